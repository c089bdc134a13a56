"""The inputs of a step: every input and every sampling column, declared once.

    T   tokens of the step           R   rows of logits
    B   sequences                    P   pages of the longest context

Graphs, plans, generated code, executors and ranks take names, element types, shapes and order from
these tables, and handle an input by its shape. Sampling has columns of R values: one for each
parameter of protos/sampling.py, and further inputs of a draw.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from trtc.protos.dtypes import DTypeName
from trtc.protos.sampling import SAMPLING_PARAMETERS

Symbol = Literal["T", "B", "B+1", "P", "R"]

MAX_DRAFT_TOKENS = 15
"""Most draft tokens of one sequence that a step verifies."""


class StepInput(NamedTuple):
    """An array of runtime/executors/base.py's StepBatch."""

    name: str
    shape: tuple[Symbol, ...]
    meaning: str
    dtype: DTypeName = "i32"
    in_graph: bool = True
    """Whether it is an input of every graph; otherwise only of executors that run ahead of the
    host."""
    per_group: bool = False
    """Whether each group of the cache layout has its own: concatenated in StepBatch, separate
    inputs of a graph."""

    @property
    def is_table(self) -> bool:
        """Whether the length of its rows depends on the step: kernels take their stride as an
        argument."""
        return self.shape[-1] == "P"


STEP_INPUTS: tuple[StepInput, ...] = (
    StepInput("token_ids", ("T",), "the tokens"),
    StepInput("positions", ("T",), "of each token in its sequence, from 0"),
    StepInput(
        "slots",
        ("T",),
        "page * page_size + offset: where each token's K and V go, or in which page its state",
        per_group=True,
    ),
    StepInput("query_start", ("B+1",), "prefix sums of new tokens a sequence"),
    StepInput("context_lens", ("B",), "tokens of each sequence after this step"),
    StepInput(
        "page_table",
        ("B", "P"),
        "page ids; those past a sequence's context, or before its window, are not read",
        per_group=True,
    ),
    StepInput("logit_rows", ("R",), "which of the T rows need logits, ascending"),
    StepInput("token_sources", ("T",), "logit row of the step before, or -1", in_graph=False),
)
"""In the order of a graph's inputs, and of `trtc_engine_step_t`."""

GRAPH_INPUTS: tuple[StepInput, ...] = tuple(one for one in STEP_INPUTS if one.in_graph)


def group_input(name: str, group: int) -> str:
    """The graph's name of a group's own input."""
    return name if group == 0 else f"{name}_{group}"


def graph_inputs(num_groups: int) -> Iterator[tuple[str, StepInput, int]]:
    """(name in the graph, input, group) of every input, those of further groups last."""
    for group in range(max(1, num_groups)):
        for one in GRAPH_INPUTS:
            if group == 0 or one.per_group:
                yield group_input(one.name, group), one, group


def in_block_order(inputs: Iterable[StepInput]) -> tuple[StepInput, ...]:
    """The order in a block of device memory of which only the used part is sent: short inputs
    first, then those with a value per token, and tables, the longest, last."""
    return tuple(sorted(inputs, key=lambda one: (one.is_table, "T" in one.shape)))


class SamplingColumn(NamedTuple):
    """One value for each row of logits: an [R] array of runtime's SamplingBatch."""

    name: str
    dtype: Literal["f32", "i32", "i64", "u64"]
    meaning: str

    @property
    def device_dtype(self) -> Literal["f32", "i32"] | None:
        """Element type of its tensor on a device. None: the column has 64 bits, and the device gets
        one random number instead of such columns."""
        return self.dtype if self.dtype == "f32" or self.dtype == "i32" else None


SAMPLING_COLUMNS: tuple[SamplingColumn, ...] = (
    *(SamplingColumn(one.name, one.dtype, one.meaning) for one in SAMPLING_PARAMETERS),
    SamplingColumn("seed", "u64", "of the request"),
    SamplingColumn("sequence", "i64", "index within the request, 0 to n - 1"),
    SamplingColumn("position", "i64", "index in the sequence's output, from 0"),
    SamplingColumn("num_logprobs", "i32", "likeliest tokens to report; -1: not even the drawn one"),
)


class SparseColumn(NamedTuple):
    """Values for a few tokens of a few rows: the SparseRows of runtime's SamplingBatch."""

    name: str
    values: str
    """Suffix of its name on a device."""
    dtype: Literal["f32", "i32"]
    meaning: str


SPARSE_COLUMNS: tuple[SparseColumn, ...] = (
    SparseColumn("seen", "counts", "i32", "tokens that penalties look at: times in the output"),
    SparseColumn("bias", "values", "f32", "added to the logits"),
)


def num_mask_words(vocab_size: int) -> int:
    """Words of 32 bits of one row's mask."""
    return -(-vocab_size // 32)
