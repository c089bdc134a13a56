"""Masks of tokens as tests word them, and a collector that is late as often as a test wants."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtc.protos.step import num_mask_words
from trtc.runtime.engine.mask_collector import Collected, MaskCollector
from trtc.runtime.engine.step_builder import MaskedRows
from trtc.runtime.sampling.masks import RowMasks, UInt32s, pack_mask, read_mask
from trtc.runtime.scheduling.sequence import Sequence as RunningSequence


@dataclass(frozen=True)
class SomeTokens:
    """Allows about a quarter of the vocabulary, another one after every output."""

    vocab_size: int
    seed: int = 0

    def tokens(self, output_ids: Sequence[int]) -> NDArray[np.bool_]:
        key = [self.seed, len(output_ids), sum(output_ids)]
        allowed = np.random.default_rng(key).random(self.vocab_size) < 0.25
        allowed[(sum(output_ids) + self.seed) % self.vocab_size] = True
        return allowed

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        return pack_mask(self.tokens(output_ids))


def drawn_masks(shape: tuple[int, int], seed: int) -> tuple[NDArray[np.bool_], RowMasks]:
    """[R, vocab] what each row may draw, and the masks of the rows that may not draw all."""
    rows, vocab_size = shape
    rng = np.random.default_rng(seed)
    allowed: NDArray[np.bool_] = rng.random(shape) < rng.choice((0.02, 0.5))
    allowed[:, rng.integers(vocab_size)] = True
    masked = np.flatnonzero(rng.random(rows) < 0.7)
    allowed[~np.isin(np.arange(rows), masked)] = True
    return allowed, masks_of(allowed, masked.tolist())


def masks_of(allowed: NDArray[np.bool_], rows: Sequence[int]) -> RowMasks:
    """The masks of some rows of [R, vocab] whether each token may be drawn."""
    vocab_size = allowed.shape[1]
    words = [read_mask(pack_mask(allowed[row]), vocab_size) for row in rows]
    shape = (len(rows), num_mask_words(vocab_size))
    return RowMasks(np.array(rows, np.int32), np.array(words, np.uint32).reshape(shape))


class PromptCollector(MaskCollector):
    """Answers on the spot, but says that an answer is late with some probability."""

    def __init__(self, vocab_size: int, *, lateness: float = 0.0, seed: int = 0) -> None:
        super().__init__(vocab_size)
        self._size = vocab_size
        self._lateness = lateness
        self._rng = random.Random(seed)
        self._late: list[RunningSequence] = []
        self.num_late = 0

    @property
    def is_waiting(self) -> bool:
        return bool(self._late)

    def ask(self, rows: Iterable[MaskedRows]) -> None:
        """`collect` asks."""

    def collect(
        self,
        rows: Iterable[MaskedRows],
        *,
        may_be_late: bool = True,
        free_s: float | None = None,
    ) -> Collected:
        numbers: list[int] = []
        words: list[UInt32s] = []
        late: list[RunningSequence] = []
        last_rows: list[int] = []
        for sequence, first, number, drafts in rows:
            if not sequence.lanes:
                continue
            if may_be_late and self._rng.random() < self._lateness:
                late.append(sequence)
                continue
            source = sequence.request.masks
            assert isinstance(source, SomeTokens)
            output = sequence.token_ids[sequence.num_prompt :]
            allowed = [source.allowed(output)]
            for at, draft in enumerate(drafts):
                if not source.tokens([*output, *drafts[:at]])[draft]:
                    last_rows.append(first + at)
                    break
                allowed.append(source.allowed([*output, *drafts[: at + 1]]))
            allowed = allowed if drafts else allowed * number
            numbers += range(first, first + len(allowed))
            words += [read_mask(one, self._size) for one in allowed]
        self._late += late
        self.num_late += len(late)
        masks = RowMasks(np.array(numbers, np.int32), np.array(words)) if words else None
        return Collected(masks, late, {}, last_rows=last_rows)

    def release(self) -> None:
        """About every second that is waited for."""
        self._release(0.5)

    def wait(self, seconds: float) -> None:
        self._release(1.0)

    def _release(self, share: float) -> None:
        kept = []
        for sequence in self._late:
            if sequence.is_held and self._rng.random() >= share:
                kept.append(sequence)
            else:
                sequence.is_held = False
        self._late = kept
