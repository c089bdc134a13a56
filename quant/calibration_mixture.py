"""Calibration text from one file or several, each with its share of the tokens."""

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path

from trtc.protos.errors import RequestError
from trtc.quant.calibration_text import (
    MIN_TOKENS,
    Texts,
    TokenSet,
    cut,
    default_calibration,
    read_texts,
    token_stream,
)

_OPTION = "--calib"
_MAX_FILES = 16
_SHARE = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")


@dataclass(frozen=True)
class CalibrationFile:
    """A file, and the share of the tokens that are to be its."""

    path: Path
    share: float


@dataclass(frozen=True)
class Mixture:
    """Texts with their shares, which add up to 1."""

    parts: tuple[tuple[Texts, float], ...]

    @property
    def is_default(self) -> bool:
        """Whether it is the text that ships with trtc."""
        return self.parts[0][0].source == "default"


def parse_calibration(option: str | Path) -> tuple[CalibrationFile, ...]:
    """The files of `FILE[:SHARE],FILE[:SHARE],...`.

    Files without a share have equal parts of what the others leave of 1. Where all have one, only
    their proportions count. A `Path`, or the name of a file that exists, is one file, whatever
    commas and colons are in it.

    Raises:
        RequestError: not of that form, or shares that leave nothing.
    """
    if isinstance(option, Path) or Path(option).is_file():
        return (CalibrationFile(Path(option), 1.0),)
    named = [_named(part) for part in option.split(",")]
    if len(named) > _MAX_FILES:
        raise RequestError(
            f"names {len(named)} files", field=_OPTION, remedy=f"Give at most {_MAX_FILES}"
        )
    given = sum(share for _, share in named if share is not None)
    others = sum(share is None for _, share in named)
    if others and given >= 1:
        first = next(path for path, share in named if share is None)
        raise RequestError(
            f"the shares come to {given:g}, and leave nothing for {first}",
            field=_OPTION,
            remedy=f"Give {first} a share too, or make the others less than 1",
        )
    whole = 1.0 if others else given
    left = (1 - given) / others if others else 0.0
    return tuple(
        CalibrationFile(path, (left if share is None else share) / whole) for path, share in named
    )


def _named(part: str) -> tuple[Path, float | None]:
    name, colon, share = part.rpartition(":")
    if not colon or Path(part).is_file():
        name, share = part, ""
    if not name or (colon and share and not _SHARE.fullmatch(share)):
        raise RequestError(
            f"has {part!r}", field=_OPTION, remedy="Give files with shares, as in a.jsonl:0.5,b.txt"
        )
    if share and not 0 < float(share) <= 1e6:
        raise RequestError(
            f"gives {name} a share of {share}", field=_OPTION, remedy="Give a number above 0"
        )
    return Path(name), float(share) if share else None


def read_calibration(option: str | Path | None) -> Mixture:
    """The texts of a `--calib`; None: what ships with trtc.

    Raises:
        RequestError: as `parse_calibration`.
        CalibrationError: a file is unreadable, or has no text.
    """
    if option is None:
        return Mixture(((default_calibration(), 1.0),))
    return Mixture(tuple((read_texts(one.path), one.share) for one in parse_calibration(option)))


def tokenize_mixture(
    mixture: Mixture, model_dir: Path, vocab_size: int, *, window: int, max_tokens: int
) -> TokenSet:
    """Windows of `window` tokens, at most `max_tokens`, in the mixture's shares: a file that has
    too little for its share makes the whole smaller. Files take turns.

    Raises:
        CalibrationError: a file with too few tokens for its share of the fewest that mean anything.
    """
    streams = [
        token_stream(
            texts,
            model_dir,
            vocab_size,
            min_tokens=MIN_TOKENS
            if len(mixture.parts) == 1
            else max(window, math.ceil(share * MIN_TOKENS)),
        )
        for texts, share in mixture.parts
    ]
    shares = [share for _, share in mixture.parts]
    total = min(
        max_tokens, *(len(stream) / share for stream, share in zip(streams, shares, strict=True))
    )
    parts = [
        cut(stream, window, max(window, round(share * total)))
        for stream, share in zip(streams, shares, strict=True)
    ]
    turns = sorted(
        ((at + 0.5) / len(windows), number, at)
        for number, windows in enumerate(parts)
        for at in range(len(windows))
    )
    sequences = tuple(parts[number][at] for _, number, at in turns)
    if len(mixture.parts) == 1:
        texts = mixture.parts[0][0]
        return TokenSet(texts.source, texts.sha256, sequences)
    return TokenSet(_named_shares(mixture), _digest(mixture), sequences)


def _named_shares(mixture: Mixture) -> str:
    return ",".join(f"{texts.source}:{share:.3g}" for texts, share in mixture.parts)


def _digest(mixture: Mixture) -> str:
    lines = [f"{texts.sha256} {share!r}\n" for texts, share in mixture.parts]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
