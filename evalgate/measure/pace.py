"""How long a measurement takes: timed while it runs, remembered for the next one like it on this machine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from evalgate.core import Window
from evalgate.measure.request import RunRequest
from evalgate.store import rates


def described(request: RunRequest) -> dict[str, Any]:
    """What the speed of a request depends on, besides the machine and how much text there is."""
    return {
        "reference": request.reference_spec,
        "candidates": request.candidate_specs,
        "device": request.device,
        "logits": request.logits,
        "windows": request.windows,
        "context": request.context,
        "dialect": request.endpoint.dialect,
        "top_k": request.endpoint.top_k,
        "noise_floor": request.noise_floor,
        **({} if request.cluster is None else {"cluster": asdict(request.cluster)}),
    }


class Timer:
    """The times of one measurement, in seconds since it was made; call `cut` and `scored` as it comes to that."""

    def __init__(self) -> None:
        self._laps = [time.monotonic()]

    def lap(self) -> None:
        """Mark the end of what comes before scoring, then the end of scoring."""
        self._laps.append(time.monotonic())

    def remember(self, key: Mapping[str, Any], windows: Sequence[Window]) -> None:
        """Keep what the windows took, for the next measurement of this description (`Measurement.described`)."""
        began, cut, scored = self._laps
        shown = [sum(window.bytes_per_token) for window in windows]
        rates.remember(
            key,
            rates.Rate(
                before=cut - began,
                scoring=scored - cut,
                after=time.monotonic() - scored,
                positions=sum(len(window.positions) for window in windows),
                tokens=sum(sum(size > 0 for size in window.bytes_per_token) for window in windows),
                bytes=sum(shown),
                created=datetime.now(UTC).isoformat(timespec="seconds"),
            ),
        )
