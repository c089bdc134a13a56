"""Streamed text is the text: pieces joined are the library's own decoding of all tokens."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from trtc.protos.errors import EngineIncompatibleError, InvalidRequestError, NoTokenizerError
from trtc.runtime.text.chat import TemplateInput
from trtc.runtime.text.chat_template import ONLY_MESSAGES
from trtc.runtime.text.tokenizer import Tokenizer

PYLLAMA = Path(__file__).parents[3] / "examples" / "models" / "pyllama"
WORDS = ["▁the", "▁cat", "cat", "s", "▁", "▁▁", "a", "é", "日", "▁日本", "!", "<s>"]


def sentencepiece_like(decoder: tokenizers.decoders.Decoder) -> Tokenizer:
    """A small vocabulary with byte fallback, as Llama 2, Gemma and Phi-3 have it."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    for word in WORDS:
        vocab[word] = len(vocab)
    fast = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    fast.decoder = decoder
    fast.add_special_tokens(["<s>", "</s>"])
    fast.add_tokens(["<tool>"])
    special = [token for token, added in fast.get_added_tokens_decoder().items() if added.special]
    return Tokenizer(fast, template=None, special_ids=frozenset(special))


def strip_decoder() -> tokenizers.decoders.Decoder:
    d = tokenizers.decoders
    return d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])


def plain_decoder() -> tokenizers.decoders.Decoder:
    d = tokenizers.decoders
    return d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse()])


BYTE_LEVEL = Tokenizer.load(PYLLAMA)
SENTENCEPIECE = {
    "strip": sentencepiece_like(strip_decoder()),
    "plain": sentencepiece_like(plain_decoder()),
    "metaspace": sentencepiece_like(tokenizers.decoders.Metaspace()),
}
FIRST_WORD = 257


def streamed(tokenizer: Tokenizer, token_ids: Sequence[int], skip_special: bool = True) -> str:
    decoder = tokenizer.incremental_decoder(skip_special)
    pieces = [decoder.push((token,)) for token in token_ids]
    return "".join(pieces) + decoder.flush()


@given(
    token_ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 20), max_size=40),
    skip_special=st.booleans(),
)
def test_byte_level_pieces_join_to_the_text_of_any_tokens(
    token_ids: list[int], skip_special: bool
) -> None:
    whole = BYTE_LEVEL.decode(token_ids, skip_special)
    assert streamed(BYTE_LEVEL, token_ids, skip_special) == whole


@given(text=st.text(max_size=60))
def test_byte_level_pieces_join_to_the_text_that_was_encoded(text: str) -> None:
    assert streamed(BYTE_LEVEL, BYTE_LEVEL.encode(text)) == text


token_runs = st.one_of(
    st.integers(FIRST_WORD, FIRST_WORD + len(WORDS) + 1).map(lambda token: [token]),
    st.text(min_size=1, max_size=4).map(lambda text: [1 + byte for byte in text.encode()]),
)


@settings(max_examples=200)
@given(runs=st.lists(token_runs, max_size=12), skip_special=st.booleans())
@pytest.mark.parametrize("kind", ["strip", "plain"])
def test_byte_fallback_pieces_join_to_the_text(
    kind: str, runs: list[list[int]], skip_special: bool
) -> None:
    tokenizer = SENTENCEPIECE[kind]
    token_ids = [token for run in runs for token in run]
    assert streamed(tokenizer, token_ids, skip_special) == tokenizer.decode(token_ids, skip_special)


@given(words=st.lists(st.integers(FIRST_WORD, FIRST_WORD + len(WORDS) - 1), max_size=12))
def test_metaspace_pieces_join_to_the_text(words: list[int]) -> None:
    tokenizer = SENTENCEPIECE["metaspace"]
    assert streamed(tokenizer, words) == tokenizer.decode(words)


def test_a_character_comes_when_its_last_byte_has() -> None:
    tokenizer = SENTENCEPIECE["strip"]
    decoder = tokenizer.incremental_decoder()
    smile = [1 + byte for byte in "😀".encode()]
    assert [decoder.push((token,)) for token in smile] == ["", "", "", "😀"]
    decoder = BYTE_LEVEL.incremental_decoder()
    pieces = [decoder.push((token,)) for token in BYTE_LEVEL.encode("a👩🏽‍🚀b")]
    assert "" in pieces
    assert "".join(pieces) == "a👩🏽‍🚀b"


def test_bytes_that_are_no_character_become_replacements_and_the_rest_survives() -> None:
    tokenizer = SENTENCEPIECE["plain"]
    cat = FIRST_WORD + WORDS.index("cat")
    smile = [1 + byte for byte in "😀".encode()]
    assert streamed(tokenizer, [*smile, 1 + 0xFF, cat]) == "😀\ufffdcat"
    assert streamed(tokenizer, [cat, *smile[:3]]) == "cat\ufffd"


def test_only_the_first_token_loses_its_space() -> None:
    the, cat = FIRST_WORD, FIRST_WORD + 1
    tokenizer = SENTENCEPIECE["strip"]
    assert streamed(tokenizer, [the, cat, the]) == "the cat the"
    (start,) = tokenizer.encode("<s>", add_special_tokens=False)
    assert streamed(tokenizer, [start, the, cat]) == "the cat"


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    assert streamed(BYTE_LEVEL, [BYTE_LEVEL.vocab_size + 5]) == ""
    assert BYTE_LEVEL.token_utf8(BYTE_LEVEL.vocab_size + 5) == b""
    assert BYTE_LEVEL.token_utf8(0) == b"<|endoftext|>"


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        BYTE_LEVEL.encode("a\ud800")


def test_a_chat_is_written_by_the_template() -> None:
    messages = TemplateInput([{"role": "user", "content": "Hi"}], dict(ONLY_MESSAGES))
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert BYTE_LEVEL.has_chat_template
    assert BYTE_LEVEL.apply_chat_template(messages) == text


def copy_of_pyllama(folder: Path, **config: object) -> Path:
    shutil.copy(PYLLAMA / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    folder = copy_of_pyllama(tmp_path, chat_template="config", eos_token={"content": "<end>"})
    assert Tokenizer.load(folder).apply_chat_template(TemplateInput([], {})) == "config"
    (folder / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert Tokenizer.load(folder).apply_chat_template(TemplateInput([], {})) == "file <end>"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    folder = copy_of_pyllama(tmp_path, chat_template=named)
    assert Tokenizer.load(folder).apply_chat_template(TemplateInput([], {})) == "d"


def test_a_template_for_tools_renders_conversations_with_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "d"},
        {"name": "tool_use", "template": "{{ tools | length }}{{ bos_token }}"},
        {"name": 5, "template": "x"},
        {"name": "rag"},
    ]
    folder = copy_of_pyllama(tmp_path, chat_template=named)
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.apply_chat_template(TemplateInput([], {"tools": [{}, {}]})) == "2<s>"
    assert tokenizer.apply_chat_template(TemplateInput([], {"tools": None})) == "d"
    tokenizer.close()


def test_without_a_template_a_chat_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(copy_of_pyllama(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(NoTokenizerError, match="no chat template"):
        tokenizer.apply_chat_template(TemplateInput([], {}))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "\udcff"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str | None) -> None:
    folder = copy_of_pyllama(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(EngineIncompatibleError, match=name):
        Tokenizer.load(folder)


def test_an_unknown_decoder_is_refused_by_name() -> None:
    with pytest.raises(EngineIncompatibleError, match="CTC"):
        sentencepiece_like(tokenizers.decoders.CTC())


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
@pytest.mark.parametrize("has_own", [True, False])
def test_files_of_templates_are_chosen_as_transformers_does(
    has_own: bool, tools: Any, tmp_path: Path
) -> None:
    """As save_pretrained writes a tokenizer with several templates, and with one in its config."""
    template = {"default": "d{{ messages | length }}", "tool_use": "t{{ tools | length }}"}
    theirs = AutoTokenizer.from_pretrained(PYLLAMA)
    theirs.chat_template = template
    theirs.save_pretrained(tmp_path)
    assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").is_file()
    if not has_own:
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": n, "template": t} for n, t in template.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        shutil.rmtree(tmp_path / "additional_chat_templates")
        (tmp_path / "chat_template.jinja").unlink()
    messages = [{"role": "user", "content": "Hi"}]
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    expected = loaded.apply_chat_template(messages, tools=tools, tokenize=False)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.apply_chat_template(TemplateInput(messages, {"tools": tools})) == expected
    tokenizer.close()
