"""A device that is not there: tensors that say they are on it, computed on the CPU, and a count of who waited for it.

`FarAway` stands in for CUDA on a machine that has none. What a real device would make the host wait for is counted: a
copy to the host, a value looked at, a search whose result's size depends on values, and a copy to the device that was
not told to go without waiting. A tensor that is made on the device from a Python list, which waits too, fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

DEVICE = torch.device("cuda", 0)
_LOOKS = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"})
_SEARCHES = frozenset({"aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2", "aten::bincount"})


class FarTensor(torch.Tensor):
    """A tensor on the device; `near` has its values."""

    near: torch.Tensor
    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, near: torch.Tensor) -> FarTensor:
        made: FarTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            near.shape,
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device="meta",
        )
        made.near = near
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"FarTensor({self.near})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on the device outside of FarAway")


class _Same(TorchDispatchMode):
    """A mode again, inside of itself."""

    def __init__(self, mode: FarAway) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._mode.__torch_dispatch__(func, types, args, kwargs)


class FarAway(TorchDispatchMode):
    """Runs everything on the device as long as it is entered.

    waits: what the host waited for, by name. bytes: of the copies to the host.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.bytes = 0
        monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def __enter__(self) -> FarAway:
        self._inference = torch.inference_mode()  # as the engine runs: views are not tracked
        self._inference.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._inference.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.name().split(".")[0], kwargs or {}
        if name != "aten::to" and _composite(func):  # inference mode leaves these whole
            with _Same(self):
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        found: list[torch.Tensor] = []
        named: list[torch.device] = []

        def near(tensor: FarTensor) -> torch.Tensor:
            found.append(tensor)
            return tensor.near

        def place(device: torch.device) -> torch.device:
            named.append(DEVICE if device.type == "meta" else device)  # what C++ takes a FarTensor to be on
            return torch.device("cpu") if named[-1].type == DEVICE.type else device

        given = tree_map_only(torch.device, place, tree_map_only(FarTensor, near, (args, kwargs)))
        far = named[-1].type == DEVICE.type if named else bool(found)
        if name == "aten::copy_":
            far = isinstance(args[0], FarTensor)
        self._count(name, func, args, kwargs, was=bool(found), far=far)
        out = func(*given[0], **given[1])
        if not far:
            return out
        if func._schema.is_mutable:
            return kwargs.get("out", args[0] if args else out)
        return tree_map_only(torch.Tensor, lambda t: t if isinstance(t, FarTensor) else FarTensor(t), out)

    def _count(self, name: str, func: Any, args: Any, kwargs: Any, *, was: bool, far: bool) -> None:
        moves = name in ("aten::_to_copy", "aten::to", "aten::copy_")
        if moves and was and not far:
            self.waits["a copy to the host"] += 1
            self.bytes += args[-1 if name == "aten::copy_" else 0].nbytes
        elif moves and far and not isinstance(args[1 if name == "aten::copy_" else 0], FarTensor):
            if not kwargs.get("non_blocking") and not (name == "aten::copy_" and len(args) > 2 and args[2]):
                self.waits["a copy to the device"] += 1
        elif was and name in _LOOKS:
            self.waits["a look at a value"] += 1
        elif was and (name in _SEARCHES or _by_mask(name, args)):
            self.waits["a search"] += 1


def _by_mask(name: str, args: Any) -> bool:
    indices = args[1] if name in ("aten::index", "aten::index_put_", "aten::index_put") else ()
    return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _composite(func: Callable[..., Any]) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))  # type: ignore[attr-defined]


def send_away(model: Any) -> None:
    """Put a model's parameters and buffers on the device."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held |= {name: FarTensor(tensor.detach()) for name, tensor in held.items() if tensor is not None}
