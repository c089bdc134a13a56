"""A model directory: its configuration, tokenizer files and weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtc.builder.checkpoint.reader import SafetensorsReader
from trtc.builder.checkpoint.resolve import model_name, resolve_model
from trtc.builder.checkpoint.sampling_defaults import sampling_defaults
from trtc.builder.families.config import token_ids
from trtc.protos.errors import CheckpointError
from trtc.protos.files import (
    UnreadableError,
    check_unique_keys,
    decode_json,
    read_file,
)
from trtc.protos.sampling import SamplingDefaults

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
QUANT_CONFIG_FILE = "hf_quant_config.json"
"""nvidia-modelopt's."""
TOKENIZER_FILE = "tokenizer.json"
_MAX_CONFIG_BYTES = 16 << 20
"""Lists of modules that are not quantised make the largest."""
_TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    GENERATION_CONFIG_FILE,
)


@dataclass(frozen=True)
class Checkpoint:
    """Description of a model, without its tensors."""

    path: Path
    name: str
    """Last part of the directory or hub name."""
    config: Mapping[str, Any]
    """config.json; the text part of it when it describes several."""
    generation_config: Mapping[str, Any]
    sampling_defaults: SamplingDefaults
    """Sampling defaults of generation_config.json."""
    hf_quant_config: Mapping[str, Any] | None
    tokenizer_files: tuple[Path, ...]
    """Files that the engine's tokenizer/ folder holds; empty without tokenizer.json."""

    @property
    def has_tokenizer(self) -> bool:
        return bool(self.tokenizer_files)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """generation_config.json decides over config.json, as it does in Transformers."""
        return self._token_ids("eos_token_id")

    def token_id(self, key: str) -> int | None:
        """First id under `bos_token_id` or `pad_token_id`."""
        return next(iter(self._token_ids(key)), None)

    def _token_ids(self, key: str) -> tuple[int, ...]:
        name = GENERATION_CONFIG_FILE
        value = self.generation_config.get(key)
        if value is None:
            name, value = CONFIG_FILE, self.config.get(key)
        return token_ids(value, f"{self.path / name}: {key}")

    def open_weights(self) -> SafetensorsReader:
        """Map the weights and check every header.

        Raises:
            CheckpointError: missing or damaged weights.
        """
        return SafetensorsReader(self.path)


def open_checkpoint(model: str, revision: str | None = None, *, weights: bool = True) -> Checkpoint:
    """Find a model (directory or hub name) and read its configuration.

    Args:
        model: path, or `owner/name` on the hub.
        revision: branch, tag or commit on the hub.
        weights: False fetches no weights from the hub.

    Raises:
        CheckpointError: no such model, or no readable config.json.
    """
    path = resolve_model(model, revision, weights=weights)
    config = _read_object(path / CONFIG_FILE)
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        config = {**config, **text_config, "architectures": config.get("architectures")}
    generation_config = _read_optional(path / GENERATION_CONFIG_FILE) or {}
    return Checkpoint(
        path=path,
        name=model_name(path),
        config=config,
        generation_config=generation_config,
        sampling_defaults=sampling_defaults(generation_config, str(path / GENERATION_CONFIG_FILE)),
        hf_quant_config=_read_optional(path / QUANT_CONFIG_FILE),
        tokenizer_files=_tokenizer_files(path),
    )


def _tokenizer_files(path: Path) -> tuple[Path, ...]:
    if not (path / TOKENIZER_FILE).is_file():
        return ()
    return tuple(path / name for name in _TOKENIZER_FILES if (path / name).is_file())


def _read_optional(path: Path) -> dict[str, Any] | None:
    return _read_object(path) if path.is_file() else None


def _read_object(path: Path) -> dict[str, Any]:
    remedy = "Give a directory that save_pretrained() wrote"
    try:
        content = read_file(path, _MAX_CONFIG_BYTES)
    except UnreadableError as error:
        raise CheckpointError(str(error), field=str(path), remedy=remedy) from error
    try:
        decoded = decode_json(content, dict[str, Any])
    except UnreadableError as error:
        raise CheckpointError(
            f"is not a JSON object ({error})", field=str(path), remedy=remedy
        ) from error
    try:
        check_unique_keys(content)
    except UnreadableError as error:
        raise CheckpointError(
            f"is ambiguous: {error}", field=str(path), remedy="Remove one of the two"
        ) from error
    return decoded
