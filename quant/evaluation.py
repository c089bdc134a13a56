"""The tokens that accuracy is measured on: held-out text, or sequences sampled from the model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from trtc.quant.calibration_text import (
    MIN_EVAL_TOKENS,
    TOKENIZER_FILE,
    WINDOW,
    TokenSet,
    default_heldout,
    read_texts,
    tokenize,
)
from trtc.quant.reference_model import load_model, reference_dtype, sample_sequences

MAX_TOKENS = 4096
"""Held-out tokens that a build measures on by default: enough for KL to settle to a few per
cent."""
HELDOUT_SEED = 2
SELF_SAMPLE_LENGTH = 128


def heldout_set(
    model_dir: Path,
    vocab_size: int,
    max_seq_len: int,
    text: Path | None = None,
    model: Any = None,
    tokens: int | None = None,
) -> TokenSet:
    """Held-out windows for a checkpoint; without a tokenizer, sequences sampled from the model.

    Args:
        max_seq_len: longest sequence that the engine takes.
        text: .jsonl or text instead of what ships with trtc.
        model: the unquantised Transformers model, where it is loaded already.
        tokens: how many, all of which the text must have; None: up to 4096, of a text with at
            least MIN_EVAL_TOKENS.

    Raises:
        CalibrationError: unreadable text, or too little of it.
    """
    window = min(WINDOW, max_seq_len)
    wanted = tokens or MAX_TOKENS
    if text is None and not (model_dir / TOKENIZER_FILE).is_file():
        length = min(window, SELF_SAMPLE_LENGTH)
        count = max(1, wanted // length)
        model = model or load_model(model_dir, reference_dtype(model_dir))
        return sample_sequences(model, count=count, length=length, seed=HELDOUT_SEED)
    option = "--eval-text"
    return tokenize(
        default_heldout() if text is None else read_texts(text, option),
        model_dir,
        vocab_size,
        window=window,
        max_tokens=wanted,
        min_tokens=MIN_EVAL_TOKENS if tokens is None else tokens,
        tail=True,
        option=option,
    )


def part_of(texts: TokenSet, max_tokens: int = MAX_TOKENS) -> TokenSet:
    """At most `max_tokens` of the windows, spread evenly; at least one window."""
    if texts.num_tokens <= max_tokens:
        return texts
    count = len(texts.sequences)
    wanted = max(1, count * max_tokens // texts.num_tokens)
    chosen = tuple(texts.sequences[i * count // wanted] for i in range(wanted))
    return replace(texts, sequences=chosen)


def text_set(
    tokenizer_dir: Path,
    vocab_size: int,
    max_seq_len: int,
    text: Path | None,
    *,
    max_tokens: int,
    window: int = WINDOW,
) -> TokenSet:
    """Windows of a text, tokenised by `tokenizer_dir`/tokenizer.json.

    Args:
        max_seq_len: longest sequence that the engine takes.
        max_tokens: of a longer text, windows are spread evenly.
        window: tokens of a sequence, all predicted from those before them in it.

    Raises:
        CalibrationError: unreadable text, or less than two tokens of it.
    """
    return tokenize(
        default_heldout() if text is None else read_texts(text, "--text"),
        tokenizer_dir,
        vocab_size,
        window=min(window, max_seq_len),
        max_tokens=max_tokens,
        min_tokens=2,
        tail=True,
        option="--text",
    )
