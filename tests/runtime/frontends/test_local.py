"""LocalEngine and `trtc generate` over the echo executor: all is real but the model."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import click.testing
import msgspec
import numpy as np
import pytest

from tests.support.chats import chat_ids
from tests.support.loops import PYLLAMA
from tests.support.servers import EchoEngine, manifest
from trtc.commands.generate import command
from trtc.protos.errors import (
    DeadlineError,
    EngineCorruptError,
    InvalidRequestError,
    NoTokenizerError,
    RequestError,
    TrtcError,
    UnavailableError,
    UnknownModelError,
)
from trtc.runtime.client import Client
from trtc.runtime.engine.session import Session
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.frontends.local import LocalEngine
from trtc.runtime.integrity.verify import HashCheck
from trtc.runtime.requests.request import FinishReason
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.sampling.masks import pack_mask
from trtc.runtime.text.chat_options import chat_of
from trtc.runtime.text.tokenizer import Tokenizer

OPTIONS = EchoOptions(vocab_size=4096, num_pages=200, never=(0, 1, 2, 3))


def echo_session(*, text: bool = True, options: EchoOptions = OPTIONS) -> Session:
    executor = EchoExecutor(options)
    return Session(
        path=Path("echo"),
        manifest=manifest(EchoEngine(options), executor),
        executor=executor,
        tokenizer=Tokenizer.load(PYLLAMA) if text else None,
    )


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    with LocalEngine(echo_session()) as opened:
        yield opened


def test_a_text_is_completed_as_its_tokens_are(engine: LocalEngine) -> None:
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode("import os\n")
    of_text = engine.generate("import os\n", max_tokens=12, temperature=0.0).result()
    of_ids = engine.generate(ids, max_tokens=12, temperature=0.0).result()
    assert of_text.token_ids == of_ids.token_ids == EchoExecutor(OPTIONS).greedy(ids, 12)
    assert of_text.text == engine.tokenizer.decode(of_text.token_ids)
    assert of_text.usage.prompt_tokens == len(ids)


def test_outputs_stream_and_add_up(engine: LocalEngine) -> None:
    generation = engine.generate("x", max_tokens=10, temperature=0.0)
    first = next(generation)
    pieces = [first.text, *(output.text for output in generation)]
    assert "".join(pieces) == generation.result().text
    assert list(generation) == []


def test_a_chat_goes_through_the_template(engine: LocalEngine) -> None:
    assert engine.tokenizer is not None
    messages = [{"role": "user", "content": "hi"}]
    result = engine.chat(messages, max_tokens=5, temperature=0.0).result()
    ids = chat_ids(engine.tokenizer, chat_of(messages, {}))
    assert result.token_ids == EchoExecutor(OPTIONS).greedy(ids, 5)


def test_several_requests_run_together(engine: LocalEngine) -> None:
    running = [engine.generate([number + 4], max_tokens=20, seed=number) for number in range(8)]
    together = [generation.result().token_ids for generation in running]
    alone = [
        engine.generate([number + 4], max_tokens=20, seed=number).result().token_ids
        for number in range(8)
    ]
    assert together == alone


def test_a_list_of_prompts_is_a_list_of_generations(engine: LocalEngine) -> None:
    assert engine.tokenizer is not None
    texts = ["import os\n", "def f(", "class A:"]
    ids = [list(engine.tokenizer.encode(text)) for text in texts]
    alone = [engine.generate(text, max_tokens=9, temperature=0.0).result() for text in texts]
    many: list[Any] = [texts, tuple(texts), ids, [np.array(one) for one in ids]]
    for prompts in many:
        started = engine.generate(prompts, max_tokens=9, temperature=0.0)
        assert len({one.request_id for one in started}) == 3
        assert [one.result().token_ids for one in started] == [one.token_ids for one in alone]
    array = engine.generate(np.array(ids[0]), max_tokens=9, temperature=0.0)  # type: ignore[call-overload]
    assert array.result().token_ids == alone[0].token_ids
    (only,) = engine.generate(["x"], max_tokens=1, request_id="mine")
    assert only.result().request_id == "mine"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt: is a NoneType. Give a text, a list of token ids"),
        (b"text", "prompt: is a bytes"),
        (7, "prompt: is a int"),
        (1.5, "prompt: is a float"),
        ({"a": 1}, "prompt: is a dict"),
        ([], "prompt: has no tokens"),
        ([[1], []], r"prompt\[1\]: has no tokens"),
        (["a", 1], r"prompt\[1\]: is a int. Give texts only, or token ids only"),
        ([1, "a"], r"prompt\[1\]: is a str"),
        ([[1], "a"], r"prompt\[1\]: is a str"),
        ([[1], [2, "a"]], r"prompt\[1\]\[1\]: is a str"),
        ([1, 2.0], r"prompt\[1\]: is a float"),
        ([True], r"prompt\[0\]: is a bool"),
        (["a", b"b"], r"prompt\[1\]: is a bytes"),
    ],
)
def test_a_prompt_of_another_kind_is_named(prompt: Any, message: str, engine: LocalEngine) -> None:
    for completer in (engine, Client("127.0.0.1:1")):
        with pytest.raises(InvalidRequestError, match=message):
            completer.generate(prompt)
    assert engine.stats().requests_admitted == 0


def test_several_prompts_start_together_or_not_at_all(engine: LocalEngine) -> None:
    with pytest.raises(InvalidRequestError, match="request_id: is given for 2 prompts"):
        engine.generate(["a", "b"], request_id="same")
    with pytest.raises(InvalidRequestError):
        engine.generate([[5], [999_999]], max_tokens=100)
    deadline = time.monotonic() + 10
    while engine.stats().running or engine.stats().waiting:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": "hot"}, "temperature: is a str. Give a number"),
        ({"max_tokens": "5"}, "max_tokens: is a str. Give a whole number"),
        ({"top_k": 1.5}, "top_k: is a float. Give a whole number"),
        ({"n": None}, "n: is a NoneType"),
        ({"ignore_eos": "no"}, "ignore_eos: is a str. Give True or False"),
        ({"cache_salt": 3}, "cache_salt: is a int. Give a text"),
        ({"logit_bias": [1]}, "logit_bias: is a list. Give a mapping"),
        ({"stop": 5}, "stop: is a int. Give a list"),
        ({"stop": ["a", 5]}, r"stop\[1\]: is a int. Give a text"),
        ({"stop_token_ids": ["a"]}, r"stop_token_ids\[0\]: is a str. Give a whole number"),
    ],
)
def test_options_of_another_kind_are_named(
    options: dict[str, Any], message: str, engine: LocalEngine
) -> None:
    for completer in (engine, Client("127.0.0.1:1")):
        with pytest.raises(InvalidRequestError, match=message):
            completer.generate([5], **options)


def test_options_may_be_numpy_scalars_and_none(engine: LocalEngine) -> None:
    options: dict[str, Any] = {
        "max_tokens": np.int64(3), "temperature": np.float32(0.0), "seed": None, "stop": None
    }  # fmt: skip
    assert len(engine.generate([5], **options).result().token_ids) == 3


@pytest.mark.parametrize("messages", [None, "hi", 5, b"hi"])
def test_messages_that_are_no_list_are_named(messages: Any, engine: LocalEngine) -> None:
    with pytest.raises(InvalidRequestError, match=r"chat\.messages: is a .*Give a list"):
        engine.chat(messages)


def test_leaving_a_generation_ends_it() -> None:
    slow = EchoOptions(vocab_size=4096, num_pages=200, step_s=0.01)
    with LocalEngine(echo_session(options=slow)) as engine:
        with engine.generate([5], max_tokens=900) as generation:
            next(generation)
        assert generation.result().finish_reason is FinishReason.ABORTED
        submitted = engine.submit(RequestInput(token_ids=(5,), max_tokens=900), timeout=0.1)
        generated = engine.generate([5], max_tokens=900, timeout=0.1)
        for timed in (submitted, generated):
            with pytest.raises(DeadlineError):
                timed.result()
        unfinished = engine.generate([5], max_tokens=900)
    with pytest.raises(UnavailableError):
        unfinished.result()
    with pytest.raises(UnavailableError, match="closed"):
        engine.generate([5])
    engine.close()


def test_bad_requests_are_refused_before_they_run(engine: LocalEngine) -> None:
    with pytest.raises(InvalidRequestError, match="temperature: is nan"):
        engine.generate("x", temperature=float("nan"))
    with pytest.raises(InvalidRequestError, match="prompt: has no tokens"):
        engine.generate("")
    with pytest.raises(UnknownModelError, match="not 'other'"):
        engine.generate("x", model="other")
    with LocalEngine(echo_session(text=False)) as mute:
        with pytest.raises(NoTokenizerError, match="without a tokenizer"):
            mute.generate("x")
        result = mute.generate([1, 2], max_tokens=4, temperature=0.0).result()
        assert (len(result.token_ids), result.text) == (4, "")


# The command.


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, text: bool = True) -> str:
    """Output of `trtc generate engine ...`; errors are raised."""

    def open_echo(path: Path, **options: Any) -> LocalEngine:
        assert path == Path("engine")
        return LocalEngine(echo_session(text=text))

    monkeypatch.setattr(LocalEngine, "open", open_echo)
    result = click.testing.CliRunner().invoke(
        command, ["engine", *arguments], catch_exceptions=False, standalone_mode=False
    )
    if result.exception:
        raise result.exception
    return result.output


GREEDY = ("--temperature", "0", "--max-tokens", "8")


@pytest.mark.parametrize(
    ("typed", "extra", "meant"),
    [
        (r"import os\n\ndef ", (), "import os\n\ndef "),
        (r"a\tb\\n", (), "a\tb\\n"),
        (r"a\d", (), r"a\d"),
        (r"a\n", ("--raw",), r"a\n"),
        ("a\nb", (), "a\nb"),
    ],
)
def test_the_command_reads_escapes_as_python_does(
    typed: str, extra: tuple[str, ...], meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.load(PYLLAMA)
    expected = EchoExecutor(OPTIONS).greedy(tokenizer.encode(meant), 8)
    assert run(monkeypatch, "--prompt", typed, *extra, *GREEDY) == tokenizer.decode(expected) + "\n"


def test_the_command_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(
        run(monkeypatch, "--prompt-ids", "5,17,9", *GREEDY, "--logprobs", "5", "--json")
    )
    assert {"token_ids", "text", "finish_reason", "usage", "logprobs"} <= set(document)
    assert document["token_ids"] == list(EchoExecutor(OPTIONS).greedy([5, 17, 9], 8))
    assert document["usage"]["completion_tokens"] == 8
    assert len(document["logprobs"]) == 8
    assert len(document["logprobs"][0]["top"]) == 5
    assert document["finish_reason"] == "length"


def test_the_command_shows_every_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run(monkeypatch, "--prompt", "x", "--max-tokens", "4", "--n", "3", "--seed", "1")
    assert "--- 1\n" in shown
    assert "--- 2\n" in shown


def test_the_command_reads_files_and_passes_options_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(r"a\n", encoding="utf-8")
    tokenizer = Tokenizer.load(PYLLAMA)
    expected = EchoExecutor(OPTIONS).greedy(tokenizer.encode(r"a\n"), 8)
    document = json.loads(run(monkeypatch, "--prompt-file", str(path), *GREEDY, "--json"))
    assert document["token_ids"] == list(expected)
    biased = run(
        monkeypatch, "--prompt-ids", "5", *GREEDY, "--json", "--logit-bias", "77=50",
        "--stop-token-ids", "77,78",
    )  # fmt: skip
    assert json.loads(biased)["token_ids"] == [77]
    chat = run(monkeypatch, "--chat", "--prompt", "hi", "--system", "Be brief.", *GREEDY, "--json")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    greedy = EchoExecutor(OPTIONS).greedy(chat_ids(tokenizer, chat_of(messages, {})), 8)
    assert json.loads(chat)["token_ids"] == list(greedy)
    path.write_text(json.dumps(messages), encoding="utf-8")
    chat = run(
        monkeypatch, "--messages", str(path), *GREEDY, "--json",
        "--chat-template-kwargs", '{"enable_thinking": false}',
    )  # fmt: skip
    assert json.loads(chat)["token_ids"] == list(greedy)


def test_without_text_the_command_prints_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = EchoExecutor(OPTIONS).greedy([5, 6], 8)
    shown = run(monkeypatch, "--prompt-ids", "5,6", *GREEDY, text=False)
    assert shown == ",".join(map(str, tokens)) + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give exactly one of them"),
        (("--prompt", "a", "--prompt-ids", "1"), "give exactly one of them"),
        (("--prompt-ids", "1,x"), "--prompt-ids: '1,x' is not a list"),
        (("--prompt-ids", ""), "--prompt-ids"),
        (("--prompt", "a", "--system", "b"), "--system: needs --chat"),
        (("--prompt-ids", "1", "--chat"), "--chat: needs a text"),
        (("--prompt", "a", "--chat-template-kwargs", "{}"), "--chat-template-kwargs: needs"),
        (("--prompt", "a", "--chat", "--chat-template-kwargs", "{"), "kwargs: is not JSON"),
        (("--prompt", "a", "--chat", "--chat-template-kwargs", "[]"), "kwargs: is another kind"),
        (("--prompt", "a", "--logit-bias", "1:2"), "--logit-bias"),
        (("--prompt", "a", "--temperature", "nan"), "temperature: is nan"),
        (("--prompt", "a", "--max-tokens", "0"), "max_tokens: is 0"),
        (("--prompt", ""), "prompt: has no tokens"),
        (("--prompt", "a", "--n", "2", "--temperature", "0"), "would all be the same"),
    ],
)
def test_the_command_names_what_is_wrong(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TrtcError, match=message.replace("(", r"\(")):
        run(monkeypatch, *arguments)


def test_a_file_that_is_not_utf8_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"ab\xff")
    with pytest.raises(RequestError, match=r"--prompt-file: is not UTF-8 \(.* at byte 2\)"):
        run(monkeypatch, "--prompt-file", str(path), *GREEDY)


def test_a_directory_that_is_no_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineCorruptError):
        LocalEngine.open(tmp_path)


class Damaged:
    """A late check that finds its file damaged, as soon as anybody waits for it."""

    def __init__(self) -> None:
        self.failure: EngineCorruptError | None = None
        self.begun = False

    def begin(self) -> None:
        self.begun = True

    def wait(self) -> None:
        self.failure = EngineCorruptError("differs", field="weights.safetensors")
        raise self.failure

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        pass


def test_no_completion_ends_well_on_damaged_weights() -> None:
    """What had come before the hashes were compared is taken back, and nothing is begun anew."""
    damaged = Damaged()
    session = msgspec.structs.replace(echo_session(), late_check=cast(HashCheck, damaged))
    with LocalEngine(session) as engine:
        assert not damaged.begun
        generation = engine.generate([5, 6, 7], max_tokens=4, ignore_eos=True)
        with pytest.raises(EngineCorruptError, match="differs"):
            generation.result()
        with pytest.raises(EngineCorruptError, match="differs"):
            engine.generate([5, 6, 7], max_tokens=4)
    assert damaged.begun


def test_masks_say_what_may_come_next(engine: LocalEngine) -> None:
    class Even:
        def allowed(self, output_ids: Sequence[int]) -> bytes:
            return pack_mask(np.arange(OPTIONS.vocab_size) % 2 == len(output_ids) % 2)

    request_input = RequestInput(token_ids=(5, 6), max_tokens=9, sampling={"seed": 1})
    tokens = engine.submit(request_input, masks=Even()).result().completions[0].token_ids
    assert [token % 2 for token in tokens] == [0, 1] * 4 + [0]


def test_a_tier_that_cannot_be_closes_the_session() -> None:
    session = echo_session(text=False)
    with pytest.raises(RequestError, match="kv_host_bytes: holds no page"):
        LocalEngine(session, kv_host_bytes=10)
    assert cast(EchoExecutor, session.executor).closed


def test_prefixes_come_back_from_the_hosts_memory() -> None:
    options = replace(OPTIONS, num_pages=8, max_seq_len=128)
    with LocalEngine(echo_session(text=False, options=options), kv_host_bytes=1 << 20) as engine:
        cached = [
            engine.generate([number] * 80, max_tokens=2).result().usage.cached_prompt_tokens
            for number in (5, 6, 5)
        ]
        assert cached == [0, 0, 79]
        assert engine.stats().host_hit_tokens > 0
