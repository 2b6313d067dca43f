"""What a gate leaves for CI: a file per report that has one (`--junit`, `--comment`, ...), and what GitHub reads."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evalgate import reports
from evalgate.cli.command import OptionGroup
from evalgate.cli.help import MORE_GATE, REPORTS
from evalgate.errors import EvalgateError, InputError
from evalgate.store.files import check_writable, write_file

if TYPE_CHECKING:
    from evalgate.gate.report import GateReport

Github = Annotated[
    bool | None,
    typer.Option(
        "--github/--no-github",
        rich_help_panel=MORE_GATE,
        help="Annotations, step outputs and step summary. Default: where GitHub Actions runs.",
    ),
]


class _ReportFiles(OptionGroup):
    """Where each report of the gate goes; the fields are the reports' names, None = it was not asked for."""

    def check(self) -> None:
        """Refuse what cannot be written, before anything is measured. Raises UsageError."""
        for path in self._asked().values():
            check_writable(path)

    def write(self, report: GateReport) -> None:
        """Write every file asked for, also after one that cannot be written; that one's InputError is raised last."""
        failed: EvalgateError | None = None
        for name, path in self._asked().items():
            try:
                write_file(path, reports.get("gate", name).text(report))
            except EvalgateError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def shown(self) -> list[str]:
        """What would be written, and where."""
        return [f"{name}: {path}" for name, path in self._asked().items()]

    def _asked(self) -> dict[str, Path]:
        values: dict[str, Path | None] = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {name: path for name, path in values.items() if path is not None}


def _option(report: reports.Report) -> Any:
    return Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, rich_help_panel=REPORTS, help=report.file)
    ]


_WITH_FILE = {name: report for name, report in reports.of("gate").items() if report.file}
ReportFiles: Any = make_dataclass(
    "ReportFiles",
    [(name, _option(report), field(default=None)) for name, report in _WITH_FILE.items()],
    bases=(_ReportFiles,),
    frozen=True,
)


def names() -> tuple[str, ...]:
    """Reports that are written to a file, by the names of their options."""
    return tuple(_WITH_FILE)


def leave(report: GateReport, files: Any, *, github: bool | None) -> None:
    """Write the files asked for, and what GitHub reads. Raises InputError where one cannot be written."""
    try:
        files.write(report)
    finally:
        write_github(report, asked=github)


def write_github(report: GateReport, *, asked: bool | None, environment: Mapping[str, str] = os.environ) -> None:
    """Write what GitHub Actions reads. asked: None = where the environment says that it runs us.

    The runner reads workflow commands on either stream, so that standard output keeps its document.
    Raises InputError where a file cannot be written.
    """
    if not (environment.get("GITHUB_ACTIONS") == "true" if asked is None else asked):
        return
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
