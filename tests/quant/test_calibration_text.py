"""Reading, checking and cutting calibration text."""

import hashlib
import json
import os
import subprocess
import sys
import time
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
from trtc.quant.data.make import spread

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


@pytest.mark.parametrize("few", [1, 3, 7])
def test_what_is_spread_keeps_its_order_and_is_everywhere(few: int) -> None:
    many = [str(number) for number in range(20)]
    parts = spread([chr(ord("a") + at) for at in range(few)], many)
    assert [one for one in parts if one.isdigit()] == many
    letters = [at for at, one in enumerate(parts) if one.isalpha()]
    assert [parts[at] for at in letters] == [chr(ord("a") + at) for at in range(few)]
    gaps = np.diff([-1, *letters])
    assert gaps.max() - gaps.min() <= 1


def test_each_part_of_the_calibration_text_has_several_scripts() -> None:
    """Whichever windows of it a calibration takes."""
    (text,) = default_calibration().samples
    assert isinstance(text, str)
    half = len(text) // 2
    for part in (text[:half], text[half:]):
        letters = {unicodedata.name(one).split()[0] for one in part if one.isalpha()}
        assert len(letters & {"LATIN", "CYRILLIC", "CJK", "HANGUL", "ARABIC", "DEVANAGARI"}) >= 3


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


HOSTILE = {
    "binary": ("a.txt", bytes(range(256)) * 64, "not UTF-8"),
    "elf": ("a.txt", b"\x7fELF\x02\x01\x01\0\xff\xfe", "not UTF-8"),
    "half a character": ("a.txt", "fine \u20ac".encode()[:-1], "not UTF-8"),
    "surrogate": ("a.txt", b"\xed\xa0\x80", "not UTF-8"),
    "empty": ("a.txt", b"", "no text"),
    "a mark alone": ("a.txt", b"\xef\xbb\xbf", "no text"),
    "blank": ("a.txt", b" \n\t\r\n" * 100, "no text"),
    "no records": ("a.jsonl", b"\n" * 100, "no text"),
    "deep": ("a.jsonl", b'{"text": ' + b"[" * 1_000_000, "line 1 is not JSON"),
    "deep unknown": ("a.jsonl", b'{"x": ' + b"[" * 1_000_000, "line 1 is not JSON"),
    "null": ("a.jsonl", b"null\n" * 9, "line 1 is not JSON"),
    "an id beyond 32 bits": ("a.jsonl", b'{"token_ids": [1, 4294967296]}', "line 1 is not JSON"),
    "an id beyond 64 bits": ("a.jsonl", b'{"token_ids": [' + b"9" * 400 + b"]}", "line 1 is not"),
    "an id below": ("a.jsonl", b'{"token_ids": [-2147483649]}', "line 1 is not JSON"),
    "a fraction": ("a.jsonl", b'{"token_ids": [1.5]}', "line 1 is not JSON"),
    "endless record": (
        "a.jsonl",
        b'{"text": "' + b"x" * 40_000_000,
        "line 1 has more than 8000000",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_is_one_line_that_names_its_file(name: str, tmp_path: Path) -> None:
    file, content, message = HOSTILE[name]
    path = write(tmp_path / file, content)
    with pytest.raises(CalibrationError, match=message) as caught:
        read_texts(path, "--eval-text")
    assert caught.value.field == f"--eval-text {path}"
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["fifo", "directory", "endless", "sparse"])
def test_what_is_no_bounded_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    began = time.monotonic()
    with pytest.raises(CalibrationError, match=r"a\.txt: (cannot be read|has 1099511627776 bytes)"):
        read_texts(path)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("character", ["x", "\u20ac", "\U0001f600"])
def test_of_one_endless_line_the_beginning_is_read(character: str, tmp_path: Path) -> None:
    content = character * (9_000_000 if character == "x" else 8_500_000)
    texts = read_texts(write(tmp_path / "a.txt", content))
    assert texts.samples == (content[:8_000_000],)
    assert texts.sha256 == hashlib.sha256(content.encode()).hexdigest()


_MEMORY = """
import resource, sys
from pathlib import Path
from trtc.quant.calibration_text import read_texts
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
print(len(read_texts(Path(sys.argv[1])).samples[0]))
"""


def test_a_file_of_line_ends_takes_no_more_memory_than_its_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"a" + b"\n" * 250_000_000)
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["8000000"], done.stderr[-600:]
