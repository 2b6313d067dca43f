"""Faults of hidden states by their names, on rows and heads made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evalgate.traces import PositionBatch
from evalgate.traces.batch import row_digests, widened
from evalgate.traces.head import LastNorm, OutputHead
from evalgate.traces.replay import check_rows

SIZE, VOCABULARY, ROWS = 48, 500, 60


def norm(kind: str) -> LastNorm:
    rng = np.random.default_rng(1)
    bias = rng.normal(0, 0.5, SIZE) if kind == "layer" else np.zeros(SIZE)
    return LastNorm(kind, 1e-6, rng.uniform(0.3, 3, SIZE), bias)


def head(kind: str, *, seed: int = 2, **changes) -> OutputHead:
    weight = np.random.default_rng(seed).normal(0, 0.3, (VOCABULARY, SIZE)).astype(np.float32)
    return replace(OutputHead(weight, None, 1.0, None, norm(kind)), **changes)


def bits(rows: np.ndarray, dtype: str) -> np.ndarray:
    rows = rows.astype(np.float32)
    if dtype == "float32":
        return rows
    return ((rows.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def batch_of(by: OutputHead, before: np.ndarray, dtype: str) -> PositionBatch:
    hidden = bits(by.norm.apply(before), dtype)
    tokens = np.random.default_rng(5).integers(0, VOCABULARY, ROWS).astype(np.int32)
    n, nothing = np.arange(ROWS, dtype=np.int32), np.zeros((ROWS, 0))
    lists = {"top_ids": nothing.astype(np.int32), "top_logprobs": nothing.astype(np.float32)}
    draws = {"tail_ids": nothing.astype(np.int32), "tail_logprobs": nothing.astype(np.float32)}
    return PositionBatch(
        window=n // 30,
        position=n % 30 + 1,
        token=tokens,
        bytes=n * 0 + 1,
        logprob=-by.nll(widened(hidden), tokens).astype(np.float32),
        rank=n * 0 + 1,
        entropy=np.ones(ROWS, np.float32),
        tail_mass=np.zeros(ROWS, np.float32),
        **lists,
        **draws,
        hidden=hidden,
        digest=row_digests(hidden),
    )


def changed(batch: PositionBatch, rows: np.ndarray, *, resealed: bool) -> PositionBatch:
    return replace(batch, hidden=rows, digest=row_digests(rows) if resealed else batch.digest)


@pytest.mark.parametrize("resealed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_each_fault_has_its_name(kind: str, dtype: str, resealed: bool) -> None:
    """Whether the digests were made of the wrong rows too or not."""
    of = head(kind, bias=np.random.default_rng(6).normal(0, 1, VOCABULARY).astype(np.float32), scale=0.7, softcap=20.0)
    before = np.random.default_rng(7).normal(0.4, 3, (ROWS, SIZE))
    batch = batch_of(of, before, dtype)
    assert check_rows(batch, of, most=64) is None and check_rows(batch, of, most=10) is None
    twice = bits(of.norm.apply(of.norm.apply(before)), dtype)
    faults = {
        "of the position after its own": np.roll(batch.hidden, -1, axis=0),
        "of the position before its own": np.roll(batch.hidden, 1, axis=0),
        "norm was not applied": bits(before, dtype),
        "norm was applied twice": twice,
    }
    for words, rows in faults.items():
        fault = check_rows(changed(batch, rows, resealed=resealed), of, most=64)
        assert fault is not None and words in fault.what, (words, fault)
    noise = bits(np.random.default_rng(8).normal(0, 1, (ROWS, SIZE)), dtype)
    fault = check_rows(changed(batch, noise, resealed=False), of, most=64)
    assert fault is not None and "not those that were recorded" in fault.what
    fault = check_rows(batch, head(kind, seed=3), most=64)
    assert fault is not None and "another model's head" in fault.what


def test_an_unknown_norm_still_finds_that_something_is_wrong() -> None:
    of = head("rms")
    before = np.random.default_rng(7).normal(0, 3, (ROWS, SIZE))
    batch = batch_of(of, before, "float32")
    fault = check_rows(changed(batch, before.astype(np.float32), resealed=False), replace(of, norm=None), most=64)
    assert fault is not None and "60 rows that are not those that were recorded" in fault.what
