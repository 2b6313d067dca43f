"""Packed attention over pages against a slow float64 sum over keys, one query and one head at a time."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.engine import attention
from serve.engine.attention import Context, KVPages, Stored, packed_attention
from serve.engine.interface import Shape
from serve.engine.runner import Segment

HEADS, SIZE, CAPACITY = 4, 8, 64


def slow(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: Shape) -> torch.Tensor:
    """One query [heads, size] at the last of the keys [n, kv heads, size] -> [heads, size] float64."""
    out = torch.zeros((HEADS, SIZE), dtype=torch.float64)
    first = 0 if shape.window is None else max(0, len(keys) - shape.window)
    for head in range(HEADS):
        own = head // (HEADS // keys.shape[1])
        scores = [float(q[head].double() @ key[own].double()) * shape.scaling for key in keys[first:]]
        if shape.softcap is not None:
            scores = [math.tanh(score / shape.softcap) * shape.softcap for score in scores]
        weights = [math.exp(score) for score in scores]
        total = sum(weights) + (0.0 if shape.sinks is None else math.exp(float(shape.sinks[head])))
        for weight, value in zip(weights, values[first:], strict=True):
            out[head] += weight / total * value[own].double()
    return out


@st.composite
def layouts(draw: Any) -> tuple[list[list[int]], list[Segment], list[tuple[int, int]], int]:
    """Pages of sequences that may share a beginning; stored segments anywhere in them and maybe new tokens of one;
    of each row of the forward its sequence and its place; how many rows are new."""
    pages = draw(st.permutations(range(CAPACITY)))
    shared, at, sequences = pages[: draw(st.integers(0, 6))], 6, []
    for length in draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)):
        sequences.append([*shared, *pages[at : at + length]])
        at += length
    segments: list[Segment] = []
    rows: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(1, 7))):
        which = draw(st.integers(0, len(sequences) - 1))
        end = draw(st.integers(1, len(sequences[which])))
        start = draw(st.integers(0, end - 1))
        segments.append(Segment(len(rows), end - start, start, array("q", sequences[which][:end]), stored=True))
        rows += [(which, token) for token in range(start, end)]
    new = draw(st.integers(0, 4))
    if new:
        start = len(sequences[0])
        sequences.append([*sequences[0], *pages[at : at + new]])
        segments.append(Segment(len(rows), new, start, array("q", sequences[-1])))
        rows += [(len(sequences) - 1, start + i) for i in range(new)]
    return sequences, draw(st.permutations(segments)), rows, new


@given(
    layouts(),
    st.sampled_from([None, 1, 2, 5, 100]),
    st.sampled_from([None, 2.0]),
    st.booleans(),
    st.sampled_from([1, 2, 4]),
)
@settings(max_examples=120, deadline=None)
def test_rows_of_stored_sequences(
    layout: Any, window: int | None, softcap: float | None, sinks: bool, kv_heads: int
) -> None:
    sequences, segments, rows, new = layout
    random = torch.Generator().manual_seed(1)
    keys, values = (torch.randn((CAPACITY, kv_heads, SIZE), generator=random) for _ in range(2))
    shape = Shape(0.5, window, softcap, torch.randn(HEADS, generator=random) if sinks else None)
    own = [sequences[which][token] for which, token in rows]  # the page of each row
    query = torch.randn((HEADS, len(rows), SIZE), generator=random)
    kv, old = KVPages(CAPACITY), [page for page in range(CAPACITY) if page not in own[len(own) - new :]]
    for pages_, given_ in zip(kv.layer(0, keys.transpose(0, 1), values.transpose(0, 1)), (keys, values), strict=True):
        pages_.fill_(1e3)[old] = given_[old]
    context = Context(Stored(kv))
    context.begin(segments)
    module = torch.nn.Module()
    module.layer_idx = 0
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(attention, "context_of", lambda module: context)
        patch.setattr(attention, "read_shape", lambda *read: shape)
        patch.setattr(attention, "_QUERY_ROWS", 3)
        k, v = (pages[own].transpose(0, 1)[None] for pages in (keys, values))
        got = packed_attention(module, query[None], k, v, None)[0][0]
    for row, (which, token) in enumerate(rows):
        seen = sequences[which][: token + 1]
        want = slow(query[:, row], keys[seen], values[seen], shape)
        torch.testing.assert_close(got[row].double(), want, atol=2e-5, rtol=1e-5)
