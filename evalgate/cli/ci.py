"""What a gate leaves for CI: JUnit XML, GitHub's step summary and annotations, a comment, a badge."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evalgate.errors import InputError
from evalgate.store.files import check_writable, write_file

if TYPE_CHECKING:
    from evalgate.gate.report import GateReport

Junit = Annotated[Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write the verdicts as JUnit XML.")]
Github = Annotated[
    bool | None,
    typer.Option(
        "--github/--no-github", help="Annotations, step outputs and step summary. Default: where GitHub Actions runs."
    ),
]
Comment = Annotated[
    Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write a pull-request comment in Markdown.")
]
Badge = Annotated[
    Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write the JSON of a shields.io endpoint badge.")
]


@dataclass(frozen=True)
class Reports:
    """The files asked for; github None = where the environment says that GitHub Actions runs us."""

    junit: Path | None = None
    github: bool | None = None
    comment: Path | None = None
    badge: Path | None = None

    def check(self) -> None:
        """Refuse what cannot be written, before anything is measured. Raises UsageError."""
        for path in (self.junit, self.comment, self.badge):
            if path is not None:
                check_writable(path)

    def write(self, report: GateReport, *, environment: Mapping[str, str] = os.environ) -> None:
        """Write every file asked for, and what GitHub reads. Raises InputError where a file cannot be written."""
        from evalgate.reports import badge, comment, junit

        renderers: tuple[tuple[Path | None, Callable[[GateReport], str]], ...] = (
            (self.junit, junit.render),
            (self.comment, comment.render),
            (self.badge, badge.render),
        )
        for path, render in renderers:
            if path is not None:
                write_file(path, render(report))
        if environment.get("GITHUB_ACTIONS") == "true" if self.github is None else self.github:
            _write_github(report, environment)


def _write_github(report: GateReport, environment: Mapping[str, str]) -> None:
    """The runner reads workflow commands on either stream, so that standard output keeps its document."""
    from evalgate.reports import comment, github

    sys.stderr.write(github.workflow_commands(report))
    summary, outputs = environment.get("GITHUB_STEP_SUMMARY"), environment.get("GITHUB_OUTPUT")
    if summary:
        _append(Path(summary), comment.render(report, max_bytes=github.MAX_SUMMARY_BYTES))
    if outputs:
        _append(Path(outputs), github.outputs(report))


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}", file=str(path)) from error
