"""What a long command says while it works."""

import pytest

from trtc.commands.phases import PhaseLines, phases
from trtc.protos.progress import Step, counted


def test_a_step_is_text_that_carries_its_numbers() -> None:
    step = Step("calibrating fp8", 3, 32, "layers")
    assert step == "calibrating fp8: 3/32 layers"
    assert (step.phase, step.done, step.total, step.unit) == ("calibrating fp8", 3, 32, "layers")
    plain = Step("planning")
    assert plain == "planning" and plain.done is None and plain.total is None


def test_counting_begins_at_nothing_and_ends_with_all() -> None:
    steps: list[Step] = []
    assert list(counted("abc", "reading", 3, "letters", steps.append)) == ["a", "b", "c"]
    assert [step.done for step in steps] == [0, 1, 2, 3]


def test_lines_are_few_and_say_how_long_it_will_take() -> None:
    lines: list[str] = []
    now = 0.0
    show = PhaseLines(lines.append, clock=lambda: now)
    for done in range(101):
        show(Step("calibrating", done, 100, "layers"))
        now += 1.0
    show(Step("writing"))
    assert lines[0] == "calibrating" and lines[-1] == "writing"
    assert lines[1] == "calibrating: 15/100 layers, about 85 s left"
    assert len(lines) == 8


def test_plain_text_is_a_phase_by_its_first_word() -> None:
    lines: list[str] = []
    show = PhaseLines(lines.append, clock=lambda: 0.0)
    for message in ("hashing a", "hashing b", "writing out"):
        show(message)
    assert lines == ["hashing a", "writing out"]


def test_a_terminal_shows_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "120")):
        monkeypatch.setenv(name, value)
    with phases() as show:
        show(Step("calibrating [fp8]", 3, 32, "layers"))
    said = capsys.readouterr().err
    assert "calibrating [fp8]" in said and "3/32 layers" in said
