"""Jobs on one model's rows: what a trace records of a reference, exact scores of named ids, and whole rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from serve.engine import reduce
from serve.engine.rowjob import Arrays, Place, RowJob
from serve.engine.tail import draw, uniforms
from serve.errors import BadRequest
from serve.wire import LEAST_LOGPROB

MOST_ROW_BYTES = 1 << 30  # of whole rows in one reply


@dataclass(kw_only=True)
class RecordJob(RowJob):
    """Per position: token logprob, rank, entropy, the top_k ids with logprobs, tail mass, and m draws of the tail.

    indices: the number that names each window in the seeding. full: besides, `shifted` float16 = logit minus the
    row's largest logit, and `lse` float64 = log sum exp of the unrounded differences.
    """

    top_k: int
    tail_samples: int
    seed: int
    indices: Sequence[int]
    full: bool = False

    def validate(self) -> None:
        """Raise BadRequest naming the field or the window that is wrong."""
        super().validate()
        vocabulary = self.model.head.vocab_size
        if not 2 <= self.top_k <= vocabulary:
            raise BadRequest(f"top_k must be in 2..{vocabulary}, the vocabulary", param="top_k")
        if self.top_k == vocabulary and self.tail_samples:
            raise BadRequest("top_k is the whole vocabulary: there is no tail to sample", param="tail_samples")
        if self.full:
            _check_size(self, 2)

    def reduce_tile(self, logits: torch.Tensor, tokens: torch.Tensor, places: Sequence[Place]) -> Arrays:
        """The recorded arrays of one tile."""
        of = reduce.marginal(logits, self.top_k)
        logprob = reduce.chosen_logprobs(logits, tokens, of.lse)
        own = of.lse - of.top.values[:, 0].double()  # in nats: where logits start is arbitrary
        for name, values in (("log-sum-exp", own), ("entropy", of.entropy), ("logprob", logprob)):
            self.refuse_unscorable(values, name, places)
        top_logprobs = of.top.values.double() - of.lse[:, None]
        found: dict[str, torch.Tensor] = {
            "logprob": logprob.float(),
            "rank": reduce.ranks(logits, tokens, of.top).int(),
            "entropy": of.entropy.clamp(min=0).float(),
            "top_ids": of.top.ids.int(),
            "top_logprobs": torch.where(top_logprobs > LEAST_LOGPROB, top_logprobs, -torch.inf).float(),
        }
        if self.full:
            peak = of.top.values[:, :1]
            found["shifted"] = (logits - peak).half()
            found["lse"] = of.lse - peak[:, 0].double()
        found |= self._tail(logits, of, places)
        return {name: values.cpu().numpy() for name, values in found.items()}

    def _tail(self, logits: torch.Tensor, of: reduce.Marginal, places: Sequence[Place]) -> dict[str, torch.Tensor]:
        keys = [(self.indices[w], p) for w, p in places]
        numbers = torch.from_numpy(uniforms(self.seed, keys, self.tail_samples)).to(logits.device)
        drawn = draw(logits, of.top.ids, of.lse, numbers)
        logprobs = logits.gather(1, drawn.ids.clamp(min=0)).double() - of.lse[:, None]
        return {
            "tail_mass": drawn.mass.float(),
            "tail_ids": drawn.ids.int(),
            "tail_logprobs": torch.where(drawn.ids >= 0, logprobs, -torch.inf).float(),
        }


@dataclass(kw_only=True)
class GatherJob(RowJob):
    """Logprobs of exactly the ids asked for, and the model's own columns.

    wanted: per window [its positions, width] int32, -1 = padding, whose logprob comes back as -inf. top_k: of the
    model's own most likely ids, which come with their logprobs.
    """

    wanted: Sequence[np.ndarray[tuple[int, int], np.dtype[np.int32]]]
    top_k: int

    def validate(self) -> None:
        """Raise BadRequest naming the field or the window that is wrong."""
        super().validate()
        vocabulary = self.model.head.vocab_size
        if not 1 <= self.top_k <= vocabulary:
            raise BadRequest(f"top_k must be in 1..{vocabulary}, the vocabulary", param="top_k")
        for i, (window, ids) in enumerate(zip(self.windows, self.wanted, strict=True)):
            if len(ids) != len(window.positions):
                raise BadRequest(
                    f"window {i} has {len(window.positions)} positions and wanted ids for {len(ids)}",
                    param=f"windows[{i}].wanted",
                )
            wrong = ids[(ids < -1) | (ids >= vocabulary)]
            if len(wrong):
                raise BadRequest(
                    f"window {i} wants token id {wrong[0]}, outside 0..{vocabulary - 1}", param=f"windows[{i}].wanted"
                )

    def reduce_tile(self, logits: torch.Tensor, tokens: torch.Tensor, places: Sequence[Place]) -> Arrays:
        """The named logprobs and the model's own columns of one tile."""
        of = reduce.reduce_side(logits, tokens, self.top_k)
        for name, values in of.side._asdict().items():
            self.refuse_unscorable(values, name, places)
        asked = torch.from_numpy(self._asked(places)).to(logits.device)
        logprobs = reduce.chosen_logprobs(logits, asked.clamp(min=0), of.marginal.lse)
        kinds = {"top1": torch.int32, "rank": torch.int32}
        found = {name: values.to(kinds.get(name, torch.float32)) for name, values in of.side._asdict().items()}
        top = of.marginal.top
        found["top_ids"] = top.ids[:, : self.top_k].int()
        found["top_logprobs"] = (top.values[:, : self.top_k].double() - of.marginal.lse[:, None]).float()
        found["logprobs"] = torch.where(asked >= 0, logprobs, -torch.inf).float()
        return {name: values.cpu().numpy() for name, values in found.items()}

    def _asked(self, places: Sequence[Place]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """The wanted ids of a tile's rows. Places run through each window's positions in order."""
        rows = [self.wanted[w][self._row(w, p)] for w, p in places]
        return np.array(rows, dtype=np.int64).reshape(len(places), -1)

    def _row(self, window: int, position: int) -> int:
        if window not in self._rows:
            self._rows.clear()
            self._rows[window] = {p: i for i, p in enumerate(self.windows[window].positions)}
        return self._rows[window][position]

    def __post_init__(self) -> None:
        self._rows: dict[int, dict[int, int]] = {}


@dataclass(kw_only=True)
class RowsJob(RowJob):
    """Whole rows of float32 logits, `logits` [positions, vocabulary] on the host; at most MOST_ROW_BYTES a job."""

    def validate(self) -> None:
        """Raise BadRequest naming the window that is wrong, or the size that is too much."""
        super().validate()
        _check_size(self, 4)

    def reduce_tile(self, logits: torch.Tensor, tokens: torch.Tensor, places: Sequence[Place]) -> Arrays:
        """The logits of one tile."""
        largest = logits.amax(1)
        self.refuse_unscorable(largest - largest, "largest logit", places)  # 0 where it is finite, else NaN
        return {"logits": logits.cpu().numpy().copy()}


def _check_size(job: RowJob, item_bytes: int) -> None:
    rows = sum(len(window.positions) for window in job.windows)
    size = rows * job.model.head.vocab_size * item_bytes
    if size > MOST_ROW_BYTES:
        raise BadRequest(
            f"{rows} whole rows are {size >> 20} MiB and one reply may have {MOST_ROW_BYTES >> 20}: ask for fewer",
            param="windows",
        )
