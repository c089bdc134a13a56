"""Which experts a step's rows choose on a GPU: with random weights far from all are as likely."""

from dataclasses import fields

import msgspec
import numpy as np

from examples.bench.gpu_operators import CallOnDevice, send_step
from trtc.plugins.moe.op import MOE
from trtc.plugins.moe.routing import Routing, route
from trtc.protos.plan import Call, Plan
from trtc.runtime.executors.base import StepBatch
from trtc.runtime.executors.cuda.buckets import fitting_variants
from trtc.runtime.executors.cuda.executor import CudaExecutor


def chosen_shares(executor: CudaExecutor, plan: Plan, batch: StepBatch) -> dict[str, float]:
    """Of each call of routed experts, by its site, the share of its experts that some row chooses.

    Runs the step call by call and routes by the operator's definition.
    """
    bucket = send_step(executor, batch)
    shares = {}
    for call, launched in zip(plan.calls, executor.program.calls, strict=True):
        if call.operator == MOE.name:
            one = CallOnDevice(plan, call, launched, executor)
            given = {argument.parameter: argument for argument in call.arguments}
            logits = one.read(given["router_logits"], batch)
            bias = one.read(given["choice_bias"], batch) if "choice_bias" in given else None
            experts, _ = route(logits, bias, _routing(call))
            shares[call.site] = len(np.unique(experts)) / int(call.axes["E"])
        _, variant = next(fitting_variants(launched, bucket))
        executor.program.run_call(launched, variant, bucket)
    return shares


def _routing(call: Call) -> Routing:
    given = {one.name: call.attributes[one.name] for one in fields(Routing)}
    return msgspec.convert(given, Routing, strict=False)  # attributes have 0 and 1 for flags
