"""Models whose weights do not fit: read from disk layer by layer, once for all windows of a job.

A job's windows are packed into the same batches as those of a model in memory, and all batches go through one layer
before the next one is read (`layerwise.py`). So the numbers are the same to the last bit, and a pass over the weights
is shared by as many batches as a request brings. The rows that predict scored positions are kept in files, under the
hash of all that they depend on, until the job is answered: one that was killed does not compute them again. Heads are
multiplied tile by tile when all bodies have run: in memory where they fit, else in blocks of their rows.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import nn

from serve.config import EngineConfig
from serve.engine.attention import KVPages
from serve.engine.head import Head, OwnHead
from serve.engine.lanes import lanes
from serve.engine.layerwise import Forward, LayerByLayer, Stage, Sweep, snapshot
from serve.engine.longwindow import long_forwards, picked
from serve.engine.remembered import key_of
from serve.engine.rowfiles import RowFiles
from serve.engine.runner import Runner, Segment, make_runner
from serve.engine.selfcheck import Checked, prepare
from serve.errors import LoadFailed
from serve.models.cache import cache_root
from serve.models.load import LoadedModel
from serve.models.room import shown
from serve.models.stream import Piece, Rows, WeightStream

PASS_TOKENS = 1 << 16
"""Tokens of one pass over the weights, at most. Past some ten thousand, computing takes longer than reading."""
_LEAST_BATCH = 64  # tokens
_BLOCK = 64 << 20  # bytes of a head's rows that are multiplied together
_BLOCK_ROWS = 4096  # they are a multiple of this, where a product can be split without another last bit
_SHORT_HEAD = 4096  # rows of the head that the load-time check compares
_KERNELS = 1.25  # what a forward takes over what is counted: arrays inside kernels


@dataclass(frozen=True)
class Plan:
    """How a limit of memory is used. limit, tile_bytes, block: bytes; batch, pass_tokens: tokens.

    ahead: the next piece is read while one computes. spill: hidden rows lie in a file between two layers. whole_head:
    the head is in memory while tiles are multiplied, else `block` bytes of it at a time.
    """

    limit: int
    batch: int
    pass_tokens: int
    tile_bytes: int
    block: int
    ahead: bool
    spill: bool
    whole_head: bool

    def document(self) -> dict[str, Any]:
        """The plan as /v1/models shows it and a manifest records it."""
        return {"memory": self.limit, "batch_tokens": self.batch, "pass_tokens": self.pass_tokens}


def planned(stream: WeightStream, config: EngineConfig, *, name: str) -> Plan:
    """The plan that keeps within the stream's limit: as much side by side as fits, and the next layer read ahead.

    Raises LoadFailed where not even the smallest pieces fit, with the least that works.
    """
    text = stream.model.config.get_text_config()
    item = stream.head.dtype.itemsize
    hidden = stream.head.shape[1] * item
    rest = stream.models * stream.rest.bytes
    piece = max(piece.bytes for piece in stream.pieces)
    reading = max(piece.largest for piece in stream.pieces) * (3 if stream.converts else 1)

    def need(batch: int, *, ahead: bool, spill: bool) -> int:
        between = 2 * batch * hidden if spill else PASS_TOKENS * hidden
        weights = (1 + ahead) * piece + reading
        return int(rest + weights + between + _KERNELS * batch * _activation(text, item))

    batch = config.max_batch_tokens
    while True:
        kinds = ((True, False), (True, True), (False, True))
        fitting = next((k for k in kinds if need(batch, ahead=k[0], spill=k[1]) <= stream.limit), None)
        if fitting is not None or batch <= _LEAST_BATCH:
            break
        batch = max(_LEAST_BATCH, batch // 2)
    least = need(_LEAST_BATCH, ahead=False, spill=True)
    if fitting is None:
        raise LoadFailed(
            f"--memory {shown(stream.limit)} is too little to stream '{name}' layer by layer: its largest piece takes "
            f"{shown(piece)}, and with what computes beside it {shown(least)} is the least"
        )
    free = (stream.limit - rest) // stream.models
    head = stream.head.shape[0] * stream.head.row_bytes
    row = 4 * stream.head.shape[0]
    whole = head + 4 * config.tile_bytes <= free  # two lanes, each with tiles of two models
    tile = config.tile_bytes if whole else max(row, min(config.tile_bytes, free // 8))
    step = _BLOCK_ROWS * stream.head.row_bytes
    block = max(stream.head.row_bytes, min(max(_BLOCK // step, 1) * step, (free - 4 * tile) // 8))
    if not whole and block >= step:
        block = block // step * step
    return Plan(stream.limit, batch, PASS_TOKENS, tile, block, *fitting, whole)


def _activation(config: Any, item: int) -> int:
    """Bytes that one token takes in a layer's forward: its largest matrices of activations, and their products."""
    size = int(config.hidden_size)
    heads = int(getattr(config, "num_attention_heads", 1) or 1)
    head = int(getattr(config, "head_dim", None) or size // heads)
    kv = int(getattr(config, "num_key_value_heads", None) or heads)
    inner = max(
        int(getattr(config, n, None) or 0) for n in ("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_dim")
    )
    inner = inner or 4 * size
    chosen = int(getattr(config, "num_experts_per_tok", None) or 1)
    return item * (6 * size + 3 * inner * max(1, chosen) + 3 * heads * head + 4 * kv * head)


class StreamedModel:
    """The passes over one model's weights, and what the load-time check said of it."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        """Raises LoadFailed where the limit is too small, or the model does not repeat its own numbers."""
        if loaded.stream is None:
            raise LoadFailed(f"'{loaded.name}' is in memory: there is nothing to stream")
        for option, given in (("--deterministic", config.deterministic), ("--logits model", config.logits == "model")):
            if given:
                raise LoadFailed(
                    f"{option} needs the whole model in memory and '{loaded.name}' is streamed: leave it out"
                )
        self.loaded, self.stream = loaded, loaded.stream
        self.plan = planned(self.stream, config, name=loaded.name)
        self.stages = [self._stage(piece) for piece in self.stream.pieces]
        self.sweep: Sweep | None = None
        self.inner: Runner | None = None
        self._windows: list[KVPages] = []
        self.layers = LayerByLayer(
            self.stages,
            snapshot=lambda: snapshot(self.inner),
            ahead=self.plan.ahead,
            scratch=cache_root() / RowFiles.FOLDER,
            watch=self._note,
            always=True,
        )
        self._lend_experts()
        for module, rows in self.stream.embeddings.items():
            _read_by_rows(module, rows)
        checked = self._check(config)
        self.inner = make_runner(checked.runner.name, loaded)
        self.head = StreamedHead(loaded.model, self.stream.head, self.plan)
        self.runner = StreamedRunner(self)
        backend = f"{checked.backend}, weights streamed"
        self.checked = Checked(self.runner, self.head, backend, checked.deviation, checked.kl_floor)
        self.rows = StreamedRows(self)

    def run(self, forwards: Sequence[Forward], *, lanes: int = 1) -> list[torch.Tensor]:
        """What several forwards of the body give, in one pass over the weights; see `LayerByLayer.run`."""
        StreamedHead.let_all_go()
        try:
            return self.layers.run(forwards, spill=self.plan.spill, lanes=lanes)
        finally:
            self.sweep = None
            self._windows.clear()

    def through(self, batch: Sequence[tuple[int, ...]]) -> list[Forward]:
        """The forwards of a batch of sequences: one for all of them, or one for each chunk of a long one."""
        inner = self.runner.inner
        total = sum(map(len, batch))
        if total <= self.plan.batch or len(batch) > 1 or not inner.keeps_kv:
            tokens = [token for ids in batch for token in ids]
            segments, row = [], 0
            for ids in batch:
                segments.append(Segment(row, len(ids)))
                row += len(ids)
            return [lambda: inner.forward(tokens, segments)]
        kv = KVPages(total)
        self._windows.append(kv)
        return long_forwards(inner, batch[0], self.plan.batch, kv)

    def whole_head(self) -> torch.Tensor:
        """The output head's weight [vocabulary, size], read now."""
        return self.stream.head.span(0, self.stream.head.shape[0])

    def progress(self) -> dict[str, Any] | None:
        """How far the pass under way has come; None where none is."""
        sweep = self.sweep
        if sweep is None:
            return None
        seconds = time.monotonic() - sweep.began
        return {
            "model": self.loaded.name,
            "pieces": sweep.stages,
            "done": sweep.done,
            "bytes": sweep.bytes,
            "total_bytes": sweep.total_bytes,
            "seconds_left": seconds / sweep.done * (sweep.stages - sweep.done) if sweep.done else None,
        }

    def _note(self, sweep: Sweep) -> None:
        self.sweep = sweep

    def _stage(self, piece: Piece) -> Stage:
        indices = []
        module = None
        if piece.expert is None:
            module = self.stream.model.get_submodule(piece.name)
            indices = [m.layer_idx for m in module.modules() if isinstance(getattr(m, "layer_idx", None), int)]

        def drop() -> None:
            self.stream.drop(piece)
            for kv in self._windows:
                for index in indices:
                    kv.drop(index)
            give_memory_back()

        return Stage(
            piece.name,
            module,
            read=lambda: self.stream.read(piece),
            bring=lambda tensors: self.stream.bring(piece, tensors),
            drop=drop,
            weight=piece.file_bytes,
        )

    def _lend_experts(self) -> None:
        """Let modules whose experts are read one by one find each expert's weights where they index all of them."""
        for module, names in self.stream.experts.items():
            path = next(p for p, m in self.stream.model.named_modules() if m is module)
            own = [
                (p, s) for p, s in zip(self.stream.pieces, self.stages, strict=True) if p.name.startswith(f"{path} ")
            ]
            for name in names:
                module._parameters.pop(name)
                module.__dict__[name] = _Experts(f"{path}.{name}", own, self.layers)
        if self.stream.experts:
            self.stream.model.set_experts_implementation("eager")  # which takes one expert at a time

    def _check(self, config: EngineConfig) -> Checked:
        """`prepare` on as many layers as there are kinds of them, with the first rows of the head.

        Whether our forward is the model's own is a matter of its architecture: reading all layers a dozen times for it
        would take longer than many a measurement.
        """
        head = self.loaded.model.get_output_embeddings()
        kept = head._parameters["weight"]
        with self.stream.shallow():
            head._parameters["weight"] = nn.Parameter(
                self.stream.head.span(0, min(_SHORT_HEAD, self.stream.head.shape[0])), requires_grad=False
            )
            bias = head._parameters.get("bias")
            if bias is not None:
                head._parameters["bias"] = nn.Parameter(bias[:_SHORT_HEAD], requires_grad=False)
            try:
                checked = prepare(self.loaded)
            finally:
                head._parameters["weight"] = kept
                if bias is not None:
                    head._parameters["bias"] = bias
        if isinstance(checked.head, OwnHead):
            raise LoadFailed(
                f"the output head of '{self.loaded.name}' is not a plain product, so it cannot be multiplied in parts: "
                "load the model whole, with more --memory"
            )
        return checked


class StreamedRunner(Runner):
    """Runs another runner's forwards over streamed weights: every call is a pass. Keeps nothing between forwards."""

    name = "streamed"
    keeps_kv = False

    def __init__(self, model: StreamedModel) -> None:
        if model.inner is None:
            raise ValueError("the model is not checked yet")
        self.inner: Runner = model.inner
        self._model = model

    def regime(self, n: int) -> int:
        """See `Runner`."""
        return self.inner.regime(n)

    def forward(self, tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """See `Runner`. One pass over the weights."""
        (rows,) = self._model.run([lambda: self.inner.forward(tokens, segments)])
        return rows

    def _forward(self, tokens: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        return self.forward(tokens, segments)

    def allocate(self, pages: int) -> None:
        """Nothing is kept between forwards, so nothing is allocated."""


class StreamedHead(Head):
    """A head whose weight is read when tiles are multiplied: whole, or in blocks of its rows."""

    _all: ClassVar[WeakSet[StreamedHead]] = WeakSet()

    def __init__(self, model: Any, rows: Rows, plan: Plan) -> None:
        super().__init__(model)
        self._rows, self._plan = rows, plan
        self._held: torch.Tensor | None = None
        self._lock = threading.Lock()
        self._all.add(self)

    @classmethod
    def let_all_go(cls) -> None:
        """Free what heads hold: a body is about to run."""
        for head in cls._all:
            head._held = None
        give_memory_back()

    def _multiply(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        if self._plan.whole_head:
            with self._lock:  # several lanes multiply at once
                held = self._held = self._rows.span(0, self.vocab_size) if self._held is None else self._held
            self._product(held, hidden, out)
            return
        step = max(1, self._plan.block // self._rows.row_bytes)
        wide = hidden.float()
        for low in range(0, self.vocab_size, step):
            block = self._rows.span(low, min(low + step, self.vocab_size))
            out[:, low : low + step] = wide @ block.float().t()


class _Experts:
    """The weights of several experts, of which an index gives one, read when its turn comes."""

    def __init__(self, key: str, own: list[tuple[Piece, Stage]], layers: LayerByLayer) -> None:
        self._key, self._own, self._layers = key, own, layers

    def __getitem__(self, index: Any) -> torch.Tensor:
        piece, stage = self._own[int(index)]
        self._layers.need(stage)
        return piece.tensors[self._key]


class StreamedRows:
    """The scored rows of one model's batches: those that are expected are computed together, and kept in files."""

    def __init__(self, model: StreamedModel) -> None:
        self._model = model
        loaded, plan = model.loaded, model.plan
        self._files = RowFiles(
            cache_root() / RowFiles.FOLDER,
            [*key_of(loaded, own_head=False, deterministic=False), model.checked.backend],
        )
        self._expected: dict[str, _Expected] = {}
        self._batch = plan.batch
        self.computed = 0  # batches that were not found in files

    def expect(self, batches: Sequence[Any], *, shared: bool) -> None:
        """Announce batches of windows that will be asked for: the first that is missing brings all of them.

        shared: in memory, the windows of a batch would be shared among lanes (`serve.engine.pair`).
        """
        for batch in batches:
            groups = self._groups(batch) if shared else []
            name = self._files.name_of(batch)
            self._expected[name] = _Expected(f"{name}-{len(groups)}", batch, groups)

    def forget(self, batches: Sequence[Any]) -> None:
        """Remove what was kept of batches: their job is answered, or was given up."""
        for batch in batches:
            found = self._expected.pop(self._files.name_of(batch), None)
            if found is not None:
                self._files.remove(found.file)

    def of(self, windows: Sequence[Any]) -> torch.Tensor:
        """Hidden rows [positions of all windows, size] that predict the scored positions, in order."""
        name = self._files.name_of(windows)
        if name not in self._expected:
            self.expect([windows], shared=False)
        asked = self._expected[name]
        found = self._files.read(asked.file)
        if found is None:
            missing = [each for each in self._expected.values() if not self._files.has(each.file)]
            self._compute([each for each in missing if each.groups])
            self._compute([each for each in missing if not each.groups])
            found = self._files.read(asked.file)
        if found is None:
            raise LoadFailed(f"hidden rows cannot be kept in {self._files.folder}: is the disk full?")
        return found.to(self._model.stream.device)

    def _groups(self, batch: Sequence[Any]) -> list[Any]:
        """The groups in which lanes would run a batch, for a model in memory; none where it runs in one forward."""
        from serve.engine.pair import groups_of  # which needs this module

        inner = self._model.runner.inner
        alike = self._model.stream.device.type == "cpu" and inner.name == "packed" and inner.lengths.none
        return groups_of(list(batch), self._batch) if alike else []

    def _compute(self, missing: Sequence[_Expected]) -> None:
        """Run the batches, as many in one pass as the plan has, and write their rows."""
        model = self._model
        limit, context = model.plan.pass_tokens, model.loaded.context_length
        while missing:
            taken, tokens = 0, 0
            while taken < len(missing) and (not taken or tokens + _tokens(missing[taken].batch) <= limit):
                tokens += _tokens(missing[taken].batch)
                taken += 1
            forwards, ends = [], []
            for each in missing[:taken]:
                for part in each.groups or [each.batch]:
                    shown_ids = [window.ids[:context] for window in part]
                    forwards += picked(model.through(shown_ids), part, self._batch)
                ends.append(len(forwards))
            rows = model.run(forwards, lanes=lanes().count if missing[0].groups else 1)
            first = 0
            for each, end in zip(missing[:taken], ends, strict=True):
                self._files.write(each.file, torch.cat(rows[first:end]))
                first = end
                self.computed += 1
            missing = missing[taken:]


@dataclass(frozen=True)
class _Expected:
    """A batch that will be asked for. file: of its rows. groups: in which lanes run it; none = in one forward."""

    file: str
    batch: Any
    groups: list[Any]


def _tokens(batch: Sequence[Any]) -> int:
    return sum(len(window.ids) for window in batch)


def _read_by_rows(module: nn.Module, rows: Rows) -> None:
    """Let an embedding read the rows of the ids at hand, in the place of all of them."""
    one = threading.Lock()  # its weight is another one in every forward
    inside: set[int] = set()  # the thread that has it

    def enter(embedding: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = next(iter(kwargs)) if not args else None
        ids = kwargs[name] if name is not None else args[0]
        distinct, places = torch.unique(ids, return_inverse=True)
        weight = nn.Parameter(rows.pick(distinct.cpu()), requires_grad=False)
        one.acquire()
        inside.add(threading.get_ident())
        embedding._parameters["weight"] = weight
        embedding.padding_idx = None  # which would have to be one of these rows
        return ((places, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: places})

    def leave(embedding: Any, *_: Any) -> None:
        if threading.get_ident() in inside:  # not where reading failed
            embedding._parameters["weight"] = empty
            inside.clear()
            one.release()

    empty = module._parameters["weight"]
    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)


def give_memory_back() -> None:
    """Return freed memory to the system: glibc's allocator keeps it, and a layer's would add up to a model's."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def unified(models: Sequence[Any]) -> None:
    """Give models of one server the same batches and tiles, where some are streamed: they are scored side by side."""
    streamed = [model for model in models if model.streamed is not None]
    if not streamed:
        return
    batch = min(model.config.max_batch_tokens for model in models)
    rows = min(model.rows_per_tile for model in models)
    for model in models:
        model.config = replace(model.config, max_batch_tokens=batch)
        model.rows_per_tile = rows
