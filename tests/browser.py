"""A headless Chromium for tests of pages: one a session, for whoever asks for the fixture `chromium`.

    def test_a_page(chromium: Chromium, tmp_path: Path) -> None:
        with chromium.open(file.as_uri(), dark=True, phone=True) as page:
            page.locator("#theme").click()
            assert page.violations() == []
            page.shot("report-dark-phone")

A page that says anything on its console, raises, or asks for anything beyond itself and `origin` fails the test when
the block ends. Screenshots lie in the session's temporary folder under `screenshots`, or in $EVALGATE_SCREENSHOTS.

Playwright's own interface leaves an event loop running in the thread that uses it, where asyncio.run of other tests
fails. So it lives in a thread of its own, and `Remote` objects carry calls over.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.stuck import STUCK

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DESKTOP, PHONE = (1280, 800), (390, 844)
SHOTS = "EVALGATE_SCREENSHOTS"
# What axe checks: WCAG 2.x A and AA, and its best practices.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def program() -> str | None:
    """Path of the browser; None where there is none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Remote:
    """An object of Playwright's, used from another thread than its own: attributes and calls are carried over."""

    def __init__(self, value: Any, carry: Callable[..., Any]) -> None:
        self._value, self._carry = value, carry

    def __getattr__(self, name: str) -> Any:
        found = self._carry(getattr, self._value, name)
        return self._wrapped(found) if not callable(found) else self._calling(found)

    def _calling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            plain = [_bare(one) for one in arguments]
            return self._wrapped(self._carry(function, *plain, **{k: _bare(v) for k, v in named.items()}))

        return call

    def _wrapped(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._wrapped(one) for one in value]
        return Remote(value, self._carry) if type(value).__module__.startswith("playwright") else value


def _bare(value: Any) -> Any:
    return value._value if isinstance(value, Remote) else value


class Page(Remote):
    """A page of Playwright's with what every test of a page asks."""

    def __init__(self, value: Any, carry: Callable[..., Any], shots: Path) -> None:
        super().__init__(value, carry)
        self._shots = shots
        self.said: list[str] = []  # on the console, and errors
        self.asked: list[str] = []  # requests beyond the page itself

    def violations(self) -> list[str]:
        """What axe-core finds: one line a rule, with the first elements that break it."""
        self.evaluate(_axe())
        found = self.evaluate(
            "async (tags) => (await axe.run(document, {runOnly: {type: 'tag', values: tags}})).violations", RULES
        )
        return [
            f"{one['id']}: {one['help']} ({len(one['nodes'])}: "
            + "; ".join(
                f"{node['html'][:160]} {node['any'][0]['message'] if node['any'] else ''}" for node in one["nodes"][:4]
            )
            + ")"
            for one in found
        ]

    def shot(self, name: str, *, full: bool = True) -> Path:
        """Save a screenshot, of the whole page or of what a screen shows."""
        path = self._shots / f"{name}.png"
        self.screenshot(path=str(path), full_page=full)
        return path

    def overflow(self) -> int:
        """By how many CSS pixels the page is wider than the window; 0 where it need not be scrolled sideways."""
        return int(self.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth"))


class Chromium:
    """The browser, and what it takes to open pages in it."""

    def __init__(self, browser: Remote, shots: Path) -> None:
        self._browser, self.shots = browser, shots

    @contextmanager
    def open(
        self,
        url: str,
        *,
        dark: bool = False,
        phone: bool = False,
        origin: str = "",
        strict: bool = True,
        **context: Any,
    ) -> Iterator[Page]:
        """A page with nothing kept from earlier ones.

        dark: as the system says. phone: a small touch screen. origin: where requests may go beside `url` itself.
        strict: fail at the end where the page said or asked anything. context: further options of Playwright's context.
        """
        width, height = PHONE if phone else DESKTOP
        made = self._browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
            **({"is_mobile": True, "has_touch": True, "device_scale_factor": 2} if phone else {}),
            **context,
        )
        try:
            page = Page(made.new_page()._value, self._browser._carry, self.shots)
            page.set_default_timeout(float(os.environ.get("EVALGATE_TEST_WAIT", STUCK)) * 1000)
            page.on("console", lambda message: page.said.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: page.said.append(f"error: {error}"))
            page.on("request", lambda request: page.asked.append(request.url))
            page.goto(url)
            yield page
            if strict:
                own = url.split("#")[0]
                beyond = [
                    one for one in page.asked if one.split("#")[0] != own and not (origin and one.startswith(origin))
                ]
                assert page.said == [], "the page's console is not empty"
                assert beyond == [], "the page asked for something beyond itself"
        finally:
            made.close()


@cache
def _axe() -> str:
    from axe_playwright_python.base import AXE_FILE_PATH

    return str(AXE_FILE_PATH.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """The session's browser; tests that ask for it are skipped where none is installed."""
    path = program()
    if path is None:
        pytest.skip(f"no browser on the path ({', '.join(PROGRAMS)}): install Debian's chromium")
    from playwright.sync_api import sync_playwright

    shots = Path(os.environ[SHOTS]) if SHOTS in os.environ else tmp_path_factory.mktemp("screenshots")
    shots.mkdir(parents=True, exist_ok=True)
    root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    # Fonts and colours as alike between machines as they can be; no attempt to reach its maker's servers.
    flags = [
        *root,
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--force-color-profile=srgb",
        "--font-render-hinting=none",
    ]
    with ThreadPoolExecutor(1, thread_name_prefix="playwright") as thread:

        def carry(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            return thread.submit(function, *arguments, **named).result(STUCK)

        playwright = carry(sync_playwright().start)
        try:
            browser = carry(playwright.chromium.launch, executable_path=path, args=flags, timeout=STUCK * 1000)
            yield Chromium(Remote(browser, carry), shots)
            carry(browser.close)
        finally:
            carry(playwright.stop)
