"""The check of sampling on a GPU tells right from wrong; here the engine is the twin itself."""

from pathlib import Path

import pytest

from examples.bench.gpu_sampling import KINDS, MAX_TOKENS, answers_of, check
from tests.support.engines import build_tiny
from tests.support.models import tiny_checkpoint


def test_an_engine_that_draws_otherwise_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_tiny(tiny_checkpoint("llama", tmp_path), tmp_path / "engine", "fp32").path
    kinds = [KINDS[0], KINDS[-1]]
    answers = answers_of(engine, kinds)
    assert check(engine, answers, kinds) == []
    assert capsys.readouterr().out.count("768 / 768") == len(kinds)
    wrong = {kinds[0].name: answers[kinds[-1].name], kinds[-1].name: answers[kinds[-1].name]}
    monkeypatch.setattr(
        "examples.bench.gpu_sampling.drawn_by_the_host", lambda *_: [0] * MAX_TOKENS
    )
    found = check(engine, wrong, kinds)
    assert [problem.partition(":")[0] for problem in found] == ["plain", "plain", kinds[-1].name]
