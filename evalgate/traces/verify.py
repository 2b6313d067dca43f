"""Is a trace intact? Every file against the manifest, every row against what a reference can say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
    want = {(w.index, p, w.ids[p]) for w in windows for p in w.positions}
    have: list[tuple[int, int, int]] = []
    for batch in trace.shards():
        have += zip(batch.window.tolist(), batch.position.tolist(), batch.token.tolist(), strict=True)
    if len(have) == len(want) and set(have) == want:
        return []
    wrong = min(want.symmetric_difference(have) or have)
    what = f"window {wrong[0]}, position {wrong[1]} is missing, strange or recorded twice"
    return [Problem(WINDOWS, what)]
