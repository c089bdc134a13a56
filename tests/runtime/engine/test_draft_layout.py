"""Rows with drafts in a step's arrays, of a model with states."""

from dataclasses import replace

import pytest

from tests.support.drafts import Guesser
from tests.support.driver import Driver
from tests.support.requests import greedy_request
from trtc.runtime.executors.base import DraftRows, PendingStep, StepBatch
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.sampling.sampler import SamplingBatch

PAGE_SIZE = 4
OPTIONS = EchoOptions(vocab_size=64, page_size=PAGE_SIZE, windows=(None, 0), max_num_tokens=24)


@pytest.mark.parametrize("as_sequences", [False, True])
def test_each_draft_has_a_page_and_goes_on_from_that_of_the_row_before(as_sequences: bool) -> None:
    options = replace(OPTIONS, draft_rows=DraftRows(16, as_sequences=as_sequences))
    driver = Driver(options, drafter=Guesser(options))
    launch = driver.executor.launch
    num_checked = 0

    def checked(batch: StepBatch, sampling: SamplingBatch) -> PendingStep:
        nonlocal num_checked
        slots = batch.slots.reshape(2, -1)[1]
        tables = batch.page_table.reshape(2, len(batch.context_lens), -1)[1]
        begin = row = 0
        for chunk in driver.planned.chunks:
            sequence, drafts = chunk.sequence, chunk.num_drafts
            table = sequence.pages[1]
            pages = [table[at // PAGE_SIZE] for at in range(chunk.start, chunk.start + chunk[2])]
            if drafts:
                num_checked += 1
                pages = list(sequence.state_pages)
                assert len({*pages, *table}) == 1 + drafts + len(set(table))
            expected = [
                page * PAGE_SIZE + at % PAGE_SIZE
                for at, page in enumerate(pages, start=chunk.start)
            ]
            assert slots[begin : begin + chunk.num_tokens].tolist() == expected
            for draft in range(1, 1 + drafts if as_sequences else 1):
                before = (chunk.start + draft - 1) // PAGE_SIZE
                assert tables[row + draft, before] == pages[draft - 1]
            if chunk.start:
                at = (chunk.start - 1) // PAGE_SIZE
                assert tables[row, at] == table[at]
            begin += chunk.num_tokens
            row += 1 + drafts if as_sequences else 1
        return launch(batch, sampling)

    driver.executor.launch = checked  # type: ignore[method-assign]
    for number in range(6):
        driver.submit(greedy_request(f"r{number}", [number] * (3 + 5 * number), 30))
    driver.run()
    assert num_checked > 20
