"""`trtc build` of what somebody made to break it: one line, and nothing left behind."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.text.test_hostile_tokenizer import CATASTROPHIC, DAMAGE, small, split
from tests.support.processes import children
from tests.support.servers import TOKENIZER as PYLLAMA
from trtc.cli import main
from trtc.protos.errors import CheckpointError

SMALL = ("--max-batch-size", "2", "--max-num-tokens", "16", "--max-seq-len", "64")
TOKENIZERS: dict[str, Callable[[], Any]] = {
    **DAMAGE,
    "an id beyond int32": lambda: small(
        model={"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}
    ),
    "panics": lambda: split(CATASTROPHIC.replace("x", "a").replace("y", "z")),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PYLLAMA, tmp_path / "home" / "model"))


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


def refused(
    model: Path, scratch: Path, capsys: pytest.CaptureFixture[str], *options: object
) -> str:
    """The one line of a build that ends so, and leaves nothing."""
    home = model.parent
    before, running = sorted(home.rglob("*")), children(running="tokenizer_check")
    command = ["build", "--model", model, "--output", home / "engine", *SMALL, *options]
    status = main([str(word) for word in command])
    captured = capsys.readouterr()
    assert status == CheckpointError.exit_code, captured
    assert captured.out == ""
    assert "Traceback" not in captured.err
    (line,) = [line for line in captured.err.splitlines() if line.startswith("trtc: error: ")]
    assert captured.err.endswith(f"{line}\n")
    assert sorted(home.rglob("*")) == before
    assert not list(scratch.iterdir())
    assert children(running="tokenizer_check") <= running
    return line


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_hostile_tokenizer_ends_a_build_in_one_line(
    name: str, model: Path, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = TOKENIZERS[name]()
    text = content if isinstance(content, str) else json.dumps(content)
    (model / "tokenizer.json").write_text(text)
    assert str(model / "tokenizer.json") in refused(model, scratch, capsys)


def test_a_tokenizer_that_is_a_device_ends_a_build_in_one_line(
    model: Path, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to("/dev/zero")
    home = model.parent
    # Not a file, so the checkpoint has none: the engine would take token ids only.
    text = home / "eval.txt"
    text.write_text("x " * 4096)
    assert "--eval-text" in refused(model, scratch, capsys, "--eval-text", text)


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("config.json", '{"vocab_size": 1, "vocab_size": 2}', "config.json: is ambiguous"),
        ("config.json", "[" * 1_000_000, "config.json: is not a JSON object"),
        ("hf_quant_config.json", '{"quantization": 7}', "hf_quant_config.json: quantization"),
        ("hf_quant_config.json", '{"quantization": {"quant_algo": []}}', "quant_algo: is []"),
        ("generation_config.json", '{"eos_token_id": {}}', "eos_token_id"),
        ("model.safetensors", "x" * 100, "model.safetensors: is not a safetensors file"),
    ],
)
def test_other_hostile_files_end_a_build_in_one_line(
    file: str,
    content: str,
    named: str,
    model: Path,
    scratch: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (model / file).write_text(content)
    assert named in refused(model, scratch, capsys)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe" * 999, b"fine\n\xed\xa0\x80", None])
def test_a_hostile_eval_text_ends_a_build_in_one_line(
    content: bytes | None, model: Path, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = model.parent / "eval.txt"
    if content is None:
        os.mkfifo(text)
    else:
        text.write_bytes(content)
    assert str(text) in refused(model, scratch, capsys, "--eval-text", text)


def test_the_process_of_a_build_ends_as_documented(model: Path, scratch: Path) -> None:
    (model / "tokenizer.json").write_text("[" * 1_000_000)
    command = [sys.executable, "-m", "trtc", "build", "--model", str(model), *SMALL]
    done = subprocess.run(
        [*command, "--output", str(model.parent / "engine")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == CheckpointError.exit_code
    assert done.stderr.splitlines()[-1].startswith("trtc: error: ")
    assert str(model / "tokenizer.json") in done.stderr.splitlines()[-1]
    assert sorted(model.parent.iterdir()) == [model]
    assert not list(scratch.iterdir())
