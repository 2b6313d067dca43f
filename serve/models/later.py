"""Imports that wait until they are needed.

Whatever model it is asked for, transformers imports what a few others need: torchao for one function that saves models,
DeepGEMM's integration, which brings torch's compiler, and scipy's optimizers for the loss of object detection. Together
they are a third of the time that transformers takes to import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

MODULES = (
    "torchao.prototype.safetensors.safetensors_support",
    "transformers.integrations.deepgemm",
    "scipy.optimize",
)


@contextmanager
def imported_later(modules: tuple[str, ...] = MODULES) -> Iterator[None]:
    """Import something inside the block without these modules: functions that it takes from one of them by
    `from MODULE import NAME` import it when they are called.

    A module that is there already, or whose package is, is left as it is, but for parts of transformers. After the
    block all can be imported as ever.
    """
    stand_ins: dict[str, ModuleType] = {}
    for name in modules:
        package = name.partition(".")[0]
        if name not in sys.modules and (package == "transformers" or package not in sys.modules):
            stand_ins[name] = sys.modules[name] = _StandIn(name)
    try:
        yield
    finally:
        for name, stand_in in stand_ins.items():
            if sys.modules.get(name) is stand_in:
                del sys.modules[name]
            parent, _, last = name.rpartition(".")
            if getattr(sys.modules.get(parent), "__dict__", {}).get(last) is stand_in:
                delattr(sys.modules[parent], last)


class _StandIn(ModuleType):
    """Gives functions that look up what they stand for when they are called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        module = self.__name__

        def later(*args: Any, **options: Any) -> Any:
            return getattr(import_module(module), name)(*args, **options)

        return later
