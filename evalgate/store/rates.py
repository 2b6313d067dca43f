"""How fast measurements went on this machine, kept in the cache folder to say how long the next one takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evalgate.paths import cache_path
from evalgate.store.files import replacing
from evalgate.store.partial import identity_hash


@dataclass(frozen=True)
class Rate:
    """What one finished measurement took, in seconds: until its text was cut, while it scored, and after.

    positions: that were scored. tokens: that were shown, without those before each text. bytes: of those tokens, 0
    where they are not known. created: UTC.
    """

    before: float
    scoring: float
    after: float
    positions: int
    tokens: int
    bytes: int
    created: str

    def seconds(self, positions: float) -> float:
        """How long so many positions would take, at the same rate."""
        return self.before + self.scoring / self.positions * positions + self.after


def remember(key: Mapping[str, Any], rate: Rate) -> None:
    """Keep the rate of measurements that are described by `key`, in the place of an earlier one."""
    if rate.positions < 1:
        return
    path = _path(key)
    # A measurement is not lost for a note beside it: the next one then does not know how long it takes.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps({"key": dict(key), "rate": asdict(rate)}, sort_keys=True).encode())


def recall(key: Mapping[str, Any]) -> Rate | None:
    """The rate of the last measurement of that description on this machine; None where there is none to be read."""
    try:
        found = json.loads(_path(key).read_bytes())
        rate = Rate(**found["rate"])
        numbers = (rate.before, rate.scoring, rate.after, rate.tokens, rate.bytes)
        return rate if found["key"] == dict(key) and rate.positions > 0 and min(numbers) >= 0 else None
    except (OSError, ValueError, KeyError, TypeError):  # none, or not one of ours
        return None


def _path(key: Mapping[str, Any]) -> Path:
    return cache_path() / "rates" / f"{identity_hash(key)}.json"
