"""The text that an engine is measured on, read with its own tokenizer."""

from pathlib import Path

from trtc.protos.errors import NoTokenizerError, RequestError
from trtc.protos.manifest import TOKENIZER_DIR, Manifest
from trtc.quant.calibration_text import WINDOW, TokenSet, read_texts
from trtc.quant.evaluation import text_set


def measured_text(
    engine: Path,
    manifest: Manifest,
    text: Path | None,
    *,
    max_seq_len: int,
    max_tokens: int,
    window: int = WINDOW,
) -> TokenSet:
    """Windows of a text.

    Args:
        text: the --text option; None: what ships with trtc.
        max_seq_len: longest sequence that is run.
        max_tokens: of a longer text, windows are spread evenly.
        window: tokens that are predicted from one another.

    Raises:
        CalibrationError: unreadable text, or less than two tokens of it.
        NoTokenizerError: text, for an engine that takes token ids.
        RequestError: an engine of sequences that are too short.
    """
    if not manifest.has_tokenizer:
        holds_ids = text is not None and not any(
            isinstance(sample, str) for sample in read_texts(text, "--text").samples
        )
        if not holds_ids:
            raise NoTokenizerError(
                "has no tokenizer to read text with",
                field=str(engine),
                remedy='Give --text a .jsonl file whose lines have "token_ids"',
            )
    if max_seq_len < 2:
        raise RequestError(
            "takes one token at a time, which predicts nothing", field=f"{engine}: max_seq_len"
        )
    return text_set(
        engine / TOKENIZER_DIR,
        manifest.model.vocab_size,
        max_seq_len,
        text,
        max_tokens=max_tokens,
        window=window,
    )
