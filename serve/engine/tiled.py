"""The tiled runner: every kernel runs in one fixed shape, so that numbers do not depend on the batch.

A GEMM picks its blocking by the number of rows, so that the same token gets other last bits in another batch. In
one fixed shape, each row's result depends on that row alone (checked at load, in every place of a tile). So:

- the body runs on tiles of exactly TILE_ROWS rows: SLOTS slots of SLOT_ROWS rows, one sequence per slot, the
  rest filled up;
- all keys and values go through pages. A slot attends to blocks of KEY_BLOCK keys at fixed token numbers, one
  block after the other with a running maximum and sum (Milakov & Gimelshein, arXiv:1805.02867), in float32.
  A block that a row does not see changes nothing, to the last bit: its weights are exactly 0.

Cached keys and values have the bits that computing them again would give, so a request's numbers are the same
alone, in any batch, cold or cached, in any chunks. They hold for one machine, torch build and thread count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from serve.engine.attention import KVPages
from serve.engine.interface import Shape, context_of, install, read_shape, register
from serve.engine.packed import refuse_other_state
from serve.engine.runner import Runner, Segment, UnsupportedModel
from serve.models.body import body_of
from serve.models.load import LoadedModel

NAME = "evalgate_tiled"
SLOT_ROWS = 4
SLOTS = 8
TILE_ROWS = SLOT_ROWS * SLOTS
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
class Tile:
    """What the attention layers read during the forward of one tile."""

    kv: KVPages | None = None
    token_bytes: dict[int, int] = field(default_factory=dict)  # layer -> KV bytes of one token, learned in a forward
    seen: int = 0
    slots: tuple[Slot, ...] = ()
    writes: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))  # rows with new keys
    targets: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))  # and their pages
    _blocks: dict[int | None, list[Block]] = field(default_factory=dict)

    def begin(self, slots: Sequence[Slot], device: torch.device) -> None:
        """Set the slots of the next forward."""
        self.slots, self._blocks = tuple(slots), {}
        rows: list[int] = []
        pages: list[int] = []
        for at, slot in enumerate(slots):
            if not slot.segment.stored:
                rows.extend(range(at * SLOT_ROWS, at * SLOT_ROWS + slot.length))
                pages.extend(slot.segment.pages[slot.start : slot.start + slot.length])
        self.writes = torch.as_tensor(rows, dtype=torch.long, device=device)
        self.targets = torch.as_tensor(pages, dtype=torch.long, device=device)

    def blocks(self, window: int | None, zero_page: int, device: torch.device) -> list[Block]:
        """The key blocks that some row of the tile sees, made once per forward and window."""
        if window not in self._blocks:
            self._blocks[window] = list(_blocks(self.slots, window, zero_page, device))
        return self._blocks[window]


def _blocks(slots: Sequence[Slot], window: int | None, zero_page: int, device: torch.device) -> Iterator[Block]:
    starts = [0 if window is None else max(0, slot.start - window + 1) for slot in slots]
    ends = [slot.start + slot.length for slot in slots]
    query = torch.full((SLOTS, SLOT_ROWS), -1, dtype=torch.long)  # a filled-up row sees nothing
    for at, slot in enumerate(slots):
        query[at, : slot.length] = torch.arange(slot.start, slot.start + slot.length)
    first, last = min(starts) // KEY_BLOCK, -(-max(ends) // KEY_BLOCK)
    for low in range(first * KEY_BLOCK, last * KEY_BLOCK, KEY_BLOCK):
        pages = torch.full((SLOTS, KEY_BLOCK), zero_page, dtype=torch.long)
        for at, (slot, end) in enumerate(zip(slots, ends, strict=True)):
            high = min(low + KEY_BLOCK, end)
            if high > low:
                pages[at, : high - low] = torch.as_tensor(slot.segment.pages[low:high], dtype=torch.long)
        distance = query[:, :, None] - torch.arange(low, low + KEY_BLOCK)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        yield Block(pages.reshape(-1).to(device), hidden.to(device))


def tiled_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one tile.

    query [1, heads, TILE_ROWS, size], key and value [1, kv heads, TILE_ROWS, size] -> [1, TILE_ROWS, heads, size].
    """
    tile: Tile = context_of(module)
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
    return _attend(q, keys, values, blocks, shape)[None], None


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
        self.tile = Tile()
        install(loaded.model, self.tile, NAME)

    def _forward(self, tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Hidden rows [total, size] of the packed tokens; `segments` tile [0, total)."""
        slots = [
            Slot(segment.row + at, min(SLOT_ROWS, segment.length - at), segment.start + at, segment)
            for segment in segments
            for at in range(0, segment.length, SLOT_ROWS)
        ]
        out: torch.Tensor | None = None
        for low in range(0, len(slots), SLOTS):
            tile = slots[low : low + SLOTS]
            hidden = self._forward_tile(tokens, tile)
            if out is None:
                out = hidden.new_empty((len(tokens), hidden.shape[1]))
            for at, slot in enumerate(tile):
                out[slot.row : slot.row + slot.length] = hidden[at * SLOT_ROWS : at * SLOT_ROWS + slot.length]
        if out is None:
            raise ValueError("a forward needs at least one token")
        return out

    def _forward_tile(self, tokens: Sequence[int], slots: list[Slot]) -> torch.Tensor:
        ids = torch.zeros((1, TILE_ROWS), dtype=torch.long)
        positions = torch.zeros_like(ids)
        for at, slot in enumerate(slots):
            rows = slice(at * SLOT_ROWS, at * SLOT_ROWS + slot.length)
            ids[0, rows] = torch.as_tensor(tokens[slot.row : slot.row + slot.length])
            positions[0, rows] = torch.arange(slot.start, slot.start + slot.length)
        self.tile.begin(slots, self._device)
        self.tile.seen = 0
        with torch.inference_mode():
            out = self._body(input_ids=ids.to(self._device), position_ids=positions.to(self._device), use_cache=False)
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


def refuse_experts(model: Any) -> None:
    """Raise UnsupportedModel for a mixture of experts: how many rows an expert gets depends on the batch."""
    config = model.config.get_text_config()
    for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        if int(getattr(config, name, None) or 0) > 1:
            raise UnsupportedModel("it routes tokens to experts, which then run in batches of varying shape")


register(NAME, tiled_attention)
