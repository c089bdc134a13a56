"""Chromium, driven by Playwright; a page that has an error or breaks its policy fails its test."""

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.site import Site

expect.set_options(timeout=10_000)
EXPECTED = "Failed to load resource"
"""What Chromium logs of answers that the page expects: keys that are refused, a server that is
gone."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Playwright holds an event loop as long as it runs, with which no other module's test can run
    its own."""
    found = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if not found:
        pytest.fail("no Chromium: install it (Debian: apt-get install chromium) or set CHROMIUM")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # root has none
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=found, args=sandbox) as browser,
    ):
        yield browser


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """One that many tests share."""
    running = Site()
    yield running
    running.stop()


Opening = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Opening]:
    """Opens a page in a browser of its own, by the site and the options of the browser."""
    contexts = []
    faults: list[str] = []

    def opening(site: Site, view: str = "", **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "console",
            lambda message: (
                faults.append(message.text)
                if message.type in ("error", "warning") and not message.text.startswith(EXPECTED)
                else None
            ),
        )
        page.goto(f"{site.url}#{view}" if view else site.url)
        return page

    yield opening
    for context in contexts:
        context.close()
    assert not faults
