"""`trtc keys`: keys are made, listed and revoked; the file never holds one."""

import json
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trtc.cli import main
from trtc.commands.keys import command
from trtc.runtime.requests.principal import Scope, tenant
from trtc.runtime.service.api_keys import KeyTable, read_keys


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def add(file: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """The key, and its id."""
    assert main(["keys", str(file), "--add", *arguments]) == 0
    shown = capsys.readouterr()
    said = re.fullmatch(r"key (\w+) of .* shown this once, .*\n", shown.err)
    assert said is not None
    return shown.out.removesuffix("\n"), said[1]


def test_a_key_that_was_made_opens_and_is_not_in_the_file(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = add(file, capsys, "alice")
    second, _ = add(file, capsys, "bob", "--scope", "metrics", "--expires-days", "7")
    table = KeyTable(read_keys(file))
    assert table.find(first) == tenant("alice")
    found = table.find(second)
    assert found is not None
    assert found.scopes == {Scope.METRICS}
    assert first not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_keys_are_listed_and_revoked_one_by_one(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, first_id = add(file, capsys, "alice", "--scope", "inference", "--scope", "metrics")
    second, second_id = add(file, capsys, "alice", "--expires-days", "1")
    assert main(["keys", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" created=")[0] for line in lines] == [
        f"alice id={one} scopes=inference,metrics" for one in (first_id, second_id)
    ]
    assert "expires=" not in lines[0]
    assert "expires=" in lines[1]
    assert main(["keys", str(file), "--revoke", first_id]) == 0
    table = KeyTable(read_keys(file))
    assert table.find(first) is None
    assert table.find(second) is not None


def test_the_file_keeps_its_mode_its_link_and_what_people_wrote(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(file, capsys, "alice")
    file.chmod(0o640)
    link = file.parent / "link.json"
    link.symlink_to(file)
    add(link, capsys, "bob")
    assert link.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert list(json.loads(file.read_text())["tenants"]) == ["alice", "bob"]
    assert sorted(one.name for one in file.parent.iterdir()) == ["keys.json", "link.json"]


def test_keys_that_are_made_at_once_are_all_kept(file: Path) -> None:
    callback = command.callback
    assert callback is not None
    nobody = {"scopes": (), "expires_days": None, "revoke": None}
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(callback, file, f"t{one}", **nobody) for one in range(24)]:
            done.result()
    assert sorted(read_keys(file).tenants) == sorted(f"t{one}" for one in range(24))


def test_a_place_that_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", str(tmp_path / "none" / "keys.json"), "--add", "alice"]) == 2
    assert "its directory cannot be opened (No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "cannot be read"),
        (["--add", "a b"], "regex"),
        (["--add", "a", "--revoke", "b"], "give one of them"),
        (["--scope", "metrics"], "--scope: has no effect alone"),
        (["--expires-days", "1"], "--expires-days: has no effect alone"),
        (["--revoke", "none"], "cannot be read"),
    ],
)
def test_bad_options(
    arguments: list[str], said: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", str(file), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not file.exists()


def test_an_id_that_no_key_has_is_said(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(file, capsys, "alice")
    assert main(["keys", str(file), "--revoke", "none"]) == 2
    assert "has the id none" in capsys.readouterr().err
