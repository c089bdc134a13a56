"""Tuning by whole steps, on a device whose kernels take the time that a table says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.kernel_programs import NamingDevice, open_program
from trtc.protos.launch_plan import (
    Address,
    CallLaunches,
    CallVariant,
    GridAxis,
    KernelCall,
    Matrix,
    ProductCall,
    TacticTable,
    TileMap,
    Work,
)
from trtc.runtime.executors.cuda.buckets import Bucket, Tactics
from trtc.runtime.executors.cuda.device import Graph, Kernel
from trtc.runtime.executors.cuda.program import Program
from trtc.runtime.executors.cuda.tuning import classes_of, tune_bucket

MILLISECOND = 1e-3
KERNELS = ("qkv_slow", "qkv_fast", "qkv_huge", "o_alone", "o_beside")
DECODE = Bucket("decode", tokens=8, sequences=8, rows=8, splits=1)
PREFILL = Bucket("mixed", tokens=300, sequences=1, rows=1, splits=1)

Price = Callable[[Sequence[str]], float]
"""Names of a step's kernels, in their order -> what it takes, in seconds."""


@dataclass
class PricedDevice(NamingDevice):
    """Has graphs, and a clock of its own."""

    price: Price = field(kw_only=True)
    now: float = 0.0
    recording: list[str] | None = None
    num_graphs: int = 0
    """That are captured and not dropped."""

    def launch(self, kernel: Kernel, grid: Any, arguments: Any, *, overlaps: bool) -> None:
        (self.asked if self.recording is None else self.recording).append(kernel.name)

    def capture(self, work: Callable[[], None]) -> Graph:
        assert self.asked, "nothing has run before the capture"
        self.recording = []
        work()
        recorded, self.recording = self.recording, None
        self.num_graphs += 1
        return _Recorded(self, recorded)

    def wait(self) -> None:
        if self.asked:
            self.now += self.price(self.asked)
        self.asked.clear()


@dataclass(frozen=True)
class _Recorded:
    device: PricedDevice
    kernels: Sequence[str]

    def replay(self) -> None:
        self.device.wait()
        self.device.asked += self.kernels

    def drop(self) -> None:
        self.device.num_graphs -= 1


def variant(kernel: str, max_rows: int = 512) -> CallVariant:
    call = KernelCall(KERNELS.index(kernel), (), (GridAxis(), GridAxis(), GridAxis()), True)
    return CallVariant(kind="any", max_rows=max_rows, work=(call,))


def calls_of_a_layer(layer: int) -> tuple[CallLaunches, ...]:
    qkv = (variant("qkv_slow", 64), variant("qkv_fast"), variant("qkv_huge"))
    return (
        CallLaunches(site=f"layers.{layer}.qkv", rows="tokens", variants=qkv),
        CallLaunches(
            site=f"layers.{layer}.o",
            rows="tokens",
            variants=(variant("o_beside"), variant("o_alone")),
        ),
    )


def two_layers(engine: Path, price: Price) -> tuple[Program, PricedDevice]:
    device = PricedDevice(price=price)
    calls = (*calls_of_a_layer(0), *calls_of_a_layer(1))
    return open_program(engine, device, KERNELS, calls), device


def calls_of_all_kinds(layer: int) -> tuple[CallLaunches, ...]:
    """A kernel with a tensor map, and a product that adds a residual: each layer's own tensors."""
    weight, x = Address("weights", offset=layer << 20), Address("arena", offset=layer << 8)
    grid = (GridAxis(), GridAxis(), GridAxis())
    maps = (TileMap(weight, sizes=(64, 8), strides=(64,), box=(64, 8)),)
    matrix = Matrix(x, "bf16", columns=64, stride=64)
    product = ProductCall(
        x=matrix,
        weight=Matrix(weight, "bf16", columns=64, stride=64, rows=64),
        out=matrix,
        input_scale=None,
        weight_scale=None,
        uniform_scale=False,
        bias=None,
        residual=matrix,
    )
    works: dict[str, Work] = {"mapped": KernelCall(0, (x,), grid, True, maps), "product": product}
    return tuple(
        CallLaunches(f"layers.{layer}.{name}", "tokens", (CallVariant("any", 512, (work,)),))
        for name, work in works.items()
    )


def price(kernels: Sequence[str]) -> float:
    """`o_alone` takes less than `o_beside`, unless what is before it would have overlapped."""
    costs = {"qkv_slow": 3.0, "qkv_fast": 2.0, "qkv_huge": 9.0, "o_alone": 1.0, "o_beside": 1.2}
    waits = sum(0.5 for name in kernels if name == "o_alone" and "qkv_fast" in kernels)
    return (sum(costs[name] for name in kernels) + waits) * MILLISECOND


def test_layers_that_differ_in_their_tensors_alone_are_one_class() -> None:
    classes = classes_of((*calls_of_all_kinds(0), *calls_of_all_kinds(1)))
    assert [one.sites for one in classes] == [
        ("layers.0.mapped", "layers.1.mapped"),
        ("layers.0.product", "layers.1.product"),
    ]


def test_a_variant_is_kept_that_makes_the_step_faster(tmp_path: Path) -> None:
    program, device = two_layers(tmp_path, price)
    found = tune_bucket(program, classes_of(program.calls), DECODE, lambda: device.now)
    (qkv,) = found
    assert qkv.sites == ("layers.0.qkv", "layers.1.qkv")
    assert (qkv.kind, qkv.rows, qkv.variant) == ("decode", 8, 1)
    assert qkv.default_microseconds == pytest.approx(2 * (3.0 + 1.2) * 1000)
    assert qkv.microseconds == pytest.approx(2 * (2.0 + 1.2) * 1000)
    assert device.num_graphs == 0


def test_what_is_kept_runs_as_fast_as_was_measured(tmp_path: Path) -> None:
    program, device = two_layers(tmp_path, price)
    found = tune_bucket(program, classes_of(program.calls), DECODE, lambda: device.now)
    device.wait()
    began = device.now
    program.run(DECODE, Tactics(TacticTable(device="", tactics=tuple(found))))
    device.wait()
    assert device.now - began == pytest.approx(found[-1].microseconds * 1e-6)


def test_a_variant_that_is_far_slower_runs_a_few_times_only(tmp_path: Path) -> None:
    """Most variants are for other numbers of rows: timed as long as likely ones they would take
    nine tenths of the time."""
    runs = {"qkv_fast": 0, "qkv_huge": 0}

    def counted(kernels: Sequence[str]) -> float:
        for name in runs:
            runs[name] += name in kernels
        return price(kernels)

    program, device = two_layers(tmp_path, counted)
    (qkv, _) = classes_of(program.calls)
    (found,) = tune_bucket(program, [qkv], DECODE, lambda: device.now)
    assert found.variant == 1
    assert runs["qkv_huge"] <= 4 < 7 <= runs["qkv_fast"]
    assert device.num_graphs == 0


def test_calls_without_a_choice_are_not_measured(tmp_path: Path) -> None:
    def price_of_prefill(kernels: Sequence[str]) -> float:
        assert "qkv_slow" not in kernels, "it is not for so many rows"
        return price(kernels)

    program, device = two_layers(tmp_path, price_of_prefill)
    (qkv, o) = classes_of(program.calls)
    assert qkv.others(PREFILL) == [2]
    found = tune_bucket(program, [o], PREFILL, lambda: device.now)
    assert found == [], "beside the fast qkv it is slower"


def test_noise_changes_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    program, device = two_layers(tmp_path, lambda kernels: float(rng.normal(1, 0.002)))
    assert tune_bucket(program, classes_of(program.calls), DECODE, lambda: device.now) == []
