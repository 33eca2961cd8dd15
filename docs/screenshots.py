"""Takes the pictures of docs/ui.md: a real stack with some load on it, in headless Chromium.

    python docs/screenshots.py     needs the `browser` extra and Chromium; takes two minutes

The figures in them are those of the machine that took them, and no measurement.
"""

from __future__ import annotations

import random
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
IMAGES = ROOT / "docs" / "images"
WORDS = (ROOT / "README.md").read_text().split()
NUM_REQUESTS, NUM_CLIENTS = 27, 3


def load(stack: Any) -> None:
    """Prompts of several lengths, some of which begin alike."""

    def client(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(NUM_REQUESTS // NUM_CLIENTS):
            shared = " ".join(random.Random(rng.randrange(3)).choices(WORDS, k=300))
            own = " ".join(rng.choices(WORDS, k=rng.choice((20, 80, 400, 700))))
            text = f"{shared if rng.random() < 0.6 else ''} {own}"
            stack.post("/v1/completions", {"prompt": text, "max_tokens": rng.choice((8, 16, 32)), "ignore_eos": True})

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(NUM_CLIENTS)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()


def main() -> int:
    from tests.e2e.stack import running_stack

    IMAGES.mkdir(exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with (
        running_stack("--prefill", "2", "--decode", "2", "--kv-cache-bytes", "400MiB") as stack,
        sync_playwright() as p,
    ):
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 960}, color_scheme="light")
        page.goto(f"{stack.base_url}/ui")
        load(stack)
        page.get_by_label("Message").fill("What is the capital of France?")
        page.get_by_label("Message").press("Enter")
        page.wait_for_timeout(6000)
        page.screenshot(path=IMAGES / "ui.png")
        page.get_by_role("button", name="First token", exact=True).click()
        chunked = page.locator("#waterfall .line", has=page.locator(".chunk.odd"))
        (chunked if chunked.count() else page.locator("#waterfall .line")).first.click()
        page.mouse.move(4, 4)
        page.wait_for_timeout(500)
        page.locator("#requests").screenshot(path=IMAGES / "ui-request.png")
        phone = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark", device_scale_factor=1.5)
        phone.goto(f"{stack.base_url}/ui")
        phone.wait_for_timeout(3000)
        phone.screenshot(path=IMAGES / "ui-phone.png")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
