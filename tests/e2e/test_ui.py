"""The page at /ui in a real browser, on the whole stack.

Needs Chromium (CHROMIUM names one that is not on the path) and the `browser` extra; without them these are skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.e2e.stack import Stack, running_stack

CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
if CHROMIUM is None:
    pytest.skip("no Chromium on this machine (set CHROMIUM to its path)", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'")
pytestmark = [pytest.mark.e2e, pytest.mark.slow]

EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
FRANCE = "What is the capital of France?"


@dataclass
class Opened:
    """A page, and what its browser complained of and asked for."""

    page: Any
    stack: Stack
    complaints: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    def check(self, *, allows: str = r"(?!)") -> None:
        """No error in the console but those that a test provokes, nothing asked of another origin."""
        assert [text for text in self.complaints if not re.search(allows, text)] == []
        assert {address for address in self.addresses if not address.startswith(self.stack.base_url + "/")} == set()

    def ask(self, text: str) -> None:
        self.page.get_by_label("Message").fill(text)
        self.page.get_by_label("Message").press("Enter")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    flags = ("--served-model-name", "smol", "--served-model-name", EVIL)
    with running_stack("--prefill", "1", "--decode", "2", "--kv-cache-bytes", "400MiB", *flags) as stack:
        yield stack


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=[(1440, 900)])
def opened(request: pytest.FixtureRequest, browser: Any, stack: Stack) -> Iterator[Opened]:
    width, height = request.param
    context = browser.new_context(viewport={"width": width, "height": height})
    page = context.new_page()
    opened = Opened(page, stack)
    page.on("console", lambda message: message.type in ("error", "warning") and opened.complaints.append(message.text))
    page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    page.on("request", lambda asked: opened.addresses.append(asked.url))
    page.goto(f"{stack.base_url}/ui")
    sync_api.expect(page.locator("#live")).to_have_text("Live")
    yield opened
    context.close()


def test_pools_and_a_chat_with_its_way_through_them(opened: Opened) -> None:
    page, expect = opened.page, sync_api.expect
    for node in ("prefill-0", "decode-0", "decode-1", "kvstore-0"):
        row = page.locator("#nodes tbody tr", has_text=node)
        expect(row).to_have_count(1)
        expect(row.locator(".state")).to_have_text("ready")
    expect(page.locator("#nodes-note")).to_have_text("4 of 4 nodes ready")
    opened.ask(FRANCE)
    answer = page.locator(".said.assistant")
    expect(answer.locator(".text")).to_contain_text("Paris", timeout=60_000)
    # The path comes with the request's own record.
    expect(answer.locator(".foot")).to_contain_text(
        re.compile(r"first token .* of 37 prompt tokens cached .* decode-[01]")
    )
    line = page.locator("#waterfall .line").first
    expect(line).to_have_attribute("aria-label", re.compile(r"^finished, 37 prompt tokens"))
    assert line.locator(".span-box .chunk").count() >= 1 and line.locator(".span-box .decode").count() == 1
    line.hover()
    tip = page.locator("#tip")
    expect(tip).to_be_visible()
    expect(tip).to_contain_text("Routing")
    # From the keyboard: open it, see the nodes' lanes, close it.
    line.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".details .swim-name", has_text="gateway")).to_have_count(1)
    page.keyboard.press("Enter")
    expect(page.locator(".details")).to_have_count(0)
    expect(page.locator("#routing .meter")).not_to_have_count(0)
    assert "Paris" not in json.dumps(opened.stack.status()) and "France" not in json.dumps(opened.stack.status())
    opened.check()


def test_stop_ends_the_request(opened: Opened) -> None:
    page, expect = opened.page, sync_api.expect
    page.get_by_label("Max tokens").fill("1500")
    opened.ask("Tell a very long story about the sea.")
    expect(page.locator(".said.assistant .text")).not_to_be_empty(timeout=60_000)
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator(".said.assistant .foot")).to_contain_text("Stopped")
    expect(page.locator("#waterfall li.aborted")).not_to_have_count(0)
    opened.check()


def test_no_text_becomes_html(opened: Opened) -> None:
    """The prompt, the model's name, and every string of /status."""
    page, expect = opened.page, sync_api.expect

    def spoil(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: spoil(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [spoil(item, key) for item in value]
        return value + EVIL if isinstance(value, str) and key not in ("incarnation", "phase", "role") else value

    opened.ask(EVIL)
    expect(page.locator(".said.user .text")).to_have_text(EVIL)
    expect(page.locator("#waterfall .line")).not_to_have_count(0, timeout=60_000)
    page.get_by_label("Model").select_option(EVIL)
    spoiled = json.dumps(spoil(opened.stack.status()))
    page.route("**/status*", lambda route: route.fulfill(status=200, content_type="application/json", body=spoiled))
    expect(page.locator("#nodes .id").first).to_contain_text("onerror")
    page.locator("#waterfall .line").first.click()
    expect(page.locator(".details")).to_contain_text("onerror")
    page.locator("#nodes tbody tr").first.hover()
    expect(page.locator("#tip")).to_contain_text("onerror")
    assert page.locator("img[src=x]").count() == 0 and page.locator("body script").count() == 0
    assert "owned" not in re.sub(re.escape(EVIL), "", page.title())
    opened.check()


@pytest.mark.parametrize("opened", [(360, 740)], indirect=True)
def test_a_phone_needs_no_sideways_scrolling(opened: Opened) -> None:
    page, expect = opened.page, sync_api.expect
    opened.ask(FRANCE)
    expect(page.locator("#waterfall .line")).not_to_have_count(0, timeout=60_000)
    page.locator("#waterfall .line").first.click()
    expect(page.locator(".details")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    controls = "[...document.querySelectorAll('button, input, select')].filter((one) => one.offsetParent)"
    outside = f"{controls}.filter((one) => one.getBoundingClientRect().right > 361).length"
    assert page.evaluate(outside) == 0
    opened.check()


@pytest.mark.parametrize("opened", [(360, 740), (1280, 800), (1440, 900)], indirect=True)
def test_no_curve_lies_over_a_text(opened: Opened) -> None:
    """Of the key figures, at their longest: what is drawn has a place of its own."""
    opened.page.evaluate(
        "document.querySelectorAll('.tile-value').forEach((one) => { one.textContent = '88.8K tok/s' })"
    )
    overlaps = """[...document.querySelectorAll('.tile')].flatMap((tile) => {
        const curve = tile.querySelector('.spark').getBoundingClientRect();
        return [...tile.querySelectorAll('span')].filter((text) => {
            const range = document.createRange();
            range.selectNodeContents(text);
            const box = range.getBoundingClientRect();
            return curve.width && box.right > curve.left && box.left < curve.right
                && box.bottom > curve.top && box.top < curve.bottom;
        }).map((text) => text.textContent);
    })"""
    assert opened.page.locator(".tile").count() == 6
    assert opened.page.evaluate(overlaps) == []
    opened.check()


def test_it_says_when_the_gateway_is_away_and_comes_back(opened: Opened) -> None:
    page, expect = opened.page, sync_api.expect
    page.route("**/status*", lambda route: route.abort())
    expect(page.locator("#live")).to_have_text("No answer")
    expect(page.locator(".notice")).to_contain_text("does not answer")
    # What was known stays in sight.
    expect(page.locator("#nodes tbody tr")).to_have_count(4)
    page.unroute("**/status*")
    page.get_by_role("button", name="Try now").click()
    expect(page.locator("#live")).to_have_text("Live")
    expect(page.locator(".notice")).to_have_count(0)
    opened.check(allows="ERR_FAILED")


def test_a_key_is_asked_for_and_kept_in_this_tab_only(opened: Opened) -> None:
    page, expect = opened.page, sync_api.expect
    seen: list[str | None] = []

    def guarded(route: Any) -> None:
        seen.append(route.request.headers.get("authorization"))
        if seen[-1] == "Bearer sesame":
            route.continue_()
        else:
            route.fulfill(status=401, content_type="application/json", body="{}")

    page.route("**/status*", guarded)
    page.get_by_label("API key").fill("sesame")
    page.get_by_role("button", name="Use it").click()
    expect(page.locator("#live")).to_have_text("Live")
    expect(page.get_by_label("API key")).to_have_count(0)
    assert page.evaluate("[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]") == [
        '{"biphase-api-key":"sesame"}', json.dumps({"biphase-theme": "auto"}, separators=(",", ":")), "",
    ]  # fmt: skip
    opened.check(allows="401")
