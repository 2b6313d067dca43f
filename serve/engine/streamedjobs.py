"""What a job will ask of streamed models, told to them before it begins: one pass over the weights serves all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from serve.engine.pair import ScoreJob, ScoreWindow, next_batch
from serve.engine.rowjob import RowJob
from serve.engine.runtime import HeadRuntime, ModelRuntime


def announce(job: Any) -> None:
    """Tell a job's streamed models its batches, before its first one."""
    if getattr(job, "done", 1) == 0:
        for model, batches, shared in _batches(job):
            if isinstance(model, ModelRuntime) and model.streamed is not None:
                model.streamed.rows.expect(batches, shared=shared)


def forget(job: Any) -> None:
    """Let a job's streamed models remove what they kept of its batches: it is answered."""
    for model, batches, _ in _batches(job):
        if isinstance(model, ModelRuntime) and model.streamed is not None:
            model.streamed.rows.forget(batches)


def _batches(job: Any) -> Iterator[tuple[HeadRuntime, list[Sequence[ScoreWindow]], bool]]:
    """Each model of a job with the batches that are asked of it, and whether lanes would share them."""
    if isinstance(job, RowJob):
        yield job.model, _cut(job.windows, job.model), False
    elif isinstance(job, ScoreJob):
        together = _cut(job.windows, job.candidates[0])
        if job.reference is not None:
            yield job.reference, together, True
        for candidate in job.candidates:
            yield candidate, [[window] for window in job.windows] if job.apart else together, not job.apart


def _cut(windows: Sequence[ScoreWindow], model: HeadRuntime) -> list[Sequence[ScoreWindow]]:
    found: list[Sequence[ScoreWindow]] = []
    first = 0
    while first < len(windows):
        last = next_batch(windows, first, model.config.max_batch_tokens)
        if any(window.positions for window in windows[first:last]):
            found.append(windows[first:last])
        first = last
    return found
