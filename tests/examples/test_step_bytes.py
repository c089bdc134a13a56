"""examples/bench/step_bytes.py: the floor of a decode step counts what the step reads."""

from typing import Any

import msgspec
import pytest

from examples.bench.step_bytes import kv_bytes_read, weight_bytes_read
from tests.support.manifests import tiny_manifest
from trtc.protos.kv import CacheLayout, Full, Group, Window, attention_entry
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


@pytest.mark.parametrize(("rows", "experts"), [(1, 2.0), (2, 3.5), (1000, 8.0)])
def test_experts_are_read_that_rows_choose(rows: int, experts: float) -> None:
    """Two of eight: a second row chooses a quarter of them again, on average."""
    given = tuple(
        Argument(parameter, "weight", name, "bf16")
        for parameter, name in (("gate_up", "experts"), ("down_bias", "biases"))
    )
    plan = plan_of("lm_head.weight", tiny_manifest().kv)
    beside = weight_bytes_read(plan, rows)
    moe = Call("moe", "moe", given, attributes={"top_k": 2}, axes={"E": 8})
    plan = msgspec.structs.replace(
        plan,
        weights=(*plan.weights, weight("experts", 80, 100), weight("biases", 8, 10)),
        calls=(*plan.calls, moe),
    )
    read = weight_bytes_read(plan, rows) - beside
    whole = 2 * (80 * 100 + 8 * 10)
    assert read == pytest.approx(experts / 8 * whole, rel=1e-3)
    assert weight_bytes_read(plan, rows, {"moe": 0.375}) - beside == 0.375 * whole


def test_windows_are_read_and_full_contexts() -> None:
    entries = tuple(
        attention_entry(layer, num_kv_heads=2, head_dim=16, dtype="bf16") for layer in range(3)
    )
    kv = CacheLayout(16, (Group(Full(), entries[:1]), Group(Window(100), entries[1:])))
    token = 2 * 2 * 16 * 2
    assert kv_bytes_read(kv, 60) == 3 * 60 * token
    assert kv_bytes_read(kv, 1000) == (1000 + 2 * 100) * token
