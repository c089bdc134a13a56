"""`trtc chat` and `trtc run` as a user has them: at a real terminal, and in a pipe."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.broken_servers import broken_server
from tests.support.servers import TOKENIZER, echo_process
from tests.support.terminal import trtc_at_terminal
from trtc.commands.talk.answers import Answer
from trtc.protos.trtc.v1 import inference_pb2 as pb
from trtc.runtime.client import Client

READY = ">>> "
LINE_READ = "\x1b[?2004l"
"""What readline writes when a line is complete: pastes are no longer marked."""
SLOW_TOKENS = "400"
"""Steps of SLOW_S: far longer than any test waits."""
SLOW_S = "0.2"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with echo_process("--tokenizer", str(TOKENIZER)) as process:
        yield process.address


@pytest.fixture(scope="module")
def slow_server() -> Iterator[str]:
    with echo_process("--tokenizer", str(TOKENIZER), "--step-s", SLOW_S) as process:
        yield process.address


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


def chat(address: str, *arguments: str) -> list[str]:
    return ["chat", "--url", address, "--temperature", "0", "--max-tokens", "6", *arguments]


def answer(address: str, messages: list[dict[str, str]], **options: float) -> str:
    """What the model says, by the client."""
    given = {"temperature": 0.0, "max_tokens": 6, **options}
    with Client(address) as client:
        return client.chat(messages, **given).result().text  # type: ignore[arg-type]


def piped(*arguments: str, stdin: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "trtc", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)


def test_a_conversation_at_a_terminal(server: str, env: dict[str, str], tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    with trtc_at_terminal(*chat(server), env=env) as terminal:
        assert "/help lists commands" in terminal.until(READY)
        for line in ("/system Be brief.", "/set temperature 0", "/set max_tokens 5"):
            terminal.type(f"{line}\r")
            terminal.until(READY)
        terminal.type('"""def\r')
        terminal.until("... ")
        terminal.type('  é 漢字 🙂"""\r')
        terminal.until(READY)
        terminal.type("again\r")
        terminal.until(READY)
        terminal.type("/stats\r")
        assert re.search(r"answer tokens +5\r\nfirst token +\d+ ms\r\n", terminal.until(READY))
        terminal.type("/show\r")
        assert re.search(r"model +echo\r\n.*system +Be brief\.\r\n", terminal.until(READY), re.S)
        terminal.type(f"/save {saved}\r")
        terminal.until(READY)
        terminal.type("/clear\r/stats\r")
        terminal.until("There is no answer yet.")
        terminal.until(READY)
        terminal.type(f"/load {saved}\r")
        terminal.until("4 messages")
        terminal.until(READY)
        terminal.type("\x04")
        assert terminal.end() == 0
    messages = json.loads(saved.read_text())
    roles = [one["role"] for one in messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert messages[1]["content"] == "def\n  é 漢字 🙂"
    for at in (2, 4):
        assert messages[at]["content"] == answer(server, messages[:at], max_tokens=5)


def test_a_rate_counts_what_comes_after_the_first_token() -> None:
    answer = Answer(started=0.0, num_tokens=10, num_first=2, first_token=1.0, last_token=5.0)
    assert answer.tokens_per_s() == 2.0
    assert Answer(num_tokens=5, num_first=5, first_token=1.0, last_token=1.0).tokens_per_s() is None


def test_ctrl_c_stops_the_answer_and_not_the_program(slow_server: str, env: dict[str, str]) -> None:
    with trtc_at_terminal(*chat(slow_server, "--max-tokens", SLOW_TOKENS), env=env) as terminal:
        terminal.until(READY)
        for _ in range(2):
            terminal.type("x = 1\r")
            terminal.until(LINE_READ)
            terminal.something()
            terminal.type("\x03")
            terminal.until(READY)
        terminal.type("/stats\r")
        assert re.search(r"ended by +you", terminal.until(READY))
        terminal.type("half a line")
        terminal.until("half a line")
        terminal.interrupt("Ctrl-D or /bye ends.")
        terminal.until(READY)
        terminal.type("/show\r")
        assert re.search(r"messages +4", terminal.until(READY))
        terminal.type("/bye\r")
        assert terminal.end() == 0


def test_errors_leave_the_conversation_as_it_was(
    server: str, env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "list.json").write_text('["a"]')
    (tmp_path / "mine.json").write_text("[]")
    wrong = {
        "/nothing": "/nothing: there is no such command. /help lists them",
        "/set warmth 1": "warmth: there is no such setting. Choose one of: temperature",
        "/set temperature -1": "temperature: is '-1'. Give a number at least 0.0 and finite",
        "/set temperature nan": "temperature: is 'nan'",
        "/set top_k 1.5": "top_k: is '1.5'. Give a whole number",
        "/save": "FILE: is missing. Write /save FILE",
        f"/save {tmp_path / 'mine.json'}": "mine.json: exists. Give another name",
        "/load /nowhere": "/nowhere: cannot be read",
        f"/load {tmp_path / 'list.json'}": "chat.messages[0]: is a str",
        "x " * 4000: "context length is 1024 tokens",
        "/show": "messages  0",
    }
    with trtc_at_terminal(*chat(server), env=env) as terminal:
        terminal.until(READY)
        for line, said in wrong.items():
            terminal.type(f"{line[:4000]}")
            terminal.type(f"{line[4000:]}\r")
            assert said in terminal.until(READY), line
        terminal.type("\x04")
        assert terminal.end() == 0
    assert (tmp_path / "mine.json").read_text() == "[]"


def test_lines_are_remembered_by_the_next_conversation(server: str, env: dict[str, str]) -> None:
    for line in ("/set seed 7\r", "\x1b[A\x1b[A\r"):
        with trtc_at_terminal(*chat(server), env=env) as terminal:
            terminal.until(READY)
            terminal.type(line)
            terminal.until(READY)
            terminal.type("/show\r")
            assert "seed=7" in terminal.until(READY)
            terminal.type("\x04")
            assert terminal.end() == 0
    history = Path(env["XDG_STATE_HOME"]) / "trtc" / "chat_history"
    assert history.stat().st_mode & 0o077 == 0
    before = history.read_text()
    with trtc_at_terminal(*chat(server, "--no-history"), env=env) as terminal:
        terminal.until(READY)
        terminal.type("secret\r")
        terminal.until(READY)
        terminal.type("\x04")
        assert terminal.end() == 0
    assert history.read_text() == before


def test_a_pasted_text_of_several_lines_is_one_message(
    server: str, env: dict[str, str], tmp_path: Path
) -> None:
    with trtc_at_terminal(*chat(server), env=env) as terminal:
        terminal.until(READY)
        terminal.type("\x1b[200~one\ntwo\x1b[201~\r")
        terminal.until(READY)
        terminal.type(f"/save {tmp_path / 'pasted.json'}\r")
        terminal.until(READY)
        terminal.type("\x04")
        assert terminal.end() == 0
    assert json.loads((tmp_path / "pasted.json").read_text())[0]["content"] == "one\ntwo"


HOSTILE = "a\x1b]0;owned\x07b\x9b31mc\x08\x7f\rd\u202ee\x00\tf\n"
HARMLESS = "a␛]0;owned␇b<U+009B>31mc␈␡d<U+202E>e␀\tf\n"


@pytest.mark.parametrize("command", ["client", "run", "chat"])
def test_what_a_model_writes_cannot_control_the_terminal(command: str, env: dict[str, str]) -> None:
    """Its server may be anybody's."""
    last = pb.GenerateResponse(
        request_id="r", finished=pb.Finished(reason=pb.FINISH_REASON_STOP), usage=pb.Usage()
    )
    replies = [pb.GenerateResponse(request_id="r", token_ids=[1], text=HOSTILE), last]
    model = pb.ModelInfo(name=HOSTILE, has_tokenizer=True, has_chat_template=True)
    info = pb.GetModelInfoResponse(models=[model]).SerializeToString()
    with broken_server([one.SerializeToString() for one in replies], info) as address:
        ask = {
            "client": ["client", "--port", address.rpartition(":")[2], "--prompt", "x"],
            "run": ["run", "--url", address, "echo", "x"],
            "chat": ["chat", "--url", address],
        }[command]
        with trtc_at_terminal(*ask, env=env) as terminal:
            if command == "chat":
                terminal.type("x\r/show\r/bye\r")
            assert terminal.end() == 0
            seen = terminal.seen.decode().replace("\r\n", "\n")
            assert HARMLESS in seen
            assert "owned\x07" not in seen
        if command != "chat":
            assert piped(*ask, stdin="").stdout == HOSTILE.replace("\r", "\n") + "\n"


def test_no_colours_where_nobody_wants_them(server: str, env: dict[str, str]) -> None:
    for extra, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        with trtc_at_terminal(*chat(server), env={**env, **extra}) as terminal:
            banner = terminal.until("/help")
            assert ("\x1b[2m" in banner) is coloured
    result = piped(*chat(server), stdin="hi\n/stats\n")
    assert result.returncode == 0
    assert "\x1b" not in result.stdout + result.stderr


def test_run_answers_what_is_given_and_what_is_piped(server: str) -> None:
    def run(*arguments: str, stdin: str = "") -> str:
        ask = ("run", "--url", server, "--temperature", "0", "--max-tokens", "6")
        result = piped(*ask, *arguments, stdin=stdin)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def expected(text: str, *before: dict[str, str]) -> str:
        return answer(server, [*before, {"role": "user", "content": text}]) + "\n"

    assert run("echo", "hi") == expected("hi")
    assert run("echo", stdin="hi\n") == expected("hi")
    assert run("echo", "Shorter:", stdin="a text\n") == expected("a text\n\nShorter:")
    system = {"role": "system", "content": "Be brief."}
    assert run("echo", "hi", "--system", "Be brief.") == expected("hi", system)


def test_piped_lines_are_messages(server: str) -> None:
    result = piped(*chat(server), stdin='one\n"""two\nthree"""\n/bye\nnever\n')
    said: list[dict[str, str]] = []
    expected = ""
    for text in ("one", "two\nthree"):
        said.append({"role": "user", "content": text})
        reply = answer(server, said)
        said.append({"role": "assistant", "content": reply})
        expected += reply + "\n"
    assert (result.returncode, result.stdout, result.stderr) == (0, expected, "")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["run", "nowhere", "hi"], 2, "NAME: nowhere is no directory, and no server is reached"),
        (["run", "x", "hi", "--url", "127.0.0.1:9", "--threads", "1"], 2, "--threads: is for an"),
        (["run", "x"], 2, "PROMPT: is missing"),
        (["chat", "--url", "127.0.0.1:9"], 6, "127.0.0.1:9: cannot reach the server"),
    ],
)
def test_bad_options(arguments: list[str], status: int, said: str) -> None:
    result = piped(*arguments, stdin="")
    assert result.returncode == status
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_error_in_a_pipe_ends_the_program(server: str) -> None:
    result = piped(*chat(server), stdin="/set top_k -1\nhi\n")
    assert (result.returncode, result.stdout) == (2, "")
    assert "top_k: is '-1'" in result.stderr
    result = piped("run", "other", "hi", "--url", server, stdin="")
    assert result.returncode == 6
    assert "echo" in result.stderr
