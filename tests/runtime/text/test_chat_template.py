"""A chat template renders in a process of its own, whose limits end whatever it does."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.chat_templates import CHATML_WITH_TOOLS
from tests.support.processes import children, resident_bytes
from trtc.protos.errors import (
    InvalidRequestError,
    NoTokenizerError,
    QueueFullError,
    TrtcError,
    UnavailableError,
)
from trtc.runtime.text.chat_template import ChatTemplate
from trtc.runtime.text.chat_workers import RenderLimits

USER = [{"role": "user", "content": 'é "<b>"'}]
QUICK = RenderLimits(cpu_seconds=0.3, memory_bytes=64 << 20, characters=100_000)
ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
ENDLESS_IF_ASKED = "{% if messages[0].content == 'hang' %}" + ENDLESS + "{% endif %}fine"
HANG = [{"role": "user", "content": "hang"}]


@contextmanager
def opened(source: str, limits: RenderLimits = QUICK) -> Iterator[ChatTemplate]:
    template = ChatTemplate(source, {"bos_token": "<s>"}, limits)
    try:
        yield template
    finally:
        template.close()


def renderers() -> set[int]:
    """Processes of this one that render chat templates."""
    return children(running="chat_sandbox")


def render(source: str) -> str:
    with opened(source) as template:
        return template.render(USER)


def render_hang(template: ChatTemplate, failures: list[TrtcError]) -> None:
    try:
        template.render(HANG)
    except TrtcError as error:
        failures.append(error)


def test_what_templates_use() -> None:
    cases = {
        "{{ bos_token }}{{ messages[0].content }}": '<s>é "<b>"',
        "{{ messages[0]['content'] | tojson }}": '"é \\"<b>\\""',
        "{% if add_generation_prompt %}go{% endif %}": "go",
        "{% if x is defined %}a{% else %}b{% endif %}": "b",
        "{% set ns = namespace(n=0) %}{% set ns.n = 2 %}{{ ns.n * 3 }}": "6",
        "{%- for m in messages %}\n  {{ m.role }}\n{% endfor %}": "  user\n",
        "{{ lipsum(n=1) | length > 9 }}": "True",
        "{{ strftime_now('%Y') | length }}": "4",
        "{{ 'a b' | wordwrap(1) | pprint }}": "'a\\nb'",
        "{{ '\\ud83d' }}{{ '\\u0000' }}": "\ud83d\0",
    }
    assert {source: render(source) for source in cases} == cases


def test_a_template_can_refuse_the_messages() -> None:
    with pytest.raises(InvalidRequestError, match=r"refuses them \(roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_the_text_of_a_refusal_is_one_line_of_bounded_length() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render("{{ raise_exception('a\nb ' * 9999) }}")
    assert "a b a b" in str(caught.value)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ nothing.at.all }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ {'a': messages} | tojson(indent=[]) }}",
        "{{ 'a'.encode('punycode') }}{{ nothing.at.all }}",
    ],
)
def test_what_goes_wrong_inside_is_an_error_of_the_request(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template refuses"):
        render(source)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% if %}", "is not valid Jinja"),
        ("{{ 'a' | nofilter }}", "is not valid Jinja"),
        ("x" * 300_000, "has 300000 characters"),
        ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "is not valid Jinja|takes more than"),
        ("{{ " + "1+" * 20_000 + "1 }}", "is not valid Jinja|takes more than"),
    ],
)
def test_a_template_that_cannot_be_used_says_so(source: str, problem: str) -> None:
    with opened(source) as template:
        for _ in range(2):
            with pytest.raises(NoTokenizerError, match=f"the chat template ({problem})"):
                template.compile()


def test_a_template_that_does_not_compile_is_known_to_be_invalid_from_then_on() -> None:
    with opened("{% if %}") as template:
        assert not template.is_invalid
        with pytest.raises(NoTokenizerError):
            template.render(USER)
        assert template.is_invalid
    with opened("x" * 300_000) as template:
        assert template.is_invalid
    with opened("{{ nothing.at.all }}") as template:
        with pytest.raises(InvalidRequestError):
            template.render(USER)
        assert not template.is_invalid


TOO_MUCH = "MiB of memory|takes more than 0.3 seconds|gives more than|refuses them"


@pytest.mark.parametrize(
    "source",
    [
        ENDLESS,
        "{{ messages | tojson(indent=10 ** 10) }}",
        "{{ messages | tojson(indent=messages[0].content.zfill(1000000000)) }}",
        "{{ range(99999) | batch(999999999, 0) | list }}",
        "{{ range(9) | slice(999999999) | list }}",
        "{{ lipsum(n=999999) }}",
        "{{ lipsum(n=99, min=9999999, max=99999999) }}",
        "{{ messages * 999999999 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'a' * 9999999999 }}",
        "{{ ('a' * 9999) * 9999999 }}",
        "{{ 'a\t'.expandtabs(2000000000) }}",
        "{{ ('ab' * 99999).translate({97: 'a' * 99999, 98: 'b' * 99999}) }}",
        "{{ 'a'.ljust(3000000000) }}",
        "{{ ('a' * 9999).replace('a', 'b' * 99999).replace('b', 'c' * 9999) }}",
        "{{ '%*d' | format(999999999, 1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ ['a' * 99999] * 99999 | join }}",
        "{% set n = namespace(t='a ' * 99) %}{{ (n.t * 9999) | wordwrap(1) | indent(99999) }}",
        "{{ range(99999) | map('string') | join('a' * 99999) }}",
        "{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}",
        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        "{% set ns = namespace(t='aa') %}{% for i in range(99) %}{% set ns.t = ns.t ~ ns.t %}"
        "{% endfor %}{{ ns.t }}",
    ],
)
def test_whatever_a_template_takes_is_bounded_and_ends_in_one_status(source: str) -> None:
    before = resident_bytes()
    with pytest.raises((InvalidRequestError, NoTokenizerError), match=TOO_MUCH):
        render(source)
    assert resident_bytes() - before < 32 << 20


def test_each_limit_has_a_message_of_its_own() -> None:
    cases = {
        ENDLESS: "takes more than 0.3 seconds with them",
        "{{ 'a' * 999999999 }}": "takes more than 64 MiB of memory with them",
        "{{ 'a' * 100001 }}": "gives more than 100000 characters for them",
    }
    for source, problem in cases.items():
        with pytest.raises(InvalidRequestError) as caught:
            render(source)
        assert problem in caught.value.problem
        assert caught.value.field == "messages"


def test_a_process_that_went_over_a_limit_is_replaced() -> None:
    before = renderers()
    with opened(ENDLESS_IF_ASKED) as template:
        assert template.render(USER) == "fine"
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="seconds"):
                template.render(HANG)
            assert template.render(USER) == "fine"
        assert len(renderers() - before) <= 2


def test_another_chat_is_rendered_while_one_hangs() -> None:
    limits = RenderLimits(cpu_seconds=60, wall_seconds=60)
    with opened(ENDLESS_IF_ASKED, limits) as template:
        failures: list[TrtcError] = []
        hanging = threading.Thread(target=render_hang, args=(template, failures))
        hanging.start()
        for _ in range(9):
            assert template.render(USER) == "fine"
        assert hanging.is_alive()
        template.close()
        hanging.join(10)
        assert [type(failure) for failure in failures] == [UnavailableError]
    with pytest.raises(UnavailableError, match="closed"):
        template.render(USER)


def test_waiting_for_a_process_ends() -> None:
    limits = RenderLimits(cpu_seconds=60, wall_seconds=60, processes=1, wait_seconds=0.1)
    with opened(ENDLESS_IF_ASKED, limits) as template:
        hanging = threading.Thread(target=render_hang, args=(template, []))
        hanging.start()
        deadline = time.monotonic() + 20
        with pytest.raises(QueueFullError, match="busy"):
            while time.monotonic() < deadline:
                template.render(USER)
        template.close()
        hanging.join(10)


def test_processes_start_with_the_first_chat_and_none_stays() -> None:
    before = renderers()
    with opened(CHATML_WITH_TOOLS) as template:
        assert not renderers() - before
        for _ in range(20):
            template.render(USER)
        assert len(renderers() - before) == 1
    assert not renderers() - before  # of those before, some may have ended since


def test_the_memory_of_the_parent_is_not_the_processs_own() -> None:
    """The kernel lets `ru_maxrss` of the parent live on in the child."""
    large = bytearray(200 << 20)
    large[::4096] = b"x" * len(large[::4096])
    before = renderers()
    with opened(CHATML_WITH_TOOLS) as template:
        template.render(USER)
        first = renderers() - before
        template.render(USER)
        assert renderers() - before == first != set()


def is_running(pid: int) -> bool:
    """False for a process that has ended, whether or not its parent has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_process_that_somebody_killed_is_replaced() -> None:
    before = renderers()
    with opened(CHATML_WITH_TOOLS) as template:
        text = template.render(USER)
        (pid,) = renderers() - before
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while is_running(pid):
            assert time.monotonic() < deadline
        assert template.render(USER) == text


def test_a_process_has_no_files_and_ends_with_its_parent() -> None:
    import subprocess
    import sys

    code = (
        "import sys, time; from trtc.runtime.text.chat_template import ChatTemplate\n"
        "template = ChatTemplate('{{ messages }}', {}); template.render([{'content': ''}])\n"
        "print(template._workers._pool.pids[0], flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        limits = Path(f"/proc/{pid}/limits").read_text()
        unlimited = [line.split()[:4] for line in limits.splitlines() if "open files" in line]
        assert unlimited == [["Max", "open", "files", "0"]]
    finally:
        parent.kill()
        parent.communicate()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_large_rendering_does_not_keep_its_memory() -> None:
    before = renderers()
    limits = RenderLimits(recycle_bytes=1)
    with opened(CHATML_WITH_TOOLS, limits) as template:
        for _ in range(2):
            assert "<b>" in template.render(USER)
            assert not renderers() - before
