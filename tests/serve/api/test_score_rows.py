"""Hidden rows over HTTP: sent with scores, and taken back in the place of a reference's body."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from serve.engine.stored import HeadModel
from serve.wire import ARROW
from tests.serve.serving import Served, served

WINDOWS = [{"ids": list(range(5, 40))}, {"ids": [7, 8, 9, 10], "score_from": 2}]
BODY = {"candidates": ["tiny"], "windows": WINDOWS, "top_k": 3}


def streams(content: bytes) -> list[Any]:
    reader, found = pa.BufferReader(content), []
    while reader.tell() < reader.size():
        found.append(pa.ipc.open_stream(reader).read_all())
    return found


def with_request(hidden: Any, request: dict[str, Any], **more: str) -> bytes:
    metadata = {**{k.decode(): v.decode() for k, v in hidden.schema.metadata.items()}, "request": json.dumps(request)}
    table = hidden.replace_schema_metadata({**metadata, **more})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def server(tmp_path: Path) -> Any:
    with served() as up:
        object.__setattr__(up.engine.config, "heads_folder", str(tmp_path))
        yield up


def test_rows_there_and_back(server: Served, tmp_path: Path) -> None:
    """What /v1/score sends beside its columns, /v1/score/rows compares with the live model: not one bit differs."""
    scores, hidden = streams(server.http.post("/v1/score", json={**BODY, "hidden": True}).content)
    assert scores.num_rows == hidden.num_rows == 36
    head = server.http.get("/v1/head").json()
    path = tmp_path / head["file"]
    assert path.stat().st_size == head["bytes"] and path.stem == head["sha256"]
    server.engine.heads["kept"] = HeadModel("kept", path, server.engine.config)
    request = {**BODY, "reference": "kept", "bits": True}
    content = with_request(hidden, request)
    (pair,) = streams(server.http.post("/v1/score/rows", content=content, headers={"Content-Type": ARROW}).content)
    assert set(pair.column("unequal").to_pylist()) == set(pair.column("kl").to_pylist()) == {0}
    assert pair.column("ref_nll").equals(scores.column("cand_nll"))


def test_what_is_not_a_stream_of_rows_is_refused(server: Served) -> None:
    _, hidden = streams(server.http.post("/v1/score", json={**BODY, "hidden": True}).content)
    named = {**BODY, "reference": "tiny"}
    cases = [
        (b"", "not an Arrow stream"),
        (b'{"candidates": []}', "not an Arrow stream"),
        (
            with_request(hidden.rename_columns(["other"]).replace_schema_metadata(hidden.schema.metadata), named),
            "not an Arrow stream",
        ),
        (with_request(hidden, BODY), "name the output head"),
        (with_request(hidden, {**named, "more": 1}), "'more'"),
        (with_request(hidden, {**named, "reference": "other"}), "no model 'other'"),
        (with_request(hidden.slice(1), named), "35 hidden rows came for 36 positions"),
        (with_request(hidden, named, dtype="bfloat16"), "for a head of 32 x bfloat16"),
        (with_request(hidden, named, dtype="object"), "hidden rows cannot be object"),
    ]
    for content, said in cases:
        reply = server.http.post("/v1/score/rows", content=content)
        assert reply.status_code in (400, 404) and said in reply.json()["error"]["message"], reply.text
    assert server.http.post("/v1/score/rows", content=with_request(hidden, named)).status_code == 200


def test_heads_are_written_only_where_the_server_was_told_to() -> None:
    with served() as server:
        reply = server.http.get("/v1/head")
        assert reply.status_code == 400 and "--heads-folder" in reply.json()["error"]["message"]
