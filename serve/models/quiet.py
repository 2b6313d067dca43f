"""Silence while libraries load: nothing on stdout, no progress bars, no log noise."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Send stdout to stderr at file-descriptor level, and turn progress bars and libraries' logged warnings off.

    Some quantization libraries print to stdout from C or on import, and stdout belongs to the results.
    Not for several threads at once: models are loaded one at a time, before the server answers.
    """
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with _no_bars(), _stdout_to_stderr():
            yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Every library's bars derive from one tqdm class, and not every library has a switch of its own."""
    bars: Any = importlib.import_module("tqdm.std").tqdm
    original = bars.__init__

    def disabled(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **(options | {"disable": True}))

    bars.__init__ = disabled
    try:
        yield
    finally:
        bars.__init__ = original


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
