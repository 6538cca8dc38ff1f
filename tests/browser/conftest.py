"""A headless Chromium for the tests of pages: the system's own, found on the PATH, driven by Playwright.

Playwright's browsers are never downloaded. Where no Chromium is installed (``apt install chromium``), the tests are skipped
with that reason, which CI does not accept: it installs one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from watching import watched

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--screenshot", metavar="FILE", help="keep the picture of the README here (with: pytest tests/browser)"
    )
    parser.addoption("--server-screenshot", metavar="FILE", help="likewise, of the server's page under load")


@pytest.fixture(scope="module")  # and no longer: while it runs, nobody else in this process may run an event loop
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no Chromium on the PATH (looked for {', '.join(NAMES)})")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh page; trouble that was seen while it was used fails the test."""
    page = browser.new_page(viewport={"width": 1180, "height": 900})
    trouble = watched(page)
    yield page
    page.close()
    assert trouble == []
