"""The per-position table: its key columns, its types, and that a stored table keeps both."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from evalgate.core import Window
from evalgate.table import KEY_COLUMNS, PAIR_COLUMNS, SIDE_COLUMNS, build, column_type, schema, score_columns

WINDOWS = (
    Window(4, "a", "prose", (9, 8, 7, 6), 1, 4, (1, 2, 3, 4), mask=(True, False, True)),
    Window(2, "b", "code", (5, 4), 1, 2, (5, 6)),
)


def test_rows_are_candidate_after_candidate_window_after_window():
    keys = build(["y", "x"], WINDOWS, {}).to_pydict()
    assert list(keys) == list(KEY_COLUMNS)
    assert keys["candidate"] == ["y"] * 3 + ["x"] * 3
    assert keys["document"] == ["a", "a", "b"] * 2 and keys["domain"] == ["prose", "prose", "code"] * 2
    assert keys["window"] == [4, 4, 2] * 2 and keys["position"] == [1, 3, 1] * 2
    assert keys["token"] == [8, 6, 4] * 2 and keys["bytes"] == [2, 4, 6] * 2


def test_a_column_has_one_type_from_the_builder_to_the_file():
    rng = np.random.default_rng(0)
    values = {name: rng.integers(0, 9, 6) if pa.types.is_integer(column_type(name)) else rng.random(6)
              for name in score_columns(pair=True)}  # fmt: skip
    built = build(["y", "x"], WINDOWS, values)
    assert built.schema == schema(pair=True)
    assert [f.name for f in schema(pair=False)] == [*KEY_COLUMNS, *(f"cand_{name}" for name in SIDE_COLUMNS)]
    file = io.BytesIO()
    pq.write_table(built, file)
    again = pq.read_table(file)
    assert again.schema.equals(built.schema) and again.equals(built)
    for name in PAIR_COLUMNS:
        expected = values[name].astype(np.int32 if pa.types.is_integer(column_type(name)) else np.float32)
        np.testing.assert_array_equal(built.column(name).to_numpy(), expected)


def test_columns_already_of_their_type_are_taken_as_they_are():
    kl = pa.chunked_array([pa.array(np.arange(6, dtype=np.float32))])
    assert build(["y", "x"], WINDOWS, {"kl": kl}).column("kl").chunk(0).buffers()[1].address == (
        kl.chunk(0).buffers()[1].address
    )


def test_bounds_and_errors_are_of_their_column_s_kind():
    assert [column_type(n) for n in ("kl_low", "kl_se", "ref_nll_high")] == [pa.float32()] * 3
    assert [column_type(n) for n in ("ref_rank", "cand_top1", "cand_rank_of_ref_top1", "bytes")] == [pa.int32()] * 4
    columns = {"kl_high": [None, 0.1] * 3, "cand_rank": [None, 2] * 3}
    assert build(["y", "x"], WINDOWS, columns).to_pydict()["cand_rank"] == [None, 2] * 3
