"""Text to calibrate and to measure on: read, checked, tokenised, cut into windows without padding.

Padding would enter every activation statistic, so samples are joined into one stream of tokens
(each with the special tokens that the tokenizer adds) and the stream is cut into equal windows.
"""

import codecs
import hashlib
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from trtc.protos.errors import CalibrationError
from trtc.protos.files import MAX_JSON_BYTES, UnreadableError, decode_json, read_file
from trtc.protos.panics import tokenizer_failures
from trtc.quant.chat_text import Chat, chat_texts

TOKENIZER_FILE = "tokenizer.json"
CALIBRATION_TEXT = Path(__file__).parent / "data" / "calibration.txt"
HELDOUT_TEXT = Path(__file__).parent / "data" / "heldout.txt"

MIN_TOKENS = 4096
"""A static scale is the largest activation ever seen, 99.9th percentile and above: with fewer than
a few thousand tokens it is set by chance. AWQ's authors and nvidia-modelopt use 16 or more windows
of 256 tokens and more; 16 * 256 is this floor."""
MIN_EVAL_TOKENS = 512
"""Below, the mean divergence of a healthy engine varies by its own size from text to text."""
WINDOW = 512
_MAX_BYTES = 256 << 20
_MAX_CHARACTERS = 8_000_000
"""Text read of a file; far more than any calibration uses."""
_MAX_LINE_BYTES = 4 * (_MAX_CHARACTERS + 1)
"""More than `_MAX_CHARACTERS`, whatever they are."""
_MARK = b"\xef\xbb\xbf"
_UTF8 = codecs.getincrementaldecoder("utf-8")

Int32s = NDArray[np.int32]


Sample = str | tuple[int, ...] | Chat


@dataclass(frozen=True)
class Texts:
    """Samples as read: text, or token ids or conversations where the file gives those."""

    source: str
    """The file's name, or `default`."""
    sha256: str
    """Of the file's bytes."""
    samples: tuple[Sample, ...]
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


_TokenId = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
"""Validates the arrays alone; whether the model has these ids is checked later."""


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class _Record(msgspec.Struct, frozen=True):
    text: str | None = None
    token_ids: tuple[_TokenId, ...] | None = None
    messages: tuple[_Message, ...] | None = None


def read_texts(path: Path, option: str = "--calib") -> Texts:
    """Read samples: .jsonl with a "text" (or "token_ids", or "messages" of a "role" and a "content"
    each) a line, anything else as one plain text.

    Repeated samples count once.

    Raises:
        CalibrationError: unreadable file; a line that is not UTF-8 or not such JSON; no text.
    """
    try:
        content = read_file(path, _MAX_BYTES)
    except UnreadableError as error:
        raise CalibrationError(str(error), field=f"{option} {path}") from error
    where = f"{option} {path}"
    lines = _lines(content, where)
    if path.suffix in (".jsonl", ".ndjson"):
        distinct = tuple(dict.fromkeys(_records(lines, where)))
    else:
        distinct = ("".join(line for _, line in lines)[:_MAX_CHARACTERS],)
    if not any(not isinstance(sample, str) or sample.strip() for sample in distinct):
        raise CalibrationError(
            "has no text in it", field=where, remedy=f"It needs at least {MIN_TOKENS} tokens"
        )
    return Texts(path.name, hashlib.sha256(content).hexdigest(), distinct)


def default_calibration() -> Texts:
    """The text that ships with trtc: its own sources and prose."""
    return _shipped(CALIBRATION_TEXT)


def default_heldout() -> Texts:
    """Prose, code and several languages, none of it in `default_calibration`, to measure accuracy
    on."""
    return _shipped(HELDOUT_TEXT)


def _shipped(path: Path) -> Texts:
    texts = read_texts(path)
    return Texts("default", texts.sha256, texts.samples)


def _lines(content: bytes, where: str) -> Iterator[tuple[int, str]]:
    """Numbered lines with their ends, up to the one that makes `_MAX_CHARACTERS` in all; of a line
    that is longer than that alone, the beginning."""
    stream = io.BytesIO(content)
    stream.seek(len(_MARK) if content.startswith(_MARK) else 0)
    read = 0
    for number in itertools.count(1):
        line = stream.readline(_MAX_LINE_BYTES)
        if not line or read > _MAX_CHARACTERS:
            return
        try:
            # Of a line that was cut, the last character may be a part.
            is_whole = len(line) < _MAX_LINE_BYTES
            text = line.decode() if is_whole else _UTF8().decode(line)
        except UnicodeDecodeError as error:
            raise CalibrationError(
                f"line {number} is not UTF-8 (byte {error.start + 1} of the line)",
                field=where,
                remedy="Save the file as UTF-8",
            ) from error
        yield number, text
        read += len(text)


def _records(lines: Iterator[tuple[int, str]], where: str) -> Iterator[Sample]:
    for number, line in lines:
        if not line.strip():
            continue
        if len(line) > _MAX_CHARACTERS:
            raise CalibrationError(
                f"line {number} has more than {_MAX_CHARACTERS} characters",
                field=where,
                remedy="Give one sample a line",
            )
        try:
            record = decode_json(line.encode(), _Record)
        except UnreadableError as error:
            raise CalibrationError(
                f'line {number} is not JSON with a "text" ({error})', field=where
            ) from error
        sample: Sample | None = record.text if record.text is not None else record.token_ids
        if sample is None and record.messages:
            said = tuple((message.role, message.content) for message in record.messages)
            sample = Chat(said, number)
        if sample is None:
            raise CalibrationError(
                f'line {number} has no "text"',
                field=where,
                remedy='Every line is an object with a "text", "messages" or "token_ids"',
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
        tail: the last window may be shorter, so that no token of `max_tokens` is left out.

    Raises:
        CalibrationError: too few tokens; ids beyond the vocabulary; text without a tokenizer.
    """
    stream = token_stream(texts, model_dir, vocab_size, min_tokens=min_tokens, option=option)
    return TokenSet(texts.source, texts.sha256, cut(stream, window, max_tokens, tail=tail))


def token_stream(
    texts: Texts, model_dir: Path, vocab_size: int, *, min_tokens: int, option: str = "--calib"
) -> Int32s:
    """All tokens of a text, sample after sample.

    Raises:
        CalibrationError: as `tokenize`.
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
    return stream


def _distinct_share(texts: Texts) -> float:
    """Share of the text's characters in lines that were not there before. Conversations may begin
    alike."""
    lines = [line for s in texts.samples if isinstance(s, str) for line in s.splitlines()]
    total = sum(map(len, lines))
    return sum(map(len, set(lines))) / total if total else 1.0


def _stream(texts: Texts, model_dir: Path, field: str) -> Int32s:
    encoded = [sample for sample in texts.samples if isinstance(sample, tuple)]
    written = [sample for sample in texts.samples if isinstance(sample, str)]
    if written:
        encoded += _encode(written, model_dir, field)
    chats = [sample for sample in texts.samples if isinstance(sample, Chat)]
    if chats:
        # The template writes the special tokens.
        rendered = chat_texts(chats, model_dir, field)
        encoded += _encode(rendered, model_dir, field, add_special_tokens=False)
    return np.fromiter((i for sample in encoded for i in sample), np.int32)


def _encode(
    written: Sequence[str], model_dir: Path, field: str, *, add_special_tokens: bool = True
) -> list[tuple[int, ...]]:
    file = model_dir / TOKENIZER_FILE
    if not file.is_file():
        raise CalibrationError(
            f"is text, but the checkpoint has no {TOKENIZER_FILE} to read it with",
            field=field,
            remedy='Add the tokenizer, or give .jsonl lines with "token_ids"',
        )
    from tokenizers import Tokenizer

    def as_error(problem: str) -> CalibrationError:
        return CalibrationError(
            f"needs a tokenizer to be read with, and {file} cannot be read ({problem})",
            field=field,
            remedy='Mend the tokenizer, or give .jsonl lines with "token_ids"',
        )

    with tokenizer_failures(as_error):
        tokenizer: Any = Tokenizer.from_buffer(read_file(file, MAX_JSON_BYTES))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        encodings = tokenizer.encode_batch(list(written), add_special_tokens=add_special_tokens)
        return [tuple(encoding.ids) for encoding in encodings]


def cut(stream: Int32s, window: int, max_tokens: int, *, tail: bool = False) -> tuple[Int32s, ...]:
    """Windows of a stream, spread evenly; see `tokenize`."""
    count = max(1, len(stream) // window)
    needed = -(-max_tokens // window) if tail else max_tokens // window
    wanted = min(count, max(1, needed))
    starts = [(i * count // wanted) * window for i in range(wanted)]
    windows = [stream[start : start + window] for start in starts]
    if tail and needed > count:
        windows.append(stream[count * window :])
    excess = sum(map(len, windows)) - max_tokens
    if excess > 0:
        windows[-1] = windows[-1][:-excess]
    # One token predicts nothing.
    return tuple(windows[:1]) + tuple(part for part in windows[1:] if len(part) > 1)
