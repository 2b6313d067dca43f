"""One request per position: the prefix is sent, and the position's token is the one to be generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from evalgate.core import Window
from evalgate.dialects.base import Ask, Exchange, Place, PositionScore, Reply, Request, WindowScores
from evalgate.dialects.rows import Entry, window_scores
from evalgate.errors import ScoreError


class Step(NamedTuple):
    """The scores of one position, and whether its alternatives came as texts."""

    row: PositionScore
    text_keyed: bool


def stepwise(
    window: Window,
    ask: Ask,
    *,
    request: Callable[[int], Request],
    read: Callable[[int, Reply], Step],
    more: Callable[[PositionScore], Request | None] = lambda row: None,
    read_more: Callable[[PositionScore, Reply], PositionScore] = lambda row, reply: row,
) -> Exchange:
    """Ask about every position, `ask.batch` requests at a time, in the order that the prefix cache likes.

    `more` may ask again about a row that is not complete, and `read_more` completes it.
    """
    steps: list[Step] = []
    for chunk in chunks(ordered(window, ask), ask.batch):
        replies = yield tuple(request(i) for i in chunk)
        new = [read(i, reply) for i, reply in zip(chunk, replies, strict=True)]
        again = {step.row.position: ask_again for step in new if (ask_again := more(step.row)) is not None}
        if again:
            answers = dict(zip(again, (yield tuple(again.values())), strict=True))
            new = [
                step._replace(row=read_more(step.row, answers[step.row.position]))
                if step.row.position in answers
                else step
                for step in new
            ]
        steps += new
    return finished(window, ask, steps)


def finished(window: Window, ask: Ask, steps: Sequence[Step]) -> WindowScores:
    """The window's scores, by ascending position."""
    rows = sorted((s.row for s in steps), key=lambda row: row.position)
    return window_scores(window, ask, rows, text_keyed=any(s.text_keyed for s in steps))


def ordered(window: Window, ask: Ask) -> tuple[int, ...]:
    """The asked positions in the order in which they are to be sent."""
    positions = ask.positions_in(window)
    return positions[::-1] if ask.descending else positions


def check_forced(generated: Entry, token: int, field: str, place: Place) -> Entry:
    """The generated entry as `token`; ScoreError where the server generated another one."""
    if generated.ids and token not in generated.ids:
        raise place.error(
            ScoreError,
            f"token {token} was forced through {field} and {sorted(generated.ids)} was generated: "
            "the server ignores that field",
        )
    return replace(generated, ids=frozenset({token}))


def chunks(positions: tuple[int, ...], size: int) -> Iterator[tuple[int, ...]]:
    """Runs of `size` positions; the last one may be shorter."""
    for start in range(0, len(positions), size):
        yield positions[start : start + size]
