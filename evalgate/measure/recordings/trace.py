"""A trace as the reference of a run: the candidate is asked for the trace's ids, or for whole rows of a full trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from evalgate.core import SourceInfo, Window
from evalgate.measure.bounds import narrowed, unknown_counts
from evalgate.measure.recordings.base import OVERLAP_K, Columns, Recorded, whole_rows
from evalgate.measure.recordings.shards import TraceRows
from evalgate.traces import (
    KlEstimate,
    NeededIds,
    PositionBatch,
    TopList,
    Trace,
    TraceMeta,
    compare,
    compare_full,
    concatenate,
    mean_standard_error,
    needed_ids,
    settled,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from evalgate.server.client import Arrays, EmbeddedClient

LIKELIEST = 32  # of the candidate's own ids, asked for at each position
ESTIMATOR = 2  # of KL: answers that an earlier one made columns of are not resumed
_ESTIMATE = {"kl": "kl", "kl_se": "se", "kl_plain": "plain", "kl_plain_se": "plain_se", "kl_rare": "rare"}
_SHARDS = 3  # in memory: runs go through them in order


class RecordedTrace(Recorded):
    """A trace folder, opened, that keeps ids or whole rows. Raises InputError naming what is cut or altered."""

    def __init__(self, trace: Trace, spec: str) -> None:
        self.trace = trace
        meta = trace.meta
        self.info = source_of(meta, spec)
        self.policy = meta.policy
        self.corpus, self.corpus_hash = meta.corpus, meta.corpus_hash
        self.documents = [(window.document, window.domain) for window in self.trace.windows]
        self._rows = TraceRows(self.trace, kept=1 if meta.full else _SHARDS)

    def windows(self, client: EmbeddedClient, model: str) -> tuple[Window, ...]:
        """As they were recorded."""
        return self.trace.windows

    def identity(self) -> dict[str, Any]:
        """The manifest's checksum covers every file."""
        return {"trace": self.trace.manifest.checksum, "estimator": ESTIMATOR}

    def columns(self, client: EmbeddedClient, model: str, part: Sequence[Window]) -> Columns:
        """See `Recorded`. Raises ScoreError or MismatchError naming window and position."""
        batches = [self.rows(window) for window in part]
        batch = concatenate(batches)
        needed = needed_ids(batch)
        starts = np.cumsum([len(b) for b in batches])[:-1]
        most = min(LIKELIEST, self.info.vocab_size)
        answer = client.gather(model, part, np.split(needed.ids, starts), top_k=most)
        columns = {**_sides(batch, answer), **_ranks(batch, answer), **_listed(batch, answer)}
        if self.trace.meta.full:
            return columns | self._full(client, model, part, batches, answer, starts)
        return columns | _estimated(batch, needed, answer)

    def _full(
        self,
        client: EmbeddedClient,
        model: str,
        part: Sequence[Window],
        batches: Sequence[PositionBatch],
        answer: Arrays,
        starts: NDArray[np.int64],
    ) -> dict[str, NDArray[Any]]:
        pairs = []
        for window, batch, best in zip(part, batches, np.split(answer["top1"], starts), strict=True):
            logits = whole_rows(client, model, window, self.info.vocab_size)
            pairs.append(compare_full(batch, logits, best))
        names = {"kl": "kl", "reverse_kl": "reverse_kl", "js": "js", "tv": "tv", "regret": "regret"}
        names["kl_rounding"] = "rounding"
        return {column: np.concatenate([getattr(pair, name) for pair in pairs]) for column, name in names.items()}

    def finished(self, table: pa.Table) -> tuple[pa.Table, list[str]]:
        """NAME where it is known at every position of a candidate, else its interval; and how kl is known."""
        notes = list(self.trace.meta.notes)
        if self.trace.meta.full:
            rounding = table.column("kl_rounding").to_numpy().astype(np.float64)
            notes.append(
                "the trace keeps float16 rows: rounding can have moved the mean KL by at most "
                f"{rounding.mean():.2g} nats and a position's by {rounding.max():.2g}"
            )
            return table.drop_columns(["kl_rounding"]), notes
        table, said = settle(table)
        notes += said
        low = table.column("kl_low")
        unknown = unknown_counts(table)
        table = narrowed(table.drop_columns(["kl_low"])).append_column("kl_low", low)
        notes += [
            f"{name} is not known at {count:,} of {table.num_rows:,} positions, which count as intervals: "
            "the trace keeps too few ids there"
            for name, count in unknown.items()
        ]
        return table, notes + self.sampling_notes(table)

    def sampling_notes(self, table: pa.Table) -> list[str]:
        """How far the estimates of the candidates that have one may be off for sampling alone."""
        meta, notes = self.trace.meta, []
        table = table.filter(table.column("kl").is_valid())
        names = np.asarray(table.column("candidate").to_pylist())
        errors = table.column("kl_se").to_numpy().astype(np.float64)
        values = table.column("kl").to_numpy().astype(np.float64)
        for name in dict.fromkeys(names.tolist()):
            mine = names == name
            error, mean = mean_standard_error(errors[mine]), float(values[mine].mean())
            share = f" ({100 * error / mean:.2g} %)" if mean > 0 else ""
            notes.append(
                f"KL of {name} is estimated from the {meta.top_k} likeliest ids and {meta.tail_samples} tail samples a "
                f"position: the mean's sampling error is {error:.2g} nats{share}, which its interval includes"
            )
        return notes

    def rows(self, window: Window) -> PositionBatch:
        """The rows of a window's scored positions. Raises MismatchError where one was not recorded."""
        return self._rows.of(window)


def source_of(meta: TraceMeta, spec: str) -> SourceInfo:
    """The recorded model as a run shows it; its noise floors stand in the certificate."""
    parts = meta.certificate.get("merged", [meta.certificate])
    floors: dict[str, float | None] = {}
    for name in ("noise_floor", "kl_floor"):
        known = [part.get(name) for part in parts]
        floors[name] = None if None in known else max(known, default=None)
    extra = {**meta.source.extra, "recorded": meta.source.spec}
    return replace(
        meta.source,
        spec=spec,
        name=spec,
        kind="trace",
        noise_floor=floors["noise_floor"],
        kl_floor=floors["kl_floor"],
        extra=extra,
    )


def estimate_columns(estimate: KlEstimate) -> dict[str, NDArray[Any]]:
    """An estimate as wide columns, from which `settle` makes kl and kl_se."""
    return {column: getattr(estimate, name) for column, name in _ESTIMATE.items()}


def settle(table: pa.Table) -> tuple[pa.Table, list[str]]:
    """kl and kl_se as all positions of each candidate together decide, and notes; null where kl is null."""
    import pyarrow as pa

    names = np.asarray(table.column("candidate").to_pylist())
    known = np.asarray(table.column("kl").is_valid().to_numpy(), dtype=np.bool_)
    values = {name: table.column(name).to_numpy().astype(np.float64) for name in _ESTIMATE}
    notes = []
    for name in dict.fromkeys(names.tolist()):
        rows = np.flatnonzero((names == name) & known)
        found = settled(KlEstimate(**{field: values[column][rows] for column, field in _ESTIMATE.items()}))
        values["kl"][rows], values["kl_se"][rows] = found.kl, found.se
        count = int(found.plain.sum())
        if count:
            notes.append(
                f"{name} likes ids that the trace's draws miss, or is far from the reference: KL of {count:,} of "
                f"{len(rows):,} positions is estimated without the control variate, as unbiased and less certain"
            )
    for column in ("kl", "kl_se"):
        new = pa.array(values[column].astype(np.float32), mask=~known)
        table = table.set_column(table.column_names.index(column), column, new)
    return table.drop_columns([column for column in _ESTIMATE if column not in ("kl", "kl_se")]), notes


def _sides(batch: PositionBatch, answer: Arrays) -> dict[str, NDArray[Any]]:
    columns: dict[str, NDArray[Any]] = {
        "ref_nll": -batch.logprob,
        "ref_entropy": batch.entropy,
        "ref_top1": batch.top1,
        "ref_margin": batch.margin,
        "ref_rank": batch.rank,
    }
    return columns | {f"cand_{name}": answer[name] for name in ("nll", "entropy", "top1", "margin", "rank")}


def _listed(batch: PositionBatch, answer: Arrays) -> dict[str, NDArray[Any]]:
    """The likeliest ids that the trace keeps, and the candidate's."""
    return {
        "ref_top_ids": batch.top_ids,
        "ref_top_logprobs": batch.top_logprobs,
        "cand_top_ids": answer["top_ids"],
        "cand_top_logprobs": answer["top_logprobs"],
    }


def _ranks(batch: PositionBatch, answer: Arrays) -> dict[str, NDArray[Any]]:
    """What the two lists say: overlap where the trace keeps enough ids, and the rank of the candidate's choice."""
    hit = batch.top_ids == answer["top1"][:, None]
    found: dict[str, NDArray[Any]] = {
        "ref_rank_of_cand_top1": np.where(hit.any(axis=1), hit.argmax(axis=1) + 1, -1).astype(np.int32)
    }
    k = min(OVERLAP_K, answer["top_ids"].shape[1])
    if batch.top_ids.shape[1] >= k:
        shared = batch.top_ids[:, :k, None] == answer["top_ids"][:, None, :k]
        found["topk_overlap"] = shared.any(axis=2).sum(axis=1) / k
    return found


def _estimated(batch: PositionBatch, needed: NeededIds, answer: Arrays) -> dict[str, NDArray[Any]]:
    likeliest = TopList(answer["top_ids"], answer["top_logprobs"].astype(np.float64))
    pair = compare(batch, needed, answer["logprobs"], likeliest)
    best = needed.ids == answer["top1"][:, None]
    known = best.any(axis=1)
    log_p = np.take_along_axis(needed.log_p, best.argmax(axis=1)[:, None], axis=1)[:, 0]
    first, last = (batch.top_logprobs[:, at].astype(np.float64) for at in (0, -1))
    regret = np.where(known, np.maximum(first - log_p, 0.0), np.nan)
    return estimate_columns(pair.estimate) | {
        "kl_low": pair.kl_low,
        "tv_low": pair.tv_low,
        "tv_high": pair.tv_high,
        "js_low": pair.js_low,
        "js_high": pair.js_high,
        "regret": regret,
        "regret_low": np.where(known, regret, np.maximum(first - last, 0.0)),
        "regret_high": regret,
    }
