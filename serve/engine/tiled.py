"""The tiled runner: every kernel runs in one fixed shape, so that numbers do not depend on the batch.

A GEMM picks its blocking by the number of rows, so that the same token gets other last bits in another batch. In
one fixed shape, each row's result depends on that row alone (checked at load, in every place of a tile). So:

- the body runs on tiles of exactly TILE_ROWS rows: SLOTS slots of SLOT_ROWS rows, one sequence per slot, the
  rest filled up. Up to WIDE tiles go through it side by side: what a layer does to each number alone it does to all of
  them, and matrix products and attention, which are what picks a way by the number of rows, take a tile at a time;
- all keys and values go through pages. A slot attends to blocks of KEY_BLOCK keys at fixed token numbers, one
  block after the other with a running maximum and sum (Milakov & Gimelshein, arXiv:1805.02867), in float32.
  A block that a row does not see changes nothing, to the last bit: its weights are exactly 0.

Cached keys and values have the bits that computing them again would give, so a request's numbers are the same
alone, in any batch, cold or cached, in any chunks. They hold for one machine, torch build and thread count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from serve.engine.attention import KVPages
from serve.engine.interface import Shape, context_of, install, read_shape, register
from serve.engine.packed import refuse_other_state
from serve.engine.runner import Runner, Segment, UnsupportedModel
from serve.engine.transfer import upload
from serve.models.body import body_of
from serve.models.load import LoadedModel

NAME = "evalgate_tiled"
SLOT_ROWS = 4
SLOTS = 8
TILE_ROWS = SLOT_ROWS * SLOTS
WIDE = 16  # tiles that run side by side
KEY_BLOCK = 64
_NEVER = -1e30  # below every score, and finite, so that exp(_NEVER - maximum) is 0 and never NaN


class Slot(NamedTuple):
    """Up to SLOT_ROWS tokens [start, start + length) of one sequence; `row`: their place in the packed input."""

    row: int
    length: int
    start: int
    segment: Segment


class Block(NamedTuple):
    """One block of keys of every slot of a tile."""

    pages: torch.Tensor  # [SLOTS * KEY_BLOCK], the zero page where a slot has no key
    hidden: torch.Tensor  # [SLOTS, SLOT_ROWS, KEY_BLOCK] bool: the row does not see the key


@dataclass
class Tiles:
    """What the attention layers read during a forward of some tiles."""

    kv: KVPages | None = None
    token_bytes: dict[int, int] = field(default_factory=dict)  # layer -> KV bytes of one token, learned in a forward
    seen: int = 0
    tiles: tuple[tuple[Slot, ...], ...] = ()
    writes: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))  # rows with new keys
    targets: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))  # and their pages
    _blocks: dict[int | None, list[list[Block]]] = field(default_factory=dict)

    def begin(self, slots: Sequence[Slot], device: torch.device) -> None:
        """Set the slots of the next forward."""
        self.tiles = tuple(tuple(slots[low : low + SLOTS]) for low in range(0, len(slots), SLOTS))
        self._blocks = {}
        rows: list[int] = []
        pages: list[int] = []
        for at, slot in enumerate(slots):
            if not slot.segment.stored:
                rows.extend(range(at * SLOT_ROWS, at * SLOT_ROWS + slot.length))
                pages.extend(slot.segment.pages[slot.start : slot.start + slot.length])
        self.writes, self.targets = upload(device, np.array(rows, dtype=np.int64), np.array(pages, dtype=np.int64))

    def blocks(self, window: int | None, zero_page: int, device: torch.device) -> list[list[Block]]:
        """The key blocks that some row of each tile sees, made once per forward and window."""
        if window not in self._blocks:
            self._blocks[window] = [list(_blocks(slots, window, zero_page, device)) for slots in self.tiles]
        return self._blocks[window]


def _blocks(slots: Sequence[Slot], window: int | None, zero_page: int, device: torch.device) -> Iterator[Block]:
    starts = [0 if window is None else max(0, slot.start - window + 1) for slot in slots]
    ends = [slot.start + slot.length for slot in slots]
    query = np.full((SLOTS, SLOT_ROWS), -1, dtype=np.int64)  # a filled-up row sees nothing
    for at, slot in enumerate(slots):
        query[at, : slot.length] = np.arange(slot.start, slot.start + slot.length)
    first, last = min(starts) // KEY_BLOCK, -(-max(ends) // KEY_BLOCK)
    for low in range(first * KEY_BLOCK, last * KEY_BLOCK, KEY_BLOCK):
        pages = np.full((SLOTS, KEY_BLOCK), zero_page, dtype=np.int64)
        for at, (slot, end) in enumerate(zip(slots, ends, strict=True)):
            high = min(low + KEY_BLOCK, end)
            if high > low:
                pages[at, : high - low] = slot.segment.pages[low:high]
        distance = query[:, :, None] - np.arange(low, low + KEY_BLOCK)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        yield Block(*upload(device, pages.reshape(-1), hidden))


def tiled_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of n tiles, one by one.

    query [1, heads, n * TILE_ROWS, size], key and value [1, kv heads, n * TILE_ROWS, size] ->
    [1, n * TILE_ROWS, heads, size].
    """
    tile: Tiles = context_of(module)
    shape = read_shape(module, query, attention_mask, kwargs)
    layer: int = module.layer_idx  # type: ignore[assignment]
    tile.seen += 1
    q, k, v = query[0], key[0], value[0]
    tile.token_bytes[layer] = (k.shape[0] * k.shape[2] + v.shape[0] * v.shape[2]) * k.element_size()
    if tile.kv is None:
        raise UnsupportedModel("the tiled runner needs pages")
    keys, values = tile.kv.layer(layer, k, v)
    keys.index_copy_(0, tile.targets, k[:, tile.writes].transpose(0, 1))
    values.index_copy_(0, tile.targets, v[:, tile.writes].transpose(0, 1))
    blocks = tile.blocks(shape.window, tile.kv.capacity - 1, q.device)
    split = torch.split(q, TILE_ROWS, dim=1)
    out = [_attend(part, keys, values, seen, shape) for part, seen in zip(split, blocks, strict=True)]
    return (out[0] if len(out) == 1 else torch.cat(out))[None], None


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, blocks: list[Block], shape: Shape
) -> torch.Tensor:
    """q [heads, TILE_ROWS, size] against key blocks, in order: [TILE_ROWS, heads, size]."""
    heads, kv_heads = q.shape[0], keys.shape[1]
    each = heads // kv_heads
    batch, rows = SLOTS * kv_heads, each * SLOT_ROWS
    # [batch = slot x kv head, rows = heads of that kv head x rows of the slot, size]
    split = q.reshape(kv_heads, each, SLOTS, SLOT_ROWS, q.shape[2]).permute(2, 0, 1, 3, 4)
    qs = split.reshape(batch, rows, q.shape[2]).float()
    peak = torch.full((batch, rows, 1), _NEVER, device=q.device)
    total = torch.zeros_like(peak)
    if shape.sinks is not None:  # a key without value that every row sees first
        sinks = shape.sinks.float().reshape(1, kv_heads, each, 1, 1).expand(SLOTS, -1, -1, SLOT_ROWS, -1)
        peak, total = sinks.reshape(batch, rows, 1).contiguous(), torch.ones_like(peak)
    acc = torch.zeros((batch, rows, values.shape[2]), device=q.device)
    for block in blocks:
        k, v = _gather(keys, block.pages), _gather(values, block.pages)
        scores = torch.bmm(qs, k.transpose(1, 2)) * shape.scaling
        if shape.softcap is not None:
            scores = torch.tanh(scores / shape.softcap) * shape.softcap
        hidden = block.hidden[:, None, None].expand(-1, kv_heads, each, -1, -1).reshape(batch, rows, KEY_BLOCK)
        scores.masked_fill_(hidden, -torch.inf)
        higher = torch.maximum(peak, scores.amax(2, keepdim=True))
        weights, fade = torch.exp(scores - higher), torch.exp(peak - higher)
        total = total * fade + weights.sum(2, keepdim=True)
        acc = acc * fade + torch.bmm(weights, v)
        peak = higher
    # a filled-up row has seen nothing: 0 / 1
    out = acc / torch.where(total == 0, 1.0, total)
    back = out.reshape(SLOTS, kv_heads, each, SLOT_ROWS, -1).permute(0, 3, 1, 2, 4)
    return back.reshape(TILE_ROWS, heads, -1).to(q.dtype)


def _gather(pages: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Pages [n, kv heads, size] of a block as [SLOTS * kv heads, KEY_BLOCK, size] float32."""
    got = pages.index_select(0, index).reshape(SLOTS, KEY_BLOCK, *pages.shape[1:]).transpose(1, 2)
    return got.reshape(SLOTS * pages.shape[1], KEY_BLOCK, pages.shape[2]).float()


class TiledRunner(Runner):
    """Runs a model's body tile by tile. Segments must have pages."""

    name = "tiled"
    keeps_kv = True
    needs_pages = True

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        refuse_other_state(loaded.model)
        refuse_experts(loaded.model)
        self._body: Any = body_of(loaded.model)
        self._device = loaded.device
        self.tile = Tiles()
        self.wide = 1  # tiles side by side; `tilecheck` allows WIDE
        install(loaded.model, self.tile, NAME)
        for module in self._body.modules():
            if _multiplies(module):
                module.forward = partial(_tile_by_tile, module.forward)

    def _forward(self, tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Hidden rows [total, size] of the packed tokens; `segments` tile [0, total)."""
        slots = [
            Slot(segment.row + at, min(SLOT_ROWS, segment.length - at), segment.start + at, segment)
            for segment in segments
            for at in range(0, segment.length, SLOT_ROWS)
        ]
        out: torch.Tensor | None = None
        for low in range(0, len(slots), SLOTS * self.wide):
            tile = slots[low : low + SLOTS * self.wide]
            hidden = self._forward_tiles(tokens, tile)
            if out is None:
                out = hidden.new_empty((len(tokens), hidden.shape[1]))
            for at, slot in enumerate(tile):
                out[slot.row : slot.row + slot.length] = hidden[at * SLOT_ROWS : at * SLOT_ROWS + slot.length]
        if out is None:
            raise ValueError("a forward needs at least one token")
        return out

    def _forward_tiles(self, tokens: Sequence[int], slots: list[Slot]) -> torch.Tensor:
        ids = np.zeros((1, -(-len(slots) // SLOTS) * TILE_ROWS), dtype=np.int64)
        positions = np.zeros_like(ids)
        for at, slot in enumerate(slots):
            rows = slice(at * SLOT_ROWS, at * SLOT_ROWS + slot.length)
            ids[0, rows] = tokens[slot.row : slot.row + slot.length]
            positions[0, rows] = np.arange(slot.start, slot.start + slot.length)
        self.tile.begin(slots, self._device)
        self.tile.seen = 0
        with torch.inference_mode():
            given, places = upload(self._device, ids, positions)
            out = self._body(input_ids=given, position_ids=places, use_cache=False)
        if self.tile.seen == 0:
            raise UnsupportedModel("its layers do not go through the attention interface")
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers, known after the first forward."""
        return sum(self.tile.token_bytes.values())

    def allocate(self, pages: int) -> None:
        """Make room for `pages` tokens, and one page of zeros that stands for keys that are not there."""
        self.tile.kv = KVPages(pages + 1, zero=True)


def _multiplies(module: torch.nn.Module) -> bool:
    """Whether it multiplies its rows with a matrix: a layer without parts that has one, other than a table of rows."""
    weight = getattr(module, "weight", None)
    table = isinstance(module, torch.nn.Embedding)
    return not table and not any(module.children()) and isinstance(weight, torch.Tensor) and weight.ndim >= 2


def _tile_by_tile(forward: Callable[..., torch.Tensor], x: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
    """A layer's output, from products of TILE_ROWS rows each. x: [..., rows, size] or [rows, size]."""
    if x.ndim < 2 or x.shape[-2] <= TILE_ROWS or x.shape[-2] % TILE_ROWS:
        return forward(x, *rest, **more)
    return torch.cat([forward(part, *rest, **more) for part in torch.split(x, TILE_ROWS, dim=-2)], dim=-2)


def refuse_experts(model: Any) -> None:
    """Raise UnsupportedModel for a mixture of experts: how many rows an expert gets depends on the batch."""
    config = model.config.get_text_config()
    for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        if int(getattr(config, name, None) or 0) > 1:
            raise UnsupportedModel("it routes tokens to experts, which then run in batches of varying shape")


register(NAME, tiled_attention)
