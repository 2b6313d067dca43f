"""The browser of the tests fails a test whose page speaks, errs or asks for anything."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.browser import Chromium

GOOD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>t</title></head><body><main><h1>Hello</h1>
<button id="b" onclick="this.textContent = 'pressed'">press</button></main></body></html>"""


def page_of(tmp_path: Path, body: str) -> str:
    file = tmp_path / "page.html"
    file.write_text(GOOD.replace("</main>", f"{body}</main>"), encoding="utf-8")
    return file.as_uri()


def test_a_quiet_page_is_driven(chromium: Chromium, tmp_path: Path) -> None:
    with chromium.open(page_of(tmp_path, ""), phone=True, dark=True) as page:
        page.locator("#b").click()
        assert page.locator("#b").text_content() == "pressed"
        assert page.evaluate("() => matchMedia('(prefers-color-scheme: dark)').matches")
        assert page.violations() == [] and page.overflow() == 0
        assert page.shot("hello").read_bytes().startswith(b"\x89PNG")
    asyncio.run(asyncio.sleep(0))  # no loop is left running in this thread


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("<script>console.log('hm')</script>", "console"),
        ("<script>missing()</script>", "console"),
        ("<img alt='' src='http://127.0.0.1:9/x.png'>", "console|beyond"),
        ("<img alt='' src='other.png'>", "console|beyond"),
    ],
)
def test_a_page_that_speaks_or_asks_fails(chromium: Chromium, tmp_path: Path, body: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint), chromium.open(page_of(tmp_path, body)) as page:
        page.wait_for_load_state("networkidle")


def test_axe_names_what_is_wrong(chromium: Chromium, tmp_path: Path) -> None:
    with chromium.open(page_of(tmp_path, "<p style='color:#bbb;background:#fff'>pale</p>")) as page:
        (found,) = page.violations()
        assert found.startswith("color-contrast")
