"""The published demo run: `make reports` measures again and writes reports/demo; `--render` only writes it anew.

Two runs on evalgate's own corpus, offline: the demo model against its int8 and bfloat16 copies, and bfloat16
once more with the model's own output head, to show what the precision of the logits does to the figure.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import evalgate
from evalgate.cli.progress import observer
from evalgate.reports import html, json, screen, terminal

if TYPE_CHECKING:
    from evalgate.summary import Comparison, StoredFigure, Summary

FOLDER = Path(__file__).parent / "demo"
WINDOWS = 27
INT8, BF16 = "demo@int8", "demo@bf16"
SUMMARY, OWN_HEAD_SUMMARY, PAGE = "summary.json", "summary-logits-model.json", "README.md"
SCREEN, BLOCK, REPORT = "screen.txt", "block.txt", "report.html"


def main() -> None:
    """Measure both runs, or with --render read them back, then write the files of reports/demo."""
    parser = argparse.ArgumentParser(description="Measure the demo and publish it in reports/demo.")
    parser.add_argument("--render", action="store_true", help="measure nothing: write from the stored summaries")
    main_run, own_head = published() if parser.parse_args().render else measure()
    FOLDER.mkdir(exist_ok=True)
    texts = {
        SUMMARY: json.render(main_run),
        OWN_HEAD_SUMMARY: json.render(own_head),
        SCREEN: screen.render(main_run),
        BLOCK: terminal.render(main_run),
        PAGE: page(main_run, own_head),
    }
    for name, text in texts.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        sys.stderr.write(f"wrote {FOLDER / name}\n")


def measure() -> tuple[Summary, Summary]:
    """Both runs, measured now: int8 and bf16 with float32 logits, then bf16 with the model's own head."""
    watch = observer(sys.stderr, noun="KL")
    main_run = evalgate.compare("demo", [INT8, BF16], limit=WINDOWS, observer=watch)
    # the page shows tokens, which no summary holds, so it is written where they are and cannot be rendered anew
    (FOLDER / REPORT).write_text(html.render(main_run), encoding="utf-8")
    own_head = evalgate.compare("demo", BF16, limit=WINDOWS, logits="model", observer=watch)
    return main_run.summary, own_head.summary


def published() -> tuple[Summary, Summary]:
    """Both runs as reports/demo holds them."""
    from evalgate.summary import Summary

    main_run, own_head = (
        Summary.model_validate_json((FOLDER / name).read_bytes()) for name in (SUMMARY, OWN_HEAD_SUMMARY)
    )
    return main_run, own_head


def page(main_run: Summary, own_head: Summary) -> str:
    """The front page of reports/demo: every figure on it is read from the two summaries."""
    rows = [(c, "float32") for c in main_run.comparisons] + [(c, "the model's own") for c in own_head.comparisons]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(main_run.versions.items()))
    corpus, group = main_run.corpus, main_run.comparisons[0].overall
    lines = [
        "# The demo run",
        "",
        f"Made by `make reports` (reports/make_demo.py), {main_run.created}, on a CPU.",
        "",
        f"Reference `demo` (weights and computation in float32), corpus {corpus.name}, {group.windows} windows of at "
        f"most {corpus.context} tokens from {group.documents} documents, {group.positions:,} positions. "
        f"Intervals are {group.metrics['kl'].statistics['mean'].confidence:.0%}, over "
        "documents. Every KL here is exact: both whole distributions were seen.",
        "",
        "| candidate | logits | mean KL (nats) | interval | 99 % KL | same top-1 | perplexity ratio |",
        "|---|---|---|---|---|---|---|",
        *(_row(comparison, logits) for comparison, logits in rows),
        "",
        "The two bf16 rows hold the same weights. Only the output head differs: computed in float32, or in bfloat16 "
        "as the checkpoint itself would. The precision of the measurement is part of the figure.",
        "",
        f"- [{REPORT}]({REPORT}): the first run as a page, with plots and the worst tokens in their text",
        f"- [{SCREEN}]({SCREEN}): what it prints",
        f"- [{BLOCK}]({BLOCK}): what it prints with `--full`",
        f"- [{SUMMARY}]({SUMMARY}): the first run as `--json` prints it",
        f"- [{OWN_HEAD_SUMMARY}]({OWN_HEAD_SUMMARY}): the second run",
        "",
        f"Versions: {versions}. The hash of the text is `{corpus.hash}`.",
    ]
    return "\n".join(lines) + "\n"


def _row(comparison: Comparison, logits: str) -> str:
    """One candidate's row of the table."""
    metrics = comparison.overall.metrics
    kl = metrics["kl"].statistics
    same, ratio = metrics["top1_agreement"].statistics["mean"], metrics["perplexity"].statistics["ratio"]
    cells = [
        f"`{comparison.candidate.spec}`",
        logits,
        f"{kl['mean'].value:.5f}",
        _interval(kl["mean"]),
        f"{kl['p99'].value:.4f}",
        f"{same.value:.2%}",
        f"{ratio.value:.4f}",
    ]
    return f"| {' | '.join(cells)} |"


def _interval(figure: StoredFigure) -> str:
    if figure.low is None or figure.high is None:
        return "unknown"
    return f"{figure.low:.5f} .. {figure.high:.5f}"


if __name__ == "__main__":
    main()
