"""A value follows its files, and outlives files that cannot be loaded."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from trtc.protos.errors import RequestError
from trtc.runtime.host.reloaded import Reloaded


def load_from(path: Path) -> Callable[[], str]:
    def load() -> str:
        try:
            text = path.read_text()
        except OSError as error:
            raise RequestError("cannot be read", field=str(path)) from error
        if text.startswith("bad"):
            raise RequestError(f"says {text}", field=str(path))
        return text

    return load


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("first")
    return path


def test_a_file_that_does_not_change_is_read_once(path: Path) -> None:
    value = Reloaded([path], load_from(path))
    assert value.get() is value.get()


def test_a_file_written_over_replaced_or_linked_anew_is_read_again(path: Path) -> None:
    value = Reloaded([path], load_from(path))
    path.write_text("other")
    assert value.get() == "other"
    (path.parent / "new").write_text("third")
    (path.parent / "new").replace(path)
    assert value.get() == "third"
    path.unlink()
    path.symlink_to(path.parent / "elsewhere")
    (path.parent / "elsewhere").write_text("fourth")
    assert value.get() == "fourth"


def test_what_cannot_be_loaded_is_said_once_and_the_last_value_stays(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtc.runtime.host.reloaded.RETRY_S", 0)
    value = Reloaded([path], load_from(path))
    path.write_text("bad")
    assert [value.get() for _ in range(3)] == ["first"] * 3
    path.unlink()
    assert value.get() == "first"
    errors = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert [one.partition("stay: ")[2] for one in errors] == [
        f"{path}: says bad",
        f"{path}: cannot be read",
    ]
    path.write_text("good")
    assert value.get() == "good"


def test_files_that_cannot_be_loaded_are_not_tried_at_every_call(path: Path) -> None:
    attempts = []

    def load() -> str:
        attempts.append(0)
        return load_from(path)()

    value = Reloaded([path], load)
    path.write_text("bad")
    for _ in range(100):
        value.get()
    assert len(attempts) == 2


def test_files_that_change_while_they_are_read_are_read_again(path: Path) -> None:
    def load() -> str:
        text = path.read_text()
        if text == "first":
            path.write_text("second")
        return text

    assert Reloaded([path], load).get() == "second"


def test_the_first_load_must_succeed(tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        Reloaded([tmp_path / "none"], load_from(tmp_path / "none"))
