"""The runs and sweeps below some folders. One that cannot be read is found too, with its reason."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from evalgate.errors import EvalgateError
from evalgate.store.runs import MANIFEST, is_run, read_summary
from evalgate.store.sweeps import DOCUMENT, PROGRESS, RUNS, is_sweep, read_sweep

if TYPE_CHECKING:
    from evalgate.leaderboard import Leaderboard
    from evalgate.summary import Summary

DEPTH = 4  # folders below a given one
MOST = 5000  # folders that are looked into: a home folder given by mistake must not take forever


@dataclass(frozen=True)
class Found:
    """One run or sweep. key: names it in addresses. name: relative to the folder it was found in. reason: "" = read."""

    key: str
    path: Path
    name: str
    summary: Summary | None = None
    board: Leaderboard | None = None
    reason: str = ""

    @property
    def order(self) -> str:
        """When it was made; empty where that is not known."""
        made = self.summary or self.board
        return "" if made is None else made.created


class Library:
    """What lies below the folders. A folder that has not changed since is not read again."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = list(roots)
        self._known: dict[Path, tuple[object, Found]] = {}

    def found(self) -> list[Found]:
        """Everything that is there now, the latest first; what cannot be read comes last."""
        ones = {found.key: found for root in self._roots for found in self._below(root)}
        return sorted(ones.values(), key=lambda one: (one.order, one.name), reverse=True)

    def get(self, key: str) -> Found | None:
        """The run or sweep of that key; None where there is none any more."""
        return next((one for one in self.found() if one.key == key), None)

    def _below(self, root: Path) -> Iterator[Found]:
        left = MOST
        folders = [(root, 0)]
        while folders and left:
            folder, depth = folders.pop()
            left -= 1
            own = is_sweep(folder) or is_run(folder)
            if own:
                yield self._read(folder, root)
            if depth < DEPTH:
                inside = folder / RUNS if own and is_sweep(folder) else None
                if not own or inside is not None:
                    folders += [(child, depth + 1) for child in _children(inside or folder)]

    def _read(self, folder: Path, root: Path) -> Found:
        sweep = is_sweep(folder)
        state = tuple(_state(folder / name) for name in ((DOCUMENT, PROGRESS) if sweep else (MANIFEST,)))
        known = self._known.get(folder)
        if known is not None and known[0] == state:
            return known[1]
        name = folder.relative_to(root).as_posix() if folder != root else folder.resolve().name
        key = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:16]
        try:
            if sweep:
                one = Found(key, folder, name, board=read_sweep(folder))
            else:
                one = Found(key, folder, name, summary=read_summary(folder))
        except EvalgateError as error:
            one = Found(key, folder, name, reason=error.message)
        self._known[folder] = (state, one)
        return one


def _children(folder: Path) -> list[Path]:
    """The folders in a folder, in reverse order (the last is looked into first); hidden ones and links are left out."""
    try:
        return sorted(
            (p for p in folder.iterdir() if not p.name.startswith(".") and not p.is_symlink() and p.is_dir()),
            reverse=True,
        )
    except OSError:
        return []


def _state(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
