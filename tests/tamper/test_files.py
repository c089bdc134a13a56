"""Only listed, regular files of an engine are read; reports are for people."""

import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from tests.tamper.support import reseal
from trtc import open_engine
from trtc.cli import main
from trtc.protos.errors import EngineCorruptError
from trtc.protos.manifest import TOKENIZER_DIR, read_manifest
from trtc.runtime.frontends.local import LocalEngine

PROMPT = "The quick brown"


def opened(engine: Path) -> LocalEngine:
    return open_engine(engine, num_threads=1, kv_bytes=1 << 22)


def test_a_chat_template_that_was_dropped_in_is_refused(engine: Path) -> None:
    (engine / TOKENIZER_DIR / "chat_template.jinja").write_text("forged")
    with pytest.raises(EngineCorruptError, match="not listed") as caught:
        opened(engine)
    assert caught.value.field.endswith("tokenizer/chat_template.jinja")
    assert "Remove it" in caught.value.remedy


@pytest.mark.parametrize("name", ["libother.so", "tokenizer/added_tokens.json", "more/file"])
def test_no_command_accepts_an_unlisted_file(
    engine: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (engine / name).parent.mkdir(exist_ok=True)
    (engine / name).write_text("x")
    for command in (
        ["generate", str(engine), "--prompt", PROMPT, "--max-tokens", "1"],
        ["inspect", str(engine), "--verify"],
        ["package", str(engine), str(tmp_path / "repository")],
    ):
        assert main(command) == EngineCorruptError.exit_code
        assert "not listed" in capsys.readouterr().err


def test_hidden_files_are_named_and_ignored(engine: Path, caplog: pytest.LogCaptureFixture) -> None:
    (engine / ".DS_Store").write_text("x")
    (engine / TOKENIZER_DIR / ".nfs0001").write_text("x")
    with closing(opened(engine)) as local:
        assert local.generate(PROMPT, max_tokens=2).result().token_ids
    assert ".DS_Store" in caplog.text and ".nfs0001" in caplog.text


def test_an_unlisted_tokenizer_is_not_loaded(engine: Path) -> None:
    def forget(document: dict) -> None:
        document["files"] = {
            name: facts
            for name, facts in document["files"].items()
            if not name.startswith(TOKENIZER_DIR)
        }

    reseal(engine, forget)
    with pytest.raises(EngineCorruptError, match="tokenizer"):
        opened(engine)
    shutil.rmtree(engine / TOKENIZER_DIR)
    with pytest.raises(EngineCorruptError, match="tokenizer"):
        opened(engine)


@pytest.mark.parametrize("damage", ["missing", "altered", "longer"])
def test_a_damaged_report_keeps_no_engine_from_running(
    engine: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    reports = [engine / name for name in ("report.html", "report.json")]
    reports = [path for path in reports if path.exists()]
    assert reports
    for path in reports:
        if damage == "missing":
            path.unlink()
        elif damage == "altered":
            path.write_bytes(bytes(len(path.read_bytes())))
        else:
            path.write_text("x" * 9)
    with closing(opened(engine)) as local:
        assert local.generate(PROMPT, max_tokens=2).result().token_ids
    assert damage == "altered" or reports[0].name in caplog.text
    assert main(["inspect", str(engine), "--verify"]) == EngineCorruptError.exit_code


@pytest.mark.parametrize("kind", ["fifo", "zero", "directory"])
@pytest.mark.parametrize(
    "name", ["manifest.json", "plan.json", "weights.safetensors", "tokenizer/tokenizer.json"]
)
def test_what_is_no_regular_file_is_refused_at_once(
    engine: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = engine / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    for command in (
        ["inspect", str(engine), "--verify"],
        ["generate", str(engine), "--prompt", PROMPT, "--max-tokens", "1"],
    ):
        assert main(command) == EngineCorruptError.exit_code
        assert "not a regular file" in capsys.readouterr().err


def test_an_engine_of_symbolic_links_opens(engine: Path, tmp_path: Path) -> None:
    """Stores that keep content apart from names, as hub caches and ConfigMaps do."""
    linked = tmp_path / "linked"
    for name in (*read_manifest(engine).files, "manifest.json"):
        (linked / name).parent.mkdir(parents=True, exist_ok=True)
        (linked / name).symlink_to(engine / name)
    with closing(opened(linked)) as local:
        assert local.generate(PROMPT, max_tokens=2).result().token_ids
