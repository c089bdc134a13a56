import time

import pytest

from trtc.protos.errors import InvalidRequestError, NoTokenizerError
from trtc.runtime import chat_sandbox
from trtc.runtime.chat_template import ChatTemplate

USER = [{"role": "user", "content": 'é "<b>"'}]


def render(source: str, messages: list[dict[str, str]] | None = None) -> str:
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
    return template.render(USER if messages is None else messages)


def test_what_templates_use() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}") == '<s>é "<b>"'
    assert render("{{ messages[0]['content'] | tojson }}") == '"é \\"<b>\\""'
    assert render("{% if add_generation_prompt %}go{% endif %}") == "go"
    assert render("{% if x is defined %}a{% else %}b{% endif %}") == "b"
    assert render("{% set ns = namespace(n=0) %}{% set ns.n = 2 %}{{ ns.n * 3 }}") == "6"
    assert render("{%- for m in messages %}\n  {{ m.role }}\n{% endfor %}") == "  user\n"


def test_a_template_can_refuse_the_messages() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


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
        "{{ 9 ** 99999999 }}",
        "{{ 'a' * 999999999 }}",
        "{{ ('a' * 1000000) * 1000000 }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_what_goes_wrong_inside_is_an_error_of_the_request(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template refuses"):
        render(source)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{% break %}", "{{ 'a' | nofilter }}", "x" * 300_000]
)
def test_a_template_that_cannot_be_used_says_so(source: str) -> None:
    with pytest.raises(NoTokenizerError, match="chat template"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{{ messages[0].role }}{% endfor %}"
        "{% endfor %}",
    ],
)
def test_time_is_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_sandbox, "MAX_SECONDS", 0.05)
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match="takes more than"):
        render(source)
    assert time.monotonic() - began < 5


def test_the_size_of_the_text_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_sandbox, "MAX_TEXT_CHARACTERS", 1000)
    with pytest.raises(InvalidRequestError, match="more than 1000 characters"):
        render("{% for i in range(99) %}{{ 'x' * 99 }}{% endfor %}")
