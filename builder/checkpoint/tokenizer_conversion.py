"""Converts tokenizers of other libraries to tokenizer.json, the only format in engines."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtc.builder.checkpoint.resolve import model_name
from trtc.protos.errors import CheckpointError
from trtc.quant.quiet import quiet_libraries

TOKENIZER_FILE = "tokenizer.json"
_CONVERTIBLE = ("tokenizer.model", "tekken.json")
"""SentencePiece's or tiktoken's; Mistral's."""
_WRITTEN = (TOKENIZER_FILE, "tokenizer_config.json", "chat_template.jinja")


@contextmanager
def with_fast_tokenizer(model: Path) -> Iterator[Path]:
    """A model's directory, or a copy of it, by links, with a converted tokenizer.

    The copy is made of a model without tokenizer.json that has a tokenizer of another kind. It
    has the model's name and is removed at the end.

    Raises:
        CheckpointError: the tokenizer cannot be converted.
    """
    foreign = [model / name for name in _CONVERTIBLE if (model / name).is_file()]
    if not foreign or (model / TOKENIZER_FILE).is_file():
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="trtc-tokenizer-") as scratch:
        copy, converted = Path(scratch, "model", model_name(model)), Path(scratch, "converted")
        copy.mkdir(parents=True)
        for path in model.iterdir():
            (copy / path.name).symlink_to(path.resolve())
        _convert(foreign[0], converted)
        for path in (converted / name for name in _WRITTEN):
            if path.is_file():
                (copy / path.name).unlink(missing_ok=True)
                path.rename(copy / path.name)
        yield copy


def _convert(source: Path, output: Path) -> None:
    """Write what Transformers makes of the tokenizer beside `source`.

    Raises:
        CheckpointError: Transformers, or the library of this kind, cannot read it.
    """
    from transformers import AutoTokenizer

    remedy = "Mend it or add tokenizer.json; without either the engine takes token ids only"
    try:
        with quiet_libraries():
            tokenizer = AutoTokenizer.from_pretrained(
                source.parent, local_files_only=True, trust_remote_code=False
            )
            tokenizer.save_pretrained(output)
    # A parser of an untrusted file: each library behind it raises its own errors.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(
            f"cannot be converted to {TOKENIZER_FILE} ({reason})", field=str(source), remedy=remedy
        ) from error
    if not (output / TOKENIZER_FILE).is_file():
        raise CheckpointError(
            f"Transformers has no fast tokenizer of this kind ({type(tokenizer).__name__})",
            field=str(source),
            remedy=remedy,
        )
