"""`trtc serve`, `client` and `bench` as a user runs them, on a real engine of the bundled model."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.certificates import make_certificates
from tests.support.engines import build_tiny
from tests.support.servers import TOKENIZER
from tests.support.serving import Serving
from trtc import open_engine
from trtc.cli import main
from trtc.protos.manifest import MANIFEST_FILE, Canary, read_manifest
from trtc.runtime.client import Client
from trtc.runtime.engine.probe import Probe

PROMPT_IDS = (5, 17, 9)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bf16 pyllama with one canary."""
    path = tmp_path_factory.mktemp("engines") / "pyllama"
    build_tiny(TOKENIZER, path, "bf16", max_seq_len=256, max_batch_size=8, max_num_tokens=64)
    tokens = Probe(num_threads=1).greedy(path, PROMPT_IDS, 12)
    set_canary(path, tokens)
    return path


NOT_IMPORTED_BEFORE_IT_SERVES = {
    "prometheus_client",
    "uvicorn",
    "zmq",
    "jinja2",
    "llguidance",
    "opentelemetry",
    "grpc_reflection.v1alpha.reflection",
    "trtc.protos.kserve.grpc_service_pb2",
    "trtc.protos.smg.trtllm_service_pb2",
    "trtc.runtime.engine.kv_events",
    "trtc.runtime.frontends.grpc.kserve.messages",
    "trtc.runtime.frontends.grpc.smg.requests",
    "trtc.runtime.frontends.http.application",
    "trtc.runtime.frontends.zmq.publisher",
    "trtc.runtime.hooks.calls",
    "trtc.runtime.service.exposition",
    "trtc.runtime.tensors.inference",
}
"""What no first token of trtc.v1 needs; imported when it is called, and some of it a second after
the port is open, so that its first caller doesn't wait."""


NOT_IMPORTED_BEFORE_A_FIRST_TOKEN = {
    "asyncio",
    "concurrent.futures",
    "dataclasses",
    "difflib",
    "jinja2",
    "logging",
    "socket",
    "subprocess",
    "traceback",
    "trtc.protos.answer_formats",
    "trtc.runtime.engine.answers",
    "trtc.runtime.engine.drafting",
    "trtc.runtime.engine.host_tier",
    "trtc.runtime.engine.kv_events",
    "trtc.runtime.engine.mask_answers",
    "trtc.runtime.engine.mask_collector",
    "trtc.runtime.grammar.answer_grammar",
    "trtc.runtime.requests.model_info",
    "trtc.runtime.requests.tools",
    "trtc.runtime.text.answer_plan",
    "trtc.runtime.text.chat",
}
"""What no completion in process needs; imported by whoever does. `dataclasses` stands for those
that would be defined: each takes 0.4 ms, a `msgspec.Struct` or named tuple a tenth."""


def test_a_first_token_in_process_comes_without_what_only_others_need(engine: Path) -> None:
    code = (
        "import sys; import trtc.cli, trtc.commands.generate; from trtc import open_engine\n"
        f"with open_engine({str(engine)!r}, num_threads=1) as opened:\n"
        "    print(next(opened.generate([5, 17, 9], max_tokens=8)).token_ids, *sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "trtc.runtime.executors.cpu" in found
    assert not NOT_IMPORTED_BEFORE_A_FIRST_TOKEN & set(found)


def test_a_server_serves_before_it_imports_what_only_other_protocols_need(engine: Path) -> None:
    serving = Serving(engine, log_imports=True)
    try:
        serving.wait_for(" serving ")
        before = {line.rpartition("|")[2].strip() for line in serving.log if "|" in line}
        assert "trtc.runtime.frontends.grpc.servicer" in before
        assert not before & NOT_IMPORTED_BEFORE_IT_SERVES
        serving.wait_for(r"\| +trtc.runtime.frontends.grpc.kserve.messages$")
        serving.wait_for(r"\| +trtc.runtime.frontends.grpc.smg.requests$")
        serving.wait_for(r"\| +grpc_reflection.v1alpha.reflection$")
        assert serving.stop() == 0
    finally:
        serving.process.kill()


def set_canary(engine: Path, tokens: tuple[int, ...]) -> None:
    manifest = msgspec.structs.replace(
        read_manifest(engine), canaries=(Canary(prompt_ids=PROMPT_IDS, token_ids=tokens),)
    )
    (engine / MANIFEST_FILE).write_bytes(manifest.sealed().to_json())


@pytest.fixture(scope="module")
def server(engine: Path) -> Iterator[tuple[str, str]]:
    """gRPC and HTTP port of a server of two names of one engine."""
    serving = Serving(f"first={engine}", f"second={engine}", "--kv-host-bytes", "1000000")
    try:
        found = serving.wait_for(r"serving engines=first,second grpc=127.0.0.1:(\d+) http=.*:(\d+)")
        yield found[1], found[2]
        assert serving.stop() == 0
        assert serving.log[-1].endswith("stopped\n")
    finally:
        serving.process.kill()


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main([str(argument) for argument in arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


COMPLETIONS: list[list[str]] = [
    ["--prompt", r"import os\n\ndef ", "--max-tokens", "24", "--temperature", "0"],
    ["--prompt", "for i in", "--max-tokens", "24", "--temperature", "0.7", "--seed", "11"],
    ["--prompt-ids", "5,17,9", "--max-tokens", "8", "--temperature", "0", "--logprobs", "3"],
    ["--prompt", "hi", "--chat", "--system", "Be brief.", "--max-tokens", "9", "--seed", "4"],
    ["--prompt", "x", "--n", "3", "--max-tokens", "9", "--seed", "4", "--stop", "\n"],
]


@pytest.mark.parametrize("arguments", COMPLETIONS)
def test_the_client_prints_what_generate_prints(
    arguments: list[str],
    engine: Path,
    server: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    local: list[str | Path] = ["generate", engine, "--threads", "1", *arguments]
    remote: list[str | Path] = ["client", "--port", server[0], "--model", "second", *arguments]
    assert run(capsys, *remote) == run(capsys, *local)
    documents = [json.loads(run(capsys, *command, "--json")) for command in (remote, local)]
    for document in documents:
        document.pop("request_id")
        document["usage"].pop("cached_prompt_tokens")
    assert documents[0] == documents[1]
    assert documents[0]["token_ids"]


def test_the_server_says_it_is_ready_and_counts(server: tuple[str, str]) -> None:
    base = f"http://127.0.0.1:{server[1]}"
    with urllib.request.urlopen(f"{base}/readyz") as answer:
        assert json.load(answer) == {"status": "ready", "reasons": {}}
    with urllib.request.urlopen(f"{base}/metrics") as answer:
        metrics = answer.read()
    assert b'trtc_engine_ready{model_name="first"} 1.0' in metrics
    num_pages = re.search(rb'trtc_kv_host_pages{model_name="second"} (\d+)', metrics)
    assert num_pages is not None
    assert int(num_pages[1]) > 0


def test_the_client_needs_a_name_when_there_are_two(
    server: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["client", "--port", server[0], "--prompt", "x"]) == 6
    error = capsys.readouterr().err
    assert error == (
        "trtc: error: model: several engines are served. Choose one of: first, second\n"
    )


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--prompt-ids", "5", "--max-tokens", "0"], 6, "max_tokens: is 0"),
        (["--prompt-ids", "999999"], 6, "token id 999999"),
        (["--prompt-ids", "-1"], 6, "cannot be written"),
        (["--prompt-ids", "5", "--temperature", "nan"], 6, "temperature: is nan"),
        (["--prompt-ids", "5", "--timeout", "0.000001"], 6, "eadline"),
        (["--prompt-ids", "five"], 2, "not a list of token ids"),
        ([], 2, "give exactly one of them"),
        (["--prompt", "x", "--prompt-ids", "5"], 2, "give exactly one of them"),
        (["--prompt-ids", "5", "--tls-ca", "/none.pem"], 2, "/none.pem cannot be read"),
    ],
)
def test_bad_client_options(
    arguments: list[str],
    status: int,
    said: str,
    server: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["client", "--port", server[0], "--model", "first", *arguments]) == status
    error = capsys.readouterr().err
    assert error.startswith("trtc: error: ")
    assert said in error
    assert error.count("\n") == 1


def test_a_taken_port_is_one_line_without_those_of_grpc(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = ["serve", str(tmp_path), "--no-http", "--log-level", "error", "--grpc-port", port]
        result = subprocess.run(
            [sys.executable, "-m", "trtc", *command], capture_output=True, text=True, timeout=120
        )
    assert result.returncode == 2
    assert result.stderr.startswith(f"trtc: error: --grpc-port: cannot listen on 127.0.0.1:{port}.")
    assert result.stderr.count("\n") == 1


def test_no_server_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main(["client", "--port", str(port), "--prompt", "x"]) == 6
    assert f"127.0.0.1:{port}: cannot reach the server" in capsys.readouterr().err


def check_loads(document: dict[str, Any], wanted: list[tuple[str, float, int]]) -> None:
    for load, (kind, value, requests) in zip(document["loads"], wanted, strict=True):
        assert load[kind] == value
        assert load["completed"] == load["num_requests"] == requests
        assert load["failures"] == {}
        assert load["output_tokens"] == requests * 6
        assert load["output_tokens_per_s"] == pytest.approx(requests * 6 / load["seconds"])
        assert load["requests_per_s"] == pytest.approx(requests / load["seconds"])
        for name in ("ttft_ms", "itl_ms", "e2e_ms"):
            spread = load[name]
            assert 0 < spread["p50"] <= spread["p95"] <= spread["p99"]
        assert load["ttft_ms"]["p50"] < load["e2e_ms"]["p50"]


SHAPE = ["--input-len", "20", "--output-len", "6", "--requests", "5", "--warmup", "1"]


def test_bench_in_this_process(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command: list[str | Path] = [
        "bench",
        engine,
        "--concurrency",
        "1,4",
        *SHAPE,
        "--threads",
        "1",
        "--seed",
        "3",
    ]
    document = json.loads(run(capsys, *command, "--json"))
    assert (document["engine"], document["url"], document["seed"]) == (str(engine), None, 3)
    check_loads(document, [("concurrency", 1, 5), ("concurrency", 4, 5)])


def test_bench_of_a_server(server: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--url", f"127.0.0.1:{server[0]}", "--model", "first", *SHAPE]
    document = json.loads(run(capsys, *command, "--rate", "50", "--json"))
    check_loads(document, [("rate", 50, 5)])
    table = run(capsys, *command, "--concurrency", "2")
    assert "20 tokens in, 6 out" in table
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--concurrency", "1"], "give exactly one of them"),
        (["--url", "h:1", "--concurrency", "zero"], "'zero' is not a list of positive numbers"),
        (["--url", "h:1", "--concurrency", "1.5"], "'1.5' is not a list of positive numbers"),
        (["--url", "h:1", "--rate", "-1"], "'-1' is not a list of positive numbers"),
        (["--url", "h:1", "--rate", "nan"], "'nan' is not a list of positive numbers"),
    ],
)
def test_bad_bench_options(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_bench_counts_failures(server: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--url", f"127.0.0.1:{server[0]}", "--model", "first", "--warmup", "0"]
    command += ["--concurrency", "1", "--input-len", "300", "--requests", "2"]
    (load,) = json.loads(run(capsys, *command, "--json"))["loads"]
    assert (load["completed"], load["failures"]) == (0, {"ContextLengthError": 2})
    assert "2 of 2 requests failed: ContextLengthError" in run(capsys, *command)


def test_an_engine_that_gives_other_tokens_is_served_to_nobody(
    engine: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(engine, other)
    (canary,) = read_manifest(other).canaries
    set_canary(other, (*canary.token_ids[:-1], canary.token_ids[-1] ^ 1))
    serving = Serving(other)
    try:
        serving.wait_for(r"not ready engine=other reason=canary 0 gives other tokens")
        port = serving.wait_for(r"listening, but not ready .* grpc=127.0.0.1:(\d+)")[1]
        with Client(f"127.0.0.1:{port}") as client, pytest.raises(Exception, match="canary 0"):
            client.generate([1], max_tokens=1).result()
        assert serving.stop() == 0
    finally:
        serving.process.kill()


def test_one_flipped_byte_is_never_served(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(engine, damaged)
    weights = damaged / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert main(["serve", str(damaged), "--grpc-port", "0", "--no-http"]) == 4
    last = capsys.readouterr().err.splitlines()[-1]
    assert "weights.safetensors: the content differs from the manifest's sha256" in last


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["/nowhere"], 4, "manifest.json cannot be read"),
        (["a/x", "b/x"], 2, "the name 'x' is given twice"),
        (["x", "--tls-cert", "c.pem"], 2, "--tls-key: is missing"),
        (["x", "--tls-client-ca", "c.pem"], 2, "--tls-cert: is missing"),
        (["x", "--host", "0.0.0.0"], 2, "--host: 0.0.0.0 is reached from other machines"),
        (["x", "--host", "::", "--allow-anonymous"], 4, "manifest.json cannot be read"),
        (["x", "--cors-origin", "chat.example.com"], 2, "--cors-origin: 'chat.example.com' is not"),
        (["x", "--cors-origin", "https://a.example/path"], 2, "--cors-origin: 'https://a"),
        (["x", "--no-http", "--cors-origin", "*"], 2, "--cors-origin: has no effect"),
        (["x", "--api-keys", "/nowhere"], 2, "/nowhere: cannot be read"),
        ([], 2, "no engine is given, and no directory of engines"),
        (["x", "--poll"], 2, "--poll: has no effect alone"),
        (["--models", "."], 2, "--models: needs one of --poll and --explicit"),
        (["--models", ".", "--poll", "--load", "a"], 2, "--load: has no effect with --poll"),
        (["--models", ".", "--explicit", "x"], 2, "both engines and a directory of them"),
        (["--models", "/nowhere", "--poll"], 2, "--models: /nowhere is not a directory"),
        (["--models", ".", "--poll", "--digest", "0" * 64], 2, "--digest: does not go with"),
    ],
)
def test_bad_serve_options(
    arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    free = ["--grpc-port", "0", "--http-port", "0"]
    assert main(["serve", *arguments, *free]) == status
    assert said in capsys.readouterr().err


def test_a_server_with_keys_and_tls_answers_the_commands_that_have_both(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_certificates(tmp_path)
    keys = tmp_path / "keys.json"
    assert main(["keys", str(keys), "--add", "alice"]) == 0
    (tmp_path / "key").write_text(capsys.readouterr().out)
    pem = tmp_path / "server.pem", tmp_path / "server.key"
    serving = Serving(
        engine, "--api-keys", keys, "--tls-cert", pem[0], "--tls-key", pem[1],
        "--host", "0.0.0.0", "--audit-log", tmp_path / "audit.jsonl",
    )  # fmt: skip
    try:
        port = serving.wait_for(r"serving .* grpc=0.0.0.0:(\d+)")[1]
        ca = str(tmp_path / "ca.pem")
        remote = ["--tls-ca", ca, "--api-key-file", str(tmp_path / "key")]
        ask = [
            "client",
            "--port",
            port,
            "--prompt-ids",
            "5,17",
            "--max-tokens",
            "3",
            "--ignore-eos",
        ]
        assert json.loads(run(capsys, *ask, *remote, "--json"))["usage"]["completion_tokens"] == 3
        measure = ["bench", "--url", f"127.0.0.1:{port}", "--concurrency", "1", "--requests", "1"]
        short = ["--input-len", "4", "--output-len", "2", "--warmup", "0", "--json"]
        assert json.loads(run(capsys, *measure, *short, *remote))["loads"]
        assert main([*ask, "--tls-ca", ca]) == 6
        public = {**os.environ, "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": ca}
        alone = [sys.executable, "-m", "trtc", *ask, "--tls", *remote[2:]]
        assert subprocess.run(alone, env=public, check=True, capture_output=True).stdout
        lines = (tmp_path / "audit.jsonl").read_text().splitlines()
        assert [json.loads(line)["client"] for line in lines] == ["tenant alice"] * 3
        assert "an API key is missing" in capsys.readouterr().err
        assert serving.stop() == 0
    finally:
        serving.process.kill()


def test_a_killed_server_leaves_an_engine_that_serves_again(engine: Path) -> None:
    serving = Serving(engine)
    port = serving.wait_for(r"serving .* grpc=127.0.0.1:(\d+)")[1]
    with Client(f"127.0.0.1:{port}") as client:
        generation = client.generate(PROMPT_IDS, max_tokens=200, ignore_eos=True)
        next(generation)
        serving.process.kill()
        begin = time.monotonic()
        with pytest.raises(Exception, match="cannot reach the server"):
            generation.result()
        assert time.monotonic() - begin < 5
    serving.process.communicate()
    with open_engine(engine, num_threads=1, kv_bytes=16_000_000) as again:
        tokens = again.generate(PROMPT_IDS, max_tokens=12, temperature=0.0, ignore_eos=True)
        assert tokens.result().token_ids == read_manifest(engine).canaries[0].token_ids


def test_a_number_of_drafts_without_drafts_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path), "--draft-tokens", "3"]) == 2
    assert "--draft-tokens: has no effect alone. Give --draft ngram" in capsys.readouterr().err


def test_content_of_an_audit_log_needs_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path), "--audit-content"]) == 2
    assert "--audit-content: has no effect alone. Give --audit-log FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kv-events", "tcp://*:5557"], "--kv-events: is reached from other machines, and sends"),
        (
            ["--kv-events", "ipc:///tmp/x", "--kv-events-replay", "tcp://0.0.0.0:1"],
            "--kv-events: is reached from other machines",
        ),
        (["--kv-events", "localhost:5557"], "--kv-events: is 'localhost:5557'. Give tcp://"),
        (
            ["--kv-events", "tcp://[::1]:1", "--kv-events-replay", "udp://[::1]:2"],
            "--kv-events-replay: is 'udp://[::1]:2'",
        ),
        (["--kv-events-replay", "ipc:///tmp/x"], "--kv-events-replay: has no effect alone"),
        (
            ["b=other", "--kv-events", "ipc:///tmp/x", "--kv-events-topic", "kv@{host}"],
            "--kv-events-topic: is one for several engines. Have {model} in it",
        ),
        (
            ["--kv-events", "ipc:///tmp/x", "--kv-events-topic", "kv@{pod}"],
            "--kv-events-topic: is 'kv@{pod}'. Only {host} and {model}",
        ),
    ],
)
def test_kv_events_are_published_only_where_it_makes_sense(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", f"a={tmp_path}", *arguments]) == 2
    assert said in capsys.readouterr().err
