"""Whole builds: what is refused and when, what is in the engine, and that it repeats itself."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

from tests.support.engines import build_tiny, config_dict
from tests.support.models import tiny_checkpoint
from trtc.builder.pipeline import build
from trtc.builder.request import BuildRequest
from trtc.builder.targets.cpu import CpuTarget
from trtc.plugins.cpu.host import runnable_isas
from trtc.protos.errors import (
    AccuracyError,
    CheckpointError,
    EnvironmentFault,
    OutputError,
    RequestError,
    TrtcError,
    UnsupportedError,
)
from trtc.protos.manifest import read_manifest
from trtc.runtime.probe import Probe
from trtc.runtime.verify import verify_files

TARGET = CpuTarget(runnable_isas()[:1], optimization="-O1")
MODEL = Path(__file__).parents[2] / "examples" / "models" / "pyllama-draft"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))


def tree(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def request_of(model: object, output: Path, **options: Any) -> BuildRequest:
    small = {"max_batch_size": 2, "max_seq_len": 128, "max_num_tokens": 32}
    return BuildRequest(model=str(model), output=output, **{**small, **options})


# --- What a build makes -----------------------------------------------------------------------


def test_building_twice_gives_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    build_tiny(checkpoint, tmp_path / "one" / "engine", "bf16")
    build_tiny(checkpoint, tmp_path / "two" / "engine", "bf16")
    first = tree(tmp_path / "one" / "engine")
    assert first == tree(tmp_path / "two" / "engine")
    assert not [name for name, content in first.items() if str(tmp_path).encode() in content]


def test_a_measured_build_of_a_real_model(tmp_path: Path) -> None:
    """fp8 through calibration, judged by its own engine; every file matches the manifest."""
    messages: list[str] = []
    result = build(
        request_of(MODEL, tmp_path / "engine", dtype="fp8", max_kl=0.5, max_seq_len=256),
        probe=Probe(1),
        progress=messages.append,
        target=TARGET,
    )
    manifest = read_manifest(tmp_path / "engine")
    assert manifest == result.manifest
    verify_files(tmp_path / "engine", manifest)
    assert sorted(manifest.files) == [
        f"engine-{TARGET.isas[0]}.so",
        "graph.onnx",
        "plan.json",
        "report.html",
        "report.json",
        "tokenizer/generation_config.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "weights.safetensors",
    ]
    assert manifest.scheme.name == "fp8" and manifest.scheme.calibration_sha256
    accuracy = manifest.accuracy
    assert accuracy is not None and accuracy.kl is not None and accuracy.top1 is not None
    assert 0 < accuracy.kl < 0.1 and 0.8 < accuracy.top1 <= 1
    assert accuracy.reference_perplexity == pytest.approx(accuracy.perplexity, rel=0.05)
    assert len(accuracy.layers) == 7 * manifest.model.num_layers
    assert manifest.canaries
    for canary in manifest.canaries:
        length = len(canary.token_ids)
        assert Probe(1).greedy(tmp_path / "engine", canary.prompt_ids, length) == canary.token_ids
    assert any("compiling" in message for message in messages)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine"]


def test_an_engine_too_far_from_the_original_is_not_left(tmp_path: Path) -> None:
    request = request_of(MODEL, tmp_path / "engine", dtype="bf16", max_kl=1e-9)
    with pytest.raises(AccuracyError, match=r"nats a token.*--max-kl|--max-kl.*nats a token"):
        build(request, probe=Probe(1), target=TARGET)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_without_a_tokenizer_builds(checkpoint: Path, tmp_path: Path) -> None:
    result = build_tiny(checkpoint, tmp_path / "engine")
    assert not result.manifest.has_tokenizer
    assert not (tmp_path / "engine" / "tokenizer").exists()
    assert any("token ids only" in note for note in result.report.notes)


def test_several_levels_in_one_engine(checkpoint: Path, tmp_path: Path) -> None:
    isas = tuple(isa for isa in ("x86-64-v4", "generic") if isa in runnable_isas())
    result = build_tiny(checkpoint, tmp_path / "engine", isas=isas)
    assert result.manifest.target.archs == isas
    assert result.manifest.target.name == f"cpu:{','.join(isas)}"
    for isa in isas:
        assert f"engine-{isa}.so" in result.manifest.files


def test_dummy_weights_need_a_config_only(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps(config_dict("llama", hidden_size=128, intermediate_size=256))
    )
    for dtype in ("bf16", "int4_awq"):
        output = tmp_path / dtype
        request = request_of(model, output, dtype=dtype, dummy_weights=True)
        result = build(dataclasses.replace(request), probe=Probe(1), target=TARGET)
        assert result.manifest.dummy_weights and result.manifest.accuracy is None
        assert result.manifest.ledger.weights > 100_000
        assert not (output / "weights.safetensors").exists()
        logits = next(Probe(1).logits(output, [np.arange(40, dtype=np.int32)]))
        assert np.isfinite(logits).all() and 0.05 < logits.std() < 50
        # Reproducible, and not the same for every token.
        np.testing.assert_array_equal(
            logits, next(Probe(1).logits(output, [np.arange(40, dtype=np.int32)]))
        )
        assert len(set(logits.argmax(axis=1).tolist())) > 3


def test_a_quantised_checkpoint_builds_without_being_asked(tmp_path: Path) -> None:
    from trtc.quant.calibrate import quantize_checkpoint
    from trtc.quant.scheme import SCHEMES

    quantized = tmp_path / "quantized"
    quantize_checkpoint(MODEL, SCHEMES["fp8"], "f8e4m3", None, quantized, lambda message: None)
    request = request_of(quantized, tmp_path / "engine", reference=str(MODEL), max_kl=0.5)
    manifest = build(request, probe=Probe(1), target=TARGET).manifest
    assert manifest.scheme.name == "fp8" and manifest.scheme.source == "modelopt"
    assert manifest.kv.dtype == "f8e4m3"
    assert manifest.accuracy is not None and manifest.accuracy.kl is not None

    for options, message in (
        ({"dtype": "int4_awq"}, "quantised as fp8"),
        ({"max_kl": 0.1}, "--reference"),
        ({"calib": MODEL / "config.json"}, "quantised already"),
    ):
        with pytest.raises(RequestError, match=message):
            build(request_of(quantized, tmp_path / "no", **options), probe=Probe(1), target=TARGET)


# --- What is refused at the door --------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "fp7"}, UnsupportedError, "--dtype"),
        ({"dtype": "int4_gptq"}, UnsupportedError, "does not make them"),
        ({"kv_dtype": "int8"}, RequestError, "--kv-dtype"),
        ({"target": "cpu:mmx"}, UnsupportedError, "--target"),
        ({"max_batch_size": 0}, RequestError, "--max-batch-size"),
        ({"max_num_tokens": 0}, RequestError, "--max-num-tokens"),
        ({"max_batch_size": 64}, RequestError, "--max-num-tokens"),
        ({"max_seq_len": 0}, RequestError, "--max-seq-len"),
        ({"max_seq_len": 1_000_000}, RequestError, "--max-seq-len"),
        ({"page_size": 3}, RequestError, "--page-size"),
        ({"tp": 3}, RequestError, "--tp: is 3"),
        ({"tp": 2, "target": "cpu"}, RequestError, "--tp: is 2, and cpu:.* takes at most 1"),
        ({"max_kl": float("nan")}, RequestError, "--max-kl"),
        ({"max_kl": -1.0}, RequestError, "--max-kl"),
        ({"dtype": "bf16", "calib": Path("x")}, RequestError, "--calib"),
        ({"dummy_weights": True, "max_kl": 1.0}, RequestError, "--max-kl"),
        ({"dummy_weights": True, "calib": Path("x")}, RequestError, "--calib"),
    ],
)
def test_bad_requests_leave_nothing(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any], error: type[TrtcError], message: str
) -> None:
    with pytest.raises(error, match=message):
        build(request_of(checkpoint, tmp_path / "engine", **options), probe=Probe(1))
    assert list(tmp_path.iterdir()) == []


def test_max_kl_without_a_way_to_measure(checkpoint: Path, tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(TARGET, isas=("sve2",))
    object.__setattr__(elsewhere, "check", lambda scheme: None)
    with pytest.raises(EnvironmentFault, match="does not run cpu:sve2"):
        build(
            request_of(checkpoint, tmp_path / "engine", max_kl=1.0),
            probe=Probe(1),
            target=elsewhere,
        )


def test_missing_models_and_existing_outputs(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        build(request_of(tmp_path / "nowhere", tmp_path / "engine"), target=TARGET)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "mine").write_text("x")
    for force in (False, True):
        with pytest.raises(OutputError):
            build(request_of(checkpoint, tmp_path / "engine", force=force), target=TARGET)
    assert tree(tmp_path) == {"engine/mine": b"x"}


def test_truncated_weights_leave_nothing(checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    weights = (checkpoint / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        build(request_of(broken, tmp_path / "engine"), target=TARGET)
    assert not (tmp_path / "engine").exists()


def test_an_engine_that_overflows_is_refused(tmp_path: Path) -> None:
    """A probe that returns NaN stands for a model whose activations overflow."""

    class Overflow:
        def logits(self, engine: Path, sequences: Sequence[Any]) -> Iterator[Any]:
            for sequence in sequences:
                yield np.full((len(sequence), 4096), np.nan, np.float32)

        def greedy(
            self, engine: Path, prompt_ids: Sequence[int], max_tokens: int
        ) -> tuple[int, ...]:
            raise AssertionError("an engine without accuracy has no canaries")

    with pytest.raises(AccuracyError, match="overflows"):
        build(request_of(MODEL, tmp_path / "engine"), probe=Overflow(), target=TARGET)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_build_leaves_no_engine(tmp_path: Path) -> None:
    """kill -9 while it works, at several moments; the next build cleans up after it."""
    command = [sys.executable, "-m", "trtc", "build", "--model", str(MODEL), "--dtype", "fp32"]
    command += ["--output", str(tmp_path / "engine")]
    for words in ("planning", "compiling"):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
            assert child.stderr is not None
            for line in child.stderr:
                if words in line:
                    break
            time.sleep(0.2)
            os.kill(child.pid, signal.SIGKILL)
        assert not (tmp_path / "engine").exists()
    build(request_of(MODEL, tmp_path / "engine", dtype="fp32"), target=TARGET)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine"]


def test_unknown_tensors_are_mentioned(checkpoint: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    tensors = safetensors.torch.load_file(checkpoint / "model.safetensors")
    tensors["extra.weight"] = tensors["model.norm.weight"].clone()
    safetensors.torch.save_file(tensors, model / "model.safetensors")
    result = build_tiny(model, tmp_path / "engine")
    assert any("extra.weight" in note for note in result.report.notes)
