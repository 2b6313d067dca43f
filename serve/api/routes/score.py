"""POST /v1/score: exact per-position columns of windows, as an Arrow IPC stream.

The reply is sent whole: every row is there, or the reply is an error. Metadata `positions` holds the number
of rows, so that a cut stream cannot pass for a short one. Hidden rows that are asked for follow as a second stream, of
one column of bytes; its metadata has their `dtype`.

POST /v1/score/rows is the same against a reference of which only the output head is here (`--head NAME=FILE`). Its
body is such a stream of hidden rows, one for each scored position in order, and its metadata `request` the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from serve.engine.pair import Columns, KnownRows, ScoreWindow
from serve.engine.stored import HeadModel, given_rows, head_written
from serve.errors import BadRequest, LoadFailed
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
        return await _scored(state, body, request)

    @routes.post("/v1/score/rows", response_class=ArrowResponse)
    async def rows(request: Request) -> Response:
        """The same; the body is an Arrow stream of the reference's hidden rows."""
        content = await request.body()
        body, dtype, hidden = await run_in_threadpool(_given, content)
        if body.reference is None:
            raise BadRequest("'reference': name the output head of the hidden rows", param="reference")
        side = state.engine.side(body.reference)
        return await _scored(state, body, request, given_rows(side, score_windows(body.windows), dtype, hidden))

    @routes.get("/v1/head")
    async def head(request: Request, model: str | None = None) -> dict[str, Any]:
        """Write a model's output head to the folder that the server was started with: its file name, SHA-256, size.

        The file is read back: under `name` it stands as a reference whose hidden rows come with the request.
        """
        folder = state.engine.config.heads_folder
        if folder is None:
            raise BadRequest("this server writes no output heads: start it with --heads-folder FOLDER")
        runtime, answer = state.engine.model(model), Answer()

        def write() -> None:
            try:
                path, digest = head_written(runtime, Path(folder))
                name = f"{runtime.name} (head)"
                state.engine.heads = {**state.engine.heads, name: HeadModel(name, path, state.engine.config)}
                found = {"file": path.name, "sha256": digest, "bytes": path.stat().st_size, "name": name}
                answer.deliver(found)
            except Exception as error:
                answer.deliver(BadRequest(error.message) if isinstance(error, LoadFailed) else error)

        state.engine.call(write)
        return cast("dict[str, Any]", await answer.wait(request, lambda: None))

    return routes


async def _scored(
    state: ServerState, body: ScoreRequest, request: Request, known: KnownRows | None = None
) -> ArrowResponse:
    engine = state.engine
    answer = Answer()
    if known is None and body.keep and body.reference is not None:
        known = engine.kept.get(body.reference)
    job = engine.score(
        engine.side(body.reference) if body.reference is not None else None,
        [engine.side(name) for name in body.candidates],
        score_windows(body.windows),
        overlap_k=body.overlap_k,
        on_end=answer.deliver,
        apart=body.apart,
        top_k=body.top_k,
        known=known,
        sends_hidden=body.hidden,
        bits=body.bits,
    )

    def cancel() -> None:
        job.cancelled = True

    columns = cast("Columns", await answer.wait(request, cancel))
    return ArrowResponse(await run_in_threadpool(_encoded, columns, job.hidden() if body.hidden else None))


def _encoded(columns: Columns, hidden: Any) -> bytes:
    return encode(columns) if hidden is None else encode(columns) + encode_rows(hidden)


def encode_rows(hidden: Any) -> bytes:
    """Hidden rows [n, size] as one Arrow IPC stream: `hidden`, the bytes of each row."""
    import torch

    raw = hidden.contiguous().view(torch.uint8).numpy()
    column = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(raw.shape[1]), len(raw), [None, pa.py_buffer(np.ascontiguousarray(raw))]
    )
    metadata = {"positions": str(len(raw)), "dtype": str(hidden.dtype).removeprefix("torch.")}
    table: Any = pa.table({"hidden": column}).replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return cast(bytes, sink.getvalue().to_pybytes())


def _given(content: bytes) -> tuple[ScoreRequest, str, np.ndarray[Any, np.dtype[np.uint8]]]:
    """The request, the dtype and the rows [n, width] of a body. Raises BadRequest where it is not one."""
    try:
        table = pa.ipc.open_stream(content).read_all()
        metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        column = table.column("hidden").combine_chunks()
        if not pa.types.is_fixed_size_binary(column.type) or column.null_count:
            raise BadRequest("'hidden' is not a column of bytes, as many in each row", param="hidden")
        request, dtype = metadata["request"], metadata["dtype"]
    except (pa.ArrowException, KeyError, ValueError, OSError) as error:
        raise BadRequest(f"the body is not an Arrow stream of hidden rows with its request ({error})") from None
    try:
        body = ScoreRequest.model_validate_json(request)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadRequest(f"'{where or 'request'}': {first['msg']}", param=where or None) from None
    width = column.type.byte_width
    raw = np.frombuffer(column.buffers()[1], dtype=np.uint8) if len(column) else np.zeros(0, np.uint8)
    start = column.offset * width
    return body, dtype, raw[start : start + len(column) * width].reshape(len(column), width)


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
