"""The kernel of gated short convolutions, and its state in pages."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.kernels import (
    KernelCall,
    KernelLibrary,
    assert_close,
    available_isas,
    compile_kernels,
)
from tests.support.operands import Array, random_array
from trtc.plugins.registry import REGISTRY

PAGE_SIZE = 8
STEP = ((5, 5), (9, 1), (17, 1), (30, 13), (16, 8), (40, 24))
"""(context, new tokens): from the start, within a page, after one, across several, whole pages."""
SHAPES = (("f32", 96, 2, False), ("bf16", 72, 2, True), ("bf16", 128, 3, False))
"""Element type, channels, columns of the state, bias."""


class Sequences:
    """Whole histories, of which any part may be a step's new tokens."""

    def __init__(self, dtype: str, channels: int, columns: int, bias: bool) -> None:
        rng = np.random.default_rng(channels)
        self.dtype, self.channels, self.columns = dtype, channels, columns
        self.gated = [
            random_array(rng, context, 3 * channels, dtype=dtype, spread=2) for context, _ in STEP
        ]
        self.weights: dict[str, Array | None] = {
            "weight": random_array(rng, columns + 1, channels),
            "bias": random_array(rng, channels) if bias else None,
        }
        widths = [-(-context // PAGE_SIZE) for context, _ in STEP]
        pages = rng.permutation(sum(widths) + 2).astype(np.int32)
        self.table = np.zeros((len(STEP), max(widths)), np.int32)
        for row, width in enumerate(widths):
            self.table[row, :width], pages = pages[:width], pages[width:]
        self.num_pages = sum(widths) + 2

    def call(self, parts: list[tuple[int, int, int]], state: Array | None = None) -> KernelCall:
        """A step over (sequence, begin, end) triples."""
        if state is None:
            shape = (self.num_pages, self.columns, self.channels)
            state = np.full(shape, np.nan, self.gated[0].dtype)
        counts = [end - begin for _, begin, end in parts]
        inputs: dict[str, Any] = {
            "gated": np.concatenate([self.gated[one][begin:end] for one, begin, end in parts]),
            "state": state,
            "query_start": np.cumsum([0, *counts]).astype(np.int32),
            "context_lens": np.array([end for *_, end in parts], np.int32),
            "page_table": self.table[[one for one, *_ in parts]],
            **self.weights,
        }
        return KernelCall(REGISTRY["short_conv"], {"page_size": PAGE_SIZE}, inputs)

    def history(self) -> list[tuple[int, int, int]]:
        """What came before STEP."""
        parts = [(one, 0, context - new) for one, (context, new) in enumerate(STEP)]
        return [part for part in parts if part[2]]

    def step(self) -> list[tuple[int, int, int]]:
        return [(one, context - new, context) for one, (context, new) in enumerate(STEP)]

    def torch_outputs(self, number: int) -> Array:
        """A whole sequence at once, by torch's convolution."""
        b, c, x = torch.tensor(self.gated[number].astype(np.float32)).chunk(3, dim=1)
        weight, bias = self.weights["weight"], self.weights["bias"]
        assert weight is not None
        mixed = F.conv1d(
            (b * x).T[None],
            torch.tensor(weight.T[:, None, :].copy()),
            None if bias is None else torch.tensor(bias),
            padding=self.columns,
            groups=self.channels,
        )
        outputs: Array = (c * mixed[0, :, : len(b)].T).numpy()
        return outputs


CASES = [Sequences(*shape) for shape in SHAPES]


@pytest.fixture(scope="module", params=available_isas())
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    return compile_kernels([case.call(case.step()) for case in CASES], request.param)


def test_the_reference_is_torchs_convolution_over_the_pieces() -> None:
    case = Sequences("f32", 24, 2, bias=True)
    first = case.call(case.history()).reference()
    outputs = case.call(case.step(), first["state_out"]).reference()["out"]
    at = 0
    for number, (context, new) in enumerate(STEP):
        expected = case.torch_outputs(number)[context - new :]
        np.testing.assert_allclose(outputs[at : at + new], expected, atol=1e-5)
        at += new


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dtype}-{case.channels}")
def test_kernels_agree_with_references(
    library: KernelLibrary, case: Sequences, num_threads: int
) -> None:
    """Nothing but the sequences' own pages is read: the others hold NaN."""
    before = case.call(case.history()).reference()["state_out"]
    call = case.call(case.step(), before)
    outputs, expected = library.run(call, num_threads), call.reference()
    assert_close(call, {"out": outputs["out"], "state_out": expected["state_out"]})
    assert outputs["state_out"].tobytes() == expected["state_out"].tobytes()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dtype}-{case.channels}")
def test_neither_company_nor_pieces_change_a_bit(library: KernelLibrary, case: Sequences) -> None:
    before = library.run(case.call(case.history()))["state_out"]
    together = library.run(case.call(case.step(), before), 2)
    for number, (context, new) in enumerate(STEP):
        at = sum(n for _, n in STEP[:number])
        state = before
        for row in range(new):
            begin = context - new + row
            alone = library.run(case.call([(number, begin, begin + 1)], state))
            assert alone["out"].tobytes() == together["out"][at + row].tobytes()
            state = alone["state_out"]
        pages = case.table[number, : -(-context // PAGE_SIZE)]
        assert state[pages].tobytes() == together["state_out"][pages].tobytes()
