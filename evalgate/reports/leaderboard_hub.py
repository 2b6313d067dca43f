"""The leaderboard as evaluation results of the Hugging Face Hub: a YAML file for a model's `.eval_results` folder.

The format is that of https://huggingface.co/docs/hub/eval-results (specification:
https://github.com/huggingface/hub-docs/blob/main/eval_results.yaml): a list of results, each with `dataset` (`id` and
`task_id`), `value`, and optionally `date`, `source` and `notes`. A file there speaks of the one model of its
repository, so a sweep has one file for each candidate. `dataset.id` must be a benchmark of the hub, which no text of a
sweep is by itself: the user names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from evalgate.printable import printable
from evalgate.reports import Report
from evalgate.reports._leaderboard import HEADINGS, measured, quantity_text

if TYPE_CHECKING:
    from evalgate.leaderboard import Entry, Leaderboard

TASKS = {"kl": "kl_divergence", "top1": "same_top1", "ratio": "perplexity_ratio"}
BENCHMARK = "OWNER/BENCHMARK"


def render(board: Leaderboard) -> str:
    """One YAML document for each candidate that was measured; `entry_text` gives one alone, which is a file."""
    return "".join(f"---\n{entry_text(entry, board)}" for entry in board.measured)


def entry_text(entry: Entry, board: Leaderboard) -> str:
    """The results of one candidate, as a file of its repository. Texts are quoted as JSON, which is YAML."""
    lines = [
        f"# {printable(entry.name)} ({printable(entry.spec)})",
        "# Copy to .eval_results/evalgate.yaml in the model's repository: https://huggingface.co/docs/hub/eval-results",
        f"# The hub shows results of its benchmarks alone: put the id of the one with this text for {BENCHMARK}.",
        *_results(entry, board),
    ]
    return "\n".join(lines) + "\n"


def _results(entry: Entry, board: Leaderboard) -> Iterator[str]:
    for name, task in TASKS.items():
        quantity = getattr(entry, name)
        if quantity is None or quantity.value is None:
            continue  # a bound is not a value
        text = quantity_text(entry, name, board)
        said = (
            f"{HEADINGS[name]} against {board.reference.spec}: {text.value} {text.interval} at {board.confidence:.0%}, "
            f"{quantity.exactness}; {measured(board)}; evalgate {board.evalgate_version}"
        )
        yield "- dataset:"
        yield f"    id: {_quoted(BENCHMARK)}"
        yield f"    task_id: {_quoted(task)}"
        yield f"  value: {_number(quantity.value.value)}"
        yield f"  date: {_quoted(board.created)}"
        yield f"  notes: {_quoted(said)}"


def _number(value: float) -> str:
    """A number that YAML 1.1 readers take for one too: they want a dot before an exponent."""
    text = repr(float(value))
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa if '.' in mantissa else f'{mantissa}.0'}e{int(exponent):+d}" if e else text


def _quoted(text: str) -> str:
    return json.dumps(printable(text), ensure_ascii=True)


REPORT = Report("sweep", render)
