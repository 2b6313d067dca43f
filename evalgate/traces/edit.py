"""Traces made of traces: parts of one recording put together, and a part cut out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from evalgate.core import Window, counted
from evalgate.errors import MismatchError, UsageError
from evalgate.traces.batch import PositionBatch
from evalgate.traces.layout import Manifest, TraceMeta
from evalgate.traces.reader import Trace, read_trace
from evalgate.traces.writer import TraceWriter


def merge(folders: Sequence[Path | str], out: Path | str) -> Manifest:
    """Put traces of the same reference and settings together in a new folder.

    Of one corpus, windows keep their indices, which must not collide (parts recorded on several machines). Of
    several corpora, documents must have different names, and windows are numbered on in the given order.

    Raises MismatchError where reference, settings, windows or documents do not fit; UsageError for fewer than two
    folders or a taken `out`; InputError for a damaged trace.
    """
    traces = [read_trace(folder) for folder in folders]
    if len(traces) < 2:
        raise UsageError("merge needs two traces or more")
    for trace in traces[1:]:
        if trace.meta.identity != traces[0].meta.identity:
            raise MismatchError(
                f"{trace.folder} has another reference, window policy, K, M or seed than {traces[0].folder}: "
                "merge only recordings of one reference with one setting"
            )
    shifts = _index_shifts(traces)
    windows = sorted(
        (replace(w, index=w.index + shift) for t, shift in zip(traces, shifts, strict=True) for w in t.windows),
        key=lambda w: w.index,
    )
    parents = [t.manifest.checksum for t in traces]
    writer = TraceWriter(out, _merged_meta(traces), windows=windows, parents=parents, head=traces[0].head)
    for trace, shift in zip(traces, shifts, strict=True):
        for batch in trace.shards():
            writer.append(replace(batch, window=batch.window + np.int32(shift)))
    return writer.finish()


def cut(
    folder: Path | str, out: Path | str, *, documents: Collection[str] | None = None, positions: int | None = None
) -> Manifest:
    """Keep the named documents, or the first `positions` positions in window order, in a new folder.

    The last window's score range is shortened where the count ends inside it.

    Raises UsageError for both or neither, an unknown document, a count outside 1..all, or a taken `out`;
    InputError for a damaged trace.
    """
    trace = read_trace(folder)
    if (documents is None) == (positions is None):
        raise UsageError("cut needs either documents or a count of positions")
    windows = _of_documents(trace, documents) if documents is not None else _first_positions(trace, positions or 0)
    keep = _keeper(windows)
    what = f"{len(windows)} of {counted(len(trace.windows), 'window')}"
    meta = replace(trace.meta, notes=(*trace.meta.notes, f"cut: {what} of the recording"))
    writer = TraceWriter(out, meta, windows=windows, parents=[trace.manifest.checksum], head=trace.head)
    for batch in trace.shards():
        kept = batch.take(keep(batch))
        if len(kept):
            writer.append(kept)
    return writer.finish()


def _index_shifts(traces: Sequence[Trace]) -> list[int]:
    """What is added to each trace's window indices so that none collides."""
    one_corpus = len({t.meta.corpus_hash for t in traces}) == 1
    seen: set[object] = set()
    for trace in traces:
        own: set[object] = {w.index for w in trace.windows} if one_corpus else {w.document for w in trace.windows}
        if seen & own:
            name = min(map(str, seen & own))
            what = f"window {name}" if one_corpus else f"document {name!r}"
            raise MismatchError(f"{trace.folder} has {what}, which another part has too: leave one of them out")
        seen |= own
    if one_corpus:
        return [0] * len(traces)
    shifts, top = [], 0
    for trace in traces:
        shifts.append(top - min(w.index for w in trace.windows))
        top += max(w.index for w in trace.windows) - min(w.index for w in trace.windows) + 1
    return shifts


def _merged_meta(traces: Sequence[Trace]) -> TraceMeta:
    metas = [t.meta for t in traces]
    hashes = list(dict.fromkeys(m.corpus_hash for m in metas))
    return replace(
        metas[0],
        corpus=" + ".join(dict.fromkeys(m.corpus for m in metas)),
        corpus_hash=hashes[0] if len(hashes) == 1 else xxhash.xxh3_128_hexdigest("\n".join(hashes).encode()),
        certificate={"merged": [dict(m.certificate) for m in metas]},
        notes=tuple(dict.fromkeys(note for m in metas for note in m.notes)),
    )


def _of_documents(trace: Trace, documents: Collection[str]) -> list[Window]:
    if isinstance(documents, str):
        documents = [documents]
    unknown = sorted(set(documents) - {w.document for w in trace.windows})
    if unknown or not documents:
        raise UsageError(f"{trace.folder} has no document {unknown[0] if unknown else ''!r}: name some that it has")
    return [w for w in trace.windows if w.document in documents]


def _first_positions(trace: Trace, count: int) -> list[Window]:
    if not 1 <= count <= len(trace):
        raise UsageError(
            f"{trace.folder} has {counted(len(trace), 'position')} and {count} were asked for: ask for 1 or more"
        )
    windows, left = [], count
    for window in trace.windows:
        if left <= 0:
            break
        windows.append(_shortened(window, left))
        left -= len(window.positions)
    return windows


def _shortened(window: Window, count: int) -> Window:
    """The window with its first `count` scored positions only."""
    if count >= len(window.positions):
        return window
    score_to = window.positions[count - 1] + 1
    return replace(window, score_to=score_to, mask=window.mask[: score_to - window.score_from])


def _keeper(windows: Sequence[Window]) -> Callable[[PositionBatch], np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Flags of a batch's rows that lie in the windows' score ranges."""
    ends = {w.index: w.score_to for w in windows}

    def keep(batch: PositionBatch) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        pairs = zip(batch.window.tolist(), batch.position.tolist(), strict=True)
        return np.array([position < ends.get(window, 0) for window, position in pairs], dtype=np.bool_)

    return keep
