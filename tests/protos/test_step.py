"""The step's inputs and sampling columns: one table, and the records that carry them."""

import msgspec
import numpy as np

from trtc.protos.step import (
    GRAPH_INPUTS,
    SAMPLING_COLUMNS,
    SPARSE_COLUMNS,
    STEP_INPUTS,
    in_block_order,
)
from trtc.runtime.executors.base import StepBatch
from trtc.runtime.sampling.sampler import COLUMN_DTYPES, SamplingBatch


def test_a_batch_has_the_inputs_of_the_table_and_may_leave_out_those_of_no_graph() -> None:
    attributes = {one.name: one.default for one in msgspec.structs.fields(StepBatch)}
    assert list(attributes) == [one.name for one in STEP_INPUTS]
    left_out = {name for name, default in attributes.items() if default is not msgspec.NODEFAULT}
    assert left_out == {one.name for one in STEP_INPUTS if not one.in_graph}
    assert all(attributes[name] is None for name in left_out)


def test_a_graph_has_no_input_that_a_batch_may_leave_out() -> None:
    assert [one.name for one in GRAPH_INPUTS] == [
        *("token_ids", "positions", "slots", "query_start", "context_lens"),
        *("page_table", "logit_rows"),
    ]


def test_a_block_ends_with_what_a_step_fills_to_its_own_length() -> None:
    shapes = [one.shape for one in in_block_order(STEP_INPUTS)]
    assert shapes[-1] == ("B", "P")
    first_of_tokens = shapes.index(("T",))
    assert set(shapes[first_of_tokens:-1]) == {("T",)}
    assert sorted(shapes) == sorted(one.shape for one in STEP_INPUTS)


def test_a_sampling_batch_has_the_columns_of_the_table_in_their_types() -> None:
    batch = SamplingBatch.greedy(3)
    names = list(SamplingBatch.__struct_fields__)
    of_rows = [one.name for one in SAMPLING_COLUMNS]
    given = [*of_rows, *(one.name for one in SPARSE_COLUMNS)]
    assert names[: len(given)] == given
    assert all(getattr(batch, name) is None for name in names[len(given) :])
    for one in SAMPLING_COLUMNS:
        column = getattr(batch, one.name)
        assert (column.dtype, column.shape) == (np.dtype(COLUMN_DTYPES[one.dtype]), (3,))
    for sparse in SPARSE_COLUMNS:
        values = getattr(batch, sparse.name).values
        assert values.dtype == np.dtype(COLUMN_DTYPES[sparse.dtype])
