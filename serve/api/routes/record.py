"""POST /v1/record, /v1/gather and /v1/rows: what traces need of a model, as Arrow IPC streams.

Each reply has one row per scored position, window by window; wide columns are fixed-size lists. It is sent whole, or
the reply is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from serve.api.routes.score import ArrowResponse, encode, score_windows
from serve.engine.record import GatherJob, RecordJob, RowsJob
from serve.engine.rowjob import Arrays, RowJob
from serve.errors import BadRequest
from serve.state import Answer, ServerState
from serve.wire import GatherRequest, GatherWindow, RecordRequest, RowsRequest


def router(state: ServerState) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    async def reply(job: RowJob, answer: Answer, request: Request) -> Response:
        state.engine.enqueue(job)

        def cancel() -> None:
            job.cancelled = True

        arrays = cast("Arrays", await answer.wait(request, cancel))
        return ArrowResponse(await run_in_threadpool(encode, arrays))

    @routes.post("/v1/record", response_class=ArrowResponse)
    async def record(body: RecordRequest, request: Request) -> Response:
        """Token logprob, rank, entropy, top-k, tail mass and seeded draws of the tail."""
        indices = list(range(len(body.windows))) if body.indices is None else body.indices
        if len(indices) != len(body.windows):
            raise BadRequest(f"{len(indices)} indices came for {len(body.windows)} windows", param="indices")
        answer = Answer()
        job = RecordJob(
            state.engine.model(body.model),
            score_windows(body.windows),
            answer.deliver,
            top_k=body.top_k,
            tail_samples=body.tail_samples,
            seed=body.seed,
            indices=indices,
            full=body.full,
        )
        return await reply(job, answer, request)

    @routes.post("/v1/gather", response_class=ArrowResponse)
    async def gather(body: GatherRequest, request: Request) -> Response:
        """Logprobs of the wanted ids (-inf at padding), and the model's own columns."""
        answer = Answer()
        model, windows = state.engine.model(body.model), score_windows(body.windows)
        job = GatherJob(model, windows, answer.deliver, wanted=_wanted(body.windows), top_k=body.top_k)
        return await reply(job, answer, request)

    @routes.post("/v1/rows", response_class=ArrowResponse)
    async def rows(body: RowsRequest, request: Request) -> Response:
        """Float32 logits over the whole vocabulary."""
        answer = Answer()
        job = RowsJob(state.engine.model(body.model), score_windows(body.windows), answer.deliver)
        return await reply(job, answer, request)

    return routes


def _wanted(windows: Sequence[GatherWindow]) -> list[np.ndarray[tuple[int, int], np.dtype[np.int32]]]:
    """[positions, width] of each window. Raises BadRequest where two lists differ in length."""
    widths = {len(ids) for window in windows for ids in window.wanted}
    if len(widths) > 1:
        raise BadRequest(
            f"wanted has lists of {min(widths)} and of {max(widths)} ids: pad all of them to one length with -1",
            param="windows",
        )
    width = widths.pop() if widths else 0
    return [np.array(window.wanted, dtype=np.int32).reshape(len(window.wanted), width) for window in windows]
