"""`report.html` in a run folder: the run as a page, made when everything else is safe on disk.

The page is no part of the run: the manifest does not list it, a run without it is whole, and it can be made again at
any time (`evalgate show RUN --html FILE`). So whatever goes wrong here is a note, and a run of very many positions is
left without a page, since nobody asked to wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evalgate.errors import EvalgateError
from evalgate.store.files import write_file
from evalgate.store.remote import publish_file
from evalgate.store.runs import PAGE

if TYPE_CHECKING:
    from evalgate.gate.report import GateReport
    from evalgate.store.runs import Run

MOST_ROWS = 4_000_000  # of the per-position table: half a minute


def leave_page(run: Run, verdict: GateReport | None = None) -> str:
    """Write the page of a stored run into its folder; verdict: of the gate that judged it.

    Returns why there is no page, as one sentence, or "" where it was written or the run has no folder.
    """
    if run.folder is None:
        return ""
    again = f"`evalgate show {run.place} --html FILE` makes one"
    if run.table.num_rows > MOST_ROWS:
        return f"no {PAGE} was written, since the run has {run.table.num_rows:,} rows: {again}"
    try:
        from evalgate.reports.html import render

        write_file(run.folder / PAGE, render(run, verdict))
        if run.url is not None:
            publish_file(run.folder / PAGE, run.url / PAGE)
    except EvalgateError as error:
        return f"no {PAGE} was written: {error.message}"
    except KeyboardInterrupt:  # of the page alone: what was measured is on disk, and there is nothing to resume
        return f"no {PAGE} was written, since it was interrupted: {again}"
    except Exception as error:  # the run is measured and stored; nothing that a page does may lose it
        return f"no {PAGE} was written ({type(error).__name__}: {error}): {again}, or shows what is wrong"
    return ""
