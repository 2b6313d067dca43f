"""The per-position table: what columns it has, of what type, and the one builder of those that name a position.

One row per candidate and scored position, in this order. `cand_*` alone makes a perplexity run; with `ref_*` and the
pair columns it is a comparison. Where only an interval is known a pair column NAME is replaced by NAME_low and
NAME_high (null = unbounded); an estimate brings NAME_se.

A column has one type (`column_type`) from the builder to the stored file: int32 for counts and ids, float32 for the
rest. Whoever reduces logits may compute in float64; `column` rounds to float32, once, where the table is built. Metrics
widen what they read to float64 (`metrics.Scores`), which changes no value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from evalgate.core import LEAST_LOGPROB, Window

if TYPE_CHECKING:
    import pyarrow as pa

TEXT_COLUMNS = ("candidate", "domain", "document")
KEY_COLUMNS = (*TEXT_COLUMNS, "window", "position", "token", "bytes")
SIDE_COLUMNS = ("nll", "entropy", "top1", "margin", "rank")  # each as ref_NAME and cand_NAME
PAIR_COLUMNS = (
    "kl",
    "reverse_kl",
    "js",
    "tv",
    "regret",
    "topk_overlap",
    "ref_rank_of_cand_top1",
    "cand_rank_of_ref_top1",
)
_INTEGERS = frozenset(
    {"window", "position", "token", "bytes", "top1", "rank", "ref_rank_of_cand_top1", "cand_rank_of_ref_top1"}
)


@dataclass(frozen=True)
class Range:
    """What a column may hold: finite values in [low, high], float32 rounding included; whole: integers alone."""

    low: float
    high: float
    whole: bool = False

    def __str__(self) -> str:
        ends = f"[{self.low:g}, {self.high:g}]" if self.high < inf else f"[{self.low:g}, infinity)"
        return f"the whole numbers of {ends}" if self.whole else ends


ROUNDING = 1e-3  # nats: the most that a logprob in a table lies above 0, where a server's probabilities exceed 1
MOST_NATS = -LEAST_LOGPROB  # of a negative log-probability, and so of what is made of some: beyond it is a mask
COUNT, RANK, ID = Range(0, inf, whole=True), Range(1, inf, whole=True), Range(0, inf, whole=True)
# The columns that no metric owns. Those of a metric have their range in its file (`metrics.Metric.ranges`).
RANGES: Mapping[str, Range] = {
    "window": COUNT,
    "position": Range(1, inf, whole=True),
    "token": ID,
    "bytes": COUNT,
    "rank": RANK,
    "ref_rank_of_cand_top1": RANK,
    "cand_rank_of_ref_top1": RANK,
}


def schema(*, pair: bool) -> pa.Schema:
    """Arrow schema of an exact table: the key columns, the reference's, the candidate's, and those of the pair.

    candidate, domain, document: dictionary-encoded strings. window: index in the run. position: index
    in the window. token: the actual next token's id. bytes: UTF-8 bytes of its text. nll: -log prob of
    the token (nats). entropy: of the whole distribution (nats). top1: argmax id. margin: logprob of
    top-1 minus that of top-2 (nats). rank: of the actual token, 1 = most likely. kl, reverse_kl, js:
    nats. tv in [0, 1]. topk_overlap in [0, 1].
    """
    import pyarrow as pa

    return pa.schema([(name, column_type(name)) for name in (*KEY_COLUMNS, *score_columns(pair=pair))])


def score_columns(*, pair: bool) -> tuple[str, ...]:
    """Every column of an exact table but the key columns, in its order."""
    candidate = tuple(f"cand_{name}" for name in SIDE_COLUMNS)
    return (*(f"ref_{name}" for name in SIDE_COLUMNS), *candidate, *PAIR_COLUMNS) if pair else candidate


def column_type(name: str) -> pa.DataType:
    """The Arrow type of a column, by its name."""
    import pyarrow as pa

    if name in TEXT_COLUMNS:
        return pa.dictionary(pa.int32(), pa.string())
    base = name.removeprefix("ref_").removeprefix("cand_")
    return pa.int32() if name in _INTEGERS or base in _INTEGERS else pa.float32()


def column(name: str, values: Any) -> pa.Array | pa.ChunkedArray:
    """Values as a column of that name. Arrow columns and arrays are cast, lists may hold None."""
    import pyarrow as pa

    wanted = column_type(name)
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values if values.type == wanted else values.cast(wanted)
    return pa.array(values, wanted)


def build(candidates: Sequence[str], windows: Sequence[Window], columns: Mapping[str, Any]) -> pa.Table:
    """The rows of every candidate at every scored position of the windows, candidate after candidate.

    columns: the other columns by name, in the table's order, as long as the table: lists (None = null), arrays or
    Arrow columns.
    """
    import pyarrow as pa

    keys = key_columns(candidates, windows)
    arrays = [*keys.values(), *(column(name, values) for name, values in columns.items())]
    return pa.table(arrays, names=[*keys, *columns])


def key_columns(candidates: Sequence[str], windows: Sequence[Window]) -> dict[str, pa.Array]:
    """What names the rows of `build`: the key columns by name, candidates x scored positions long."""
    import numpy as np
    import pyarrow as pa

    places = [(w, p) for w in windows for p in w.positions]

    def named(values: list[str]) -> pa.Array:
        return pa.array(values, pa.string()).dictionary_encode()

    def tiled(values: list[int]) -> pa.Array:
        return pa.array(np.tile(np.array(values, np.int32), len(candidates)))

    return {
        "candidate": named([name for name in candidates for _ in places]),
        "domain": named([w.domain for w, _ in places] * len(candidates)),
        "document": named([w.document for w, _ in places] * len(candidates)),
        "window": tiled([w.index for w, _ in places]),
        "position": tiled([p for _, p in places]),
        "token": tiled([w.ids[p] for w, p in places]),
        "bytes": tiled([w.bytes_per_token[p] for w, p in places]),
    }
