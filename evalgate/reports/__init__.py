"""Reports: a document as text. One file each; its name is its name on the command line.

A file of this folder that defines `REPORT` is a report: `evalgate show --format NAME` prints it, or
`evalgate gate --NAME FILE` writes it. Files with `_` are shared by reports. A report computes nothing: what is not in
the document it shows belongs in evalgate.stats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from evalgate.errors import UsageError, choose

if TYPE_CHECKING:
    from evalgate.store.remote import Place


@dataclass(frozen=True)
class Report:
    """How documents of one kind are shown.

    document: "summary" (of a run), "run" (the run itself), "gate", "compare", "plan", "slices" or "diff". render:
    (document) -> text. terminal: it is laid out for a terminal, and `render` takes `width` (columns) and `color` too.
    first: of the reports for a terminal the one that is printed where none is asked for; its `render` also takes
    `folder`, where the run lies (None = it was not written). file: what `evalgate gate` writes with `--NAME FILE`, as
    help text; "" = it writes no such file.
    """

    document: str
    render: Callable[..., str]
    terminal: bool = False
    first: bool = False
    file: str = ""

    def text(self, document: Any, *, width: int = 80, color: bool = False, folder: Place | None = None) -> str:
        """The document as this report shows it."""
        if self.first:
            return self.render(document, width=width, color=color, folder=folder)
        return self.render(document, width=width, color=color) if self.terminal else self.render(document)


def of(document: str) -> dict[str, Report]:
    """The reports of a kind of document by name: the first, the others for a terminal, the rest; each by name."""
    found = {name: report for name, report in _registry(tuple(__path__)).items() if report.document == document}
    return dict(sorted(found.items(), key=lambda item: (not item[1].first, not item[1].terminal, item[0])))


def get(document: str, name: str) -> Report:
    """The report of that name. Raises UsageError naming those there are."""
    known = of(document)
    if name not in known:
        raise UsageError(f"there is no report '{name}' of a {document}: {choose(name, known)}")
    return known[name]


@cache
def _registry(path: tuple[str, ...]) -> dict[str, Report]:
    """Every report of these folders. The folders are the key: one that is added later is read as well."""
    found: dict[str, Report] = {}
    for module in iter_modules(path):
        report = getattr(import_module(f"{__name__}.{module.name}"), "REPORT", None)
        if isinstance(report, Report):
            found[module.name] = report
    return found
