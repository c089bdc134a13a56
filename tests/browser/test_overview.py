"""The page in a browser: what it shows, how it is reached and read."""

import re
import threading
from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser.conftest import Opening
from tests.support.site import Site

VIEWS = ("overview", "requests", "playground")
PROMPT = {"model": "echo", "prompt": "def add(a, b):", "max_tokens": 20, "ignore_eos": True}


@pytest.fixture
def load(site: Site) -> Iterator[None]:
    """Requests, one after the other."""
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.1):
            site.post("v1/completions", PROMPT)

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    over.set()
    thread.join(30)


def plot(page: Page, title: str) -> str:
    """What a plot says of itself to those who do not see it."""
    said = page.get_by_role("img", name=f"{title}:").get_attribute("aria-label")
    assert said is not None
    return said


def test_plots_move_while_requests_run(open_page: Opening, site: Site, load: None) -> None:
    page = open_page(site)
    expect(page.locator("#state")).to_have_text("ready")
    expect(
        page.get_by_role("img", name=re.compile("Tokens a second: generated [1-9]"))
    ).to_be_visible()
    line = page.locator(".plot path.line").first
    before = line.get_attribute("d")
    expect(line).not_to_have_attribute("d", before or "")
    expect(page.locator("#tiles dd").first).not_to_have_text(re.compile(r"^[0–] "))
    for title in ("Time to first token", "Between tokens", "Queue"):
        assert re.search(r"p50 [\d.]+ (µs|ms|s), p90 .*, p99 ", plot(page, title)), title
    assert re.search(r"finished \d", plot(page, "Requests ended"))
    assert "anonymous" in page.locator("#clients").inner_text()


def test_models_have_digests(open_page: Opening, site: Site) -> None:
    page = open_page(site)
    digest = site.server.handle().manifest.digest
    expect(page.locator(".card .digest")).to_have_text(digest)
    expect(page.locator(".card")).to_contain_text("not measured")
    expect(page.locator(".card .pill")).to_have_text("ready")


def test_a_pause_keeps_what_is_shown(open_page: Opening, site: Site, load: None) -> None:
    page = open_page(site)
    expect(
        page.get_by_role("img", name=re.compile("Tokens a second: generated [1-9]"))
    ).to_be_visible()
    page.get_by_role("button", name="Pause").click()
    line = page.locator(".plot path.line").first
    before = line.get_attribute("d")
    page.wait_for_timeout(1500)
    assert line.get_attribute("d") == before
    page.get_by_role("button", name="Go on").click()
    expect(line).not_to_have_attribute("d", before or "")


def test_one_read_out_for_all_plots(open_page: Opening, site: Site, load: None) -> None:
    page = open_page(site)
    page.wait_for_timeout(2500)
    box = page.locator(".plot svg").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    expect(page.locator("#cursor-text")).to_have_text(re.compile(r"^\d\d:\d\d:\d\d \(−\d:\d\d\)$"))
    assert page.locator(".plot:visible .cursor:not([hidden])").count() >= 12
    page.mouse.move(5, 5)
    expect(page.locator("#cursor-text")).to_have_text("now")


def test_a_request_has_a_timeline(open_page: Opening, site: Site) -> None:
    answer = site.post("v1/completions", PROMPT)
    page = open_page(site, "requests")
    page.get_by_label("Filter").fill(answer["id"])
    toggle = page.locator("#timelines tbody button")
    expect(toggle).to_have_count(1)
    toggle.focus()
    page.keyboard.press("Enter")
    expect(toggle).to_have_attribute("aria-expanded", "true")
    facts = page.locator(".facts")
    expect(facts).to_contain_text(answer["id"])
    expect(facts).to_contain_text("20 tokens")
    expect(facts.get_by_role("img")).to_have_attribute(
        "aria-label", re.compile("queue .*, prefill .*, decode ")
    )
    expect(facts.locator(".mark")).to_have_count(20)
    page.wait_for_timeout(1200)  # a new status must not take the focus away
    expect(toggle).to_be_focused()
    page.get_by_label("Filter").fill("nobody")
    expect(page.locator("#requests-empty")).to_have_text("No request matches the filter.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing(
    open_page: Opening, site: Site, load: None, view: str, scheme: str
) -> None:
    page = open_page(site, view, color_scheme=scheme)
    expect(page.locator("#state")).to_have_text("ready")
    page.wait_for_timeout(1200)
    if view == "requests":
        page.locator("#timelines tbody button").first.click()
    if view == "playground":
        page.get_by_label("Colour tokens by probability").check()
        page.get_by_label("Max tokens").fill("30")
        page.get_by_label("Message").fill("hello")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".assistant .foot")).to_contain_text("length")
        page.locator(".assistant .token").first.hover()
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_dark_mode_is_dark(open_page: Opening, site: Site) -> None:
    colors = [
        open_page(site, color_scheme=scheme).evaluate(
            "((body) => [body.backgroundColor, body.color])(getComputedStyle(document.body))"
        )
        for scheme in ("light", "dark")
    ]
    brightness = [[sum(map(int, re.findall(r"\d+", one))) for one in pair] for pair in colors]
    assert brightness[0][0] > 600 > 200 > brightness[0][1]
    assert brightness[1][0] < 200 < 600 < brightness[1][1]


@pytest.mark.parametrize("view", VIEWS)
def test_a_phone_scrolls_in_one_direction(
    open_page: Opening, site: Site, load: None, view: str
) -> None:
    page = open_page(site, view, viewport={"width": 360, "height": 740}, has_touch=True)
    expect(page.locator("#state")).to_have_text("ready")
    page.wait_for_timeout(1200)
    if view == "requests":
        page.locator("#timelines tbody button").first.tap()
        expect(page.locator(".facts")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    small = page.evaluate(
        """[...document.querySelectorAll("button, nav a, summary, select, .segments label")]
        .filter((one) => one.offsetParent && one.getBoundingClientRect().height < 24)
        .map((one) => one.outerHTML)"""
    )
    assert not small, "too small for a finger (WCAG 2.5.8)"


def test_the_keyboard_reaches_everything(open_page: Opening, site: Site) -> None:
    page = open_page(site)
    expect(page.locator("#state")).to_have_text("ready")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    for name in ("Overview", "Requests", "Playground"):
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name=name, exact=True)).to_be_focused()
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", "the focus is seen"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#requests")).to_be_visible()
    expect(page.get_by_role("link", name="Requests", exact=True)).to_have_attribute(
        "aria-current", "page"
    )
    page.go_back()
    expect(page.locator("#overview")).to_be_visible()
    page.get_by_label("2 min").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_label("5 min")).to_be_checked()
    page.keyboard.press("Tab")
    expect(page.get_by_label("Read out at")).to_be_focused()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    expect(page.locator("#cursor-text")).to_contain_text("−0:03")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Go on")).to_have_attribute("aria-pressed", "true")
