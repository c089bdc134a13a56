"""Packaged models in the real Triton server, driven by the unmodified tritonclient."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.engines import build_tiny
from tests.support.loops import PYLLAMA
from tests.support.manifests import write_engine
from tests.support.serving import Serving
from tests.support.triton_client import (
    PATIENCE_S,
    Message,
    ask,
    grpcclient,
    open_stream,
    refusal,
)
from tests.support.triton_server import (
    TritonServer,
    find_installation,
    triton_server,
    why_it_does_not_start,
)
from trtc.cli import main
from trtc.protos.manifest import TargetFacts
from trtc.runtime.frontends.local import LocalEngine

MODEL = "coder"
PROMPT = "import os\n\ndef "
LONG = 480
"""Tokens of a request that runs until someone ends it."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    find_installation()  # skips before anything is built
    path = tmp_path_factory.mktemp("engines") / "pyllama"
    build_tiny(PYLLAMA, path, "bf16", max_seq_len=512, max_batch_size=8, max_num_tokens=64)
    return path


@pytest.fixture(scope="module")
def server(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Two models of one engine: each has its own process, and metrics under its own name."""
    repository = tmp_path_factory.mktemp("models") / "repository"
    for name in (MODEL, "ensemble"):
        assert main(["package", str(engine), str(repository), "--name", name]) == 0
    with triton_server(repository, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def local(engine: Path) -> Iterator[LocalEngine]:
    """The oracle: the same engine, in this process, without Triton."""
    with LocalEngine.open(engine, num_threads=1) as opened:
        yield opened


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_streamed_text_is_the_engines_own(server: TritonServer, local: LocalEngine) -> None:
    expected = local.generate(PROMPT, max_tokens=24, temperature=0.0).result()
    messages = ask(server.grpc_port, MODEL, text_input=PROMPT, max_tokens=24, stream=True)
    assert [len(message.token_ids) for message in messages] == [1] * 24
    assert tuple(token for message in messages for token in message.token_ids) == (
        expected.token_ids
    )
    assert "".join(message.text for message in messages) == expected.text
    assert messages[-1].finish_reason == "length"
    assert "finish_reason" not in messages[0].outputs


def test_an_unstreamed_text_is_one_message(server: TritonServer, local: LocalEngine) -> None:
    expected = local.generate(PROMPT, max_tokens=24, temperature=0.0).result()
    (message,) = ask(server.grpc_port, MODEL, text_input=PROMPT, max_tokens=24)
    assert message.text == expected.text
    assert message.outputs["text_output"].shape == (1,)
    (whole,) = ask(
        server.grpc_port,
        MODEL,
        text_input=PROMPT,
        max_tokens=24,
        exclude_input_in_output=False,
        outputs=["text_output"],
    )
    assert whole.text == PROMPT + expected.text
    assert set(whole.outputs) == {"text_output"}


@pytest.mark.parametrize("streaming", [True, False])
def test_token_level_requests_are_answered_in_tokens(
    streaming: bool, server: TritonServer, local: LocalEngine
) -> None:
    expected = local.generate([5, 17, 9], max_tokens=12, temperature=0.0, logprobs=0).result()
    messages = ask(
        server.grpc_port,
        MODEL,
        input_ids=[5, 17, 9, 0],
        input_lengths=3,
        request_output_len=12,
        end_id=-1,
        pad_id=3,
        beam_width=1,
        streaming=streaming,
        return_log_probs=True,
    )
    assert len(messages) == (12 if streaming else 1)
    assert tuple(token for message in messages for token in message.token_ids) == (
        expected.token_ids
    )
    assert all(
        message.outputs["sequence_length"].tolist() == [[len(message.token_ids)]]
        for message in messages
    )
    log_probs = np.concatenate([message.outputs["output_log_probs"][0][0] for message in messages])
    np.testing.assert_allclose(log_probs, [one.logprob for one in expected.logprobs], atol=1e-5)
    total = messages[-1].outputs["cum_log_probs"]
    np.testing.assert_allclose(total, [[log_probs.sum()]], rtol=1e-5)


def test_sampling_is_the_engines_own(server: TritonServer, local: LocalEngine) -> None:
    expected = local.generate(
        PROMPT, max_tokens=16, temperature=0.5, top_k=20, top_p=0.75, seed=11, n=2
    ).result()
    messages = ask(
        server.grpc_port,
        MODEL,
        text_input=PROMPT,
        max_tokens=16,
        temperature=0.5,
        top_k=20,
        top_p=0.75,
        seed=11,
        num_return_sequences=2,
    )
    by_index = {message.outputs["sequence_index"].item(): message for message in messages}
    assert [by_index[index].text for index in range(2)] == [
        completion.text for completion in expected.completions
    ]


def test_stop_words_end_the_text_and_are_part_of_it(
    server: TritonServer, local: LocalEngine
) -> None:
    expected = local.generate(
        PROMPT, max_tokens=64, temperature=0.0, stop=["("], include_stop=True
    ).result()
    (message,) = ask(
        server.grpc_port, MODEL, text_input=PROMPT, max_tokens=64, stop_words=["(", "never said"]
    )
    assert message.text == expected.text
    assert message.text.endswith("(")
    assert message.finish_reason == "stop"


def test_an_end_token_is_not_said(server: TritonServer, local: LocalEngine) -> None:
    tokens = local.generate(PROMPT, max_tokens=8, temperature=0.0).result().token_ids
    at = tokens.index(tokens[3])
    messages = ask(
        server.grpc_port,
        MODEL,
        text_input=PROMPT,
        max_tokens=8,
        end_id=tokens[3],
        stream=True,
    )
    assert [message.token_ids for message in messages] == [[token] for token in tokens[:at]] + [[]]
    assert messages[-1].outputs["output_ids"].shape == (1, 1, 0)
    assert messages[-1].text == ""
    assert messages[-1].finish_reason == "stop"


def test_rows_of_one_request_are_told_apart(server: TritonServer, local: LocalEngine) -> None:
    prompts, lengths = [PROMPT, "class Stack:"], [5, 9]
    with open_stream(server.grpc_port) as stream:
        stream.send_rows(MODEL, {"text_input": prompts, "max_tokens": lengths})
        messages = stream.receive_all()
    found = {message.outputs["batch_index"].item(): message.text for message in messages}
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        expected = local.generate(prompt, max_tokens=length, temperature=0.0).result()
        assert found[index] == expected.text


def test_concurrent_requests_share_the_engines_steps(
    server: TritonServer, local: LocalEngine
) -> None:
    prompts = [f"def f{number}(" for number in range(6)]
    before = server.metric("trtc_engine_steps_total", MODEL)
    running = 0.0
    with open_stream(server.grpc_port) as first, open_stream(server.grpc_port) as second:
        for number, prompt in enumerate(prompts):
            (first, second)[number % 2].send(
                MODEL, request_id=str(number), text_input=prompt, max_tokens=LONG, end_id=-1
            )

        def several_run() -> bool:
            nonlocal running
            running = max(running, server.metric("trtc_num_requests_running", MODEL))
            return running == len(prompts)

        wait_for(several_run)
        answers = [(first, second)[number % 2].receive().text for number in range(6)]
    steps = server.metric("trtc_engine_steps_total", MODEL) - before
    expected = [
        local.generate(prompt, max_tokens=LONG, temperature=0.0, ignore_eos=True).result().text
        for prompt in prompts
    ]
    assert sorted(answers) == sorted(expected)
    assert steps < 2 * LONG  # one after the other they would take 6 * LONG
    assert server.metric("trtc_kv_pages_used", MODEL) == 0


def test_a_cancelled_request_gives_its_pages_back(server: TritonServer) -> None:
    before = server.metric("trtc_engine_steps_total", MODEL)
    with open_stream(server.grpc_port, cancel=True) as stream:
        stream.send(MODEL, text_input=PROMPT, max_tokens=LONG, end_id=-1, stream=True)
        for _ in range(3):
            stream.receive()
        wait_for(lambda: server.metric("trtc_kv_pages_used", MODEL) > 0)
    wait_for(lambda: server.metric("trtc_kv_pages_used", MODEL) == 0)
    assert server.metric("trtc_engine_steps_total", MODEL) - before < LONG
    assert len(ask(server.grpc_port, MODEL, text_input=PROMPT, max_tokens=3, stream=True)) == 3


def test_a_stop_request_ends_the_one_of_its_id(server: TritonServer) -> None:
    with open_stream(server.grpc_port) as stream, open_stream(server.grpc_port) as other:
        stream.send(
            MODEL,
            request_id="mine",
            text_input=PROMPT,
            max_tokens=LONG,
            end_id=-1,
            stream=True,
        )
        stream.receive()
        other.send(
            MODEL,
            request_id="mine",
            input_ids=[0],
            input_lengths=0,
            request_output_len=0,
            stop=True,
        )
        assert other.receive_all()[-1].outputs == {}
        messages = stream.receive_all()
    assert messages[-1].finish_reason == "aborted"
    assert len(messages) < LONG - 1


def test_a_request_ends_when_its_time_is_up(server: TritonServer) -> None:
    with open_stream(server.grpc_port) as stream:
        stream.send(
            MODEL, text_input=PROMPT, max_tokens=LONG, end_id=-1, stream=True, timeout_s=0.05
        )
        with pytest.raises(Exception, match="timeout: passed"):
            for _ in range(LONG):
                stream.receive()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"text_input": "a", "beam_width": 4}, "beam_width: is not supported"),
    ({"text_input": "a", "bad_words": ["b"]}, "bad_words: is not supported"),
    ({"text_input": "a", "lora_task_id": 1}, "lora_task_id: is not supported"),
    (
        {"text_input": "a", "guided_decoding_guide_type": "xml"},
        "guided_decoding_guide_type: is 'xml'",
    ),
    ({"text_input": "a", "max_tokens": 9999}, "max_tokens: is 9999"),
    ({"text_input": "a", "temperature": -1.0}, "temperature: is -1.0"),
    ({"input_ids": [70000]}, "input_ids: token id 70000"),
    ({"max_tokens": 4}, "text_input: is missing"),
]
TRITONS_OWN = ({"text_input": "a", "image_url_input": "b"}, "image_url_input")


@pytest.mark.parametrize(("request_inputs", "message"), [*REFUSED, TRITONS_OWN], ids=str)
def test_what_cannot_be_done_is_refused_by_name(
    request_inputs: dict[str, Any], message: str, server: TritonServer
) -> None:
    assert message in refusal(server.grpc_port, MODEL, **request_inputs)
    assert server.metric("trtc_kv_pages_used", MODEL) == 0


@pytest.fixture(scope="module")
def serve_port(engine: Path) -> Iterator[int]:
    """The gRPC port of `trtc serve` with the same engine."""
    serving = Serving(f"{MODEL}={engine}")
    try:
        yield int(serving.wait_for(r"serving engines=.* grpc=127.0.0.1:(\d+)")[1])
        assert serving.stop() == 0
    finally:
        serving.process.kill()


SAME: list[dict[str, Any]] = [
    {"text_input": PROMPT, "max_tokens": 12},
    {"text_input": PROMPT, "max_tokens": 12, "exclude_input_in_output": False, "stop_words": "("},
    {
        "input_ids": [5, 17, 9, 0],
        "input_lengths": 3,
        "request_output_len": 12,
        "end_id": -1,
        "return_log_probs": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    },
    {
        "text_input": PROMPT,
        "max_tokens": 12,
        "temperature": 0.5,
        "top_k": 20,
        "seed": 11,
        "num_return_sequences": 3,
    },
    {
        "text_input": PROMPT,
        "max_tokens": 12,
        "embedding_bias_words": ["x"],
        "embedding_bias_weights": [5.0],
        "outputs": ["text_output", "finish_reason"],
    },
]


def by_sequence(messages: list[Message]) -> list[Message]:
    return sorted(messages, key=lambda one: one.outputs.get("sequence_index", np.array(0)).item())


@pytest.mark.parametrize("request_inputs", SAME, ids=str)
def test_trtc_serve_sends_the_messages_that_triton_sends(
    request_inputs: dict[str, Any], server: TritonServer, serve_port: int
) -> None:
    triton = by_sequence(ask(server.grpc_port, MODEL, **request_inputs))
    ours = by_sequence(ask(serve_port, MODEL, **request_inputs))
    assert len(triton) == len(ours)
    for theirs, own in zip(triton, ours, strict=True):
        assert theirs.outputs.keys() == own.outputs.keys()
        for name, array in theirs.outputs.items():
            assert (array.dtype, array.shape) == (own.outputs[name].dtype, own.outputs[name].shape)
            assert array.tolist() == own.outputs[name].tolist(), name


@pytest.mark.parametrize(("request_inputs", "message"), REFUSED, ids=str)
def test_trtc_serve_refuses_in_the_same_words(
    request_inputs: dict[str, Any], message: str, server: TritonServer, serve_port: int
) -> None:
    said = refusal(serve_port, MODEL, **request_inputs)
    assert message in said
    assert said == refusal(server.grpc_port, MODEL, **request_inputs)


def test_http_clients_need_no_change_either(server: TritonServer, local: LocalEngine) -> None:
    """The request of every guide to TensorRT-LLM's backend."""
    body = {
        "text_input": PROMPT,
        "max_tokens": 20,
        "bad_words": "",
        "stop_words": "",
        "pad_id": 3,
        "end_id": 0,
    }
    expected = local.generate(PROMPT, max_tokens=20, temperature=0.0).result()
    answer = json.loads(server.post("/v2/models/ensemble/generate", json.dumps(body)))
    assert answer["text_output"] == expected.text
    assert (answer["model_name"], answer["model_version"]) == ("ensemble", "1")
    lines = server.post(
        "/v2/models/ensemble/generate_stream", json.dumps(body | {"stream": True})
    ).splitlines()
    events = [json.loads(line.removeprefix("data:")) for line in lines if line]
    assert "".join(event["text_output"] for event in events) == expected.text
    assert len(events) == 20
    refused = json.loads(
        server.post("/v2/models/ensemble/generate", json.dumps(body | {"beam_width": 2}))
    )
    assert "beam_width: is not supported" in refused["error"]


def test_a_decoupled_model_only_streams(server: TritonServer) -> None:
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        sent = grpcclient.InferInput("input_ids", (1, 1), "INT32")
        sent.set_data_from_numpy(np.array([[5]], np.int32))
        with pytest.raises(Exception, match="decoupled transaction policy"):
            client.infer(MODEL, [sent])


def test_a_damaged_engine_is_not_served(engine: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    assert main(["package", str(engine), str(repository), "--name", MODEL]) == 0
    tokenizer = repository / MODEL / "1/engine/tokenizer/tokenizer.json"
    text = tokenizer.read_text()
    tokenizer.unlink()  # it is a link to the engine's own
    tokenizer.write_text(text.replace("a", "b", 1))
    assert "tokenizer.json: the content differs" in why_it_does_not_start(
        repository, tmp_path / "server"
    )


def test_capabilities_reach_the_model_which_needs_a_gpu_of_one(tmp_path: Path) -> None:
    """Triton starts no instance on a GPU where there is none, so the model is put on the CPU."""
    engines = []
    for sm in (80, 90):
        target = TargetFacts(kind="cuda", name=f"cuda:sm_{sm}", archs=(f"sm_{sm}",), toolchain="")
        engines.append(str(write_engine(tmp_path / f"sm_{sm}", {}, target=target)))
    repository = tmp_path / "repository"
    assert main(["package", *engines, str(repository), "--name", MODEL]) == 0
    config = repository / MODEL / "config.pbtxt"
    text = config.read_text()
    assert "kind: KIND_GPU gpus: [ 0 ]" in text
    config.write_text(text.replace("kind: KIND_GPU gpus: [ 0 ]", "kind: KIND_CPU"))
    assert "is needed by every engine of the model" in why_it_does_not_start(
        repository, tmp_path / "server"
    )


def test_numpy_2_is_refused_by_a_server_that_misreads_it(engine: Path, tmp_path: Path) -> None:
    """This release does; without the check its models would see every input as its first byte."""
    packages = find_spec("msgspec")
    assert packages is not None and packages.origin is not None
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site,) = (environment / "lib").glob("python*/site-packages")
    root = Path(__file__).parents[2]
    (site / "trtc.pth").write_text(f"{Path(packages.origin).parents[1]}\n{root}\n")
    repository = tmp_path / "repository"
    assert main(["package", str(engine), str(repository), "--name", MODEL]) == 0
    log = why_it_does_not_start(repository, tmp_path / "server", python=environment)
    assert "is too new for this Triton's Python backend" in log
