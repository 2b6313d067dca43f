"""The weights of one model, read from its files piece by piece, while nothing else of it is in memory.

A piece is a layer, or where a layer does not fit, what it has besides its experts, and then each expert. Embeddings are
read row by row for the tokens at hand. What is left (norms) stays in memory. A piece is read by transformers' own
loader into a shadow of the model that never runs, on any thread, converted there, and then handed to the model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers.utils.logging import disable_progress_bar

from serve.errors import LoadFailed
from serve.models.body import body_of
from serve.models.checks import check_finite
from serve.models.conversions import Conversion
from serve.models.conversions._base import Change, copy_sharing
from serve.models.skeleton import Skeleton
from serve.models.tensorfiles import Stored

_LAYER = re.compile(r"(.*?\.\d+)(?:\.|$)")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ELSEWHERE = "\0"  # a device map that names a disk makes the loader read one tensor after the other


@dataclass
class Piece:
    """Weights that are read together. keys: of the state dict. bytes: in memory, as the model holds them.

    expert: its number, for one of several experts whose weights are one tensor; tensors: that expert's, once read.
    """

    name: str
    keys: list[str]
    stored: dict[str, Stored]
    bytes: int
    expert: int | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def file_bytes(self) -> int:
        """Bytes in its files."""
        return sum(tensor.file_bytes for tensor in self.stored.values())

    @property
    def largest(self) -> int:
        """Bytes of its largest tensor in memory or in its files: what reading takes beside the piece itself."""
        return max((tensor.file_bytes for tensor in self.stored.values()), default=0)


@dataclass(frozen=True)
class Rows:
    """A tensor whose rows are read apart: an embedding, or the output head."""

    stored: Stored
    dtype: torch.dtype
    device: torch.device
    change: Change | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""
        return self.stored.shape

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return self.stored.shape[-1] * self.dtype.itemsize

    def pick(self, index: torch.Tensor) -> torch.Tensor:
        """The rows of ascending numbers."""
        return self._made(self.stored.rows(index.tolist()))

    def span(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop)."""
        return self._made(self.stored.rows(range(start, stop)))

    def _made(self, rows: torch.Tensor) -> torch.Tensor:
        made = rows.to(device=self.device, dtype=self.dtype)
        return made if self.change is None else self.change(made)


class WeightStream:
    """Where the weights of `model` (on the meta device) come from. Reading is safe from one other thread at a time."""

    def __init__(
        self, skeleton: Skeleton, conversion: Conversion | None, *, name: str, device: str, split_above: int
    ) -> None:
        """Prepare a converted copy of the skeleton. split_above: bytes of a layer that is read expert by expert.

        Raises LoadFailed for a model whose weights cannot be taken apart.
        """
        base = skeleton.model
        changes = {} if conversion is None else conversion.changes(base, name=name)
        casts = conversion is not None and conversion.dtype is not None
        self.model: Any = conversion.apply(base, name=name)[0] if casts and conversion else copy_sharing(base, {})
        self.scheme = "" if conversion is None else conversion.scheme(self.model, name=name)
        self.name = name
        self.device = torch.device(device)
        self._skeleton = skeleton
        disable_progress_bar()  # one for every piece
        self._changes: Mapping[str, Change] = changes
        self._by_rows = conversion is None or conversion.by_rows
        self._shadow = copy.deepcopy(self.model)
        self._load = replace(skeleton.load, device_map={"": self.device, _ELSEWHERE: "disk"})
        self._checked: set[str] = set()
        self._empty: dict[str, torch.Tensor] = {}
        self.limit = 0  # bytes that all models of the server may take, and how many those are
        self.models = 1
        self.converts = bool(changes)
        self.embeddings: dict[nn.Module, Rows] = {}
        self.experts: dict[nn.Module, list[str]] = {}  # modules whose weights are read expert by expert: their names
        self.pieces: list[Piece] = []
        self._owners: list[str] = []
        self.rest, self.head = self._take_apart(split_above)
        self.bring(self.rest)

    @property
    def bytes_read(self) -> int:
        """Bytes read from the files so far, by every model of the same source."""
        return self._skeleton.bytes_read

    @property
    def bytes(self) -> int:
        """Bytes of all weights, as the model would hold them in memory."""
        heads = [self.head, *self.embeddings.values()]
        own = {id(rows.stored): rows.shape[0] * rows.row_bytes for rows in heads}
        return sum(piece.bytes for piece in [self.rest, *self.pieces]) + sum(own.values())

    def read(self, piece: Piece) -> dict[str, torch.Tensor]:
        """A piece's tensors by their keys, from its files. Raises LoadFailed, and ServeError for a file that was
        cut."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model

        for key in piece.keys:
            _put(self._shadow, key, self._placeholder(key, piece))
        info, _ = convert_and_load_state_dict_in_model(
            model=self._shadow, state_dict=dict(piece.stored), load_config=self._load
        )
        wrong = [*map(str, info.error_msgs), *map(str, info.conversion_errors.values())]
        if wrong or info.mismatched_keys:
            shapes = [f"{key} {list(got)} for {list(want)}" for key, got, want in info.mismatched_keys]
            raise LoadFailed(f"'{self.name}' cannot be read: {'; '.join([*wrong, *shapes])}")
        found: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for key in piece.keys:
                tensor = _get(self._shadow, key)
                _put(self._shadow, key, self._meta(key))
                if tensor.is_meta:
                    raise LoadFailed(f"'{self.name}' lacks {key}: get the complete checkpoint")
                change = self._changes.get(key)
                value = tensor.detach() if change is None else change(tensor.detach())
                found[key] = nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value
        self._check_finite(piece, found)
        return found

    def bring(self, piece: Piece, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Give the model a piece's tensors, read now where they are not given."""
        tensors = self.read(piece) if tensors is None else tensors
        if piece.expert is not None:
            piece.tensors = {key: tensor[0] for key, tensor in tensors.items()}
            return
        for key, tensor in tensors.items():
            _put(self.model, key, tensor)

    def drop(self, piece: Piece) -> None:
        """Take a piece's tensors from the model, so that their memory is free."""
        if piece.expert is not None:
            piece.tensors = {}
            return
        for key in piece.keys:
            _put(self.model, key, self._meta(key))

    @contextmanager
    def shallow(self) -> Iterator[None]:
        """Inside the block the model has only as many layers as it takes to have one of each kind."""
        owners = {path.rpartition(".")[0] for path in self._owners}
        kinds = [self._kind(path, number) for number, path in enumerate(self._owners)]
        depth = max(kinds.index(kind) for kind in kinds) + 1
        config = self.model.config.get_text_config()
        if len(owners) > 1 or depth >= len(kinds):
            yield
            return
        parent, _, name = owners.pop().rpartition(".")
        holder = self.model.get_submodule(parent)
        layers, count = getattr(holder, name), config.num_hidden_layers
        setattr(holder, name, nn.ModuleList(list(layers)[:depth]))
        config.num_hidden_layers = depth
        try:
            yield
        finally:
            setattr(holder, name, layers)
            config.num_hidden_layers = count

    def _kind(self, path: str, number: int) -> tuple[Any, ...]:
        """What tells a layer from another one: its tensors, its modules and what the configuration calls it."""
        module = self.model.get_submodule(path)
        config = self.model.config.get_text_config()
        lists = (getattr(config, name, None) for name in ("layer_types", "mlp_layer_types", "layers_block_type"))
        named = tuple(found[number] for found in lists if isinstance(found, list) and number < len(found))
        tensors = tuple(
            (key.removeprefix(path), tuple(t.shape)) for key, t in self._empty.items() if key.startswith(f"{path}.")
        )
        return (*named, tensors, tuple(type(m).__name__ for m in module.modules()))

    def _check_finite(self, piece: Piece, tensors: Mapping[str, torch.Tensor]) -> None:
        if piece.name not in self._checked:
            holder = nn.Module()
            for number, (key, tensor) in enumerate(tensors.items()):
                holder.register_buffer(f"t{number}", tensor)
                try:
                    check_finite(holder, name=self.name)
                except LoadFailed:
                    raise LoadFailed(
                        f"'{self.name}' has NaN or infinity in '{key}': the checkpoint or its conversion is broken"
                    ) from None
                del holder._buffers[f"t{number}"]
            self._checked.add(piece.name)

    def _meta(self, key: str) -> torch.Tensor:
        return self._empty[key]

    def _placeholder(self, key: str, piece: Piece) -> torch.Tensor:
        """The tensor without data that the loader fills; of one expert alone, where it is one of several."""
        empty = self._empty[key]
        if piece.expert is None:
            return empty
        return nn.Parameter(empty.detach()[:1].clone(), requires_grad=False)

    def _take_apart(self, split_above: int) -> tuple[Piece, Rows]:
        state = self.model.state_dict(keep_vars=True)
        self._empty = dict(state)
        of_key: dict[str, dict[str, Stored]] = {}
        for stored_name, key in self._skeleton.targets.items():
            of_key.setdefault(key, {})[stored_name] = self._skeleton.tensors[stored_name]
        together = self._together(of_key, set(state))
        tied = dict(self.model.all_tied_weights_keys)
        names = {module: path for path, module in self.model.named_modules()}
        head = self._head(of_key, tied, names)
        taken = {f"{names[self.model.get_output_embeddings()]}.weight", *tied}
        for path, module in list(self.model.named_modules()):
            key = f"{path}.weight"
            if isinstance(module, nn.Embedding) and not _LAYER.match(path):
                rows = self._rows(of_key, tied.get(key, key))
                if rows is not None:
                    self.embeddings[module] = rows
                    taken.add(key)
        owners = self._owners = layer_paths(self.model)
        keys: dict[str, list[str]] = {path: [] for path in owners}
        rest: list[str] = []
        for key in state:
            if key in taken or isinstance(tied.get(key), str):
                continue
            match = _LAYER.match(key)
            keys.get(match[1] if match else "", rest).append(key)
        for path in owners:
            self.pieces.extend(self._of_layer(path, keys[path], together, split_above))
        return self._piece("the parts outside its layers", rest, together), head

    def _together(self, of_key: Mapping[str, dict[str, Stored]], state: set[str]) -> dict[str, dict[str, Stored]]:
        """By key, the stored tensors that it is made of; keys that are made of one tensor together share them."""
        found = {key: dict(stored) for key, stored in of_key.items()}
        from transformers.core_model_loading import WeightConverter

        for converter in self._skeleton.load.weight_mapping or []:
            if isinstance(converter, WeightConverter) and len(converter.target_patterns) > 1:
                first, *others = converter.target_patterns
                for key, stored in of_key.items():
                    for other in others:
                        sibling = key.replace(first, other)
                        if first in key and sibling in state and sibling not in of_key:
                            found[sibling] = dict(stored)
        return found

    def _of_layer(
        self, path: str, keys: list[str], together: Mapping[str, dict[str, Stored]], split_above: int
    ) -> Iterator[Piece]:
        """A layer as one piece, or what it has besides its experts, and each of them."""
        whole = self._piece(path, keys, together)
        fused = [key for key in keys if self._is_of_experts(key)]
        if whole.bytes <= split_above or not fused or not (self._by_rows or not any(k in self._changes for k in fused)):
            yield whole
            return
        yield self._piece(path, [key for key in keys if key not in fused], together)
        for module_path in dict.fromkeys(key.rpartition(".")[0] for key in fused):
            own = [key for key in fused if key.rpartition(".")[0] == module_path]
            module = self.model.get_submodule(module_path)
            self.experts[module] = [key.rpartition(".")[2] for key in own]
            for expert in range(self._empty[own[0]].shape[0]):
                stored = {
                    name: tensor.part(expert, expert + 1) if found is None else tensor
                    for key in own
                    for name, tensor in together.get(key, {}).items()
                    for found in [_EXPERT.search(name)]
                    if found is None or int(found[1]) == expert
                }
                size = sum(_size(self._empty[key]) // self._empty[key].shape[0] for key in own)
                yield Piece(f"{module_path} {expert}", own, stored, size, expert)

    def _is_of_experts(self, key: str) -> bool:
        tensor = self._empty[key]
        module = self.model.get_submodule(key.rpartition(".")[0])
        experts = getattr(module, "num_experts", None)
        return "experts" in key and tensor.ndim >= 2 and isinstance(experts, int) and tensor.shape[0] == experts > 1

    def _piece(self, name: str, keys: list[str], together: Mapping[str, dict[str, Stored]]) -> Piece:
        stored = {n: tensor for key in keys for n, tensor in together.get(key, {}).items()}
        return Piece(name, keys, stored, sum(_size(self._empty[key]) for key in keys))

    def _head(self, of_key: Mapping[str, dict[str, Stored]], tied: Mapping[str, str], names: Mapping[Any, str]) -> Rows:
        head = self.model.get_output_embeddings()
        key = f"{names[head]}.weight"
        rows = self._rows(of_key, tied.get(key, key)) if type(head) is nn.Linear else None
        if rows is None:
            raise LoadFailed(
                f"'{self.name}' keeps its output head in a form that cannot be read in parts: load the model whole, "
                f"with "
                "more --memory"
            )
        return rows

    def _rows(self, of_key: Mapping[str, dict[str, Stored]], key: str) -> Rows | None:
        """The tensor of a key where its rows can be read apart: it is stored as it is used."""
        stored = list(of_key.get(key, {}).values())
        empty = self._empty[key]
        if key in self._changes and not self._by_rows:
            return None
        if len(stored) != 1 or tuple(stored[0].shape) != tuple(empty.shape) or not getattr(stored[0], "by_rows", True):
            return None
        return Rows(stored[0], empty.dtype, self.device, self._changes.get(key))


def layer_paths(model: Any) -> list[str]:
    """Paths of the decoder's layers, in the order in which they run. Raises LoadFailed where they have no numbers."""
    body = body_of(model)
    own = next(path for path, module in model.named_modules() if module is body)
    found: dict[str, None] = {}
    for path, module in body.named_modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            match = _LAYER.match(f"{own}.{path}" if own else path)
            if match:
                lists = match[1].rpartition(".")[0]
                found.update({f"{lists}.{number}": None for number in range(len(model.get_submodule(lists)))})
    if not found:
        raise LoadFailed(f"{type(model).__name__} has no numbered layers: they cannot be run one by one")
    return list(found)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _get(model: Any, key: str) -> torch.Tensor:
    path, _, name = key.rpartition(".")
    module = model.get_submodule(path)
    found: torch.Tensor = module._parameters[name] if name in module._parameters else module._buffers[name]
    return found


def _put(model: Any, key: str, tensor: torch.Tensor) -> None:
    path, _, name = key.rpartition(".")
    module = model.get_submodule(path)
    holder = module._parameters if name in module._parameters else module._buffers
    holder[name] = tensor
