"""config.pbtxt: a model's configuration for Triton, in protobuf's text format."""

import json
from collections.abc import Iterable

from trtc.runtime.frontends.triton.engines import ENGINE_DIR, EngineSet
from trtc.runtime.frontends.triton.settings import Settings
from trtc.runtime.tensors.table import INPUTS, OUTPUTS, Tensor

CONFIG_FILE = "config.pbtxt"
ENGINE_PARAMETER = "engine"


def config_text(name: str, engines: EngineSet) -> str:
    """The text of the file. It does not depend on the version of the model.

    A model instance is one process with one engine, which batches all requests itself: a second
    instance would load the model a second time.
    """
    limits = engines.engines[0].manifest.limits
    parameters = Settings().as_parameters()
    if not engines.by_capability:
        parameters = {ENGINE_PARAMETER: ENGINE_DIR, **parameters}
    lines = [
        f"name: {_quoted(name)}",
        'backend: "python"',
        f"max_batch_size: {limits.max_batch_size}",
        "model_transaction_policy { decoupled: true }",
        f"instance_group [ {{ count: 1 {_place(engines)} }} ]",
        *_list("input", (_input(tensor) for tensor in INPUTS)),
        *_list("output", (_output(tensor) for tensor in OUTPUTS)),
        *(
            f"cc_model_filenames {{ key: {_quoted(key)} value: {_quoted(value)} }}"
            for key, value in sorted(engines.by_capability.items())
        ),
        *(
            f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}"
            for key, value in parameters.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _place(engines: EngineSet) -> str:
    """The first GPU: without a list Triton would start an instance on each."""
    return "kind: KIND_GPU gpus: [ 0 ]" if engines.on_gpu else "kind: KIND_CPU"


def _list(field: str, entries: Iterable[str]) -> list[str]:
    return [f"{field} [", ",\n".join(f"  {{ {entry} }}" for entry in entries), "]"]


def _input(tensor: Tensor) -> str:
    return f"{_output(tensor)} optional: true"


def _output(tensor: Tensor) -> str:
    dims = ", ".join(map(str, tensor.dims))
    return f"name: {_quoted(tensor.name)} data_type: {tensor.data_type} dims: [ {dims} ]"


def _quoted(text: str) -> str:
    """A quoted string: JSON's ASCII escapes are also valid in protobuf's text format."""
    return json.dumps(text)
