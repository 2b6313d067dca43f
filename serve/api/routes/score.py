"""POST /v1/score: exact per-position columns of windows, as an Arrow IPC stream.

The reply is sent whole: every row is there, or the reply is an error. Metadata `positions` holds the number
of rows, so that a cut stream cannot pass for a short one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from serve.engine.pair import Columns, ScoreWindow
from serve.errors import BadRequest
from serve.state import Answer, ServerState
from serve.wire import ARROW, ScoreRequest, Window


class ArrowResponse(Response):
    """An Arrow IPC stream."""

    media_type = ARROW


def router(state: ServerState) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/v1/score", response_class=ArrowResponse)
    async def score(body: ScoreRequest, request: Request) -> Response:
        """Rows: candidate, then window and position; columns as docs/semantics.md defines them."""
        engine = state.engine
        answer = Answer()
        job = engine.score(
            engine.model(body.reference) if body.reference is not None else None,
            [engine.model(name) for name in body.candidates],
            score_windows(body.windows),
            overlap_k=body.overlap_k,
            on_end=answer.deliver,
            apart=body.apart,
            top_k=body.top_k,
        )

        def cancel() -> None:
            job.cancelled = True

        columns = cast("Columns", await answer.wait(request, cancel))
        return ArrowResponse(await run_in_threadpool(encode, columns))

    return routes


def score_windows(windows: Sequence[Window]) -> list[ScoreWindow]:
    """A request's windows as the engine takes them. Raises BadRequest naming one whose range does not fit."""
    found = []
    for number, window in enumerate(windows):
        try:
            found.append(ScoreWindow(tuple(window.ids), window.positions()))
        except ValueError as error:
            raise BadRequest(f"windows[{number}]: {error}", param=f"windows[{number}]") from None
    return found


def encode(columns: Columns) -> bytes:
    """Columns [n] and [n, width] as one Arrow IPC stream; wide ones as fixed-size lists."""
    table: Any = pa.table({name: _column(values) for name, values in columns.items()})
    table = table.replace_schema_metadata({"positions": str(table.num_rows)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return cast(bytes, sink.getvalue().to_pybytes())


def _column(values: np.ndarray[Any, np.dtype[Any]]) -> Any:
    if values.ndim == 1:
        return pa.array(values)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    if not values.shape[1]:
        return pa.array([[]] * len(values), pa.list_(flat.type, 0))
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
