"""Text to tokens and back, through the `tokenizers` library; chat through its template.

Streaming text needs each token's own bytes. What a token adds to the text depends on its decoder:

    ByteLevel       the characters of the token spell bytes, one each
    ByteFallback    `<0xE2>` is one byte; other tokens are text
    Metaspace, ...  text, less its leading space when it is the first

So each token's piece is computed once and cached, and a UTF-8 decoder joins the pieces.
"""

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import Decoder

from trtc.protos.errors import EngineIncompatibleError, InvalidRequestError, NoTokenizerError
from trtc.protos.files import MAX_JSON_BYTES, UnreadableError, decode_json, read_file
from trtc.protos.panics import tokenizer_failures
from trtc.runtime.text.template_options import SPECIAL_TOKENS

if TYPE_CHECKING:
    from trtc.runtime.text.chat import TemplateInput
    from trtc.runtime.text.chat_template import ChatTemplate

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
"""In older checkpoints."""
TEMPLATE_FILE = "chat_template.jinja"
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"

_SUPPORTED_DECODERS = frozenset(
    {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Sequence", "Strip"}
)
_SHORT = 2048
"""Up to this many characters or tokens the library's single-text methods are used, which hold the
GIL; beyond it the batch methods, which release the GIL and may start threads."""
_REPLACEMENT = "\ufffd".encode()
"""Text of a token that the library's decoder fails on, so that other tokens keep their texts."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """Thread-safe: after `load` only the cache of pieces changes, and its entries never do."""

    def __init__(
        self, fast: FastTokenizer, *, template: "ChatTemplate | None", special_ids: frozenset[int]
    ) -> None:
        self._fast = fast
        self._template = template
        self._special_ids = special_ids
        self._pieces = _Pieces(fast)

    @classmethod
    def load(cls, directory: Path, names: Collection[str] | None = None) -> "Tokenizer":
        """Read tokenizer.json and, where there is one, the chat template.

        Args:
            names: files that may be read, whatever else is in the directory; None: any.

        Raises:
            EngineIncompatibleError: a file is missing or broken, or of a kind not supported.
        """
        files = _Files(directory, names)
        with tokenizer_failures(_cannot_be_used(directory / TOKENIZER_FILE)):
            fast = _load_fast(files)
            added = fast.get_added_tokens_decoder()
            special_ids = frozenset(token for token, facts in added.items() if facts.special)
            return cls(fast, template=_load_template(files), special_ids=special_ids)

    def close(self) -> None:
        """End the processes that render chats. Idempotent."""
        if self._template is not None:
            self._template.close()

    @property
    def vocab_size(self) -> int:
        """Number of token ids with a text; a model's vocabulary may be padded beyond."""
        return self._fast.get_vocab_size()

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template that is not known to be invalid."""
        return self._template is not None and not self._template.is_invalid

    def template_has(self, text: str) -> bool:
        """Whether the chat template, if there is one, has a text in it."""
        return self._template is not None and self._template.has(text)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a special token, which texts leave out."""
        return token_id in self._special_ids

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the tokens that were added to the vocabulary, special or not, by their texts."""
        added = self._fast.get_added_tokens_decoder()
        return {facts.content: token for token, facts in added.items()}

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens, by their texts."""
        return {text: one for text, one in self.added_tokens.items() if one in self._special_ids}

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text.

        Raises:
            InvalidRequestError: the text holds half a surrogate pair, or the tokenizer fails on it.
        """
        with tokenizer_failures(_fails_on("text")):
            try:
                if len(text) <= _SHORT:
                    encoding = self._fast.encode(text, add_special_tokens=add_special_tokens)
                else:
                    (encoding,) = self._fast.encode_batch_fast(
                        [text], add_special_tokens=add_special_tokens
                    )
                return tuple(encoding.ids)
            except (TypeError, UnicodeEncodeError) as error:
                raise InvalidRequestError(
                    "is not valid Unicode", field="text", remedy="Remove lone surrogates"
                ) from error

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of whole sequences; bytes that are not UTF-8 become U+FFFD.

        Raises:
            InvalidRequestError: the tokenizer fails on them.
        """
        with tokenizer_failures(_fails_on("token_ids")):
            if len(token_ids) <= _SHORT:
                return self._fast.decode(list(token_ids), skip_special_tokens=skip_special)
            (text,) = self._fast.decode_batch([list(token_ids)], skip_special_tokens=skip_special)
            return str(text)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the text of the longest token."""
        byte_level = self._pieces.is_byte_level
        return max(len(t if byte_level else t.encode()) for t in self._fast.get_vocab())

    def incremental_decoder(
        self, skip_special: bool = True, shown_ids: frozenset[int] = frozenset()
    ) -> "IncrementalDecoder":
        """Args: shown_ids: special tokens that are not skipped."""
        return IncrementalDecoder(self, skip_special=skip_special, shown_ids=shown_ids)

    def special_within(self, texts: Collection[str]) -> frozenset[int]:
        """The special tokens that occur in one of these texts."""
        special = self.special_tokens.items()
        return frozenset(token for mark, token in special if any(mark in text for text in texts))

    def token_utf8(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, special or not; b"" for an id without a token."""
        return self.piece(token_id, first=False, skip_special=False) or b""

    def apply_chat_template(self, conversation: "TemplateInput") -> str:
        """The prompt of a conversation.

        Raises:
            NoTokenizerError: the model has no chat template.
            InvalidRequestError: the template refuses the messages, or takes too long.
        """
        if self._template is None:
            raise NoTokenizerError(
                "the model has no chat template", field="chat", remedy="Give a text prompt"
            )
        return self._template.render(
            conversation.messages,
            conversation.variables,
            continue_final_message=conversation.continue_final_message,
        )

    def piece(self, token_id: int, *, first: bool, skip_special: bool) -> bytes | None:
        """UTF-8 bytes, maybe of a part of a character, that a token adds to the text; None: the
        token is skipped.

        The first token may add nothing: "▁" alone, whose space is stripped.
        """
        if skip_special and token_id in self._special_ids:
            return None
        return self._pieces.of(token_id, first=first)


class IncrementalDecoder:
    """Incremental text of one sequence, in whole characters.

    The concatenated text equals `Tokenizer.decode` of all tokens, with one exception: if a part of
    a run of byte-fallback tokens is not UTF-8, libraries replace the whole run; here only that part
    is replaced.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown_ids = shown_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._first = True

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        return "".join([self._utf8.decode(piece) for piece in self._pieces(token_ids)])

    def flush(self) -> str:
        """The rest: U+FFFD if the tokens end inside a character. Resets the decoder."""
        rest = self._utf8.decode(b"", final=True)
        self._first = True
        return rest

    def _pieces(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        for token in token_ids:
            skip_special = self._skip_special and token not in self._shown_ids
            piece = self._tokenizer.piece(token, first=self._first, skip_special=skip_special)
            if piece is not None:
                self._first = False
                yield piece


class _Pieces:
    """The bytes that each token adds to the text, computed by the library and cached."""

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

    @property
    def is_byte_level(self) -> bool:
        """Whether each character of a token is one byte."""
        return self._byte_level is not None

    def of(self, token_id: int, *, first: bool) -> bytes | None:
        known = self._first if first else self._later
        if token_id not in known:
            try:
                with tokenizer_failures(_fails_on("token_ids")):
                    known[token_id] = self._find(token_id, first)
            except InvalidRequestError:
                known[token_id] = _REPLACEMENT
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
        """A token of plain text, to decode another token after it."""
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
    # Only the decoder's part of tokenizer.json: serialising all of it takes as long as loading.
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
    """Bytes that a token spells; an added token with other characters is plain text."""
    spelt = [alphabet.get(character) for character in token]
    known = [byte for byte in spelt if byte is not None]
    return bytes(known) if len(known) == len(spelt) else token.encode()


class _Files(NamedTuple):
    """A tokenizer's directory, with an optional list of files that may be read."""

    directory: Path
    names: Collection[str] | None

    def read(self, name: str) -> bytes | None:
        """A file's content; None: there is none, or it may not be read.

        Raises:
            EngineIncompatibleError: it exists and cannot be read.
        """
        path = self.directory / name
        if not (path.exists() if self.names is None else name in self.names):
            return None
        try:
            return read_file(path, MAX_JSON_BYTES)
        except UnreadableError as error:
            raise EngineIncompatibleError(str(error), field=str(path)) from error


def _load_fast(files: _Files) -> FastTokenizer:
    content = files.read(TOKENIZER_FILE)
    if content is None:
        raise FileNotFoundError("there is no such file")
    return FastTokenizer.from_buffer(content)


def _cannot_be_used(path: Path) -> Callable[[str], EngineIncompatibleError]:
    return lambda problem: EngineIncompatibleError(
        f"cannot be read ({problem})",
        field=str(path),
        remedy="Build the engine from a checkpoint with a working tokenizer.json",
    )


def _fails_on(field: str) -> Callable[[str], InvalidRequestError]:
    return lambda problem: InvalidRequestError(
        f"the model's tokenizer fails on it ({problem})", field=field
    )


def load_template(directory: Path) -> "ChatTemplate | None":
    """The chat template of a checkpoint or tokenizer folder; None: there is none.

    Raises:
        EngineIncompatibleError: a file is broken.
    """
    return _load_template(_Files(directory, None))


def _load_template(files: _Files) -> "ChatTemplate | None":
    """The template of chat_template.jinja, else of tokenizer_config.json, else None; and beside it
    the one for tools: a file of its own, or where the configuration has several by name."""
    config = _read_config(files, CONFIG_FILE)
    named = _named_templates(config.get("chat_template"))
    own = _template_text(files, TEMPLATE_FILE)
    source = named.get("default") if own is None else own
    if source is None:
        return None
    of_tools = _template_text(files, TOOL_TEMPLATE_FILE)
    if of_tools is None and own is None:
        of_tools = named.get("tool_use")
    from trtc.runtime.text.chat_template import ChatTemplate  # not needed at every start

    special = _special_tokens({**_read_config(files, SPECIAL_TOKENS_FILE), **config})
    return ChatTemplate(
        source, special, tool_use=None if of_tools is None else ChatTemplate(of_tools, special)
    )


def _named_templates(given: Any) -> dict[str, str]:
    """Templates by name, from a template or a list of them; other values are ignored."""
    if isinstance(given, str):
        return {"default": given}
    entries = [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    return {
        name: source
        for one in entries
        if isinstance(name := one.get("name"), str)
        and isinstance(source := one.get("template"), str)
    }


def _template_text(files: _Files, name: str) -> str | None:
    content = files.read(name)
    try:
        return None if content is None else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EngineIncompatibleError(
            "is not UTF-8",
            field=str(files.directory / name),
            remedy="Mend the checkpoint's tokenizer",
        ) from error


def _read_config(files: _Files, name: str) -> dict[str, Any]:
    content = files.read(name)
    if content is None:
        return {}
    try:
        return decode_json(content, dict[str, Any])
    except UnreadableError as error:
        raise EngineIncompatibleError(
            f"is not a JSON object ({error})",
            field=str(files.directory / name),
            remedy="Mend the checkpoint's tokenizer",
        ) from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, which are strings or {"content": ...}."""
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens
