"""What pairs two sides: the same positions, so that what they share cancels."""

from __future__ import annotations

import numpy as np

from evalgate.core import counted
from evalgate.errors import MismatchError
from evalgate.metrics import Scores


def same_positions(a: Scores, b: Scores) -> None:
    """Raise MismatchError unless both sides' rows are the same windows, positions and tokens, in order."""
    if len(a) != len(b):
        raise MismatchError(
            f"the first side ({a.candidate}) has {counted(len(a), 'position')} and the second ({b.candidate}) has "
            f"{len(b):,}: score both on the same text and windows"
        )
    tokens = a.integers("token") != b.integers("token")
    differs = (a.window != b.window) | (a.position != b.position) | tokens
    if differs.any():
        row = int(np.argmax(differs))
        raise MismatchError(f"{a.where(row)} and {b.where(row)} are not the same token: score both on the same windows")
