"""The report of a large run: how long it takes to make, how large it is, and how soon a browser shows it.

    python -m benchmarks.report [--positions 1000000] [--candidates 1] [--out FILE] [--size quick|full] [--json FILE]

The run is fabricated (`tests/evalgate/reports/worded_run.py`). Times of the browser are its own: from the beginning of
the navigation to the first contentful paint, to the load event, and to the moment when the explorer's rows are there;
where there is no browser on the path they are left out.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from pathlib import Path

from benchmarks import result, timing
from evalgate.reports import html
from tests.browser import program
from tests.evalgate.reports.worded_run import worded_run

POSITIONS = {"tiny": 3_000, "quick": 250_000, "full": 1_000_000}


def main() -> None:
    parser = result.parser(__doc__, runs=3)
    parser.add_argument("--positions", type=int, help="default: by size")
    parser.add_argument("--candidates", type=int, default=1)
    parser.add_argument("--out", type=Path, help="keep the page there")
    options = parser.parse_args()
    measured(options).publish(options)


def measured(options: argparse.Namespace) -> result.Result:
    positions = options.positions or POSITIONS[options.size]
    names = tuple(f"candidate-{number}" for number in range(options.candidates))
    settings = {"positions": positions, "candidates": options.candidates}
    found = result.Result(name="report", size=options.size, settings=settings)
    whole, half = (
        worded_run(n, candidates=names, documents=max(n // 2000, 10), window=500) for n in (positions, positions // 2)
    )
    memory = _peak()
    page = html.render(whole)
    found.figure("most memory over the run's, at the first", (_peak() - memory) / 2**20, "MiB")
    sides = {
        "whole": lambda: timing.seconds(lambda: html.render(whole)),
        "half": lambda: timing.seconds(lambda: html.render(half)),
    }
    took = timing.interleaved(sides, options.runs)
    found.figure(f"rendered, {positions:,} positions", took["whole"], "s")
    found.figure("size", len(page.encode()) / 1e6, "MB", most=5)
    found.ratio("time for twice the positions", took["whole"], took["half"], better="lower", goal=2.2)
    with tempfile.TemporaryDirectory() as folder:
        path = options.out or Path(folder) / "report.html"
        path.write_text(page, encoding="utf-8")
        if options.size != "tiny" and program() is not None:
            opened = [_opened(path.resolve().as_uri()) for _ in range(options.runs)]
            for name in opened[0]:
                found.figure(f"in a browser: {name}", [one[name] for one in opened], "s")
    return found


def _peak() -> int:
    """Bytes: the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _opened(url: str) -> dict[str, float]:
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
    return {name: (value or 0) / 1000 for name, value in zip(names, times, strict=True)}


if __name__ == "__main__":
    main()
