"""Answers on disk: what an endpoint said about a window, kept as it came, so that nothing is asked twice."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalgate.core import Window
from evalgate.dialects.base import PositionScore, Score, WindowScores
from evalgate.endpoints.constancy import Named
from evalgate.store.documents import parse
from evalgate.store.partial import PartialRun

if TYPE_CHECKING:
    import pyarrow as pa

_META = b"evalgate.answer"
_NULLABLE = ("rank", "rank_high")  # None = not known


class Answers:
    """The answers of one source, by window index; a shard per window, written beside and renamed."""

    def __init__(self, folder: Path) -> None:
        self._shards = PartialRun(folder)
        self._kept: dict[int, tuple[int, pa.Table]] | None = None  # as an earlier process left them

    def keep(self, scores: WindowScores, named: Collection[Named] = ()) -> None:
        """Store one window's answer. named: what the endpoint's replies name as the model."""
        self._shards.keep(scores.window, scores.window + 1, encode(scores, named))

    def named(self, window: Window) -> frozenset[Named]:
        """What the replies named when an earlier process stored the answer to a window."""
        if self.get(window) is None or self._kept is None:
            return frozenset()
        return frozenset(Named(*found) for found in _meta(self._kept[window.index][1])["named"])

    def get(self, window: Window) -> WindowScores | None:
        """The answer that an earlier process stored; None where there is none that can be read, or it is of another."""
        if self._kept is None:
            self._kept = self._shards.shards()
        found = self._kept.get(window.index)
        if found is None:
            return None
        try:
            scores = decode(found[1])
            if (scores.window, scores.document) != (window.index, window.document):
                raise ValueError
            if tuple(row.position for row in scores.rows) != window.positions:
                raise ValueError
        except (KeyError, ValueError, TypeError):
            del self._kept[window.index]
            return None
        return scores


def encode(scores: WindowScores, named: Collection[Named] = ()) -> pa.Table:
    """One row per position, float64 throughout: the answer comes back bit by bit."""
    import pyarrow as pa

    meta = {"window": scores.window, "document": scores.document, "k": scores.k, "text_keyed": scores.text_keyed}
    meta["named"] = sorted(map(list, named))
    rows = [_encoded(row) for row in scores.rows]
    table = pa.Table.from_pylist(rows, schema=_schema())
    return table.replace_schema_metadata({_META: json.dumps(meta).encode()})


def decode(table: pa.Table) -> WindowScores:
    """The reverse of `encode`; KeyError, ValueError or TypeError where the table is something else."""
    meta = _meta(table)
    if not table.schema.equals(_schema()):
        raise ValueError
    if any(_has_nulls(table.column(name).combine_chunks()) for name in _schema().names if name not in _NULLABLE):
        raise ValueError
    rows = tuple(_decoded(row) for row in table.to_pylist())
    return WindowScores(meta["window"], meta["document"], meta["k"], rows, meta["text_keyed"])


def _has_nulls(values: pa.Array) -> bool:
    """Whether a value is null, or one inside it."""
    import pyarrow as pa

    if values.null_count:
        return True
    if pa.types.is_struct(values.type):
        return any(_has_nulls(part) for part in values.flatten())
    return pa.types.is_list(values.type) and _has_nulls(values.flatten())


def _meta(table: pa.Table) -> dict[str, Any]:
    """What `encode` keeps besides the rows; KeyError or ValueError where it is something else."""
    found: dict[str, Any] = parse((table.schema.metadata or {})[_META])
    kinds = {"window": int, "document": str, "k": int, "text_keyed": bool, "named": list}
    if not isinstance(found, dict) or any(type(found[name]) is not kind for name, kind in kinds.items()):
        raise ValueError
    if not all(isinstance(name, list) and [type(part) for part in name] == [str] * 3 for name in found["named"]):
        raise ValueError
    return found


def _schema() -> pa.Schema:
    import pyarrow as pa

    floats, score = (
        pa.list_(pa.float64()),
        pa.struct([("token", pa.int64()), ("low", pa.float64()), ("high", pa.float64()), ("why", pa.string())]),
    )
    return pa.schema(
        [
            ("position", pa.int64()),
            ("chosen", score),
            ("rank", pa.int64()),
            ("rank_low", pa.int64()),
            ("rank_high", pa.int64()),
            ("top_ids", pa.list_(pa.int64())),
            ("top_logprobs", floats),
            ("unmatched", floats),
            ("merged", pa.bool_()),
            ("wanted", pa.list_(score)),
            ("tail", pa.float64()),
            ("sentinels", floats),
        ]
    )


def _encoded(row: PositionScore) -> dict[str, Any]:
    plain = {name: getattr(row, name) for name in ("position", "rank", "rank_low", "rank_high", "merged", "tail")}
    lists = {name: list(getattr(row, name)) for name in ("top_ids", "top_logprobs", "unmatched", "sentinels")}
    return plain | lists | {"chosen": _score(row.chosen), "wanted": [_score(s) for s in row.wanted]}


def _score(score: Score) -> dict[str, Any]:
    return {"token": score.token, "low": score.low, "high": score.high, "why": score.why}


def _decoded(row: dict[str, Any]) -> PositionScore:
    lists = {name: tuple(row[name]) for name in ("top_ids", "top_logprobs", "unmatched", "sentinels")}
    wanted = tuple(Score(**s) for s in row["wanted"])
    return PositionScore(**{**row, **lists, "chosen": Score(**row["chosen"]), "wanted": wanted})
