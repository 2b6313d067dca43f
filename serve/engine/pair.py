"""Exact scoring of windows: one model alone, or a reference with candidates, tile by tile.

Each window runs once through every model; then the heads of the scored rows are reduced a tile of rows at a
time: the reference's tile once, each candidate's against it. A [positions, vocabulary] tensor never exists.
On a CPU windows and tiles are shared among lanes (lanes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from serve.engine import reduce
from serve.engine.lanes import lanes
from serve.engine.longwindow import long_rows
from serve.engine.packed import PackedRunner
from serve.engine.pages import OutOfPages
from serve.engine.runner import Segment
from serve.engine.runtime import HeadRuntime, ModelRuntime
from serve.errors import BadRequest, Mismatch, ScoringFailed
from serve.wire import LEAST_LOGPROB

Columns = dict[str, "np.ndarray[Any, np.dtype[Any]]"]
INTEGERS = frozenset({"top1", "rank", "top_ids", "ref_rank_of_cand_top1", "cand_rank_of_ref_top1", "unequal"})

_LEAST_TILE = 1 << 23  # logits of a tile that is worth a lane of its own: 32 rows of 262,144 ids
_LEAST_GROUP, _MOST_GROUP = 256, 1024  # tokens of the windows that run together in a lane: what fits its caches


class ScoreWindow(NamedTuple):
    """Token ids and the positions to score: the prediction of ids[i] from ids[0..i) for i in positions."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]


class KnownRows(Protocol):
    """Hidden rows of a job's reference that need not be computed: kept from before, or given with the job.

    A batch is what runs in one forward: hidden states depend, in their last bits, on all that is in it.
    """

    def find(self, windows: Sequence[ScoreWindow], first: int) -> torch.Tensor | None:
        """The rows that predict all scored positions of a batch, in order; None where they have to be computed.

        first: number of the batch's first window in the job.
        """

    def keep(self, windows: Sequence[ScoreWindow], rows: torch.Tensor) -> None:
        """Take in the rows of a batch that was computed."""


@dataclass
class ScoreJob:
    """Windows to be scored, in order. Without a reference only the candidates' own columns are made.

    `on_end` gets one dict of columns per job, or the error, exactly once. Order of rows: candidate,
    window, position.

    apart: run the candidates one window at a time, even where one is the reference, which runs as many together as
    fit: what a model then differs from itself by is the noise of batch shapes.

    top_k: also each side's most likely ids, `ref_top_ids` and `ref_top_logprobs` [rows, top_k], and the candidate's. An
    id that the side masks has -inf.

    known: hidden rows of the reference, or of the only candidate where there is none, that are not computed again.
    sends_hidden: keep the hidden rows of that model for `hidden`. bits: also `unequal`, how many logits of a
    row differ between the two sides in any bit.
    """

    reference: HeadRuntime | None
    candidates: Sequence[HeadRuntime]
    windows: Sequence[ScoreWindow]
    overlap_k: int
    on_end: Callable[[Columns | Exception], None]
    apart: bool = False
    top_k: int = 0
    known: KnownRows | None = None
    sends_hidden: bool = False
    bits: bool = False
    done: int = 0
    cancelled: bool = False
    parts: list[Columns] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)

    def validate(self) -> None:
        """Raise BadRequest naming the window that cannot be scored."""
        if (self.sends_hidden or self.known is not None) and self.reference is None and len(self.candidates) > 1:
            raise BadRequest("hidden states are those of the reference: name it, or one candidate", param="hidden")
        if self.bits and self.reference is None:
            raise BadRequest("logits are compared with a reference's: name it", param="reference")
        check_windows([*([self.reference] if self.reference else []), *self.candidates], self.windows)

    @property
    def finished(self) -> bool:
        """Whether every window is scored."""
        return self.done >= len(self.windows)

    def advance(self) -> None:
        """Score the next batch of windows (as many as fit the token budget, at least one)."""
        first = self.done
        last = next_batch(self.windows, first, self.candidates[0].config.max_batch_tokens)
        self.parts.extend(self._score(list(self.windows[first:last]), first))
        self.done = last

    def columns(self) -> Columns:
        """All rows so far."""
        if not self.parts:
            return {}
        found = {name: np.concatenate([part[name] for part in self.parts]) for name in self.parts[0]}
        order = np.argsort(found["candidate"], kind="stable")  # windows come batch by batch, each with all candidates
        return {name: values[order] for name, values in found.items()}

    def hidden(self) -> torch.Tensor:
        """The rows that `sends_hidden` kept so far, [rows, size] on the host."""
        return torch.cat(self.rows) if self.rows else torch.empty((0, 0))

    def _score(self, windows: list[ScoreWindow], first: int) -> list[Columns]:
        places = [(first + w, p) for w, window in enumerate(windows) for p in window.positions]
        if not places:
            return []
        tokens = torch.tensor([self.windows[w].ids[p] for w, p in places])
        with torch.inference_mode():
            kept = self.known.find(windows, first) if self.known is not None else None
            together, apart = self._hidden(windows, kept)
            if self.sends_hidden:
                self.rows.append(together[id(self.reference or self.candidates[0])].cpu())
            tiles = self._reduce(together, apart, tokens, places, counted=kept is None)
        window_column = np.array([w for w, _ in places], dtype=np.int32)
        position_column = np.array([p for _, p in places], dtype=np.int32)
        parts = []
        for number in range(len(self.candidates)):
            part: Columns = {
                "window": window_column,
                "position": position_column,
                "candidate": np.full(len(places), number, dtype=np.int32),
            }
            for name in tiles[0][number]:
                values = torch.cat([tile[number][name] for tile in tiles]).cpu().numpy()
                part[name] = values.astype(np.int32 if _integer(name) else np.float32)
            parts.append(part)
        return parts

    def _hidden(
        self, windows: list[ScoreWindow], kept: torch.Tensor | None
    ) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Scored hidden rows by id of the model: the reference's, and the candidates'.

        kept: the reference's, or of the only candidate where there is none.
        """
        lead = self.reference or self.candidates[0]
        reference = [] if self.reference is None else [self.reference]
        models = {id(m): m for m in (reference if self.apart else [*reference, *self.candidates])}
        together = {}
        if kept is not None:
            together[id(lead)] = kept.to(lead.device)
            models.pop(id(lead))
        together |= self._forward(models, windows)
        if self.known is not None and kept is None:
            self.known.keep(windows, together[id(lead)])
        if not self.apart:
            return together, together
        alone = {id(m): m.runs() for m in self.candidates}
        return together, {key: torch.cat([scored_rows(m, [w]) for w in windows]) for key, m in alone.items()}

    def _forward(self, models: dict[int, HeadRuntime], windows: list[ScoreWindow]) -> dict[int, torch.Tensor]:
        """Scored hidden rows by id of the model: its windows shared among the lanes, in groups, or all together."""
        groups = groups_of(windows, self.candidates[0].config.max_batch_tokens)
        found: dict[int, torch.Tensor] = {}
        shared: list[int] = []
        for key, model in models.items():
            runs = model.runs()
            if groups and model.in_lanes and runs.runner.parallel:
                shared.append(key)
                continue
            with model.timed(sum(len(window.ids) for window in windows)):
                found[key] = scored_rows(runs, windows)

        def piece(model: HeadRuntime, group: list[ScoreWindow]) -> Callable[[], torch.Tensor]:
            def run() -> torch.Tensor:
                with model.timed(sum(len(window.ids) for window in group), share=1 / lanes().count):
                    return scored_rows(model.runs(), group)

            return run

        parts = lanes().run([piece(models[key], group) for group in groups for key in shared]) if shared else []
        return found | {key: torch.cat(parts[number :: len(shared)]) for number, key in enumerate(shared)}

    def _reduce(
        self,
        together: dict[int, torch.Tensor],
        apart: dict[int, torch.Tensor],
        tokens: torch.Tensor,
        places: list[tuple[int, int]],
        *,
        counted: bool,
    ) -> list[list[dict[str, torch.Tensor]]]:
        """Every tile's columns by candidate, in order: tiles shared among the lanes where there is enough to do."""
        lead, count = self.candidates[0], len(places)
        models = [*([self.reference] if self.reference else []), *self.candidates]
        worth = count * lead.head.vocab_size // _LEAST_TILE
        number = min(lanes().count, worth) if worth > 1 and all(m.in_lanes for m in models) else 1
        most = lead.rows_per_tile
        tiles = -(-count // most)
        tiles += -tiles % number  # as many for each lane
        ends = [count * tile // tiles for tile in range(tiles + 1)] if number > 1 else [*range(0, count, most), count]

        def piece(low: int, high: int) -> Callable[[], list[dict[str, torch.Tensor]]]:
            def run() -> list[dict[str, torch.Tensor]]:
                rows = lead.full_tile(list(range(low, high)))
                found = self._score_tile(
                    together,
                    apart,
                    rows,
                    tokens[rows],
                    [places[row] for row in rows],
                    counted=counted,
                    share=1 / number,
                )
                return [{name: values[: high - low] for name, values in tile.items()} for tile in found]

            return run

        pieces = [piece(low, high) for low, high in pairwise(ends)]
        return lanes().run(pieces) if number > 1 else [each() for each in pieces]

    def _score_tile(
        self,
        together: dict[int, torch.Tensor],
        apart: dict[int, torch.Tensor],
        rows: list[int],
        tokens: torch.Tensor,
        places: list[tuple[int, int]],
        *,
        counted: bool,
        share: float,
    ) -> list[dict[str, torch.Tensor]]:
        """Reduce one tile of rows for every model; returns each candidate's columns.

        counted: the reference's time counts: it ran its body too. share: of the machine, which a lane has a part of.
        """
        got = []
        k = self.overlap_k
        reference = None
        if self.reference is not None:
            with self.reference.timed(share=share) if counted else nullcontext():
                logits = self.reference.tile(together[id(self.reference)][rows], buffer="reference")
            reference = reduce.reduce_side(logits, tokens.to(logits.device), max(k, self.top_k))
            _check(reference.side, places, self.reference.name)
        for model in self.candidates:
            if reference is not None and model is self.reference and not self.apart:
                candidate = reference
            else:
                with model.timed(share=share):
                    logits = model.tile(apart[id(model)][rows])
                candidate = reduce.reduce_side(logits, tokens.to(logits.device), max(k, self.top_k))
                _check(candidate.side, places, model.name)
            columns = {}
            if reference is not None:
                columns = {f"ref_{n}": v for n, v in reference.side._asdict().items()}
            columns |= {f"cand_{n}": v for n, v in candidate.side._asdict().items()}
            if reference is not None:
                pair = reduce.reduce_pair(reference, candidate, k)
                _check(pair, places, f"{model.name} against {self.reference.name if self.reference else ''}")
                columns |= pair._asdict()
                if self.bits:
                    columns["unequal"] = _unequal(reference.logits, candidate.logits)
            if self.top_k:
                sides = {"ref": reference, "cand": candidate}
                columns |= {f"{s}_{n}": v for s, of in sides.items() if of for n, v in self._likeliest(of).items()}
            got.append(columns)
        return got

    def _likeliest(self, of: reduce.Reduced) -> dict[str, torch.Tensor]:
        """One side's `top_k` most likely ids [rows, k] and their logprobs (float64, -inf at a mask)."""
        top = of.marginal.top
        logprobs = top.values[:, : self.top_k].double() - of.marginal.lse[:, None]
        return {
            "top_ids": top.ids[:, : self.top_k],
            "top_logprobs": torch.where(logprobs > LEAST_LOGPROB, logprobs, -torch.inf),
        }


def check_windows(models: Sequence[HeadRuntime], windows: Sequence[ScoreWindow]) -> None:
    """Raise BadRequest naming the models that do not go together, or the window that cannot be scored."""
    sizes = {m.head.vocab_size for m in models}
    if len(sizes) > 1:
        named = ", ".join(f"{m.name} {m.head.vocab_size}" for m in models)
        raise Mismatch(f"the models have different vocabularies ({named}) and cannot be compared", param="candidates")
    for i, window in enumerate(windows):
        for model in models:
            if len(window.ids) - 1 > model.context_length:  # the last token is only predicted
                raise BadRequest(
                    f"window {i} has {len(window.ids)} tokens, more than the context of {model.name} "
                    f"({model.context_length})",
                    param=f"windows[{i}]",
                )
        vocabulary = min(sizes)
        wrong = next((t for t in window.ids if not 0 <= t < vocabulary), None)
        if wrong is not None:
            raise BadRequest(f"window {i} has token id {wrong}, outside 0..{vocabulary - 1}", param=f"windows[{i}]")
        if not all(1 <= p < len(window.ids) for p in window.positions):
            raise BadRequest(f"window {i} asks for a position outside 1..{len(window.ids) - 1}", param=f"windows[{i}]")


def next_batch(windows: Sequence[ScoreWindow], first: int, budget: int) -> int:
    """End (exclusive) of the batch that starts at `first`: as many windows as fit `budget` tokens, at least one."""
    last, tokens = first, 0
    while last < len(windows) and (last == first or tokens + len(windows[last].ids) <= budget):
        tokens += len(windows[last].ids)
        last += 1
    return last


def _unequal(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """How many float32 logits of each row have other bits, [rows] int64; -0.0 is not 0.0 here, and a NaN is itself."""
    return torch.count_nonzero(p.view(torch.int32) != q.view(torch.int32), dim=1)


def groups_of(windows: list[ScoreWindow], budget: int) -> list[list[ScoreWindow]]:
    """The windows in neighbouring groups that lanes run by themselves; none where all have to run in one forward."""
    count = lanes().count
    tokens = sum(len(window.ids) for window in windows)
    if count == 1 or any(len(window.ids) > budget for window in windows):
        return []
    most = max(_LEAST_GROUP, min(_MOST_GROUP, -(-tokens // count)))
    groups: list[list[ScoreWindow]] = []
    low = 0
    while low < len(windows):
        high = next_batch(windows, low, most)
        groups.append(windows[low:high])
        low = high
    return groups if len(groups) >= count else []


def _integer(name: str) -> bool:
    return name in INTEGERS or name.removeprefix("ref_").removeprefix("cand_") in INTEGERS


def _check(columns: NamedTuple, places: list[tuple[int, int]], model: str) -> None:
    """Raise ScoringFailed at the first value that cannot be, naming window and position."""
    for name, values in zip(columns._fields, columns, strict=True):
        refuse_unscorable(values, name, places, model)


def refuse_unscorable(values: torch.Tensor, name: str, places: Sequence[tuple[int, int]], model: str) -> None:
    """Raise ScoringFailed at the first row of `values` [rows], in nats, that a -inf, a NaN or a mask went into."""
    bad = torch.nonzero(reduce.unscorable(values))
    if len(bad):
        window, position = places[int(bad[0, 0])]
        why = "" if bool(values[bad[0, 0]].isnan()) else " (a logit is -inf or a mask)"
        raise ScoringFailed(f"{model} gives a non-finite {name} at window {window}, position {position}{why}")


def scored_rows(model: ModelRuntime, windows: Sequence[ScoreWindow]) -> torch.Tensor:
    """Hidden rows that predict the scored positions, in order: [positions of all windows, size]."""
    if model.streamed is not None:
        return model.streamed.rows.of(windows)
    long = len(windows[0].ids) > model.config.max_batch_tokens and model.runner.keeps_kv
    if long and isinstance(model.runner, PackedRunner):
        step = model.config.max_batch_tokens
        each = [(window, window.ids[: model.context_length]) for window in windows]
        return torch.cat([long_rows(model.runner, model.loaded.model, window, ids, step) for window, ids in each])
    if long or model.runner.needs_pages:
        return torch.cat([_through_pages(model, window) for window in windows])
    tokens: list[int] = []
    segments: list[Segment] = []
    rows: list[int] = []
    for window in windows:
        base, shown = len(tokens), window.ids[: model.context_length]
        segments.append(Segment(base, len(shown)))
        rows.extend(base + p - 1 for p in window.positions)
        tokens.extend(shown)
    return model.runner.forward(tokens, segments)[rows]


def _through_pages(model: ModelRuntime, window: ScoreWindow) -> torch.Tensor:
    """The same for one window, in chunks through borrowed pages, for a runner whose shapes are fixed."""
    need = min(len(window.ids), model.context_length)
    if model.pool.free < need:
        model.scheduler.cache.evict(need - model.pool.free)
    try:
        pages = model.pool.take(need)
    except OutOfPages:
        raise BadRequest(
            f"a window of {need} tokens needs more KV memory than {model.name} has ({model.pool.free} tokens free): "
            "raise --kv-memory or --max-batch-tokens"
        ) from None
    try:
        kept = []
        step = model.config.max_batch_tokens
        for low in range(0, need, step):
            high = min(low + step, need)
            segment = Segment(0, high - low, low, tuple(pages[:high]), total=need)
            hidden = model.runner.forward(window.ids[low:high], [segment])
            kept.append(hidden[[p - 1 - low for p in window.positions if low <= p - 1 < high]])
        return torch.cat(kept)
    finally:
        model.pool.release(pages)
