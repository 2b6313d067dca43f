"""Whether an endpoint still serves the model that it served before: by what its replies name, and by asking again."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import orjson

from evalgate.core import Window
from evalgate.dialects.base import PositionScore, Reply, WindowScores
from evalgate.errors import EndpointError

MOST_POSITIONS = 8  # of a window that is asked again, where each position is a request of its own
MOVED = 0.05  # nats: a mean change of log-probabilities that caches and batches do not make


class Named(NamedTuple):
    """What a reply on one path names: the model, and the fingerprint of what serves it; "" = not named."""

    path: str
    model: str
    fingerprint: str

    def same(self, other: Named) -> bool:
        """Whether both may be one model: a name that is missing says nothing."""
        pairs = ((self.model, other.model), (self.fingerprint, other.fingerprint))
        return all(a == b or not a or not b for a, b in pairs)

    def __str__(self) -> str:
        return f"'{self.model}'" + (f" (system_fingerprint {self.fingerprint})" if self.fingerprint else "")


class Served:
    """What one URL's replies name, path by path; thread-safe."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._named: dict[str, Named] = {}

    @property
    def named(self) -> frozenset[Named]:
        """What was named so far."""
        with self._lock:
            return frozenset(self._named.values())

    def read(self, path: str, reply: Reply) -> None:
        """Compare a good reply with those before it. Raises EndpointError where it names another model."""
        if b'"model"' not in reply.body and b'"system_fingerprint"' not in reply.body:
            return
        try:
            body = orjson.loads(reply.body)
        except orjson.JSONDecodeError:
            return  # the dialect says what is wrong with it
        if not isinstance(body, dict):
            return
        model, fingerprint = (body.get(name) for name in ("model", "system_fingerprint"))
        now = Named(path, *(value if isinstance(value, str) else "" for value in (model, fingerprint)))
        with self._lock:
            before = self._named.setdefault(path, now)
            if before.same(now):
                self._named[path] = Named(path, before.model or now.model, before.fingerprint or now.fingerprint)
                return
        raise EndpointError(
            f"{self._url}{path} answered as {before} before and answers as {now} now: its model changed while it was "
            "measured; start again with --no-resume when it serves one model",
            endpoint=self._url,
        )


def check_named(spec: str, kept: Collection[Named], now: Collection[Named]) -> None:
    """Compare what kept answers named with what replies name now. Raises EndpointError where they differ."""
    for before in kept:
        here = [named for named in now if named.path == before.path]
        if here and not any(before.same(named) for named in here):
            raise EndpointError(
                f"{spec} answered as {before} when the run was interrupted and answers as {here[0]} now: its model "
                "changed, so start the run anew with --no-resume"
            )


def few_positions(window: Window, most: int = MOST_POSITIONS) -> Window:
    """The window with at most its first `most` positions scored."""
    kept = window.positions[:most]
    if len(kept) == len(window.positions):
        return window
    mask = tuple(p in kept for p in range(kept[0], kept[-1] + 1))
    return replace(window, score_from=kept[0], score_to=kept[-1] + 1, mask=mask)


def difference(before: WindowScores, now: WindowScores) -> float:
    """Mean change (nats) of the log-probabilities that both know; 0 where they share none."""
    rows = {row.position: known(row) for row in before.rows}
    deltas = [
        abs(value - rows[row.position][token])
        for row in now.rows
        for token, value in known(row).items()
        if token in rows.get(row.position, {})
    ]
    return math.fsum(deltas) / len(deltas) if deltas else 0.0


def known(row: PositionScore) -> dict[int, float]:
    """The actual token's log-probability and that of the likeliest, as far as they are numbers."""
    own = {row.chosen.token: row.chosen.low} if row.chosen.known else {}
    return own | dict(zip(row.top_ids[:3], row.top_logprobs[:3], strict=True))
