"""Text to calibrate and to measure on: read, checked, tokenised, cut into windows without padding.

Padding would enter every activation statistic, so samples are joined into one stream of tokens
(each with the special tokens that the tokenizer adds) and the stream is cut into equal windows.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from trtc.protos.errors import CalibrationError

TOKENIZER_FILE = "tokenizer.json"
CALIBRATION_TEXT = Path(__file__).parent / "data" / "calibration.txt"
HELDOUT_TEXT = Path(__file__).parent / "data" / "heldout.txt"

MIN_TOKENS = 4096
"""A static scale is the largest activation ever seen, 99.9th percentile and above: with fewer than
a few thousand tokens it is set by chance. AWQ's authors and nvidia-modelopt use 16 or more windows
of 256 tokens and more; 16 * 256 is this floor."""
WINDOW = 512
_MAX_CHARACTERS = 8_000_000
"""Text read of a file; far more than any calibration uses."""

Int32s = NDArray[np.int32]


@dataclass(frozen=True)
class Texts:
    """Samples as read: text, or token ids where the file gives those."""

    source: str
    """The file's name, or `default`."""
    sha256: str
    """Of the file's bytes."""
    samples: tuple[str | tuple[int, ...], ...]
    """Distinct, in the file's order."""


@dataclass(frozen=True)
class TokenSet:
    """Windows of token ids to run a model on."""

    source: str
    sha256: str
    sequences: tuple[Int32s, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence) for sequence in self.sequences)


class _Record(msgspec.Struct, frozen=True):
    text: str | None = None
    token_ids: tuple[int, ...] | None = None


def read_texts(path: Path, option: str = "--calib") -> Texts:
    """Read samples: .jsonl with a "text" (or "token_ids") a line, anything else as one plain text.

    Repeated samples count once.

    Raises:
        CalibrationError: unreadable file; a line that is not UTF-8 or not such JSON; no text.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CalibrationError(
            f"cannot be read ({error.strerror})", field=f"{option} {path}"
        ) from error
    where = f"{option} {path}"
    lines = _lines(content, where)
    if path.suffix in (".jsonl", ".ndjson"):
        distinct = tuple(dict.fromkeys(_records(lines, where)))
    else:
        distinct = ("\n".join(line for _, line in lines),)
    if not any(not isinstance(sample, str) or sample.strip() for sample in distinct):
        raise CalibrationError(
            "has no text in it", field=where, remedy=f"It needs at least {MIN_TOKENS} tokens"
        )
    return Texts(path.name, hashlib.sha256(content).hexdigest(), distinct)


def default_calibration() -> Texts:
    """The text that ships with trtc: its own sources and prose."""
    return _shipped(CALIBRATION_TEXT)


def default_heldout() -> Texts:
    """Shipped text that is not in `default_calibration`, to measure accuracy on."""
    return _shipped(HELDOUT_TEXT)


def _shipped(path: Path) -> Texts:
    texts = read_texts(path)
    return Texts("default", texts.sha256, texts.samples)


def _lines(content: bytes, where: str) -> Iterator[tuple[int, str]]:
    """Numbered lines of at most `_MAX_CHARACTERS` in all."""
    read = 0
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CalibrationError(
                f"line {number} is not UTF-8 (byte {error.start + 1} of the line)",
                field=where,
                remedy="Save the file as UTF-8",
            ) from error
        yield number, text
        read += len(text)
        if read > _MAX_CHARACTERS:
            return


def _records(lines: Iterator[tuple[int, str]], where: str) -> Iterator[str | tuple[int, ...]]:
    for number, line in lines:
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line, type=_Record)
        except msgspec.DecodeError as error:
            raise CalibrationError(
                f'line {number} is not JSON with a "text" ({error})', field=where
            ) from error
        sample = record.text if record.text is not None else record.token_ids
        if sample is None:
            raise CalibrationError(
                f'line {number} has no "text"',
                field=where,
                remedy='Every line is an object with a "text", or with "token_ids"',
            )
        if sample:
            yield sample


def tokenize(
    texts: Texts,
    model_dir: Path,
    vocab_size: int,
    *,
    window: int,
    max_tokens: int,
    min_tokens: int,
    tail: bool = False,
    option: str = "--calib",
) -> TokenSet:
    """Cut `texts` into windows of `window` tokens, at most `max_tokens` spread evenly over it.

    Args:
        model_dir: holds tokenizer.json, which samples of token ids do not need.
        min_tokens: the fewest that mean anything.
        tail: keep the shorter window at the end.

    Raises:
        CalibrationError: too few tokens; ids beyond the vocabulary; text without a tokenizer.
    """
    field = option if texts.source == "default" else f"{option} {texts.source}"
    stream = _stream(texts, model_dir, field)
    if len(stream) * _distinct_share(texts) < min_tokens:
        repeated = f", {1 - _distinct_share(texts):.0%} of them in repeated lines"
        raise CalibrationError(
            f"has {len(stream)} tokens{repeated if len(stream) >= min_tokens else ''}, too few to "
            "mean anything",
            field=field,
            remedy=f"Give at least {min_tokens} tokens of varied text such as the model will see",
        )
    if stream.min() < 0 or stream.max() >= vocab_size:
        bad = int(stream.min()) if stream.min() < 0 else int(stream.max())
        raise CalibrationError(
            f"token {bad} is not among the model's {vocab_size}",
            field=field,
            remedy="Tokenizer and weights must be of one model",
        )
    return TokenSet(texts.source, texts.sha256, _windows(stream, window, max_tokens, tail))


def _distinct_share(texts: Texts) -> float:
    """Share of the text's characters in lines that were not there before."""
    lines = [line for s in texts.samples if isinstance(s, str) for line in s.splitlines()]
    total = sum(map(len, lines))
    return sum(map(len, set(lines))) / total if total else 1.0


def _stream(texts: Texts, model_dir: Path, field: str) -> Int32s:
    encoded = [sample for sample in texts.samples if not isinstance(sample, str)]
    written = [sample for sample in texts.samples if isinstance(sample, str)]
    if written:
        encoded += _encode(written, model_dir, field)
    return np.fromiter((i for sample in encoded for i in sample), np.int32)


def _encode(written: Sequence[str], model_dir: Path, field: str) -> list[tuple[int, ...]]:
    file = model_dir / TOKENIZER_FILE
    if not file.is_file():
        raise CalibrationError(
            f"is text, but the checkpoint has no {TOKENIZER_FILE} to read it with",
            field=field,
            remedy='Add the tokenizer, or give .jsonl lines with "token_ids"',
        )
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [tuple(encoding.ids) for encoding in tokenizer.encode_batch(list(written))]


def _windows(stream: Int32s, window: int, max_tokens: int, tail: bool) -> tuple[Int32s, ...]:
    count = max(1, len(stream) // window)
    wanted = min(count, max(1, max_tokens // window))
    starts = [(i * count // wanted) * window for i in range(wanted)]
    size = min(window, max_tokens)
    windows = [stream[start : start + size] for start in starts]
    rest = stream[count * window :][: max_tokens - wanted * size]
    if tail and wanted == count and len(rest) > 1:  # one token predicts nothing
        windows.append(rest)
    return tuple(windows)
