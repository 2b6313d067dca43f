"""Progress on standard error: a live bar on a terminal, a plain line now and then elsewhere.

Both are a pipeline.Observer. `advance` counts windows and positions since the call before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

from evalgate.cli import colors
from evalgate.core import counted
from evalgate.printable import printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from evalgate.measure.run import Observer

LINE_SECONDS = 10.0
BAR, TIME, NAME = 12, 7, 16  # characters of the bar, of the time left, and of one of several candidates' names


def observer(stream: TextIO, *, noun: str) -> Observer:
    """The observer that suits the stream; `noun` names the running mean ("KL", "nll").

    A bar needs a terminal on which a line can be drawn again; it is colored as reports are (evalgate.cli.colors).
    """
    drawn = stream.isatty() and colors.moves()
    return BarObserver(stream, noun=noun) if drawn else LineObserver(stream, noun=noun)


class LineObserver:
    """One line per stage, then one line every LINE_SECONDS and one at the end. clock: seconds, monotonic."""

    def __init__(self, stream: TextIO, *, noun: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._noun = noun
        self._clock = clock
        self._windows = self._positions = self._total = 0
        self._running: dict[str, float] = {}
        self._began = self._said = clock()
        self._open = False  # something was counted since the last line

    def stage(self, text: str) -> None:
        """Say what happens now."""
        self._say(text)

    def start(self, *, windows: int, positions: int) -> None:
        """Begin counting towards `windows`."""
        self._total, self._windows, self._positions = windows, 0, 0
        self._began = self._said = self._clock()
        self._say(f"{counted(windows, 'window')}, {counted(positions, 'position')}")

    def advance(self, *, windows: int, positions: int, running: dict[str, float]) -> None:
        """Count windows and positions just measured."""
        self._windows += windows
        self._positions += positions
        self._running = running
        self._open = True
        if self._clock() - self._said >= LINE_SECONDS:
            self._say_counts()

    def finish(self) -> None:
        """Say where the counting ended, once."""
        if self._open:
            self._say_counts()

    def _say_counts(self) -> None:
        self._said = self._clock()
        self._open = False
        seconds = self._said - self._began
        parts = [
            f"{self._windows:,}/{counted(self._total, 'window')}",
            *speeds(self._windows, self._positions, seconds),
            *time_left(self._windows, self._total, seconds),
            *running_means(self._running, self._noun),
        ]
        self._say(", ".join(parts))

    def _say(self, text: str) -> None:
        self._stream.write(f"{printable(text)}\n")
        self._stream.flush()


class BarObserver:
    """A live bar with speeds, time left and the running means under way."""

    def __init__(self, stream: TextIO, *, noun: str) -> None:
        self._stream = stream
        self._noun = noun
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._windows = self._positions = self._room = 0
        self._began = time.monotonic()

    def stage(self, text: str) -> None:
        """Say what happens now, above the bar where there is one."""
        if self._progress is not None:
            self._progress.console.print(printable(text), markup=False, highlight=False)
        else:
            self._stream.write(f"{printable(text)}\n")

    def start(self, *, windows: int, positions: int) -> None:
        """Show an empty bar of `windows`."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        self.finish()
        self._windows = self._positions = 0
        self._began = time.monotonic()
        # Rich takes width from every column where a line is too long: the text alone gives way here.
        console, counts = (
            Console(file=self._stream, no_color=not colors.wanted(terminal=True)),
            len(f"{windows}/{windows}"),
        )
        self._room = console.width - BAR - counts - TIME - 3
        self._progress = Progress(
            BarColumn(bar_width=BAR, table_column=Column(min_width=BAR, no_wrap=True)),
            MofNCompleteColumn(table_column=Column(min_width=counts, no_wrap=True)),
            TimeRemainingColumn(compact=True, table_column=Column(min_width=TIME, no_wrap=True)),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=console,
        )
        self._task = self._progress.add_task(counted(positions, "position"), total=windows)
        self._progress.start()

    def advance(self, *, windows: int, positions: int, running: dict[str, float]) -> None:
        """Move the bar by windows just measured."""
        self._windows += windows
        self._positions += positions
        if self._progress is None or self._task is None:
            return
        seconds = time.monotonic() - self._began
        means = running_means(running, self._noun, longest=NAME)
        rates = speeds(self._windows, self._positions, seconds)
        # The rate is seen in any case: before the means of several candidates, after that of a single one.
        parts, dropped = ([*means, *rates], False) if len(means) == 1 else ([*rates[:1], *means], True)
        self._progress.update(self._task, advance=windows, description=fitting(parts, self._room, dropped=dropped))

    def finish(self) -> None:
        """Leave the bar as it stands and give the terminal back. Idempotent."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None


def speeds(windows: int, positions: int, seconds: float) -> list[str]:
    """Windows/s and positions/s; nothing before any time has passed."""
    if seconds <= 0:
        return []
    return [f"{windows / seconds:.3g} windows/s", f"{positions / seconds:,.0f} positions/s"]


def fitting(parts: list[str], room: int, *, dropped: bool = True) -> str:
    """As many of the parts, from the first, as fit into `room` characters; the first one in any case.

    dropped: say how many do not.
    """
    text = parts[0] if parts else ""
    for number, part in enumerate(parts[1:], 1):
        if len(text) + 2 + len(part) > room:
            left = f" (+{len(parts) - number})" if dropped else ""
            return text + left if len(text) + len(left) <= room else text
        text = f"{text}, {part}"
    return text


def time_left(windows: int, total: int, seconds: float) -> list[str]:
    """Time left at the speed so far; nothing before the first window or after the last."""
    if windows <= 0 or windows >= total:
        return []
    left = round(seconds / windows * (total - windows))
    minutes, rest = divmod(left, 60)
    hours, minutes = divmod(minutes, 60)
    return [f"{hours}:{minutes:02}:{rest:02} left"]


def running_means(running: Mapping[str, float], noun: str, *, longest: int = 1000) -> list[str]:
    """`mean KL 0.00123` for one candidate, with its name, or the end of a long one, where there are several."""
    if len(running) == 1:
        return [f"mean {noun} {value:.4g}" for value in running.values()]
    shown = {name: printable(name) for name in running}
    cut = {name: one if len(one) <= longest else f"...{one[3 - longest :]}" for name, one in shown.items()}
    return [f"{cut[name]} mean {noun} {value:.4g}" for name, value in running.items()]
