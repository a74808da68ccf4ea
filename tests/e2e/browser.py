"""A headless Chromium for the tests of the page, and what it complains about."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from needed import program
from playwright.sync_api import Browser, Page, sync_playwright


@contextmanager
def launched() -> Iterator[Browser]:
    """A running browser: the machine's own, for Playwright would bring one that needs a download."""
    path = program("chromium", "chromium-browser", "google-chrome", package="chromium")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


def complaints(page: Page) -> list[str]:
    """Fills up with what the page's console and its errors say from now on: also what its policy forbids."""
    found: list[str] = []
    page.on("console", lambda message: found.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: found.append(f"error: {error}"))
    return found
