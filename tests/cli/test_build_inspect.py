"""`trtc build` and `trtc inspect` as a user types them."""

import json
from pathlib import Path

import pytest

from tests.support.models import tiny_checkpoint
from trtc.cli import main
from trtc.protos.manifest import read_manifest
from trtc.protos.plan import read_plan

LIMITS = ("--max-batch-size", "2", "--max-num-tokens", "16", "--max-seq-len", "64")
SMALL = (*LIMITS, "--eval-tokens", "512")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("cli") / "engine"
    command = ["build", "--model", str(checkpoint), "--dtype", "fp32", "--output", str(output)]
    assert main([*command, "--target", "cpu", "--threads", "1", *SMALL]) == 0
    return output


def output_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_build_tells_what_it_made(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("build", "--model", checkpoint, "--output", tmp_path / "e", *SMALL)
    status, out, err = output_of(capsys, *arguments, "--threads", 1)
    assert status == 0
    assert "bf16" in out and f"built {tmp_path / 'e'}" in out.replace("\n", "")
    assert "token ids only" in err.replace("\n", " ") and "token ids only" not in out
    assert "compiling" in err and err.count("writing weights") == 1

    status, out, err = output_of(capsys, *arguments)
    assert status == 2 and not out
    assert err.endswith("Choose another --output, or give --force\n")


def test_a_build_can_print_its_manifest(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = output_of(
        capsys, "build", "--model", checkpoint, "--output", tmp_path / "e", "--dummy-weights",
        "--json", *LIMITS,
    )  # fmt: skip
    assert status == 0
    assert out == (tmp_path / "e" / "manifest.json").read_text()
    assert json.loads(out)["dummy_weights"] is True


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--dtype", "fp7"), 2, "--dtype"),
        (("--target", "tpu"), 2, "--target"),
        (("--max-kl", "0", "--dtype", "bf16"), 3, "--max-kl"),
        (("--calib", "/nowhere.txt", "--dtype", "fp8"), 2, "--calib"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    status: int,
    message: str,
) -> None:
    command = ("build", "--model", checkpoint, "--output", tmp_path / "e", *SMALL, *arguments)
    found, out, err = output_of(capsys, *command)
    assert found == status and not out
    last = err.splitlines()[-1]
    assert last.startswith("trtc: error: ") and message in last
    assert list(tmp_path.iterdir()) == []


def test_inspect_shows_facts_and_accuracy(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = output_of(capsys, "inspect", engine, "--verify")
    assert status == 0
    for text in ("Qwen2ForCausalLM", "fp32", "2 sequences of 64 tokens", "perplexity", "match"):
        assert text in out


def test_inspect_prints_the_manifest_and_the_plan(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = output_of(capsys, "inspect", engine, "--json")
    assert json.loads(out)["digest"] == read_manifest(engine).digest
    _, out, _ = output_of(capsys, "inspect", engine, "--plan", "--json")
    assert out.encode() == (engine / "plan.json").read_bytes()
    _, out, _ = output_of(capsys, "inspect", engine, "--plan")
    plan = read_plan(engine / "plan.json")
    for call in plan.calls:
        assert f"{call.operator:16} {call.site}" in out
    assert "layers.0.attention.qkv.out[:, 0:64]" in out


def test_inspect_refuses_what_is_damaged(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = output_of(capsys, "inspect", tmp_path)
    assert status == 4 and "trtc build" in err
    path = engine / "graph.onnx"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    status, _, err = output_of(capsys, "inspect", engine, "--verify")
    path.write_bytes(whole)
    assert status == 4 and "graph.onnx" in err and "sha256" in err
