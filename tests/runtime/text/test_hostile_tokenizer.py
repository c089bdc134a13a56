"""A tokenizer.json that somebody made to crash, hang or confuse whoever uses it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import children
from tests.support.servers import TOKENIZER
from trtc.protos.errors import CheckpointError, EngineIncompatibleError, InvalidRequestError
from trtc.runtime.engine.probe import Probe
from trtc.runtime.text import tokenizer_trial
from trtc.runtime.text.tokenizer import Tokenizer

CATASTROPHIC = "(x+x+)+y"
SLOW = r"(?:(a|a|a|a|a|a){7}b)|."
"""Each position of a run of a's costs many attempts, none so many that the library gives up."""


def small(**changes: Any) -> dict[str, Any]:
    vocab = {letter: number for number, letter in enumerate("abxyĠ")}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        **changes,
    }


def split(pattern: str) -> dict[str, Any]:
    kind = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return small(pre_tokenizer=kind)


def write(folder: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "tokenizer.json").write_text(text)
    return folder


DAMAGE: dict[str, Callable[[], Any]] = {
    "empty": lambda: "",
    "no object": lambda: "[]",
    "nested": lambda: "[" * 1_000_000,
    "nested decoders": lambda: json.dumps(small()).replace(
        '{"type": "Fuse"}',
        '{"type": "Sequence", "decoders": [' * 9000 + '{"type": "Fuse"}' + "]}" * 9000,
    ),
    "negative ids": lambda: small(model={"type": "BPE", "vocab": {"a": -1}, "merges": []}),
    "enormous ids": lambda: small(model={"type": "BPE", "vocab": {"a": 2**63}, "merges": []}),
    "unknown merges": lambda: small(
        model={"type": "BPE", "vocab": {"a": 0}, "merges": [["q", "r"]]}
    ),
    "broken expression": lambda: split("("),
    "unknown model": lambda: small(model={"type": "Prophet"}),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_cannot_be_loaded_is_one_line_with_the_files_name(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, DAMAGE[name]())
    with pytest.raises(EngineIncompatibleError, match=r"cannot be read \(") as opened:
        Tokenizer.load(folder)
    with pytest.raises(CheckpointError) as built:
        Probe().check_tokenizer(folder)
    for error in (opened.value, built.value):
        assert error.field == str(folder / "tokenizer.json")
        assert "\n" not in str(error)
        assert len(str(error)) < 600


def test_an_id_beyond_int32_is_refused_at_build(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}
    with pytest.raises(CheckpointError, match="4294967295 as its largest token id"):
        Probe().check_tokenizer(write(tmp_path, small(model=model)))


def test_a_key_that_is_given_twice_is_refused_at_build(tmp_path: Path) -> None:
    """Whoever reviews the file may read one of the two, and the library the other."""
    text = json.dumps(small()).replace('"a": 0', '"a": 1, "a": 0')
    with pytest.raises(CheckpointError, match="an object has the key 'a' twice"):
        Probe().check_tokenizer(write(tmp_path, text))


def test_a_panic_is_the_requests_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, split(CATASTROPHIC)))
    for length in (3000, 9000):
        with pytest.raises(InvalidRequestError, match="the model's tokenizer fails on it"):
            tokenizer.encode("x" * length)
    assert tokenizer.encode("ab") == (0, 1)


def test_an_expression_that_panics_is_found_at_build(tmp_path: Path) -> None:
    folder = write(tmp_path, split(CATASTROPHIC.replace("x", "a").replace("y", "z")))
    with pytest.raises(CheckpointError, match="retry-limit"):
        Probe().check_tokenizer(folder)


def test_one_that_does_not_end_is_killed_at_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_trial, "_CPU_SECONDS", 0.5)
    before = children(running="tokenizer_check")
    with pytest.raises(CheckpointError, match=r"takes more than 0.5 seconds on a short text"):
        Probe().check_tokenizer(write(tmp_path, split(SLOW)))
    assert not children(running="tokenizer_check") - before


def test_a_working_tokenizer_is_taken_and_a_broken_template_is_a_note(tmp_path: Path) -> None:
    assert Probe().check_tokenizer(TOKENIZER) == ()
    write(tmp_path, (TOKENIZER / "tokenizer.json").read_text())
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    (note,) = Probe().check_tokenizer(tmp_path)
    assert "the chat template is not valid Jinja" in note
    assert "takes no chats" in note


@pytest.mark.parametrize("text", ["[]", "{", "[" * 1_000_000])
def test_a_broken_tokenizer_config_is_named(text: str, tmp_path: Path) -> None:
    write(tmp_path, small())
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        Probe().check_tokenizer(tmp_path)
    assert caught.value.field == str(tmp_path / "tokenizer_config.json")
