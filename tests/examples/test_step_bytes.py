"""examples/bench/step_bytes.py: the floor of a decode step counts what the step reads."""

from typing import Any

import pytest

from examples.bench.step_bytes import weight_bytes_read
from tests.support.manifests import tiny_manifest
from trtc.protos.manifest import Limits
from trtc.protos.plan import Argument, Call, Fill, Plan, Weight

FILL = Fill(element="bf16")


def weight(name: str, *shape: int) -> Weight:
    size = 2 * shape[0] * shape[1]
    return Weight(name, "bf16", shape, "row_major", 0, size, FILL)


def call(operator: str, *weights: tuple[str, str]) -> Call:
    given = tuple(Argument(parameter, "weight", name, "bf16") for parameter, name in weights)
    return Call(operator, operator, given, {}, {})


def plan_of(lm_head: str, layout: Any) -> Plan:
    weights = [weight("embedding.weight", 1000, 8), weight("qkv", 24, 8), weight("rope", 512, 4)]
    if lm_head == "lm_head.weight":
        weights.append(weight(lm_head, 1000, 8))
    calls = (
        call("embedding", ("table", "embedding.weight")),
        call("linear", ("weight", "qkv")),
        call("rope_kv_write", ("cos", "rope")),
        call("rope_kv_write", ("cos", "rope")),
        call("linear", ("weight", lm_head)),
    )
    return Plan(
        limits=Limits(max_batch_size=64, max_seq_len=512, max_num_tokens=64),
        kv=layout,
        vocab_size=1000,
        buffers=(),
        weights=tuple(weights),
        calls=calls,
        arena_bytes=0,
        weights_bytes=sum(one.bytes for one in weights),
    )


@pytest.mark.parametrize("lm_head", ["lm_head.weight", "embedding.weight"])
@pytest.mark.parametrize("rows", [1, 16])
def test_tables_are_read_by_row(lm_head: str, rows: int) -> None:
    plan = plan_of(lm_head, tiny_manifest().kv)
    embedded = rows * 8 * 2 if lm_head == "lm_head.weight" else 0
    assert weight_bytes_read(plan, rows) == 1000 * 8 * 2 + 24 * 8 * 2 + rows * 4 * 2 + embedded
    assert weight_bytes_read(plan, rows) < plan.weights_bytes
