"""The report of a large run: how long it takes to make, how large it is, and how soon a browser shows it.

Usage: python benchmarks/report.py [--positions 1000000] [--candidates 1] [--out FILE]

The run is fabricated (`tests/evalgate/reports/worded_run.py`). Times of the browser are its own: from the beginning of
the navigation to the first contentful paint, to the load event, and to the moment when the explorer's rows are there.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

from evalgate.reports import html
from tests.browser import program
from tests.evalgate.reports.worded_run import worded_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=1_000_000)
    parser.add_argument("--candidates", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = tuple(f"candidate-{number}" for number in range(options.candidates))
    run = worded_run(options.positions, candidates=names, documents=max(options.positions // 2000, 10), window=500)
    memory, began = _peak(), time.perf_counter()
    page = html.render(run)
    seconds = time.perf_counter() - began
    print(f"rows            {run.table.num_rows:,}")
    print(f"rendered in     {seconds:.1f} s, {(_peak() - memory) / 1e6:,.0f} MB more memory at most")
    print(f"size            {len(page.encode()) / 1e6:.2f} MB")
    with tempfile.TemporaryDirectory() as folder:
        path = options.out or Path(folder) / "report.html"
        path.write_text(page, encoding="utf-8")
        if program() is None:
            print("no browser on the path")
            return
        for attempt in range(3):
            print(f"opened          {_opened(path.resolve().as_uri())} (attempt {attempt + 1})")


def _peak() -> int:
    """Bytes: the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _opened(url: str) -> str:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program(), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto(url, timeout=120_000)
        page.locator("#tokens-list > li").nth(20).wait_for(timeout=120_000)
        times = page.evaluate(
            """() => {
                const navigation = performance.getEntriesByType("navigation")[0];
                const paint = performance.getEntriesByName("first-contentful-paint")[0];
                return [paint?.startTime, navigation.domInteractive, navigation.loadEventEnd];
            }"""
        )
        browser.close()
    names = ("first paint", "interactive", "loaded, rows shown")
    return ", ".join(f"{name} {(value or 0) / 1000:.2f} s" for name, value in zip(names, times, strict=True))


if __name__ == "__main__":
    main()
