"""From a request to a published sweep, and a sweep as Python has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from evalgate.core import counted
from evalgate.errors import SourceError, UsageError
from evalgate.measure.sweep import SweepRequest, check_sweep, folder_of, inputs_of, measure
from evalgate.printable import printable
from evalgate.store.sweeps import check_sweep_target, read_sweep, unfinished

if TYPE_CHECKING:
    import pandas as pd

    from evalgate.leaderboard import Leaderboard
    from evalgate.measure.request import Observer
    from evalgate.notebook import ShownRun


@dataclass(frozen=True, repr=False)
class Sweep:
    """A finished sweep: its leaderboard, and the folder that holds its runs and reports.

    sweep = evalgate.sweep("demo", ["demo@int8", "demo@bf16"])
    sweep              # the plot and the table, in a notebook
    sweep.frame        # one row a candidate, a pandas frame
    sweep["demo@int8"] # the candidate's run
    """

    board: Leaderboard
    folder: Path
    left_out: tuple[str, ...] = field(default=())

    def __repr__(self) -> str:
        """Against what, and how many; figures are in `board` and `frame`."""
        board = self.board
        count = f"{len(board.measured)} of {counted(len(board.entries), 'candidate')}"
        return printable(f"Sweep against {board.reference.spec}: {count} measured, {self.folder}")

    def __getitem__(self, name: str) -> ShownRun:
        """The run of the candidate of that name. Raises UsageError where there is none, and as `evalgate.load`."""
        from evalgate.measure.stored import read_run
        from evalgate.notebook import ShownRun

        entry = next((entry for entry in self.board.entries if entry.name == name), None)
        if entry is None:
            names = ", ".join(entry.name for entry in self.board.entries)
            raise UsageError(f"the sweep has no candidate {name!r}: name one of {names}")
        if entry.run is None:
            raise UsageError(f"{name} was not measured: {entry.reason}")
        return ShownRun.of(read_run(self.folder / entry.run))

    @property
    def frame(self) -> pd.DataFrame:
        """The leaderboard as a data frame, one row a candidate, best first: the columns of sweep.csv."""
        import pandas as pd

        from evalgate.reports.leaderboard_csv import COLUMNS, rows

        return pd.DataFrame(rows(self.board), columns=list(COLUMNS))

    def _repr_html_(self) -> str:
        from evalgate.reports.leaderboard_html import fragment

        return fragment(self.board)


def run_sweep(request: SweepRequest, *, new_folder: Callable[[], Path], observer: Observer | None = None) -> Sweep:
    """Measure what is not measured yet, and write the folder.

    new_folder: names the folder of a new sweep, where the request names none and no unfinished one lies beside it.
    Raises SourceError where no candidate could be measured, and the errors of measuring.
    """
    from dataclasses import replace

    from evalgate.measure.request import silent
    from evalgate.stats.leaderboard import Contender, leaderboard
    from evalgate.sweeps.outputs import write_outputs

    watch, run = observer or silent(), request.run
    check_sweep(request)
    inputs = inputs_of(run, silent())
    if run.out is None:
        new = new_folder()
        run = replace(run, out=(unfinished(new.parent, inputs) if run.resume else None) or new)
        request = replace(request, run=run)
    folder = folder_of(run)
    assert folder is not None
    check_sweep_target(folder, inputs, overwrite=run.overwrite)
    found = measure(request, inputs, watch)
    if not found.runs:
        said = [f"{c.name}: {found.reasons.get(c.source.spec, 'not measured')}" for c in request.candidates]
        raise SourceError(f"no candidate could be measured: {'; '.join(said)}")
    contenders = [
        Contender(
            name=candidate.name,
            spec=candidate.source.spec,
            run=one,
            reason="" if one is not None else found.reasons.get(candidate.source.spec, "not measured"),
            folder=None if one is None or one.folder is None else one.folder.relative_to(folder).as_posix(),
            bytes=candidate.bytes,
            speed=found.speeds.get(candidate.source.spec),
        )
        for candidate in request.candidates
        for one in [found.runs.get(candidate.source.spec)]
    ]
    watch.stage("writing the reports")
    board = leaderboard(contenders, confidence=run.confidence, seconds=found.seconds)
    return Sweep(board, folder, tuple(write_outputs(folder, board)))


def load_sweep(folder: Path) -> Sweep:
    """A sweep that was written. Raises InputError where there is none."""
    return Sweep(read_sweep(Path(folder)), Path(folder))
