"""The comparison with other CPU runtimes: everything in it but the peers themselves."""

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from examples.bench import cpu_peers
from examples.bench.peers import ik_llama_cpp, machine, openvino_genai, trtc_engine
from examples.bench.peers.checkpoint import (
    LLAMA_1B,
    ModelShape,
    Shape,
    write_calibration,
    write_checkpoint,
)
from examples.bench.peers.contestants import Setting, decode_figures, stream_figures
from examples.bench.peers.environment import PeerEnvironment
from examples.bench.peers.failures import RunFailed, Unavailable
from examples.bench.peers.jobs import RawTrace, chat_seconds
from examples.bench.peers.llama_cpp import LlamaCpp, LlamaCppBuild
from examples.bench.peers.llama_server import LlamaServer
from examples.bench.peers.plot import ratio_plot, times_better
from examples.bench.peers.processes import free_port, run, run_step, seconds_to_first_line, serving
from examples.bench.peers.published import LFM2_1_2B, MOE_16, QWEN3_5_2B, PublishedShape
from examples.bench.peers.report import Report
from examples.bench.peers.results import MACHINE, Sample, append, load, medians, rows
from examples.bench.peers.work import Work
from tests.support.manifests import tiny_manifest

TINY = ModelShape("tiny", 128, 256, 2, 2, 1, 4096)


def sample(workload: str, contestant: str, bits: int = 4, **figures: float) -> Sample:
    runtime = contestant.split()[0]
    return Sample(workload, contestant, runtime, bits, 0, 0.0, figures)


def line(samples: Sequence[Sample], title: str, engine: str = "trtc int4") -> Any:
    (found,) = [r for r in rows(samples) if r.wanted.title == title and r.engine == engine]
    return found


# --- figures ------------------------------------------------------------------------------------


def test_decode_is_timed_while_every_sequence_decodes() -> None:
    early = RawTrace(0.0, [(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)])
    late = RawTrace(0.0, [(2.0, 1), (3.0, 1), (4.0, 1), (5.0, 1)])
    found = decode_figures([early, late], prompt_len=10, peak_rss=7)
    assert found["decode_tok_s"] == pytest.approx(4 / 2)  # tokens of both in (2, 4]
    assert found["prefill_tok_s"] == pytest.approx(20 / 2)
    assert found["peak_rss_bytes"] == 7


def test_sequences_that_never_decode_together_have_no_rate() -> None:
    first = RawTrace(0.0, [(1.0, 1), (2.0, 1)])
    second = RawTrace(0.0, [(3.0, 1), (4.0, 1)])
    with pytest.raises(RunFailed, match="before the last one"):
        decode_figures([first, second], prompt_len=1, peak_rss=0)


def test_streams_are_timed_from_the_first_request_to_the_last_token() -> None:
    traces = [RawTrace(1.0, [(2.0, 1), (2.1, 1)]), RawTrace(1.5, [(4.5, 1), (5.0, 1)])]
    found = stream_figures(traces, peak_rss=0)
    assert found["stream_tok_s"] == pytest.approx(4 / 4)
    assert found["ttft_p50_ms"] == pytest.approx((1000 + 3000) / 2)
    assert 100 < found["itl_p99_ms"] <= 500


def test_each_turn_of_a_chat_repeats_all_that_was_said() -> None:
    prompts: list[list[int]] = []

    def complete(prompt: Sequence[int], output_len: int) -> list[int]:
        prompts.append(list(prompt))
        return [90 + len(prompts)] * output_len

    assert chat_seconds(complete, [[1, 2], [3]], 2) >= 0
    assert prompts == [[1, 2], [1, 2, 91, 91, 3]]
    with pytest.raises(RunFailed, match="1 tokens came instead of 2"):
        chat_seconds(lambda prompt, output_len: [0], [[1]], 2)


# --- medians and ratios -------------------------------------------------------------------------


def test_the_ratio_is_to_the_best_peer_of_the_same_width() -> None:
    samples = [
        *(sample("decode-1", "trtc int4", decode_tok_s=rate) for rate in (1.0, 60.0, 50.0)),
        sample("decode-1", "a int4", decode_tok_s=40.0),
        sample("decode-1", "b int4", decode_tok_s=25.0),
        sample("decode-1", "b int8", 8, decode_tok_s=1000.0),
    ]
    found = line(samples, "decode, 1 sequence, tok/s")
    assert (found.ours, found.best_peer, found.ratio) == (50.0, "a int4", pytest.approx(1.25))
    assert found.reached
    assert dict(found.peers) == {"a int4": 40.0, "b int4": 25.0}


def test_lower_is_better_for_times_and_memory_and_a_limit_is_a_limit() -> None:
    samples = [
        sample("start", "trtc int4", first_token_s=0.6),
        sample("start", "a int4", first_token_s=4.0),
        sample("start", "b int4", first_token_s=3.0),
    ]
    found = line(samples, "process start to first token, s")
    assert (found.best_peer, found.ratio) == ("b int4", pytest.approx(0.2))
    assert found.reached is False  # 0.2 <= 0.25, but 0.6 s are not under 0.5
    quicker = line(
        [sample("start", "trtc int4", first_token_s=0.4), *samples[1:]],
        *["process start to first token, s"],
    )
    assert quicker.reached is True


def test_a_limit_without_a_ratio_needs_no_peer() -> None:
    title = "concurrent streams, ITL p99, ms"
    for latency, reached in ((249.0, True), (250.0, False)):
        found = line([sample("streams", "trtc int4", itl_p99_ms=latency)], title)
        assert (found.ratio, found.wanted_ratio, found.reached) == (None, None, reached)


def test_a_chat_is_held_against_peers_with_and_without_reuse() -> None:
    samples = [
        sample("chat", "trtc int4", chat_s=4.0),
        sample("chat", "a int4", chat_s=5.0),
        sample("chat-no-reuse", "a int4", chat_s=7.0),
        sample("chat-no-reuse", "trtc int4", chat_s=9.0),
    ]
    assert line(samples, "chat against prefix reuse, s").ratio == pytest.approx(0.8)
    without = line(samples, "chat against no prefix reuse, s")
    assert without.ratio == pytest.approx(4 / 7)
    assert without.reached is False


def test_other_widths_have_aims_of_their_own_and_a_missing_peer_is_no_success() -> None:
    samples = [
        sample("decode-1", "trtc fp8", 8, decode_tok_s=24.0),
        sample("decode-1", "a int8", 8, decode_tok_s=20.0),
        sample("decode-1", "trtc bf16", 16, decode_tok_s=24.0),
    ]
    assert line(samples, "decode, 1 sequence, tok/s", "trtc fp8").wanted_ratio == 1.2
    alone = line(samples, "decode, 1 sequence, tok/s", "trtc bf16")
    assert (alone.best_peer, alone.ratio, alone.reached) == (None, None, None)


def test_runs_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    assert load(path) == []
    runs = [sample("start", "a", first_token_s=1.0), sample("chat", "b", 8, chat_s=2.5)]
    for one in runs:
        append(path, one)
    assert load(path) == runs
    assert medians(load(path))["chat", "b"] == {"chat_s": 2.5}


# --- the report ---------------------------------------------------------------------------------

RUNS = (
    sample(MACHINE, MACHINE, 0, read_bytes_s=40e9, int8_ops_s=2e12),
    sample("decode-1", "trtc int4", decode_tok_s=50.0, prefill_tok_s=600.0),
    sample("decode-1", "a int4", decode_tok_s=40.0, prefill_tok_s=500.0),
    sample("decode-16", "trtc int4", peak_rss_bytes=1.5e9),
)


def report(absent: dict[str, str] | None = None) -> Report:
    return Report(
        facts={"date": "2026-01-31"},
        absent=absent or {},
        failures=["b int4, chat: it ended with 1"],
        samples=RUNS,
        read_bytes={"trtc int4": 800_000_000, "a int4": 700_000_000},
        prefill_ops_per_token=2_000_000_000,
    )


def test_the_report_says_what_was_measured_and_what_was_not() -> None:
    text = report({"llama.cpp": "no C++ compiler"}).markdown()
    assert (
        "| decode, 1 sequence, tok/s | 50 | a int4 | 40 | 1.25x | >= 1.25x | yes |"
        in text.splitlines()
    )
    assert "llama.cpp: not installed: no C++ compiler" in text
    assert "failed: b int4, chat: it ended with 1" in text
    assert "| no peer was measured | - | - |" in text
    assert "1,500 (1)" in text  # MB


def test_the_bounds_are_shares_of_what_the_machine_did_in_the_same_run() -> None:
    ours = report().bounds()[0]
    assert ours.read_bytes_s == pytest.approx(40e9)
    assert ours.prefill_ops_s == pytest.approx(1.2e12)
    assert "| trtc int4 | 0.80 | 40.0 | 100% | 1.20 | 60% |" in report().markdown()


def test_the_report_says_how_steady_the_machine_was() -> None:
    others = [sample(MACHINE, MACHINE, 0, read_bytes_s=rate) for rate in (10e9, 44e9)]
    text = replace(report(), samples=[*RUNS, *others]).markdown()
    assert "GB/s read 40 (10 to 44), int8 TOP/s 2 (2 to 2)." in text


def test_the_json_holds_every_run_and_every_ratio() -> None:
    document = json.loads(json.dumps(report({"openvino": "no wheel"}).as_json()))
    assert document["not_installed"] == {"openvino": "no wheel"}
    assert len(document["samples"]) == len(RUNS)
    (decode,) = [r for r in document["table"] if r["line"] == "decode, 1 sequence, tok/s"]
    assert (decode["ratio"], decode["reached"]) == (1.25, True)
    (memory,) = [r for r in document["table"] if "16 sequences, MB" in r["line"]]
    assert (memory["ratio"], memory["reached"]) == (None, None)


def test_the_plot_is_svg_with_a_bar_for_each_ratio() -> None:
    slow = [
        sample("start", "trtc int4", first_token_s=3.0),
        sample("start", "a int4", first_token_s=1.0),
    ]
    table = rows([*RUNS, *slow])
    svg = ElementTree.fromstring(ratio_plot(table))
    bars = [node for node in svg.iter() if node.get("class") in ("yes", "no", "open")]
    assert [bar.get("class") for bar in bars] == ["yes", "no", "no"]
    assert times_better(table[-1] if table[-1].ratio else table[2]) == pytest.approx(1 / 3)
    # 1.25 and 1.2 times better begin where they are equal; 3 times worse ends there.
    starts = [float(bar.get("x", "")) for bar in bars]
    assert starts[0] == starts[1]
    assert starts[2] + float(bars[2].get("width", "")) == pytest.approx(starts[0], abs=0.2)


# --- prompts and the checkpoint -----------------------------------------------------------------


def test_the_same_seed_gives_every_contestant_the_same_prompts() -> None:
    work = Work(vocab=1000)
    assert work.prompts(2, 8, 5) == work.prompts(2, 8, 5)
    assert work.prompts(2, 8, 5) != work.prompts(2, 8, 6)
    assert work.prompts(1, work.prompt_len, 5)[0] != work.warmup()
    assert all(4 <= token < 1000 for token in work.prompts(1, 5000, 0)[0])


def test_a_chat_begins_with_its_system_prompt() -> None:
    work = Work(vocab=1000)
    turns = work.chat(3)
    assert [len(turn) for turn in turns] == [1032] + [32] * 7
    assert sum(map(len, turns)) + work.turns * work.reply_len == work.chat_len


def test_the_large_shape_is_llama_3_2_1b() -> None:
    linears = LLAMA_1B.layers * sum(n * k for n, k in LLAMA_1B.linears.values())
    norms = (2 * LLAMA_1B.layers + 1) * LLAMA_1B.hidden
    assert linears + norms + LLAMA_1B.vocab * LLAMA_1B.hidden == 1_235_814_400
    assert LLAMA_1B.prefill_ops_per_token == 2 * linears


def smaller(shape: PublishedShape, **fields: Any) -> PublishedShape:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096}
    return PublishedShape(shape.name, {**shape.settings, **sizes, **heads, **fields})


SMALLER = [
    smaller(LFM2_1_2B, layer_types=["conv", "full_attention", "conv", "conv"]),
    smaller(QWEN3_5_2B, linear_num_key_heads=2, linear_num_value_heads=4),
    smaller(MOE_16, moe_intermediate_size=64),
]


def test_of_experts_those_that_a_token_chooses_count() -> None:
    shape = SMALLER[2]
    attention, router = 128 * 128 * 2 + 128 * 64 * 2, 128 * 16
    assert shape.prefill_ops_per_token == 2 * 4 * (attention + router + 4 * 3 * 128 * 64)


@pytest.mark.parametrize("shape", [TINY, *SMALLER], ids=lambda shape: shape.name)
def test_transformers_reads_the_checkpoint_and_its_activations_keep_their_size(
    tmp_path: Path, shape: Shape
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    write_checkpoint(tmp_path / "checkpoint", shape)
    model, said = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint", dtype=torch.float32, output_loading_info=True
    )
    assert not any(said.values()), said
    with torch.inference_mode():
        found = model(torch.arange(4, 20)[None], output_hidden_states=True)
    assert torch.isfinite(found.logits).all()
    # Each layer adds terms of about the size of its normed input, as a trained model's do.
    assert 0.1 < float(found.hidden_states[-2].std()) < 10
    assert not list(tmp_path.glob("*.unfinished"))


def test_the_calibration_file_is_the_least_that_a_build_takes(tmp_path: Path) -> None:
    from trtc.quant.calibration_text import MIN_TOKENS, read_texts

    write_calibration(tmp_path / "c.jsonl", TINY)
    samples = read_texts(tmp_path / "c.jsonl").samples
    assert sum(len(sample) for sample in samples if isinstance(sample, tuple)) == MIN_TOKENS


def test_engines_that_are_missing_or_of_another_trtc_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []
    monkeypatch.setattr(
        trtc_engine, "run_step", lambda command, log, environment: built.append(command[4])
    )
    setting = Setting(
        TINY, Work(vocab=4096), 2, tmp_path / "checkpoint", tmp_path, tmp_path / "logs"
    )
    engines = {dtype: tmp_path / "engines" / dtype for dtype in ("bf16", "fp8", "int8_sq")}
    for dtype in ("bf16", "fp8"):
        engines[dtype].mkdir(parents=True)
        (engines[dtype] / "manifest.json").write_bytes(tiny_manifest().sealed().to_json())
    old = json.loads((engines["fp8"] / "manifest.json").read_text())
    (engines["fp8"] / "manifest.json").write_text(json.dumps(old | {"schema_version": 1}))
    trtc_engine.prepare(setting, tmp_path / "c.jsonl", list(engines), rebuild=False)
    assert built == [engines["fp8"], engines["int8_sq"]]
    trtc_engine.prepare(setting, tmp_path / "c.jsonl", ["bf16"], rebuild=True)
    assert built[2:] == [engines["bf16"]]


@pytest.mark.parametrize(("dtype", "has_planes"), [("bf16", False), ("int8_sq", True)])
def test_what_a_step_of_one_sequence_reads(tmp_path: Path, dtype: str, has_planes: bool) -> None:
    """All but a table that is only looked up in, and of an int8 lm_head one plane."""
    from tests.support.engines import build_tiny
    from tests.support.models import tiny_checkpoint
    from trtc.protos.plan import read_plan

    build_tiny(tiny_checkpoint("llama", tmp_path), tmp_path / "engine", dtype)
    plan = read_plan(tmp_path / "engine" / "plan.json")
    sizes = {weight.name: weight.bytes for weight in plan.weights}
    lm_head = sum(weight.bytes for weight in plan.weights if weight.layout == "planes")
    assert (lm_head > 0) is has_planes
    read = sum(sizes.values()) - sizes["embedding.weight"] - lm_head // 2
    assert trtc_engine.read_bytes(plan) == read


# --- processes ----------------------------------------------------------------------------------


def python(program: str) -> list[str | Path]:
    return [sys.executable, "-c", program]


def test_a_run_gives_output_and_its_own_peak_memory() -> None:
    program = "import sys, time; x = b'1' * 80_000_000; print(len(sys.stdin.read())); "
    done = run(python(program + "time.sleep(0.3); print('[1, 2]')"), stdin="y" * 100_000)
    assert done.last_json() == [1, 2]
    assert done.stdout.startswith("100000")
    assert 80_000_000 < done.peak_rss < 160_000_000


def test_a_run_that_fails_says_how() -> None:
    with pytest.raises(RunFailed, match=r"ended with 3: .*no such model"):
        run(python("import sys; print('no such model', file=sys.stderr); sys.exit(3)"))
    with pytest.raises(RunFailed, match="it said nothing"):
        seconds_to_first_line(python("pass"))


def test_the_first_line_is_waited_for_and_no_more() -> None:
    program = "import time; time.sleep(0.2); print(1, flush=True); time.sleep(2)"
    assert 0.2 <= seconds_to_first_line(python(program)) < 2


def test_a_failed_step_of_an_installation_is_unavailable_with_its_last_words(
    tmp_path: Path,
) -> None:
    log = tmp_path / "logs" / "pip.log"
    with pytest.raises(Unavailable, match=r"ended with 1: no wheel for this Python"):
        run_step(python("import sys; sys.exit('no wheel for this Python')"), log)
    assert "no wheel for this Python" in log.read_text()
    with pytest.raises(Unavailable, match="No such file"):
        run_step([tmp_path / "nothing"], log)


def test_a_server_that_ends_before_it_is_ready_fails_and_one_that_runs_is_ended() -> None:
    with (
        pytest.raises(RunFailed, match="ended with 4: cannot open"),
        serving(python("import sys; print('cannot open'); sys.exit(4)"), lambda: False),
    ):
        pass
    ready = time.perf_counter() + 0.1
    with serving(python("import time; time.sleep(60)"), lambda: time.perf_counter() > ready) as one:
        assert one.peak_rss() > 1_000_000
        assert one.seconds_since_start() >= 0.05
    assert one.process.returncode is not None


# --- llama-server's client ----------------------------------------------------------------------


class FakeLlama(BaseHTTPRequestHandler):
    """Answers as llama-server does; `asked` holds what it was sent."""

    asked: list[dict[str, Any]]
    tokens = (5, 6, 7)

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body["prompt"] == [0]:
            self.send_error(400, "empty prompt")
            return
        self.send_response(200)
        self.end_headers()
        if not body["stream"]:
            self.wfile.write(json.dumps({"tokens": self.tokens}).encode())
            return
        # The second token ends amid a character.
        for predicted, stop in ((1, False), (3, False), (3, True)):
            event = json.dumps({"content": "", "tokens_predicted": predicted, "stop": stop})
            self.wfile.write(f"data: {event}\n\n".encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing on the test's stderr."""


@contextmanager
def fake_llama() -> Iterator[tuple[LlamaServer, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []
    handler = type("Handler", (FakeLlama,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield LlamaServer(server.server_address[1]), asked
        finally:
            server.shutdown()
            thread.join()


def test_the_client_of_llama_server_counts_tokens_not_texts() -> None:
    with fake_llama() as (client, asked):
        assert client.is_ready()
        assert client.complete([1, 2], 3, reuse=True) == [5, 6, 7]
        traces = client.streams([[1], [2]], 3)
        assert [[count for _, count in trace.arrivals] for trace in traces] == [[1, 2]] * 2
        with pytest.raises(RunFailed, match="3 of 4 tokens"):
            client.stream([1], 4)
        with pytest.raises(RunFailed, match="answered 400"):
            client.complete([0], 3, reuse=False)
    assert asked[0]["cache_prompt"] is True
    assert {body["ignore_eos"] for body in asked} == {True}
    assert {body["cache_prompt"] for body in asked[1:]} == {False}


def test_a_port_without_a_server_is_not_ready() -> None:
    assert not LlamaServer(free_port()).is_ready()
    with socket.socket() as mute:  # takes no connection
        mute.bind(("127.0.0.1", 0))
        assert not LlamaServer(mute.getsockname()[1]).is_ready()


# --- ik_llama.cpp -------------------------------------------------------------------------------

TABLE = """
main: n_kv_max = 576, n_batch = 2048, n_ubatch = 512, flash_attn = 1

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   512 |     64 |    1 |    576 |    1.023 |   500.49 |    0.613 |   104.40 |    1.636 |   352.08 |

"""
"""As llama-batched-bench of ik_llama.cpp prints it, on stderr."""


def test_rates_are_read_from_the_table_of_ik_llama_cpp() -> None:
    assert ik_llama_cpp.rates(TABLE) == (500.49, 104.40)
    with pytest.raises(RunFailed, match="no figures: 'error: unable to load model'"):
        ik_llama_cpp.rates("error: unable to load model")


def test_ik_llama_cpp_needs_its_sources_and_the_models_of_llama_cpp(tmp_path: Path) -> None:
    asked = plan(tmp_path, "--ik-llama-cpp", str(tmp_path / "sources"))
    assert asked.runtimes[-1] == "ik_llama.cpp"
    setting, source = asked.setting(), tmp_path / "sources"
    environment = PeerEnvironment(tmp_path / "environment", tmp_path / "pip.log")
    like = [LlamaCpp(setting, LlamaCppBuild(tmp_path, tmp_path / "log"), "Q4_0")]
    output, log = tmp_path / "out", tmp_path / "log"
    prepare = partial(ik_llama_cpp.prepare, source, output, environment, log, like)
    with pytest.raises(Unavailable, match=f"--ik-llama-cpp: {source} has no CMakeLists.txt"):
        prepare()
    source.mkdir()
    (source / "CMakeLists.txt").touch()
    with pytest.raises(Unavailable, match=r"Q4_0\.gguf is not there: .* run both"):
        prepare()


def test_ik_llama_cpp_takes_part_in_decodes_alone(tmp_path: Path) -> None:
    two = [FakeContestant("ik_llama.cpp Q4_0"), FakeContestant("x a")]
    asked = plan(tmp_path, "--only", "decode-16", "chat", "--repeats", "1")
    order = [(one.workload, one.runtime) for one in cpu_peers.run_all(asked, two, None)]  # type: ignore[union-attr]
    assert order == [("decode-16", "ik_llama.cpp"), ("decode-16", "x"), ("chat", "x")]


# --- the script ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class FakeContestant:
    name: str
    bits: int = 4
    fails: bool = False

    @property
    def runtime(self) -> str:
        return self.name.split()[0]

    @property
    def read_bytes(self) -> int:
        return 1000

    def decode(self, batch: int, seed: int) -> dict[str, float]:
        if self.fails:
            raise RunFailed("it ended with 1")
        return {"decode_tok_s": 10.0, "prefill_tok_s": 10.0, "peak_rss_bytes": 1.0}

    def start(self, seed: int) -> dict[str, float]:
        return {"first_token_s": 1.0}

    def streams(self, seed: int) -> dict[str, float]:
        return {"stream_tok_s": 1.0, "ttft_p50_ms": 1.0, "itl_p99_ms": 1.0, "peak_rss_bytes": 1.0}

    def chat(self, seed: int, *, reuse: bool) -> dict[str, float]:
        return {"chat_s": 1.0 if reuse else 2.0}


def plan(tmp_path: Path, *arguments: str) -> cpu_peers.Plan:
    return cpu_peers.parse(["--workdir", str(tmp_path), *arguments])


def test_contestants_take_turns_and_another_begins_each_time(tmp_path: Path) -> None:
    three = [FakeContestant("trtc a"), FakeContestant("x a"), FakeContestant("y a", 8)]
    asked = plan(tmp_path, "--only", "decode-1", "chat", "--repeats", "2")
    order = [(one.workload, one.contestant) for one in cpu_peers.run_all(asked, three, None)]  # type: ignore[union-attr]
    assert order == [
        *[("decode-1", name) for name in ("trtc a", "x a", "y a")],
        *[("chat", name) for name in ("trtc a", "x a")],
        *[("decode-1", name) for name in ("x a", "y a", "trtc a")],
        *[("chat", name) for name in ("x a", "trtc a")],
    ]


def test_a_peer_that_cannot_be_installed_is_named_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unavailable(*arguments: object) -> None:
        raise Unavailable("no wheel for this Python")

    monkeypatch.setattr(trtc_engine, "prepare", lambda *given: [FakeContestant("trtc int4")])
    monkeypatch.setattr(openvino_genai, "prepare", unavailable)
    monkeypatch.setattr(machine, "prepare", unavailable)
    monkeypatch.setattr(cpu_peers, "write_checkpoint", lambda path, shape: path.mkdir(parents=True))
    asked = plan(
        tmp_path, "--quick", "--runtimes", "trtc", "openvino", "--only", "decode-1", "start"
    )
    assert cpu_peers.run(asked) == 0
    document = json.loads((asked.directory / "report.json").read_text())
    assert document["not_installed"]["openvino"] == "no wheel for this Python"
    assert {row["ratio"] for row in document["table"]} == {None}
    assert "openvino: not installed: no wheel for this Python" in capsys.readouterr().out
    ElementTree.fromstring((asked.directory / "report.svg").read_text())
    cpu_peers.run(plan(tmp_path, *["--quick", "--runtimes", "trtc", "--only", "start", "--keep"]))
    assert len(load(asked.directory / "samples.jsonl")) == 3


def test_a_run_that_fails_is_reported_and_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [FakeContestant("trtc int4"), FakeContestant("a int4", fails=True)]
    monkeypatch.setattr(trtc_engine, "prepare", lambda *given: made)
    monkeypatch.setattr(machine, "prepare", lambda *given: None)
    monkeypatch.setattr(cpu_peers, "write_checkpoint", lambda path, shape: path.mkdir(parents=True))
    asked = plan(tmp_path, "--quick", "--runtimes", "trtc", "--only", "decode-1")
    assert cpu_peers.run(asked) == 1
    document = json.loads((asked.directory / "report.json").read_text())
    assert document["failures"] == ["a int4, decode-1: it ended with 1"]


@pytest.mark.parametrize("option", ["--repeats", "--threads"])
def test_a_count_of_nothing_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cpu_peers.parse([option, "0"])
    assert f"{option} is 0; give 1 or more" in capsys.readouterr().err


def test_the_workers_import_nothing_but_the_standard_library() -> None:
    """They run in the peers' environments, where trtc is not installed."""
    program = (
        "import sys; before = set(sys.modules); import examples.bench.peers.jobs; "
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before} "
        "- set(sys.stdlib_module_names) - {'examples'}))"
    )
    done = run(python(program))
    assert done.stdout.strip() == "[]"
