"""Masks of next tokens for constrained decoding: the interfaces of their sources.

TokenMasks     computes the mask of one sequence, in a thread of the engine
JointMasks     computes the masks of all sequences of a step together, also of other requests
BothMasks      the intersection of two sources
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec


class TokenEdit(msgspec.Struct, frozen=True):
    """Changes to the logits of one token's draw."""

    mask: bytes | None = None
    """A mask as from `TokenMasks.allowed`; None: every token may be drawn."""
    bias: Mapping[int, float] = {}
    """Token id -> value added to its logit, like the request's `logit_bias`."""


class TokenMasks(Protocol):
    """Computes which tokens may come next in the sequences of a request.

    Called from threads of the engine, concurrently for several sequences. The result must depend on
    the argument only, because it may be requested again, and requested for drafts that are rejected
    later: tokens that it allows itself. While a result is late its sequence skips steps, and the
    others go on. An exception ends the request, if the sequence gets there.
    """

    def allowed(self, output_ids: Sequence[int]) -> bytes | TokenEdit:
        """The mask of the token after `output_ids`, a sequence's output so far.

        Returns:
            ceil(vocab_size / 32) little-endian words of 32 bits; token t may be drawn if bit t % 32
            of word t // 32 is 1. At least one token must be allowed. Or a TokenEdit, which can also
            have biases.
        """
        ...


class MaskQuery(Protocol):
    """A request for the mask of one sequence. It is answered once, by any of the methods, in any
    thread; an answer after the sequence has ended is dropped. Once it is answered, an answerer must
    not touch it: it may be asked again, about the next token."""

    memo: object
    """What its answerer keeps for the sequence from one query to the next, to be changed before
    an answer; None at first. Without it, the next query is another object."""

    @property
    def source(self) -> "MaskSource":
        """The source that must answer; for JointMasks, one of those of the same answerer."""
        ...

    @property
    def output_ids(self) -> Sequence[int]:
        """The sequence's output so far, of which that of an earlier query about it is the
        beginning. A copy of it for each call."""
        ...

    @property
    def num_output(self) -> int:
        """Length of `output_ids`."""
        ...

    @property
    def new_ids(self) -> Sequence[int]:
        """Last of `output_ids`, which were not yet in those of the last query with this memo."""
        ...

    @property
    def drafts(self) -> Sequence[int]:
        """Tokens that may follow `output_ids`: the masks after each of them are requested as well,
        as far as they are allowed. Empty if the source does not take drafts."""
        ...

    @property
    def is_answered(self) -> bool: ...

    def output_from(self, start: int) -> list[int]:
        """`output_ids[start:]`."""
        ...

    def answer(self, edit: bytes | TokenEdit) -> None:
        """Answer with a result as of `TokenMasks.allowed`. An invalid one fails the query."""
        ...

    def answer_each(self, edits: Iterator[bytes | TokenEdit]) -> None:
        """Answer with the next of `edits`, and, for each of the drafts as far as they are allowed,
        with the one after it. The first draft whose edit is invalid, or raises, ends the answer."""
        ...

    def fail(self, error: BaseException) -> None:
        """End the request with this error."""
        ...


class MaskQueries(Protocol):
    """Those of a step that one answerer answers."""

    def __iter__(self) -> Iterator[MaskQuery]: ...

    def __len__(self) -> int: ...

    def answer_from(
        self, masks: memoryview, answered: Iterable[tuple[MaskQuery, int, int]]
    ) -> None:
        """Answer some of them, at once, with rows of `masks`, which are not copied and must not
        change: each as from `TokenMasks.allowed`, with 0 in bits past the vocabulary.

        Args:
            answered: query, first row and number of drafts of each. The rows are those after its
                output, and after each of so many of its drafts.
        """
        ...

    def answer_unmasked(self, answered: Iterable[MaskQuery]) -> None:
        """Answer some of them, at once: every token may be drawn, without a bias."""
        ...


class MaskAnswerer(Protocol):
    """Answers queries about the sequences of a step together."""

    def begin(self, queries: MaskQueries) -> None:
        """Start to answer, without blocking. Called in the engine loop's thread."""
        ...


class JointMasks(Protocol):
    """Masks of a request whose answerer also computes masks of other requests."""

    @property
    def answerer(self) -> MaskAnswerer | None:
        """The shared answerer. None: the source is also a TokenMasks, which is called for each
        sequence."""
        ...

    @property
    def takes_drafts(self) -> bool:
        """Whether it answers about drafts (`MaskQuery.drafts`). If not, the sequences of the
        request are not drafted."""
        ...


class BothMasks(msgspec.Struct, frozen=True):
    """The intersection of two sources' masks, with the biases of both."""

    first: "MaskSource"
    second: "MaskSource"


MaskSource = TokenMasks | JointMasks | BothMasks


def both_masks(first: MaskSource | None, second: MaskSource | None) -> MaskSource | None:
    """The intersection of two sources, of which either may be None; None: both are."""
    if first is None or second is None:
        return second if first is None else first
    return BothMasks(first, second)


def each_source(source: MaskSource) -> tuple[TokenMasks | JointMasks, ...]:
    """Those that a source is made of."""
    if isinstance(source, BothMasks):
        return each_source(source.first) + each_source(source.second)
    return (source,)


def takes_drafts(source: MaskSource) -> bool:
    """Whether masks after drafts can be requested: of any TokenMasks, and of JointMasks that say
    so."""
    return all(getattr(one, "takes_drafts", True) for one in each_source(source))
