"""Names of calls: taken from clients, told to them again, and in the lines of logs."""

import asyncio
import io
import json
import logging
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import pytest

from tests.support.aio import asynchronous
from tests.support.servers import CONFIG, TOKENIZER, EchoEngine, RunningServer, echo_server
from trtc.protos.kserve import grpc_service_pb2 as kserve
from trtc.protos.smg import trtllm_service_pb2 as smg
from trtc.protos.trtc.v1 import inference_pb2 as own
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.host.line_log import LineLogConfig
from trtc.runtime.requests.call import call_of, current_call
from trtc.runtime.server.log_lines import CallFormatter
from trtc.runtime.service.audit import AuditConfig

TEXT = EchoEngine(EchoOptions(vocab_size=4096), tokenizer=TOKENIZER)
CHAT = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any] | None] = {
    "/v1/models": None,
    "/metrics": None,
    "/nowhere": None,
    "/v1/chat/completions": {"model": "echo", "messages": CHAT, "max_tokens": 2},
    "/v1/completions": {"model": "echo", "prompt": "hi", "max_tokens": 2, "stream": True},
    "/v1/responses": {"model": "echo", "input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"model": "echo", "messages": CHAT, "max_tokens": 2},
    "/api/generate": {"model": "echo", "prompt": "hi", "options": {"num_predict": 2}},
    "/generate": {"inputs": "hi", "parameters": {"max_new_tokens": 2}},
    "/v2/models/echo/generate": {"text_input": "hi", "max_tokens": 2},
}


async def ask(server: RunningServer, path: str, body: Any, name: str = "") -> tuple[int, Any]:
    def send() -> tuple[int, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.http_port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"content-type": "application/json", **({"X-Request-Id": name} if name else {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                answer.read()
                return answer.status, answer.headers
        except urllib.error.HTTPError as error:
            return error.code, error.headers

    return await asyncio.to_thread(send)


@asynchronous
async def test_every_dialect_of_http_answers_with_the_clients_id_or_one_of_its_own() -> None:
    async with echo_server(TEXT) as server:
        for path, body in BODIES.items():
            for name in ("gateway/7f-1", ""):
                status, headers = await ask(server, path, body, name)
                assert status == (404 if path == "/nowhere" else 200), path
                (told,) = headers.get_all("x-request-id")
                assert told == name if name else len(told) >= 32, path
        broken = {"model": "echo", "messages": "nonsense"}
        status, headers = await ask(server, "/v1/chat/completions", broken, "mine")
        assert (status, headers["x-request-id"]) == (400, "mine")
        for nonsense in ("a b", "x" * 129, 'a"b', "é"):
            _, headers = await ask(server, "/v1/models", None, nonsense.encode().decode("latin-1"))
            assert nonsense not in headers["x-request-id"]


@asynchronous
async def test_grpc_tells_the_clients_id_again() -> None:
    calls = {
        "/trtc.v1.Inference/Generate": own.GenerateRequest(
            token_ids=own.TokenIds(ids=[5]), max_tokens=2
        ),
        "/trtc.v1.Inference/GetModelInfo": own.GetModelInfoRequest(),
        "/inference.GRPCInferenceService/ServerLive": kserve.ServerLiveRequest(),
        "/trtllm.TrtllmService/HealthCheck": smg.HealthCheckRequest(),
        "/trtllm.TrtllmService/Abort": smg.AbortRequest(request_id="nobody"),
    }
    async with echo_server() as server, grpc.aio.insecure_channel(server.address) as channel:
        for path, request in calls.items():
            for name, told in (("mine-1", "mine-1"), ("no good", None), (None, None)):
                metadata = () if name is None else (("x-request-id", name),)
                call: Any = channel.unary_stream(path)(  # type: ignore[call-arg]
                    request.SerializeToString(), metadata=metadata
                )
                assert [one async for one in call], path
                initial = dict(await call.initial_metadata())
                assert initial.get("x-request-id") == told, path


@asynchronous
async def test_logs_name_the_call(tmp_path: Path) -> None:
    log = tmp_path / "audit"
    config = replace(CONFIG, audit=AuditConfig(LineLogConfig(log)))
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(CallFormatter("%(message)s"))
    logging.getLogger("trtc.server").addHandler(handler)
    try:
        async with echo_server(TEXT, config=config) as server:
            chat = BODIES["/v1/chat/completions"]
            await ask(server, "/v1/chat/completions", chat, "mine")
            _, headers = await ask(server, "/v1/chat/completions", chat)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(server.server.service, "info", None)
                status, _ = await ask(server, "/v1/models", None, "broken")
            assert status == 500
    finally:
        logging.getLogger("trtc.server").removeHandler(handler)
    first, second = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    assert first["call_id"] == "mine"
    assert second["request_id"] == headers["x-request-id"] == f"chatcmpl-{second['call_id']}"
    told = [line for line in lines.getvalue().splitlines() if "request_id=" in line]
    assert told == ["internal error path=/v1/models request_id=broken"]
    assert not current_call().id


def test_trace_headers_that_are_too_long_are_not_taken() -> None:
    assert call_of("", "x" * 513, "y" * 513, drawn="1") == call_of("", drawn="1")
    assert call_of("", "x" * 512, "y" * 512).tracestate == "y" * 512
