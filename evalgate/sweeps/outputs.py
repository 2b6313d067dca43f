"""What a finished sweep leaves in its folder, beside the runs: one document, and its reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from evalgate.errors import InputError
from evalgate.reports import (
    _pareto,
    leaderboard_csv,
    leaderboard_html,
    leaderboard_hub,
    leaderboard_json,
    leaderboard_markdown,
)
from evalgate.reports._pareto_png import png
from evalgate.store.files import write_file
from evalgate.store.sweeps import DOCUMENT, folder_names

if TYPE_CHECKING:
    from evalgate.leaderboard import Leaderboard

HTML, MARKDOWN, CSV, SVG, PNG = "sweep.html", "sweep.md", "sweep.csv", "sweep.svg", "sweep.png"
HUB = "eval_results"
RUN_PAGE = "report.html"  # of a run folder


def write_outputs(folder: Path, board: Leaderboard) -> list[str]:
    """Write every report, the document last: a folder with one is finished. Returns what was left out, and why.

    Raises InputError where the disk refuses.
    """
    texts = {
        HTML: leaderboard_html.render(board, links=_links(folder, board)),
        MARKDOWN: leaderboard_markdown.render(board),
        CSV: leaderboard_csv.render(board),
    }
    notes = []
    drawn = _pareto.plot(board, alone=True)
    if drawn:
        texts[SVG] = drawn + "\n"
        picture = None
        try:
            picture = png(board)
        except ImportError:
            notes.append(f"{PNG} was left out: pip install 'evalgate-lm[plot]' for it ({SVG} is there)")
        if picture is not None:
            write_file(folder / PNG, picture)
    else:
        notes.append(f"{SVG} and {PNG} were left out: no candidate with a KL has a known size")
    for name, text in texts.items():
        write_file(folder / name, text)
    _write_hub(folder / HUB, board)
    write_file(folder / DOCUMENT, leaderboard_json.render(board))
    return notes


def _write_hub(folder: Path, board: Leaderboard) -> None:
    """One file for each candidate that was measured, and none of an earlier command."""
    names = folder_names(entry.name for entry in board.measured)
    wanted = {f"{name}.yaml": entry for name, entry in zip(names, board.measured, strict=True)}
    try:
        folder.mkdir(exist_ok=True)
        for old in folder.glob("*.yaml"):
            if old.name not in wanted:
                old.unlink()
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}", folder=str(folder)) from error
    for name, entry in wanted.items():
        write_file(folder / name, leaderboard_hub.entry_text(entry, board))


def _links(folder: Path, board: Leaderboard) -> dict[str, str]:
    """By name, the page of a candidate's own run, where it has one."""
    return {
        entry.name: f"{entry.run}/{RUN_PAGE}"
        for entry in board.measured
        if entry.run is not None and (folder / entry.run / RUN_PAGE).is_file()
    }
