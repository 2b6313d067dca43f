"""Is a trace intact? Every file against the manifest, every row against what a reference can say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evalgate.errors import EvalgateError
from evalgate.store.manifest import FileEntry
from evalgate.traces import replay
from evalgate.traces.head import read_output_head
from evalgate.traces.layout import FORMAT, MANIFEST, WINDOWS, read_manifest
from evalgate.traces.reader import Trace


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the file's name in the folder, and what."""

    file: str
    what: str


def verify(folder: Path | str) -> list[Problem]:
    """Everything that is wrong with a trace folder; empty = intact. One flipped byte anywhere is found."""
    folder = Path(folder)
    try:
        trace = Trace(folder, read_manifest(folder))
    except EvalgateError as error:
        return [Problem(MANIFEST, error.message)]
    files = trace.manifest.files
    listed = {MANIFEST, *files}
    problems = [problem for name, entry in files.items() for problem in _file_problems(folder / name, entry)]
    problems += [
        Problem(path.name, "is not listed in the manifest: delete it")
        for path in sorted(folder.iterdir())
        if path.name not in listed
    ]
    return problems or _row_problems(trace) or _coverage_problems(trace) or _hidden_problems(trace)


def _file_problems(path: Path, entry: FileEntry) -> list[Problem]:
    try:
        FORMAT.check(path, entry)
    except EvalgateError as error:
        return [Problem(path.name, error.message)]
    return []


def _row_problems(trace: Trace) -> list[Problem]:
    """Of files that are as they were written: shards whose rows no reference can have given."""
    problems = []
    for number, name in enumerate(trace.manifest.shards):
        try:
            trace.shard(number)
        except EvalgateError as error:
            problems.append(Problem(name, error.message))
    return problems


def _hidden_problems(trace: Trace) -> list[Problem]:
    """Of a trace of hidden states: rows that do not give, through the head, what was recorded of the reference."""
    meta = trace.meta
    if meta.hidden is None or trace.head is None:
        return []
    try:
        head = read_output_head(trace.head, vocab_size=meta.source.vocab_size, size=meta.hidden.size)
    except EvalgateError as error:
        return [Problem(trace.head.name, error.message)]
    shards = list(trace.manifest.shards)
    step = max(1, len(shards) * 2 // replay.SAMPLE)
    tried = len(range(0, len(shards), step))
    problems = []
    for number, name in enumerate(shards):
        # the digest of every row, and of a sample what the head makes of them
        most = max(2, replay.SAMPLE // tried) if number % step == 0 else 2
        fault = replay.check_rows(trace.shard(number), head, most=most)
        if fault is not None:
            problems.append(Problem(name, fault.what))
    return problems


def _coverage_problems(trace: Trace) -> list[Problem]:
    """Of an otherwise intact trace: windows without rows, and rows without windows."""
    try:
        windows = trace.windows
    except EvalgateError as error:
        return [Problem(WINDOWS, error.message)]
    scored = (np.array([(w.index, p, w.ids[p]) for p in w.positions], np.int64).reshape(-1, 3) for w in windows)
    want = _ordered(np.concatenate([np.empty((0, 3), np.int64), *scored]))
    rows = [np.stack([batch.window, batch.position, batch.token], axis=1) for batch in trace.shards()]
    have = _ordered(np.concatenate([np.empty((0, 3), np.int64), *rows]))
    if np.array_equal(want, have):
        return []
    wrong = min(set(map(tuple, want.tolist())).symmetric_difference(map(tuple, have.tolist())), default=None)
    place = wrong or tuple(have[1:][(have[1:] == have[:-1]).all(axis=1)][0].tolist())
    what = f"window {place[0]}, position {place[1]} is missing, strange or recorded twice"
    return [Problem(WINDOWS, what)]


def _ordered(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows [n, 3] by window, position and token."""
    ordered: NDArray[np.int64] = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    return ordered
