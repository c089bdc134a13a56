"""What accuracy is measured on: the shipped text, a text of the user's, and how much of it."""

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from trtc.protos.errors import CalibrationError
from trtc.quant.calibration_text import MIN_EVAL_TOKENS, TokenSet
from trtc.quant.evaluation import MAX_TOKENS, heldout_set, part_of

PYLLAMA = Path(__file__).parents[2] / "examples" / "models" / "pyllama"
VOCAB = 4096


def id_lines(path: Path, count: int) -> Path:
    rows = np.arange(count).reshape(-1, 10) % VOCAB
    path.write_text("\n".join(json.dumps({"token_ids": row.tolist()}) for row in rows))
    return path


def test_the_default_tokens_are_prose_code_and_many_scripts() -> None:
    texts = heldout_set(PYLLAMA, VOCAB, 512)
    assert texts.source == "default" and texts.num_tokens == MAX_TOKENS
    tokenizer = Tokenizer.from_file(str(PYLLAMA / "tokenizer.json"))
    text = "".join(tokenizer.decode(ids.tolist()) for ids in texts.sequences)
    scripts = {unicodedata.name(c, "?").split()[0] for c in text if c.isalpha()}
    assert len(scripts & {"LATIN", "CYRILLIC", "CJK", "HIRAGANA", "ARABIC", "DEVANAGARI"}) >= 4
    assert text.count("{") > 10 and "return" in text, "no code"
    assert text.count(" the ") > 10, "no English prose"


def test_as_many_tokens_as_were_asked_for(tmp_path: Path) -> None:
    path = id_lines(tmp_path / "mine.jsonl", 2000)
    texts = heldout_set(tmp_path, VOCAB, 512, path, tokens=1300)
    assert texts.source == "mine.jsonl"
    assert [len(ids) for ids in texts.sequences] == [512, 512, 276]
    assert heldout_set(tmp_path, VOCAB, 512, path).num_tokens == 2000


@pytest.mark.parametrize(("asked", "needed"), [(None, MIN_EVAL_TOKENS), (900, 900)])
def test_too_little_text_is_refused_with_the_number_needed(
    asked: int | None, needed: int, tmp_path: Path
) -> None:
    path = id_lines(tmp_path / "mine.jsonl", 300)
    with pytest.raises(CalibrationError, match=rf"--eval-text.*has 300 tokens.*at least {needed}"):
        heldout_set(tmp_path, VOCAB, 512, path, tokens=asked)


def test_the_shipped_text_has_only_so_many_tokens() -> None:
    with pytest.raises(CalibrationError, match=r"--eval-text: has \d+ tokens.*at least 1000000"):
        heldout_set(PYLLAMA, VOCAB, 512, tokens=1_000_000)


def test_a_part_is_spread_over_the_whole() -> None:
    whole = TokenSet("x", "", tuple(np.full(100, i, np.int32) for i in range(10)))
    part = part_of(whole, 350)
    assert [int(ids[0]) for ids in part.sequences] == [0, 3, 6]
    assert part_of(whole, 10).num_tokens == 100
    assert part_of(whole, 1000) is whole
