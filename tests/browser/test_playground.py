"""The playground in a browser: the same answers as the API gives, and text that stays text."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from playwright.sync_api import Page, expect

from tests.browser.conftest import Opening
from tests.support.servers import TOKENIZER
from tests.support.site import OPTIONS, Site

STEPS = (0.9, 0.7, 0.5, 0.3, 0.1)


def send(page: Page, message: str, **fields: str) -> None:
    for label, value in fields.items():
        page.get_by_label(label.replace("_", " "), exact=True).fill(value)
    page.get_by_label("Message").fill(message)
    page.get_by_label("Message").press("Enter")


@pytest.fixture
def slow() -> Iterator[Site]:
    running = Site(replace(OPTIONS, step_s=0.05))
    yield running
    running.stop()


def test_an_answer_is_that_of_the_api(open_page: Opening, site: Site) -> None:
    page = open_page(site, "playground")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    messages = [{"role": "user", "content": "hello"}]
    for turn in range(2):
        body = {"model": "echo", "messages": messages, "max_tokens": 12, "temperature": 0}
        text = site.post("v1/chat/completions", body)["choices"][0]["message"]["content"]
        send(page, messages[-1]["content"], Max_tokens="12", Temperature="0")
        answer = page.locator(".assistant").nth(turn)
        expect(answer.locator(".foot")).to_have_text(
            re.compile(r"12 tokens · [\d.]+ tokens/s · first after [\d.]+ m?s · length")
        )
        assert answer.locator(".text").text_content() == text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    assert page.get_by_label("Message").input_value() == ""
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".assistant")).to_have_count(0)


def test_a_completion_goes_on_from_its_prompt(open_page: Opening, site: Site) -> None:
    page = open_page(site, "playground")
    page.locator("label[for=mode-completion]").click()
    body = {"model": "echo", "prompt": "def add", "max_tokens": 12, "temperature": 0, "stop": ["z"]}
    text = site.post("v1/completions", body)["choices"][0]["text"]
    for label, value in (("Max tokens", "12"), ("Temperature", "0"), ("Stop string", "z")):
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Prompt", exact=True).fill("def add")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".completion .foot")).to_contain_text(re.compile("length|stop"))
    assert page.locator(".completion .text").text_content() == text


def test_tokens_have_the_colours_of_their_probabilities(open_page: Opening, site: Site) -> None:
    body = {
        "model": "echo",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 30,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 5,
    }
    (choice,) = site.post("v1/chat/completions", body)["choices"]
    page = open_page(site, "playground")
    page.get_by_label("Colour tokens by probability").check()
    send(page, "hello", Max_tokens="30", Temperature="0")
    answer = page.locator(".assistant")
    expect(answer.locator(".foot")).to_contain_text("length")
    assert answer.locator(".text").text_content() == choice["message"]["content"]
    shown = answer.locator(".text .token").evaluate_all(
        "(all) => all.map((one) => [one.textContent, one.classList[1]])"
    )
    by_text = {
        one["token"]: f"p{sum(math.exp(one['logprob']) < step for step in STEPS)}"
        for one in choice["logprobs"]["content"]
    }
    whole = [pair for pair in shown if "�" not in pair[0] and pair[0] in by_text]
    assert len(whole) > 20
    assert all(by_text[text] == color for text, color in whole)
    answer.locator(".text .token").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(answer.locator(".text .token").nth(2)).to_be_focused()
    expect(answer.locator(".readout li")).to_have_count(5)
    expect(answer.locator(".readout p")).to_contain_text(re.compile(r"% · log −[\d.]+"))


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stopping_ends_the_request(open_page: Opening, slow: Site, how: str) -> None:
    page = open_page(slow, "playground")
    send(page, "hello", Max_tokens="900")
    expect(page.locator("#speed")).to_contain_text("tokens/s")
    assert slow.num_running() == 1
    expect(page.get_by_role("log")).to_have_attribute("aria-busy", "true")
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    expect(page.locator(".assistant .foot")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    page.goto(f"{slow.url}#requests")
    expect(page.locator("#timelines .pill").first).to_have_text("left")
    assert slow.num_running() == 0


def test_errors_are_said(open_page: Opening, site: Site) -> None:
    page = open_page(site, "playground")
    send(page, "hello", Max_tokens="100000")
    expect(page.locator(".turn .error")).to_contain_text("max_tokens")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


HOSTILE = '<img src=x onerror="document.title=1">'


def hostile_tokenizer(folder: Path) -> Path:
    """One whose every token is markup."""
    text = HOSTILE.replace(" ", "Ġ")  # as byte-level tokenizers write it
    vocab = {f"{text}{number}": number for number in range(OPTIONS.vocab_size - 1)}
    vocab["<unk>"] = OPTIONS.vocab_size - 1
    model = tokenizers.models.WordLevel(vocab, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    chat = {"chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | chat))
    return folder


def test_text_of_models_and_names_is_never_markup(open_page: Opening, tmp_path: Path) -> None:
    name = f"{HOSTILE}model"
    site = Site(tokenizer=hostile_tokenizer(tmp_path), names=(name, "second"))
    try:
        page = open_page(site, "playground")
        page.get_by_label("System prompt").fill(HOSTILE)
        for colored in (False, True):
            page.get_by_label("Colour tokens by probability").set_checked(colored)
            send(page, HOSTILE, Max_tokens="3")
            expect(page.locator(".assistant .foot").last).to_contain_text("length")
            assert HOSTILE in (page.locator(".assistant .text").last.text_content() or "")
        page.locator(".assistant .token").first.hover()
        page.goto(f"{site.url}#requests")
        page.locator("#timelines tbody button").first.click()
        expect(page.locator(".facts")).to_contain_text(name)
        page.goto(f"{site.url}#overview")
        expect(page.locator(".card h3").first).to_have_text(name)
        expect(page.locator("#engines label").first).to_have_text(name)
        assert page.locator("img").count() == 0
        assert page.title() == "Overview · trtc"
    finally:
        site.stop()
