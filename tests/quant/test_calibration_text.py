"""Reading, checking and cutting calibration text."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtc.protos.errors import CalibrationError
from trtc.quant.calibration_text import (
    MIN_TOKENS,
    default_calibration,
    default_heldout,
    read_texts,
    tokenize,
)

PYLLAMA = Path(__file__).parents[2] / "examples" / "models" / "pyllama"
VOCAB = 4096


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_plain_text_is_one_sample_as_it_stands(tmp_path: Path) -> None:
    content = "one\ntwo\n\n\nthree\r\n \nfour"
    texts = read_texts(write(tmp_path / "a.txt", content))
    assert texts.samples == (content,)
    assert texts.source == "a.txt"


def test_repeating_a_line_makes_no_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "the same few words again\n" * 5000)
    with pytest.raises(CalibrationError, match="100% of them in repeated lines"):
        cut(path, min_tokens=MIN_TOKENS)


def test_json_lines(tmp_path: Path) -> None:
    lines = [{"text": "one", "url": "x"}, {"text": ""}, {"token_ids": [1, 2]}, {"text": "one"}]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_texts(path).samples == ("one", (1, 2))


def test_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert read_texts(write(tmp_path / "a.txt", b"\xef\xbb\xbfhello")).samples == ("hello",)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\nb\xffd", r"line 2 is not UTF-8 \(byte 2 of the line\)"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text"', "line 3 is not JSON"),
        ("a.jsonl", b'{"text": 5}', "line 1 is not JSON with a .text."),
        ("a.jsonl", b'["x"]', "line 1 is not JSON"),
        ("a.jsonl", b'{"content": "x"}', 'line 1 has no "text"'),
        ("a.jsonl", b'{"text": "\xff"}', "line 1 is not UTF-8"),
        ("a.txt", b"\n \n", "has no text in it"),
        ("a.jsonl", b"", "has no text in it"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(CalibrationError, match=message) as caught:
        read_texts(write(tmp_path / name, content))
    assert name in caught.value.field


@pytest.mark.parametrize("name", ["absent.txt", "."])
def test_unreadable_files(tmp_path: Path, name: str) -> None:
    with pytest.raises(CalibrationError, match="cannot be read"):
        read_texts(tmp_path / name)


def cut(path: Path, **changes: Any) -> tuple[np.ndarray, ...]:
    settings: dict[str, Any] = {"window": 8, "max_tokens": 1000, "min_tokens": 16} | changes
    return tokenize(read_texts(path), PYLLAMA, VOCAB, **settings).sequences


def id_lines(path: Path, count: int) -> Path:
    return write(path, "\n".join(json.dumps({"token_ids": [n, n + 1]}) for n in range(0, count, 2)))


def test_windows_are_equal_and_in_order(tmp_path: Path) -> None:
    sequences = cut(id_lines(tmp_path / "a.jsonl", 100))
    assert [len(s) for s in sequences] == [8] * 12
    assert np.concatenate(sequences).tolist() == list(range(96))


def test_tail_is_kept_where_asked_for(tmp_path: Path) -> None:
    path = id_lines(tmp_path / "a.jsonl", 100)
    assert [len(s) for s in cut(path, tail=True)] == [8] * 12 + [4]
    assert [len(s) for s in cut(path, tail=True, max_tokens=98)] == [8] * 12 + [2]
    assert [len(s) for s in cut(path, tail=True, max_tokens=40)] == [8] * 5


def test_fewer_tokens_than_a_window(tmp_path: Path) -> None:
    sequences = cut(id_lines(tmp_path / "a.jsonl", 100), max_tokens=5)
    assert [s.tolist() for s in sequences] == [[0, 1, 2, 3, 4]]


def test_of_a_long_text_windows_are_spread_evenly(tmp_path: Path) -> None:
    sequences = cut(id_lines(tmp_path / "a.jsonl", 800), max_tokens=40)
    assert [int(s[0]) for s in sequences] == [0, 160, 320, 480, 640]


def test_text_shorter_than_a_window_is_one_short_window(tmp_path: Path) -> None:
    (sequence,) = cut(id_lines(tmp_path / "a.jsonl", 20), window=512)
    assert len(sequence) == 20


def test_too_few_tokens_are_refused_with_the_number_needed(tmp_path: Path) -> None:
    path = id_lines(tmp_path / "a.jsonl", 100)
    with pytest.raises(CalibrationError, match=r"has 100 tokens.*at least 4096 tokens"):
        cut(path, min_tokens=MIN_TOKENS)


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path, token: int) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"token_ids": [token, *range(100)]}))
    with pytest.raises(CalibrationError, match=f"token {token} is not among the model's {VOCAB}"):
        cut(path)


def test_text_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    texts = read_texts(write(tmp_path / "a.txt", "words"))
    with pytest.raises(CalibrationError, match=r"no tokenizer\.json"):
        tokenize(texts, tmp_path, VOCAB, window=8, max_tokens=8, min_tokens=1)


def test_shipped_texts_suffice_and_are_disjoint() -> None:
    calibration, heldout = default_calibration(), default_heldout()
    paragraphs = [
        {part for part in str(texts.samples[0]).split("\n\n") if len(part) > 200}
        for texts in (calibration, heldout)
    ]
    assert min(map(len, paragraphs)) > 20
    assert not paragraphs[0] & paragraphs[1]
    found = tokenize(calibration, PYLLAMA, VOCAB, window=512, max_tokens=10**6, min_tokens=1)
    assert found.num_tokens > 8 * MIN_TOKENS
    found = tokenize(heldout, PYLLAMA, VOCAB, window=512, max_tokens=10**6, min_tokens=1)
    assert found.num_tokens > 2 * MIN_TOKENS


def test_shipped_texts_hold_no_control_characters() -> None:
    for texts in (default_calibration(), default_heldout()):
        assert texts.source == "default"
        assert all(
            isinstance(sample, str)
            and all(unicodedata.category(c) != "Cc" or c in "\n\t" for c in sample)
            for sample in texts.samples
        )


def test_same_file_gives_the_same_windows() -> None:
    one, two = (
        tokenize(default_heldout(), PYLLAMA, VOCAB, window=64, max_tokens=640, min_tokens=1)
        for _ in range(2)
    )
    assert one.sha256 == two.sha256
    np.testing.assert_array_equal(np.stack(one.sequences), np.stack(two.sequences))
