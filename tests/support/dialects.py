"""Every way in to one engine, for a table of requests that must give the same tokens by each.

A dialect is a line of DIALECTS: how its unmodified client asks for a `Case`. One that has no words
for a case says so with None, never by leaving a parameter out.
"""

import asyncio
import json
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc.aio
import pytest

from tests.support.anthropic_sdk import anthropic_sdk
from tests.support.ollama_client import ollama_client
from tests.support.openai_sdk import ECHO, sdk
from tests.support.servers import RunningServer, manifest
from tests.support.shared_text import shared_tokenizer
from tests.support.tensors import tensors
from tests.support.tgi_client import tgi_client
from trtc.runtime.client import AsyncClient
from trtc.runtime.engine.session import Session
from trtc.runtime.executors.echo import EchoExecutor
from trtc.runtime.frontends.local import LocalEngine
from trtc.runtime.text.tokenizer import Tokenizer

ENGINE = ECHO

Sequences = list[list[int]]
"""The tokens of each sequence."""
Ask = Callable[[RunningServer, "Case"], Awaitable[Sequences | None]]


@dataclass(frozen=True)
class Case:
    """One request, in the words of `trtc`."""

    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]
    """A text, token ids, or a conversation."""
    expected: Sequences
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `generate`."""

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str) and not isinstance(self.prompt[0], int)


async def in_process(server: RunningServer, case: Case) -> Sequences:
    def run() -> Sequences:
        executor = EchoExecutor(ENGINE.options)
        tokenizer = Tokenizer.load(ENGINE.tokenizer) if ENGINE.tokenizer else None
        session = Session(ENGINE.tokenizer, manifest(ENGINE, executor), executor, tokenizer)
        with LocalEngine(session) as engine:
            ask: Any = engine.chat if case.is_chat else engine.generate
            result = ask(case.prompt, **case.options).result()
            return [list(one.token_ids) for one in result.completions]

    return await asyncio.to_thread(run)


async def trtc_v1(server: RunningServer, case: Case) -> Sequences:
    async with AsyncClient(server.address) as client:
        ask: Any = client.chat if case.is_chat else client.generate
        result = await ask(case.prompt, **case.options).result()
        return [list(one.token_ids) for one in result.completions]


async def _openai(server: RunningServer, case: Case, *, stream: bool) -> Sequences:
    extra: dict[str, Any] = {"return_token_ids": True}
    asked: dict[str, Any] = {"model": "echo", "stream": stream}
    own = {"max_tokens", "temperature", "top_p", "seed", "n", "stop", "logit_bias"}
    own |= {"presence_penalty", "frequency_penalty"}
    options = dict(case.options)
    schema = options.pop("json_schema", None)
    if schema is not None and case.is_chat:
        named = {"name": "any", "strict": True, "schema": schema}
        asked["response_format"] = {"type": "json_schema", "json_schema": named}
    elif schema is not None:
        extra["structured_outputs"] = {"json": schema}
    for name, value in options.items():
        (asked if name in own else extra)[name] = value
    told: dict[int, list[int]] = {}
    async with sdk(server) as client:
        create: Any = client.completions.create
        if case.is_chat:
            create = client.chat.completions.create
        asked["messages" if case.is_chat else "prompt"] = case.prompt
        answer = await create(**asked, extra_body=extra)
        choices = (
            [one async for chunk in answer for one in chunk.choices] if stream else answer.choices
        )
        for choice in choices:
            told.setdefault(choice.index, []).extend(choice.model_dump().get("token_ids") or ())
    return [told[index] for index in sorted(told)]


async def openai(server: RunningServer, case: Case) -> Sequences:
    return await _openai(server, case, stream=False)


async def openai_streamed(server: RunningServer, case: Case) -> Sequences:
    return await _openai(server, case, stream=True)


async def _anthropic(server: RunningServer, case: Case, *, stream: bool) -> Sequences | None:
    """A conversation, one sequence; what the API has no field for has vLLM's name."""
    if not case.is_chat or case.options.get("n", 1) > 1:
        return None
    messages: Any = case.prompt
    first, *others = messages
    assert first["role"] == "system"
    options = dict(case.options)
    schema = options.pop("json_schema", None)
    if schema is not None:
        options["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    async with anthropic_sdk(server) as client:
        create: Any = client.messages.create
        answer = await create(
            model="echo",
            system=first["content"],
            messages=others,
            max_tokens=case.options["max_tokens"],
            stream=stream,
            # The SDK has no argument for sampling any more.
            extra_body={"return_token_ids": True, **options},
        )
        if not stream:
            return [answer.model_dump()["token_ids"]]
        events = [event.model_dump() async for event in answer]
    return [[token for one in events for token in one.get("token_ids") or ()]]


async def anthropic(server: RunningServer, case: Case) -> Sequences | None:
    return await _anthropic(server, case, stream=False)


async def anthropic_streamed(server: RunningServer, case: Case) -> Sequences | None:
    return await _anthropic(server, case, stream=True)


def _tensors(case: Case) -> dict[str, Any] | None:
    """In the names of TensorRT-LLM's backend; None: it has none for a conversation."""
    if case.is_chat:
        return None
    # Its clients get the likeliest token unless they give top_k or top_p.
    options = {"top_p": 1.0, **case.options}
    names = {"max_tokens": "request_output_len", "n": "num_return_sequences"}
    sent = {names.get(name, name): value for name, value in options.items()}
    if "json_schema" in sent:
        sent["guided_decoding_guide_type"] = "json_schema"
        sent["guided_decoding_guide"] = json.dumps(sent.pop("json_schema"))
    if "logit_bias" in sent:
        sent["embedding_bias"] = _dense(sent.pop("logit_bias"))
    if "stop_token_ids" in sent:
        words = sent.pop("stop_token_ids")
        sent["stop_words_list"] = [words, list(range(1, len(words) + 1))]
    prompt = case.prompt
    return {
        **sent,
        **({"text_input": prompt} if isinstance(prompt, str) else {"input_ids": prompt}),
    }


def _dense(bias: Mapping[int, float]) -> list[float]:
    """A number for every token."""
    return [bias.get(token, 0.0) for token in range(ENGINE.options.vocab_size)]


async def kserve(server: RunningServer, case: Case) -> Sequences | None:
    """A reply holds one sequence; several are streamed."""
    asked = _tensors(case)
    if asked is None or case.options.get("n", 1) > 1:
        return None
    triton = pytest.importorskip("tests.support.triton_client", exc_type=ImportError)
    import tritonclient.grpc.aio

    lists = {name: list(one) if isinstance(one, tuple) else one for name, one in asked.items()}
    inputs = [triton.input_of(name, array) for name, array in tensors(**lists).items()]
    async with tritonclient.grpc.aio.InferenceServerClient(server.address) as client:
        result = await client.infer("echo", inputs)
    lengths = result.as_numpy("sequence_length")[0].tolist()
    rows = result.as_numpy("output_ids")[0].tolist()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


async def kserve_http(server: RunningServer, case: Case) -> Sequences | None:
    """`generate_stream`, an event a step and sequence."""
    asked = _tensors(case)
    if asked is None:
        return None
    told: dict[int, list[int]] = {}
    url = f"http://127.0.0.1:{server.http_port}/v2/models/echo/generate_stream"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json={**asked, "streaming": True}) as response,
    ):
        async for line in response.content:
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                ids = event["output_ids"]
                sequence = told.setdefault(event.get("sequence_index", 0), [])
                sequence += ids if isinstance(ids, list) else [ids]
    return [told[index] for index in sorted(told)]


async def smg(server: RunningServer, case: Case) -> Sequences | None:
    """Its router renders and tokenises: the service is given token ids."""
    sampling = {"temperature", "top_k", "top_p", "min_p", "seed", "min_tokens"}
    sampling |= {"repetition_penalty", "presence_penalty", "frequency_penalty"}
    options = dict(case.options)
    if isinstance(case.prompt, str) or case.is_chat:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stubs made by an older protobuf than ours
        stubs = pytest.importorskip("smg_grpc_proto", reason="make setup installs it")
    pb = stubs.trtllm_service_pb2
    config = {name: value for name, value in options.items() if name in sampling}
    guide = None
    if "json_schema" in options:
        schema = json.dumps(options.pop("json_schema"))
        guide = pb.GuidedDecodingParams(guide_type="GUIDE_TYPE_JSON_SCHEMA", guide=schema)
    request = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_token_ids=case.prompt),
        max_tokens=options["max_tokens"],
        sampling_config=pb.SamplingConfig(num_return_sequences=options.get("n", 1), **config),
        embedding_bias=_dense(options["logit_bias"]) if "logit_bias" in options else (),
        stop_token_ids=options.get("stop_token_ids", ()),
        include_stop_token_in_output=True,
        guided_decoding=guide,
    )
    left = options.keys() - sampling - {"max_tokens", "n", "logit_bias", "stop_token_ids"}
    assert not left, "a parameter that nobody has words for"
    told: dict[int, list[int]] = {}
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = stubs.trtllm_service_pb2_grpc.TrtllmServiceStub(channel)
        async for response in stub.Generate(request):
            complete = response.complete
            told[complete.sequence_index] = list(complete.output_token_ids)
    return [told[index] for index in sorted(told)]


def _of_text(text: str, case: Case) -> Sequences:
    """The tokens of an answer that tells its text alone: those expected, if that is their text."""
    assert ENGINE.tokenizer is not None
    tokenizer = shared_tokenizer(ENGINE.tokenizer)
    (expected,) = case.expected
    return [expected if tokenizer.decode(expected) == text else list(tokenizer.encode(text))]


async def _ollama(server: RunningServer, case: Case, *, stream: bool) -> Sequences | None:
    """It takes and tells texts; a text is `raw`, as others would render it."""
    names = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
    same = {"temperature", "top_k", "top_p", "min_p", "seed"}
    same |= {"presence_penalty", "frequency_penalty"}
    is_ids = not case.is_chat and not isinstance(case.prompt, str)
    if is_ids or case.options.keys() - same - names.keys() - {"json_schema"}:
        return None
    options = {names.get(name, name): value for name, value in case.options.items()}
    asked: dict[str, Any] = {"model": "echo", "stream": stream, "options": options}
    asked["format"] = options.pop("json_schema", None)
    async with ollama_client(server) as client:
        ask: Any = client.chat if case.is_chat else client.generate
        if case.is_chat:
            asked["messages"] = [_flat(one) for one in case.prompt]  # type: ignore[arg-type]
        else:
            asked |= {"prompt": case.prompt, "raw": True}
        answer = await ask(**asked)
        answers = [one async for one in answer] if stream else [answer]
    texts = [one.message.content if case.is_chat else one.response for one in answers]
    return _of_text("".join(texts), case)


def _flat(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose content is one text."""
    content = message["content"]
    text = content if isinstance(content, str) else "".join(one["text"] for one in content)
    return {**message, "content": text}


async def ollama(server: RunningServer, case: Case) -> Sequences | None:
    return await _ollama(server, case, stream=False)


async def ollama_streamed(server: RunningServer, case: Case) -> Sequences | None:
    return await _ollama(server, case, stream=True)


async def _tgi(server: RunningServer, case: Case, *, stream: bool) -> Sequences | None:
    """It takes texts, and knows no conversations."""
    same = {"seed", "temperature", "top_k", "top_p", "repetition_penalty", "frequency_penalty"}
    known = same | {"max_tokens", "json_schema"}
    if not isinstance(case.prompt, str) or case.options.keys() - known:
        return None
    sent = {name: value for name, value in case.options.items() if name in same}
    asked: dict[str, Any] = {
        **({"do_sample": True} | sent if sent.get("temperature") != 0.0 else {}),
        "max_new_tokens": case.options["max_tokens"],
        "details": True,
    }
    if "json_schema" in case.options:
        asked["grammar"] = {"type": "json", "value": case.options["json_schema"]}
    async with tgi_client(server) as client:
        ask: Any = client.text_generation
        answer = await ask(case.prompt, stream=stream, **asked)
        if stream:
            return [[one.token.id async for one in answer]]
        return [[one.id for one in answer.details.tokens]]


async def tgi(server: RunningServer, case: Case) -> Sequences | None:
    return await _tgi(server, case, stream=False)


async def tgi_streamed(server: RunningServer, case: Case) -> Sequences | None:
    return await _tgi(server, case, stream=True)


DIALECTS: Mapping[str, Ask] = {
    "in process": in_process,
    "trtc.v1": trtc_v1,
    "OpenAI": openai,
    "OpenAI, streamed": openai_streamed,
    "Anthropic": anthropic,
    "Anthropic, streamed": anthropic_streamed,
    "KServe": kserve,
    "KServe over HTTP": kserve_http,
    "Ollama": ollama,
    "Ollama, streamed": ollama_streamed,
    "TGI": tgi,
    "TGI, streamed": tgi_streamed,
    "SMG": smg,
}
