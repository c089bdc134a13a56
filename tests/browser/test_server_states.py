"""The page while its server wants keys, ends, is gone, and comes back."""

import re
from dataclasses import replace
from pathlib import Path

from playwright.sync_api import expect

from tests.browser.conftest import Opening
from tests.support.keys import holding, write_keys
from tests.support.servers import CONFIG
from tests.support.site import Site
from trtc.runtime.requests.principal import Scope
from trtc.runtime.service.access import AccessConfig


def test_keys_open_what_their_scopes_say(open_page: Opening, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    alice = holding("alice-key")
    ops = holding("ops-key", scopes=(Scope.INFERENCE, Scope.METRICS))
    write_keys(path, {"alice": alice, "ops": ops})
    site = Site(config=replace(CONFIG, access=AccessConfig(path)))
    try:
        page = open_page(site)
        key = page.get_by_label("API key")
        expect(page.locator("#state")).to_have_text("key needed")
        expect(page.locator("#plots")).to_be_hidden()
        key.fill("guess")
        key.press("Enter")
        expect(page.locator("#gate-text")).to_contain_text("does not know this key")
        key.fill("alice-key")
        key.press("Enter")
        expect(page.locator("#gate-text")).to_contain_text("scope “metrics”")
        page.get_by_role("link", name="Playground").click()
        expect(page.locator("#model option")).to_have_text(["echo"])
        page.get_by_label("Max tokens").fill("5")
        page.get_by_label("Message").fill("hello")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".assistant .foot")).to_contain_text("5 tokens")
        page.get_by_role("link", name="Overview").click()
        key.fill("ops-key")
        key.press("Enter")
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.locator("#clients")).to_contain_text("tenant alice")
        assert page.evaluate("localStorage.length") == 0
        assert page.context.cookies() == []
        page.reload()
        expect(page.locator("#state")).to_have_text("ready")
        # Another tab is another session.
        other = page.context.new_page()
        other.goto(site.url)
        expect(other.locator("#state")).to_have_text("key needed")
    finally:
        site.stop()


def test_a_server_that_ends_and_comes_back(open_page: Opening) -> None:
    site = Site()
    try:
        page = open_page(site)
        expect(page.locator("#state")).to_have_text("ready")
        site.drain()
        expect(page.locator("#state")).to_have_text("draining")
        expect(page.get_by_role("alert")).to_contain_text("takes no new ones")
        site.stop()
        expect(page.locator("#state")).to_have_text("no answer")
        expect(page.get_by_role("alert")).to_contain_text("has not answered for")
        expect(page.locator("#plots")).to_be_visible()
        site.start()
        expect(page.locator("#state")).to_have_text("ready")
        expect(page.get_by_role("alert")).to_be_hidden()
        expect(page.get_by_role("img", name=re.compile("Sequences: running 0"))).to_be_visible()
    finally:
        site.stop()
