"""Calibration text of several files: what names them, their shares, and conversations."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtc.protos.errors import CalibrationError, RequestError
from trtc.quant.calibration_mixture import parse_calibration, read_calibration, tokenize_mixture
from trtc.quant.calibration_text import TokenSet

PYLLAMA = Path(__file__).parents[2] / "examples" / "models" / "pyllama"
VOCAB = 4096


def parsed(option: str) -> list[tuple[str, Any]]:
    return [(str(one.path), pytest.approx(one.share)) for one in parse_calibration(option)]


def ids_file(path: Path, number: int, tokens: int) -> Path:
    """Lines of tokens `number`, whose window says which file it is of."""
    path.write_text(json.dumps({"token_ids": [number] * tokens}))
    return path


def mixed(option: str | Path, model_dir: Path = PYLLAMA, max_tokens: int = 16_384) -> TokenSet:
    return tokenize_mixture(
        read_calibration(option), model_dir, VOCAB, window=512, max_tokens=max_tokens
    )


def test_files_have_shares_or_what_is_left() -> None:
    assert parsed("a.txt") == [("a.txt", 1.0)]
    assert parsed("a.jsonl:0.5,b.txt") == [("a.jsonl", 0.5), ("b.txt", 0.5)]
    assert parsed("a:0.6,b,c") == [("a", 0.6), ("b", 0.2), ("c", 0.2)]
    assert parsed("a:1,b:3") == [("a", 0.25), ("b", 0.75)]


@given(st.lists(st.one_of(st.none(), st.integers(1, 999)), min_size=1, max_size=8))
def test_shares_add_up_to_one(shares: list[int | None]) -> None:
    parts = [f"f{at}" + (f":{share / 8000}" if share else "") for at, share in enumerate(shares)]
    found = parse_calibration(",".join(parts))
    assert sum(one.share for one in found) == pytest.approx(1) and len(found) == len(shares)
    assert all(one.share > 0 for one in found)


def test_a_file_that_exists_is_one_whatever_its_name(tmp_path: Path) -> None:
    odd = tmp_path / "a,b:0.5.txt"
    odd.write_text("x")
    assert [one.path for one in parse_calibration(str(odd))] == [odd]
    assert [one.path for one in parse_calibration(Path("no:1,such"))] == [Path("no:1,such")]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("a:0.5,b:0.5,c", r"--calib: the shares come to 1, and leave nothing for c"),
        ("a:0,b", r"--calib: gives a a share of 0"),
        ("a:x,b", r"--calib: has 'a:x'"),
        ("a:-1,b", r"--calib: has 'a:-1'"),
        ("a,,b", r"--calib: has ''"),
        (":0.5", r"--calib: has ':0.5'"),
        (",".join(["a"] * 17), r"--calib: names 17 files.*16"),
    ],
)
def test_what_is_no_mixture_is_refused(option: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_calibration(option)


def test_windows_are_of_files_in_their_shares_and_turns(tmp_path: Path) -> None:
    first = ids_file(tmp_path / "a.jsonl", 1, 40_000)
    second = ids_file(tmp_path / "b.jsonl", 2, 40_000)
    tokens = mixed(f"{first}:0.25,{second}")
    origins = [int(window[0]) for window in tokens.sequences]
    assert origins.count(1) == 8 and origins.count(2) == 24
    assert {len(window) for window in tokens.sequences} == {512}
    for begin in range(0, 32, 8):
        assert origins[begin : begin + 8].count(1) == 2
    assert tokens.source == "a.jsonl:0.25,b.jsonl:0.75"
    assert tokens.sha256 != mixed(f"{first}:0.5,{second}").sha256


def test_a_small_file_makes_the_mixture_smaller(tmp_path: Path) -> None:
    first = ids_file(tmp_path / "a.jsonl", 1, 3000)
    second = ids_file(tmp_path / "b.jsonl", 2, 40_000)
    origins = [int(window[0]) for window in mixed(f"{first},{second}").sequences]
    assert origins.count(1) == origins.count(2) == 5
    few = ids_file(tmp_path / "few.jsonl", 1, 1000)
    with pytest.raises(CalibrationError, match=r"--calib few\.jsonl: has 1000.*at least 2048"):
        mixed(f"{few},{second}")


def test_one_file_is_as_it_always_was(tmp_path: Path) -> None:
    from trtc.quant.calibration_text import MIN_TOKENS, read_texts, tokenize

    path = ids_file(tmp_path / "a.jsonl", 7, 9000)
    expected = tokenize(
        read_texts(path), PYLLAMA, VOCAB, window=512, max_tokens=4096, min_tokens=MIN_TOKENS
    )
    found = mixed(path, max_tokens=4096)
    assert (found.source, found.sha256) == (expected.source, expected.sha256)
    assert all(map(np.array_equal, found.sequences, expected.sequences))


def chats(path: Path, *chats: Any) -> Path:
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return path


def test_conversations_are_written_by_the_chat_template(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    said = [
        {"messages": [{"role": "user", "content": f"def f{n}(): " + "x " * 300}]} for n in range(40)
    ]
    tokens = mixed(chats(tmp_path / "a.jsonl", *said))
    tokenizer = Tokenizer.from_file(str(PYLLAMA / "tokenizer.json"))
    text = tokenizer.decode(tokens.sequences[0].tolist(), skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\ndef f0(): x x")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": []}, r"line 2 has no \"text\""),
        ({"messages": [{"role": "user"}]}, r"line 2.*content.*messages\[0\]"),
        ({"messages": [{"role": "user", "content": [1]}]}, r"line 2.*messages\[0\]\.content"),
        ({"messages": "hello"}, r"line 2.*messages"),
    ],
)
def test_bad_conversations_are_named_by_line(line: Any, message: str, tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", {"text": "fine"}, line)
    with pytest.raises(CalibrationError, match=rf"a\.jsonl: {message}"):
        read_calibration(path)


def test_a_template_that_refuses_or_lacks_is_said(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((PYLLAMA / "tokenizer_config.json").read_text())
    (model / "tokenizer.json").write_bytes((PYLLAMA / "tokenizer.json").read_bytes())
    path = chats(
        tmp_path / "a.jsonl",
        {"text": "fine"},
        {"messages": [{"role": "user", "content": "hello"}]},
    )
    refusing = {**config, "chat_template": "{{ raise_exception('no users') }}"}
    (model / "tokenizer_config.json").write_text(json.dumps(refusing))
    with pytest.raises(CalibrationError, match=r"line 2 is refused by the chat template.*no users"):
        mixed(path, model)
    (model / "tokenizer_config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key != "chat_template"})
    )
    with pytest.raises(CalibrationError, match="no chat template"):
        mixed(path, model)
