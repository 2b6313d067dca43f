"""What a measurement would do, for the terminal: `--dry-run`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from evalgate.core import counted, sized
from evalgate.reports import Report
from evalgate.reports._rich import fact_table, printed


def render(forecast: Any, *, width: int = 80, color: bool = False) -> str:
    """A forecast (evalgate.measure.forecast) as names and sentences, no line wider than `width` columns."""
    return printed([fact_table(list(_facts(forecast)))], width=width, color=color)


def _facts(forecast: Any) -> Iterator[tuple[str, str]]:
    yield "dry run", f"evalgate {forecast.kind}: nothing is loaded, asked or measured now"
    for model in forecast.models:
        yield model.role, f"{model.spec}: {model.what}{'' if model.bytes is None else f', {sized(model.bytes)}'}"
    yield "text", _text(forecast.text)
    yield "windows", f"{_amount(forecast.windows, 'window')}, {forecast.cut}"
    yield "positions", f"{_amount(forecast.positions, 'position')} scored, {_amount(forecast.tokens, 'token')} shown"
    yield "counted", forecast.counted
    for asked in forecast.requests:
        yield "requests", f"{asked.spec}: {_amount(asked.requests, 'request')}, {asked.how}"
    yield "time", f"{'not known' if forecast.seconds is None else f'about {_time(forecast.seconds)}'}: {forecast.pace}"
    for place in forecast.writes:
        yield "writes", place
    if forecast.resumes:
        yield "resumes", forecast.resumes
    for note in forecast.notes:
        yield "note", note


def _text(text: Any) -> str:
    parts = [counted(text.documents, "document")] if text.documents is not None else []
    parts += [sized(text.bytes)] if text.bytes is not None else []
    parts += [f"{text.skipped:,} skipped"] if text.skipped else []
    parts += [f"hash {text.hash[:16]}"] if text.hash else []
    return f"{text.name}: {', '.join(parts) or 'not known yet'}"


def _amount(amount: Any, noun: str) -> str:
    return f"{noun}s not known yet" if amount is None else str(amount.text(noun))


def _time(seconds: float) -> str:
    """`45 s`, `3 min`, `2 h 10 min`: no finer than an estimate is."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


REPORT = Report("forecast", render, terminal=True)
