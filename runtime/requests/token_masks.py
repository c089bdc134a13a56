"""Which tokens may come next in a sequence: what constrained decoding asks, and who answers.

TokenMasks     answers about one sequence, in a thread of its engine's
JointMasks     is asked about all sequences of a step at once, whatever their requests
BothMasks      allows what two of them allow
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class TokenEdit:
    """What is done to the logits of one token's draw."""

    mask: bytes | None = None
    """As `TokenMasks.allowed`; None: every token may be drawn."""
    bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> what is added to its logit, as `logit_bias` of the request is."""


class TokenMasks(Protocol):
    """Says which tokens may come next in the sequences of a request: constrained decoding.

    Called from threads of the engine, for each sequence in order and for several at the same time.
    It must answer by its argument alone, because a sequence may be asked about again. While an
    answer is late its sequence sits steps out, and the others go on. What it raises ends the
    request.
    """

    def allowed(self, output_ids: Sequence[int]) -> bytes | TokenEdit:
        """The mask of the token after `output_ids`, a sequence's output so far.

        Returns:
            ceil(vocab_size / 32) little-endian words of 32 bits; token t may be drawn if bit t % 32
            of word t // 32 is 1. At least one token must be allowed. Or a TokenEdit, which may have
            biases as well.
        """
        ...


class MaskQuestion(Protocol):
    """What is asked about one sequence. It is answered once, by any of the methods, in any thread;
    what is answered after its sequence has ended is dropped."""

    @property
    def source(self) -> "MaskSource":
        """Whose answer is wanted: of `JointMasks.asked`'s questions one of those masks."""
        ...

    @property
    def output_ids(self) -> Sequence[int]:
        """The sequence's output so far."""
        ...

    def answer(self, edit: bytes | TokenEdit) -> None:
        """As `TokenMasks.allowed` answers. A wrong one fails the question."""
        ...

    def answer_from(self, masks: memoryview, row: int) -> None:
        """A row of masks that are kept as they are: each as `TokenMasks.allowed` says, with 0 in
        bits behind the vocabulary."""
        ...

    def fail(self, error: BaseException) -> None:
        """It ends the request."""
        ...


class MaskAnswerer(Protocol):
    """Answers questions about the sequences of a step together."""

    def begin(self, questions: Sequence[MaskQuestion]) -> None:
        """Begin to answer, and return at once. Called in the engine loop's thread."""
        ...


class JointMasks(Protocol):
    """Masks of a request whose answerer is asked about those of other requests as well."""

    @property
    def answerer(self) -> MaskAnswerer | None:
        """None: it is a TokenMasks too, and wants to be asked about each sequence alone."""
        ...


@dataclass(frozen=True)
class BothMasks:
    """Allows what two sources allow, with the biases of both."""

    first: "MaskSource"
    second: "MaskSource"


MaskSource = TokenMasks | JointMasks | BothMasks


def both_masks(first: MaskSource | None, second: MaskSource | None) -> MaskSource | None:
    """A source of what both allow; None: there is neither."""
    if first is None or second is None:
        return second if first is None else first
    return BothMasks(first, second)


def each_source(source: MaskSource) -> Iterator[TokenMasks | JointMasks]:
    """Those that a source is made of."""
    if isinstance(source, BothMasks):
        yield from each_source(source.first)
        yield from each_source(source.second)
    else:
        yield source
