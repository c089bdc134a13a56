"""Text to tokens and back, through the `tokenizers` library; chat through Jinja's sandbox.

Streaming text needs each token's own bytes. What a token adds to the text depends on its decoder:

    ByteLevel       the characters of the token spell bytes, one each
    ByteFallback    `<0xE2>` is one byte; other tokens are text
    Metaspace, ...  text, less its leading space when it is the first

so a token's piece is looked up once, kept, and a UTF-8 decoder joins the pieces.
"""

import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import Decoder

from trtc.protos.errors import EngineIncompatibleError, InvalidRequestError, NoTokenizerError

if TYPE_CHECKING:
    from trtc.runtime.chat_template import ChatTemplate

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"

_SUPPORTED_DECODERS = frozenset(
    {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Sequence", "Strip"}
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """Thread-safe: nothing changes after `load` but the table of pieces, whose entries never do."""

    def __init__(
        self, fast: FastTokenizer, *, template: "ChatTemplate | None", special_ids: frozenset[int]
    ) -> None:
        self._fast = fast
        self._template = template
        self._special_ids = special_ids
        self._pieces = _Pieces(fast)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read tokenizer.json and, where there is one, the chat template.

        Raises:
            EngineIncompatibleError: a file is missing or broken, or of a kind not supported.
        """
        fast = _load_fast(directory / TOKENIZER_FILE)
        added = fast.get_added_tokens_decoder()
        return cls(
            fast,
            template=_load_template(directory),
            special_ids=frozenset(token for token, facts in added.items() if facts.special),
        )

    @property
    def vocab_size(self) -> int:
        """Token ids that have a text; a model's vocabulary may be padded beyond."""
        return self._fast.get_vocab_size()

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text.

        Raises:
            InvalidRequestError: the text holds half a surrogate pair.
        """
        try:
            return tuple(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequestError(
                "is not valid Unicode", field="text", remedy="Remove lone surrogates"
            ) from error

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of whole sequences; bytes that are not UTF-8 become U+FFFD."""
        return self._fast.decode(list(token_ids), skip_special_tokens=skip_special)

    def incremental_decoder(self, skip_special: bool = True) -> "IncrementalDecoder":
        return IncrementalDecoder(self, skip_special=skip_special)

    def token_text(self, token_id: int) -> str:
        """A token by name: `<|im_end|>`; "" for an id without a token."""
        return self._fast.id_to_token(token_id) or ""

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt that asks for the assistant's next message.

        Args:
            messages: {"role": ..., "content": ...} each, oldest first.

        Raises:
            NoTokenizerError: the model has no chat template.
            InvalidRequestError: the template refuses the messages, or takes too long over them.
        """
        if self._template is None:
            raise NoTokenizerError(
                "the model has no chat template", field="chat", remedy="Give a text prompt"
            )
        return self._template.render(messages)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of a chat; the template has written its special tokens itself."""
        return self.encode(self.apply_chat_template(messages), add_special_tokens=False)

    def piece(self, token_id: int, *, first: bool, skip_special: bool) -> bytes | None:
        """UTF-8 (or a part of it) that a token adds to the text before it; None: it is not there.

        A first token may add nothing and yet be the first: "▁" alone, whose space is stripped.
        """
        if skip_special and token_id in self._special_ids:
            return None
        return self._pieces.of(token_id, first=first)


class IncrementalDecoder:
    """Text of one sequence as its tokens come: always whole characters.

    The pieces joined are `Tokenizer.decode` of all tokens. One exception: among byte-fallback
    tokens, libraries replace a whole run of them if any part is not UTF-8; here only that part is.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._first = True

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        return "".join([self._utf8.decode(piece) for piece in self._pieces(token_ids)])

    def flush(self) -> str:
        """The rest: U+FFFD if the tokens end inside a character. The decoder starts anew."""
        rest = self._utf8.decode(b"", final=True)
        self._first = True
        return rest

    def _pieces(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        for token in token_ids:
            piece = self._tokenizer.piece(token, first=self._first, skip_special=self._skip_special)
            if piece is not None:
                self._first = False
                yield piece


class _Pieces:
    """What each token adds to the text, found through the library and kept."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        decoders = _decoder_types(fast.decoder)
        unknown = sorted(decoders - _SUPPORTED_DECODERS)
        if unknown:
            raise EngineIncompatibleError(
                f"the decoder {unknown[0]} is not supported",
                field=f"{TOKENIZER_FILE}: decoder",
                remedy="Use a byte-level or SentencePiece-like tokenizer",
            )
        self._byte_level = _byte_level_alphabet() if "ByteLevel" in decoders else None
        self._byte_fallback = "ByteFallback" in decoders
        self._neutral = self._find_neutral()
        self._first: dict[int, bytes | None] = {}
        self._later: dict[int, bytes | None] = {}

    def of(self, token_id: int, *, first: bool) -> bytes | None:
        known = self._first if first else self._later
        if token_id not in known:
            known[token_id] = self._find(token_id, first)
        return known[token_id]

    def _find(self, token_id: int, first: bool) -> bytes | None:
        token = self._fast.id_to_token(token_id)
        if token is None:
            return None
        if self._byte_level is not None:
            return _spelt_bytes(token, self._byte_level)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            byte = bytes.fromhex(match[1])
            return self._decode([token_id]) if first and byte.isascii() else byte
        if first:
            return self._decode([token_id])
        # After a plain token nothing is stripped from this one.
        return self._decode([self._neutral, token_id])[len(self._decode([self._neutral])) :]

    def _find_neutral(self) -> int:
        """A token that is plain text, to stand before the one in question."""
        if self._byte_level is not None:
            return 0
        for token, token_id in self._fast.get_vocab(with_added_tokens=False).items():
            if token.isascii() and token.isalpha():
                return token_id
        raise EngineIncompatibleError("no token is a plain word", field=TOKENIZER_FILE)

    def _decode(self, token_ids: list[int]) -> bytes:
        return self._fast.decode(token_ids, skip_special_tokens=False).encode()


def _decoder_types(decoder: Decoder | None) -> set[str]:
    """Names of all decoders, also in a sequence of them."""
    if decoder is None:
        return {"none"}  # would join tokens with spaces: no generative model wants that
    # Its part of tokenizer.json; the whole takes as long to write and read again as to load.
    return _types_in(json.loads(decoder.__getstate__()))


def _types_in(description: dict[str, Any]) -> set[str]:
    nested = [_types_in(part) for part in description.get("decoders", ())]
    return {str(description["type"])}.union(*nested)


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's byte-level BPE.

    Printable characters of Latin-1 stand for themselves; the other 68 bytes, in order, for the
    characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + at): byte for at, byte in enumerate(others)})
    return alphabet


def _spelt_bytes(token: str, alphabet: Mapping[str, int]) -> bytes:
    """Bytes that a token spells; an added token with other characters stands for itself."""
    spelt = [alphabet.get(character) for character in token]
    known = [byte for byte in spelt if byte is not None]
    return bytes(known) if len(known) == len(spelt) else token.encode()


def _load_fast(path: Path) -> FastTokenizer:
    try:
        return FastTokenizer.from_buffer(path.read_bytes())
    except Exception as error:  # the library raises nothing narrower
        raise EngineIncompatibleError(
            f"cannot be read ({error})",
            field=str(path),
            remedy="Build the engine from a checkpoint with a working tokenizer.json",
        ) from error


def _load_template(directory: Path) -> "ChatTemplate | None":
    """The template of chat_template.jinja, else of tokenizer_config.json, else None."""
    config = _read_config(directory / CONFIG_FILE)
    path = directory / TEMPLATE_FILE
    source = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    from trtc.runtime.chat_template import ChatTemplate  # not every start has a use for it

    return ChatTemplate(source, special_tokens=_special_tokens(config))


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineIncompatibleError(
            f"is not a JSON object ({error})",
            field=str(path),
            remedy="Mend the checkpoint's tokenizer",
        ) from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its kin, which are strings or {"content": ...}."""
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens
