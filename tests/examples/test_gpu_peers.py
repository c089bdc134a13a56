"""The comparison with vLLM on a GPU: everything in it but vLLM and the GPU."""

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from examples.bench import gpu_peers
from examples.bench.gpu_peers import table
from examples.bench.gpu_shapes import LLAMA_8B, Shape
from examples.bench.gpu_weights import fill_like_vllm, vllm_e4m3_dummies, with_weights
from examples.bench.peers.failures import RunFailed
from examples.bench.peers.gpu_work import PARTS, GpuJob, measure, read_gpu_job, settled
from examples.bench.peers.processes import lines
from examples.bench.peers.vllm_checkpoint import write_configuration
from examples.bench.peers.vllm_weights import fill_model
from trtc import build
from trtc.protos.plan import Fill, Weight
from trtc.runtime.executors.dummy_weights import fill_weights
from trtc.runtime.frontends.local import LocalEngine

SHAPE = LLAMA_8B | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


# --- the work -----------------------------------------------------------------------------------


class Simulated:
    """An engine that takes prompts by steps of 8192 tokens beside whoever decodes.

    A step takes 1 ms for each sequence that decodes, and 10 for the prompts."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []

    def timed(self, requests: int, input_len: int, output_len: int) -> float:
        self.asked.append((requests, input_len, output_len))
        waiting, left, milliseconds = requests, [0] * requests, 0.0
        while waiting or any(left):
            milliseconds += sum(map(bool, left)) + 10 * bool(waiting)
            left = [max(0, one - 1) for one in left]
            starting = min(waiting, 8192 // input_len)
            first = requests - waiting
            left[first : first + starting] = [output_len - 1] * starting
            waiting -= starting
        return milliseconds / 1e3


def job(*parts: str, repeats: int) -> GpuJob:
    return GpuJob("model", fp8_kv=False, weights="random", parts=parts, repeats=repeats)


def test_a_decode_is_what_full_steps_take_whatever_the_prompts_and_the_end_cost() -> None:
    found = dict(measure(Simulated().timed, job("decode", repeats=1)))
    assert found == {
        f"decode of {batch} at 1024, ms": pytest.approx(batch) for batch in (1, 16, 64, 128, 256)
    }


def test_decodes_have_the_context_that_is_told_in_the_middle() -> None:
    engine = Simulated()
    dict(measure(engine.timed, job("decode", repeats=1)))
    # One load that does not count, then pairs.
    for (_, prompt, new), (_, same, fewer) in zip(
        engine.asked[1::5], engine.asked[2::5], strict=True
    ):
        assert prompt == same
        assert prompt + (new + fewer) / 2 == 1024


def test_rates_and_first_tokens_are_medians_of_runs_that_follow_one() -> None:
    seconds = iter([99.0, 2.1, 2.0, 1.0, 99.0, 4.0, 4.1, 8.0])
    found = dict(measure(lambda *_: next(seconds), job("prefill", repeats=3)))
    assert found == {
        "prefill 64 x 1024, tok/s": 64 * 1024 / 2.0,
        "prefill 32 x 4096, tok/s": 32 * 4096 / 4.1,
    }
    seconds = iter([99.0, 0.05, 0.05, 0.06, 99.0, 8.0, 8.0])
    found = dict(measure(lambda *_: next(seconds), job("first token", "offline", repeats=1)))
    assert found["first token of 4096, ms"] == pytest.approx(50)
    assert found["offline 512 x (512 in, 256 out), tok/s"] == 512 * 256 / 8.0


def test_runs_in_which_kernels_are_compiled_do_not_count() -> None:
    seconds = iter([1.0, 60.0, 30.0, 1.0, 1.02])
    assert settled(lambda: next(seconds), repeats=1) == pytest.approx(1.01)
    assert not list(seconds)


def test_runs_that_never_agree_are_taken_as_they_are() -> None:
    seconds = iter([1.0, 2.0] * 3)
    assert settled(lambda: next(seconds), repeats=1) == 1.5
    assert not list(seconds)


def test_a_job_reaches_its_worker_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sent = GpuJob("model", fp8_kv=True, weights="zeros", parts=PARTS, repeats=2)
    given = tmp_path / "job"
    given.write_text(sent.to_json())
    with given.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        read = read_gpu_job()
    assert replace(read, parts=tuple(read.parts)) == sent


def test_a_start_counts_from_when_the_job_was_sent() -> None:
    asked = replace(job("start", repeats=1), sent_at=time.time() - 7)
    found = dict(measure(lambda *_: 0.0, asked))
    assert found == {"start to first token, s": pytest.approx(7, abs=1)}


def ratios(lines: Sequence[str]) -> list[str]:
    return [line.split()[-1] for line in lines[1:]]


def test_a_ratio_says_how_many_times_as_fast_trtc_is() -> None:
    names = ("start to first token, s", "decode of 1, ms", "prefill 64 x 1024, tok/s")
    vllm = dict(zip(names, (60.0, 3.0, 80_000.0), strict=True))
    trtc = dict(zip(names, (3.0, 2.0, 100_000.0), strict=True))
    assert ratios(table("fp8", vllm, trtc)) == ["20.00x", "1.50x", "1.25x"]


class Workers:
    """In the place of worker processes: what they are given, and what the disk holds then."""

    def __init__(self) -> None:
        self.given: dict[str, tuple[GpuJob, set[str]]] = {}

    def run(self, python: str | Path, module: str, job: GpuJob) -> Iterator[tuple[str, float]]:
        if python == Path("broken"):
            raise RunFailed("no CUDA here")
        self.given[module] = job, {path.suffix for path in Path(job.model).iterdir()}
        yield "decode of 1, ms", 1.0 if module == "trtc_gpu_worker" else 1.5


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With an engine without weights of a small shape, under the name of a large one."""
    monkeypatch.setattr(gpu_peers, "SHAPES", {"8b": Shape(SHAPE)})
    model = write_configuration(tmp_path / "model", SHAPE)
    build(model=model, output=tmp_path / "8b-fp8", dtype="fp8", target="cpu", dummy_weights=True)
    return tmp_path


@pytest.mark.parametrize("weights", gpu_peers.WEIGHTS)
def test_both_are_given_weights_of_the_same_kind(
    directory: Path,
    weights: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    workers = Workers()
    monkeypatch.setattr(gpu_peers, "_worker", workers.run)
    setting = gpu_peers.Setting(directory, Path("python"), ("decode",), 2, longest_decode=1024)
    assert gpu_peers.compare(setting, [gpu_peers.Match(gpu_peers.ENGINES["fp8"], weights)]) == 0
    assert ratios(capsys.readouterr().out.splitlines()[2:]) == ["1.50x"]
    ours, files = workers.given["trtc_gpu_worker"]
    theirs, checkpoint = workers.given["vllm_worker"]
    assert ours.weights == theirs.weights == weights
    # What trtc does not draw by itself it reads from a file; vLLM draws either kind.
    assert (".safetensors" in files) == (weights == "zeros")
    assert ".safetensors" not in checkpoint
    assert not (directory / "8b-fp8-zeros").exists()
    (found,) = json.loads((directory / "peers.json").read_text()).items()
    assert found == (
        f"8b-fp8, {weights} weights",
        {"vllm": {"decode of 1, ms": 1.5}, "trtc": {"decode of 1, ms": 1.0}},
    )


def test_a_runtime_that_fails_is_told_and_ends_its_match_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_peers, "_worker", Workers().run)
    setting = gpu_peers.Setting(directory, Path("broken"), ("decode",), 2, longest_decode=1024)
    assert gpu_peers.compare(setting, [gpu_peers.Match(gpu_peers.ENGINES["fp8"], "random")]) == 1
    assert "8b-fp8, random weights: no CUDA here" in capsys.readouterr().out
    (found,) = json.loads((directory / "peers.json").read_text()).values()
    assert set(found) == {"trtc"}


def test_a_side_alone_is_told_as_it_comes(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_peers, "_worker", Workers().run)
    setting = gpu_peers.Setting(
        directory, Path("python"), ("decode",), 2, 1024, sides=("vllm",), results="one.json"
    )
    assert gpu_peers.compare(setting, [gpu_peers.Match(gpu_peers.ENGINES["fp8"], "random")]) == 0
    told = "8b-fp8, random weights, vllm_worker: decode of 1, ms 1.50"
    assert capsys.readouterr().out.splitlines() == [told]
    assert json.loads((directory / "one.json").read_text()) == {
        "8b-fp8, random weights": {"vllm": {"decode of 1, ms": 1.5}}
    }


def test_answers_are_read_among_other_lines_until_a_worker_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = 'print(["log"]); print(\'["a", 1.5]\'); raise SystemExit("no CUDA here")'
    command: list[str | Path] = [sys.executable, "-c", answers]
    monkeypatch.setattr(gpu_peers, "lines", lambda *_, stdin: lines(command, stdin=stdin))
    found = gpu_peers._worker("python", "vllm_worker", job("decode", repeats=1))
    assert next(found) == ("a", 1.5)
    with pytest.raises(RunFailed, match="no CUDA here"):
        next(found)


# --- weights ------------------------------------------------------------------------------------


def test_dummies_like_vllms_are_what_torch_rounds_the_same_numbers_to() -> None:
    found = vllm_e4m3_dummies()
    values = np.random.Generator(np.random.Philox(0)).uniform(-1e-3, 1e-3, len(found))
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(found, expected)
    assert np.mean(found & 0x7F == 0) == pytest.approx(0.977, abs=0.002)


def test_only_e4m3_weights_are_made_like_vllms() -> None:
    size = 1 << 16
    fills = (Fill(element="i8"), Fill(element="f8e4m3"), Fill(element="bf16"))
    weights = [
        Weight(fill.element, "u8", (size,), "row_major", at * size, size, fill)
        for at, fill in enumerate(fills)
    ]
    before = fill_weights(weights, 3 * size)
    data = before.copy()
    fill_like_vllm(data, weights)
    np.testing.assert_array_equal(data[:size], before[:size])
    np.testing.assert_array_equal(data[size : 2 * size], vllm_e4m3_dummies()[:size])
    np.testing.assert_array_equal(data[2 * size :], before[2 * size :])


def test_an_engine_says_the_same_with_its_dummies_from_a_file(tmp_path: Path) -> None:
    model = write_configuration(tmp_path / "model", SHAPE)
    engine = tmp_path / "engine"
    build(model=model, output=engine, dtype="fp8", target="cpu", dummy_weights=True)
    said = []
    for one in (engine, with_weights(engine, tmp_path / "filled")):
        with LocalEngine.open(one, dummy_weights=one == engine) as opened:
            said.append(
                opened.generate([1, 2, 3], max_tokens=8, temperature=0.0, ignore_eos=True).result()
            )
    assert len(said[0].token_ids) == 8
    assert said[0].token_ids == said[1].token_ids


class Linear(nn.Module):
    """As vLLM makes them with static FP8 scales: two products as one, in the type of `weight`."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        super().__init__()
        self.weight = _empty((rows, columns), dtype)
        if dtype == torch.float8_e4m3fn:
            self.weight_scale = _empty((2,), torch.float32)
            self.input_scale = _empty((2,), torch.float32)


class Experts(nn.Module):
    """As vLLM makes them for MXFP4."""

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.w13_weight = _empty((experts, 2 * inner, hidden // 2), torch.uint8)
        self.w13_weight_scale = _empty((experts, 2 * inner, hidden // 32), torch.uint8)
        self.w13_bias = _empty((experts, 2 * inner), torch.bfloat16)
        self.w2_weight = _empty((experts, hidden, inner // 2), torch.uint8)
        self.w2_weight_scale = _empty((experts, hidden, inner // 32), torch.uint8)
        self.w2_bias = _empty((experts, hidden), torch.bfloat16)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = Linear(512, 1024, torch.bfloat16)
        self.input_norm = nn.ParameterDict({"weight": _empty((1024,), torch.bfloat16)})
        self.qkv_proj = Linear(512, 1024)
        self.gate = Linear(256, 1024, torch.bfloat16)
        self.experts = Experts(4, 1024, 256)
        self.A_log = _empty((8,), torch.float32)
        self.k_scale = nn.Parameter(torch.tensor(-1.0), requires_grad=False)


def _empty(size: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """Full of ones' bits, which are NaN in every type that has it."""
    bits = torch.full((math.prod(size) * dtype.itemsize,), 0xFF, dtype=torch.uint8)
    return nn.Parameter(bits.view(dtype).view(size), requires_grad=False)


@pytest.fixture(scope="module")
def layer() -> Layer:
    filled = Layer()
    fill_model(filled)
    return filled


def test_e4m3_codes_of_vllm_keep_the_size_of_activations(layer: Layer) -> None:
    linear = layer.qkv_proj
    weights = linear.weight.float() * linear.weight_scale[0]
    assert float(weights.std()) * 1024**0.5 == pytest.approx(1, abs=0.1)
    assert float((weights == 0).float().mean()) < 0.02
    assert linear.weight_scale[0] == linear.weight_scale[1]
    assert linear.input_scale.tolist() == [1 / 32, 1 / 32]


def test_mxfp4_experts_of_vllm_keep_the_size_of_activations(layer: Layer) -> None:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    for codes, scales, depth in (
        (layer.experts.w13_weight, layer.experts.w13_weight_scale, 1024),
        (layer.experts.w2_weight, layer.experts.w2_weight_scale, 256),
    ):
        (exponent,) = scales.unique().tolist()
        pairs = torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]])
        # The nearest power of two is within a factor of the square root of two.
        gain = float(pairs.std()) * 2.0 ** (exponent - 127) * depth**0.5
        assert 0.7 < gain < 1.42
    assert 0 < float(layer.experts.w13_bias.abs().max()) <= 0.01


def test_rows_choose_vllms_experts_evenly(layer: Layer) -> None:
    rows = torch.randn(16, 1024, generator=torch.Generator().manual_seed(0))
    chosen = (rows @ layer.gate.weight.float().T).topk(8).indices
    even = 256 * (1 - (1 - 8 / 256) ** 16)
    assert chosen.unique().numel() == pytest.approx(even, rel=0.1)


def test_what_vllm_has_beside_weights_is_what_it_means(layer: Layer) -> None:
    assert set(layer.input_norm["weight"].tolist()) == {1.0}
    assert float(layer.embed_tokens.weight.float().std()) == pytest.approx(3**-0.5, abs=0.01)
    assert set(layer.A_log.tolist()) == {0.0}
    # Minus one says that a checkpoint has none.
    assert float(layer.k_scale) == -1
