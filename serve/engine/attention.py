"""Packed attention: sequences of different lengths in one forward, no padding, keys and values in pages.

Registered with transformers' attention interface under NAME. A forward runs on input_ids [1, total];
`Context.segments` says which rows belong to which sequence. The attention of a row sees its own sequence's
earlier tokens only: those of this forward, and those whose keys and values lie in pages.

What each layer asks of it is read in `interface`.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from serve.engine.interface import Shape, context_of, read_shape, register
from serve.engine.runner import Segment
from serve.engine.transfer import Array, upload

NAME = "evalgate_packed"
_QUERY_ROWS = 1024  # rows of one masked attention call: bounds the mask to rows x keys
_SCORES = 1 << 26  # scores of one call that keeps them: bounds heads x rows x keys of eager attention to 256 MiB
_GROUP_KEYS = 1 << 16  # keys of one grouped decode call: bounds the gathered copy


class KVPages:
    """Keys and values of every layer, [capacity, kv heads, head size] each, allocated at first use.

    zero: fill them with zeros (otherwise they hold anything until written).
    """

    def __init__(self, capacity: int, *, zero: bool = False) -> None:
        self.capacity = capacity
        self._zero = zero
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's pages; key and value [kv heads, rows, size] give shape and dtype at first use."""
        if index not in self._layers:
            make = torch.zeros if self._zero else torch.empty
            self._layers[index] = (
                make((self.capacity, key.shape[0], key.shape[2]), dtype=key.dtype, device=key.device),
                make((self.capacity, value.shape[0], value.shape[2]), dtype=value.dtype, device=value.device),
            )
        return self._layers[index]

    def drop(self, index: int) -> None:
        """Free a layer's pages; what they held is lost."""
        self._layers.pop(index, None)

    @property
    def bytes(self) -> int:
        """Bytes allocated."""
        return sum(t.numel() * t.element_size() for pair in self._layers.values() for t in pair)


@dataclass
class Stored:
    """What all forwards of a model share. kv: None until pages are allocated."""

    kv: KVPages | None = None
    token_bytes: dict[int, int] = field(default_factory=dict)  # layer -> KV bytes of one token, learned in a forward


class Context(threading.local):
    """What the attention layers of one model read during a forward, set by the runner.

    Each thread has its own, so that several may be in a forward at once, as long as only one of them uses pages.
    """

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self.segments: tuple[Segment, ...] = ()
        self.seen = 0  # attention calls of this forward
        # segment's row -> its pages, and window -> groups of one-row segments, on each device that has layers
        self._index: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._groups: dict[tuple[int | None, torch.device], list[Group]] = {}
        self.together: list[Together] = []
        self._moved: dict[int, tuple[torch.Tensor, ...]] = {}  # of `together`, on the device

    def __deepcopy__(self, memo: object) -> Context:
        """Of a copied model: one without pages."""
        return Context(Stored())

    @property
    def kv(self) -> KVPages | None:
        """The pages."""
        return self.stored.kv

    def begin(self, segments: Sequence[Segment]) -> None:
        """Set the segments of the next forward."""
        self.together, self.segments = _together(segments) if self.kv is not None else ([], tuple(segments))
        self.seen = 0
        self._index, self._groups, self._moved = {}, {}, {}

    def page_index(self, segment: Segment, device: torch.device) -> torch.Tensor:
        """The segment's pages as an index tensor [start + length], made once per forward."""
        key = segment.row, device
        if key not in self._index:
            pages = segment.pages if isinstance(segment.pages, array) else array("q", segment.pages)
            (self._index[key],) = upload(device, np.array(pages))
        return self._index[key]

    def moved(self, part: Together, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The part's rows and tokens on the device, made once per forward."""
        key = part.last.row
        if key not in self._moved:
            self._moved[key] = upload(device, part.rows, part.tokens)
        return self._moved[key]

    def groups(self, singles: list[Segment], window: int | None, device: torch.device) -> list[Group]:
        """One-row segments in groups of similar length, made once per forward and window."""
        key = window, device
        if key not in self._groups:
            self._groups[key] = [_group(g, self, window, device) for g in _similar(singles)]
        return self._groups[key]


class Together(NamedTuple):
    """Stored segments of one sequence, or of its prefixes: their rows attend to one run of keys.

    rows [n]: of the forward. tokens [n]: their places in the sequence. last: the longest segment.
    """

    rows: Array
    tokens: Array
    last: Segment


class Group(NamedTuple):
    """Several one-row segments, keys padded to the longest: n segments, `longest` keys."""

    rows: torch.Tensor  # [n] rows of the forward
    pages: torch.Tensor  # [n * longest] pages, of the segment or (padding) page 0
    seen: torch.Tensor  # [n, 1, 1, longest] bool: not padding
    dead: torch.Tensor | None  # [n, 1, longest, 1] bool: padding; None where there is none
    longest: int


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over packed rows.

    query [1, heads, total, size], key and value [1, kv heads, total, size] -> [1, total, heads, size].
    """
    context: Context = context_of(module)
    shape = read_shape(module, query, attention_mask, kwargs)
    layer: int = module.layer_idx  # type: ignore[assignment]
    context.seen += 1
    q, k, v = query[0], key[0], value[0]
    context.stored.token_bytes[layer] = (k.shape[0] * k.shape[2] + v.shape[0] * v.shape[2]) * k.element_size()
    out = q.new_empty((q.shape[1], q.shape[0], v.shape[2]))  # [total, heads, size]
    singles = []
    for segment in context.segments:
        rows = slice(segment.row, segment.row + segment.length)
        if segment.pages and context.kv is not None:
            keys, values = context.kv.layer(layer, k, v)
            index = context.page_index(segment, k.device)
            if not segment.stored:
                new = index[segment.start :]
                keys.index_copy_(0, new, k[:, rows].transpose(0, 1))
                values.index_copy_(0, new, v[:, rows].transpose(0, 1))
            if segment.length == 1 and shape.plain:
                singles.append(segment)
                continue
        if segment.start == 0:
            out[rows] = _attend(q[:, rows], k[:, rows], v[:, rows], start=0, first=0, shape=shape)
            continue
        first = 0 if shape.window is None else max(0, segment.start - shape.window + 1)
        have = index[first:]
        past_k, past_v = _gather(keys, have), _gather(values, have)
        out[rows] = _attend(q[:, rows], past_k, past_v, start=segment.start, first=first, shape=shape)
    if context.kv is not None and (singles or context.together):
        keys, values = context.kv.layer(layer, k, v)
        for part in context.together:
            where, tokens = context.moved(part, q.device)
            index = context.page_index(part.last, q.device)
            first = 0 if shape.window is None else max(0, int(part.tokens.min()) - shape.window + 1)
            out[where] = _attend_together(q[:, where], keys, values, tokens, index, first, shape)
        for group in context.groups(singles, shape.window, q.device):
            out[group.rows] = _attend_singles(q[:, group.rows], keys, values, group, shape)
    return out[None], None


def _together(segments: Sequence[Segment]) -> tuple[list[Together], tuple[Segment, ...]]:
    """Stored segments whose pages are a prefix of a longer one's, two or more of a kind, and all other segments."""
    kinds: list[tuple[bytes, list[Segment]]] = []  # the longest one's pages, as bytes: quick to compare
    for segment in sorted((s for s in segments if s.stored), key=lambda s: len(s.pages), reverse=True):
        own = array("q", segment.pages).tobytes()
        kind = next((kind for whole, kind in kinds if whole.startswith(own)), None)
        if kind is None:
            kinds.append((own, [segment]))
        else:
            kind.append(segment)
    several = [kind for _, kind in kinds if len(kind) > 1]
    taken = {segment.row for kind in several for segment in kind}
    return [_joined(kind) for kind in several], tuple(s for s in segments if s.row not in taken)


def _joined(kind: list[Segment]) -> Together:
    rows = [row for s in kind for row in range(s.row, s.row + s.length)]
    tokens = [token for s in kind for token in range(s.start, s.start + s.length)]
    return Together(np.array(rows), np.array(tokens), kind[0])


def _attend_together(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tokens: torch.Tensor,
    index: torch.Tensor,
    first: int,
    shape: Shape,
) -> torch.Tensor:
    """Rows of one sequence anywhere in it, `tokens` [n] of it: q [heads, n, size] -> [n, heads, size].

    first: the first token that any of them sees.
    """
    k, v = _gather(keys, index[first:]), _gather(values, index[first:])
    attend = _sdpa if shape.plain else _eager
    step = _rows_at_once(q.shape[0], index.shape[0] - first, shape)
    parts = []
    for low in range(0, tokens.shape[0], step):
        at = tokens[low : low + step]
        distance = at[:, None] - torch.arange(first, index.shape[0], device=q.device)[None]
        seen = distance >= 0
        mask = seen if shape.window is None else seen & (distance < shape.window)
        parts.append(attend(q[:, low : low + step], k, v, shape, mask=mask, causal=False).transpose(0, 1))
    return torch.cat(parts)


def _gather(pages: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Pages [n, kv heads, size] of `index` as [kv heads, n, size]; a run of neighbours is not copied."""
    n = index.shape[0]
    if index.device.type == "cpu" and n > 1:
        low = int(index[0])
        if int(index[-1]) - low == n - 1 and bool((index[1:] - index[:-1] == 1).all()):
            return pages[low : low + n].transpose(0, 1)
    return pages.index_select(0, index).transpose(0, 1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, start: int, first: int, shape: Shape) -> torch.Tensor:
    """One sequence: q [heads, rows, size] are tokens start.., k and v [kv heads, keys, size] tokens first.. .

    Returns [rows, heads, size].
    """
    rows, keys = q.shape[1], k.shape[1]
    whole = first == 0 and start == 0 and (shape.window is None or rows <= shape.window)
    if shape.plain and whole:
        return _sdpa(q, k, v, shape, mask=None, causal=rows > 1).transpose(0, 1)
    step = _rows_at_once(q.shape[0], keys if shape.window is None else min(keys, shape.window + _QUERY_ROWS), shape)
    parts = []
    for low in range(0, rows, step):
        high = min(low + step, rows)
        # keys that rows [low, high) may see: token numbers [k_low, k_high)
        k_low = first if shape.window is None else max(first, start + low - shape.window + 1)
        k_high = min(start + high, first + keys)
        mask = _mask(start + low, start + high, k_low, k_high, shape.window, q.device)
        ks, vs = k[:, k_low - first : k_high - first], v[:, k_low - first : k_high - first]
        attend = _sdpa if shape.plain else _eager
        parts.append(attend(q[:, low:high], ks, vs, shape, mask=mask, causal=False).transpose(0, 1))
    return torch.cat(parts)


def _rows_at_once(heads: int, keys: int, shape: Shape) -> int:
    """Rows of one masked call: as many as bound the mask, and the scores where attention keeps them."""
    return _QUERY_ROWS if shape.plain else max(16, min(_QUERY_ROWS, _SCORES // max(1, heads * keys)))


def _mask(q_low: int, q_high: int, k_low: int, k_high: int, window: int | None, device: torch.device) -> torch.Tensor:
    """True where query token [q_low, q_high) sees key token [k_low, k_high)."""
    distance = torch.arange(q_low, q_high, device=device)[:, None] - torch.arange(k_low, k_high, device=device)[None]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _spread(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[kv heads, keys, size] -> [heads, keys, size]: query head h reads kv head h // (heads / kv heads)."""
    if x.shape[0] == heads:
        return x
    each = heads // x.shape[0]
    return x[:, None].expand(x.shape[0], each, *x.shape[1:]).reshape(heads, *x.shape[1:])


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Shape, *, mask: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    """Torch's fused attention. [heads, rows, size] in and out."""
    heads = q.shape[0]
    return F.scaled_dot_product_attention(
        q[None], _spread(k, heads)[None], _spread(v, heads)[None], attn_mask=mask, is_causal=causal, scale=shape.scaling
    )[0]


def _eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Shape, *, mask: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    """Attention with soft-capping and sinks, softmax in float32 as the models' own eager code has it."""
    heads = q.shape[0]
    scores = torch.matmul(q, _spread(k, heads).transpose(1, 2)) * shape.scaling
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if shape.sinks is not None:
        sinks = shape.sinks.reshape(-1, 1, 1).expand(-1, scores.shape[1], 1).to(scores.dtype)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores.float(), dim=-1).to(q.dtype)
    if shape.sinks is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights, _spread(v, heads))


def _similar(singles: list[Segment]) -> Iterator[list[Segment]]:
    """Split one-row segments into groups of similar length with a bounded sum of padded keys."""
    ordered = sorted(singles, key=lambda s: s.start, reverse=True)
    at = 0
    while at < len(ordered):
        size = max(1, _GROUP_KEYS // (ordered[at].start + 1))
        yield ordered[at : at + size]
        at += size


def _group(segments: list[Segment], context: Context, window: int | None, device: torch.device) -> Group:
    lengths = [s.start + 1 for s in segments]
    firsts = [0 if window is None else max(0, n - window) for n in lengths]
    longest = max(n - f for n, f in zip(lengths, firsts, strict=True))
    pages = torch.zeros((len(segments), longest), dtype=torch.long, device=device)
    seen = torch.zeros((len(segments), longest), dtype=torch.bool, device=device)
    for i, (segment, first, n) in enumerate(zip(segments, firsts, lengths, strict=True)):
        pages[i, : n - first] = context.page_index(segment, device)[first:n]
        seen[i, : n - first] = True
    (rows,) = upload(device, np.array([s.row for s in segments]))
    padded = any(n - f < longest for n, f in zip(lengths, firsts, strict=True))
    dead = ~seen[:, None, :, None] if padded else None
    return Group(rows, pages.reshape(-1), seen[:, None, None, :], dead, longest)


def _attend_singles(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: Group, shape: Shape
) -> torch.Tensor:
    """One new token each for several sequences: q [heads, n, size] -> [n, heads, size]."""
    heads, n = q.shape[0], q.shape[1]
    k = keys.index_select(0, group.pages).reshape(n, group.longest, *keys.shape[1:]).transpose(1, 2)
    v = values.index_select(0, group.pages).reshape(n, group.longest, *values.shape[1:]).transpose(1, 2)
    # heads of one kv head become query rows: [n, kv heads, heads per kv head, size]
    qs = q.transpose(0, 1).reshape(n, k.shape[1], heads // k.shape[1], q.shape[2])
    seen = None
    if group.dead is not None:
        # padded keys are garbage pages and may hold anything finite or not: zero them so that 0 * x stays 0
        k, v, seen = k.masked_fill(group.dead, 0), v.masked_fill(group.dead, 0), group.seen
    got = F.scaled_dot_product_attention(qs, k, v, attn_mask=seen, scale=shape.scaling)
    return got.reshape(n, heads, v.shape[3])


register(NAME, packed_attention)
