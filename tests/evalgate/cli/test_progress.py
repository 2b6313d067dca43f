import io
import re

import pytest

from evalgate.cli.progress import BarObserver, LineObserver, fitting, observer, speeds, time_left
from evalgate.core import counted


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_stream_and_its_terminal_decide(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(observer(io.StringIO(), noun="KL"), LineObserver)
    assert isinstance(observer(Terminal(), noun="KL"), BarObserver)
    monkeypatch.setenv("TERM", "dumb")  # which cannot draw a line again
    assert isinstance(observer(Terminal(), noun="KL"), LineObserver)


@pytest.mark.parametrize(("variable", "colored"), [("NO_COLOR", False), ("FORCE_COLOR", True)])
def test_a_bar_is_colored_as_reports_are(monkeypatch, variable, colored):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv(variable, "1")
    stream = Terminal()
    bar = observer(stream, noun="KL")
    bar.start(windows=4, positions=120)
    bar.advance(windows=1, positions=30, running={"demo": 0.1})
    bar.finish()
    # of the 16 colors, of 256, or of all
    assert bool(re.search(r"\x1b\[(?:\d;)*(?:3[0-8]|9[0-7])[;m]", stream.getvalue())) is colored


def test_a_line_every_ten_seconds_and_one_at_the_end():
    clock, stream = Clock(), io.StringIO()
    lines = LineObserver(stream, noun="KL", clock=clock)
    lines.stage("loading demo")
    lines.start(windows=100, positions=51_100)
    for _ in range(25):
        clock.now += 1.0
        lines.advance(windows=2, positions=1022, running={"demo@int8": 0.0012345})
    lines.finish()
    lines.finish()
    assert stream.getvalue().splitlines() == [
        "loading demo",
        "100 windows, 51,100 positions",
        "20/100 windows, 2 windows/s, 1,022 positions/s, 0:00:40 left, mean KL 0.001234",
        "40/100 windows, 2 windows/s, 1,022 positions/s, 0:00:30 left, mean KL 0.001234",
        "50/100 windows, 2 windows/s, 1,022 positions/s, 0:00:25 left, mean KL 0.001234",
    ]


def test_several_candidates_are_named():
    clock, stream = Clock(), io.StringIO()
    lines = LineObserver(stream, noun="nll", clock=clock)
    lines.start(windows=1, positions=10)
    clock.now += 11
    lines.advance(windows=1, positions=10, running={"a": 2.5, "b": 3.0})
    assert stream.getvalue().splitlines()[-1].endswith("a mean nll 2.5, b mean nll 3")


def test_the_bar_shows_counts_and_leaves_the_terminal_clean(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    bar = BarObserver(stream, noun="KL")
    bar.stage("tokenizing [bold]")
    bar.start(windows=4, positions=40)
    for _ in range(4):
        bar.advance(windows=1, positions=10, running={"c": 0.5})
    bar.stage("statistics [bold]")
    bar.finish()
    bar.finish()
    shown = stream.getvalue()
    assert "tokenizing [bold]" in shown and "statistics [bold]" in shown
    assert "4/4" in shown and "windows/s" in shown and "positions/s" in shown and "mean KL 0.5" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h")  # the cursor comes back


def test_nothing_is_guessed_from_nothing():
    assert speeds(0, 0, 0.0) == []
    assert time_left(0, 10, 5.0) == []
    assert time_left(10, 10, 5.0) == []
    assert time_left(1, 4, 1800.0) == ["1:30:00 left"]


def test_80_columns_keep_bar_count_and_time_whatever_is_measured(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    bar = BarObserver(stream, noun="KL")
    bar.start(windows=1234, positions=40)
    running = {f"/models/somewhere/far/away/candidate-{n}": 0.5 + n for n in range(3)}
    bar.advance(windows=1000, positions=10, running=running)
    bar.finish()
    last = [line for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).splitlines() if line.strip()][-1]
    assert re.search(r"[━╸╺]{12} 1000/1234 \S+ +\S+ windows/s, \.\.\.e?/?\S*candidate-0 mean K", last), last
    assert len(last.rstrip()) <= 80


def test_80_columns_have_mean_rate_and_time_of_one_candidate(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    bar = BarObserver(stream, noun="KL")
    bar.start(windows=1234, positions=40)
    bar.advance(windows=1000, positions=10, running={"demo@int8": 0.0034661})
    bar.finish()
    last = [line for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).splitlines() if line.strip()][-1]
    assert re.search(r"1000/1234 \S+ +mean KL 0\.003466, \S+ windows/s", last) and "(+" not in last, last


def test_parts_that_do_not_fit_are_counted():
    assert fitting(["one", "two", "three"], 80) == "one, two, three"
    assert fitting(["one", "two", "three"], 13) == "one, two (+1)"
    assert fitting(["a long one", "two"], 5) == "a long one"
    assert fitting(["one", "two", "three"], 13, dropped=False) == "one, two"
    assert counted(1, "window") == "1 window" and counted(1234, "window") == "1,234 windows"


def test_one_is_no_plural():
    stream = io.StringIO()
    LineObserver(stream, noun="KL").start(windows=1, positions=1)
    assert stream.getvalue() == "1 window, 1 position\n"
