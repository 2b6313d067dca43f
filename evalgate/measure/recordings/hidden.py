"""A trace of hidden states as the reference of a run: its rows go through its own head beside the candidates'.

Every figure is exact, as if the reference were loaded. What the head gives here is held against what the reference said
when it was recorded, so that a run says whether the two are the same to the last bit.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evalgate.core import Window
from evalgate.errors import ScoreError
from evalgate.measure.embedded import with_alternatives
from evalgate.measure.recordings.base import Columns, Recorded
from evalgate.measure.recordings.shards import TraceRows
from evalgate.measure.recordings.trace import source_of
from evalgate.server.batches import BATCH_TOKENS
from evalgate.server.client import HiddenRows
from evalgate.traces import PositionBatch, Trace, concatenate
from evalgate.traces.layout import HiddenStates

if TYPE_CHECKING:
    import pyarrow as pa

    from evalgate.server.client import EmbeddedClient

HEAD = "the reference's output head"  # its name on the server
MOST_OFF = 0.05  # nats: more than another machine, build or batch can move a log-probability
_SHARDS = 3  # in memory: runs go through them in order
_LEAST_BODY = 64 << 20  # bytes of a request that the server takes without being told


class RecordedHidden(Recorded):
    """A trace folder with hidden states. Raises InputError naming what is missing, cut or altered."""

    def __init__(self, trace: Trace, spec: str) -> None:
        meta = trace.meta
        if meta.hidden is None:
            raise ValueError(f"{spec} has no hidden states")
        self.trace = trace
        self.states: HiddenStates = meta.hidden
        self.info = source_of(meta, spec)
        self.policy = meta.policy
        self.corpus, self.corpus_hash = meta.corpus, meta.corpus_hash
        self.documents = [(window.document, window.domain) for window in trace.windows]
        self._rows = TraceRows(trace, kept=_SHARDS)
        self._lock = threading.Lock()  # batches are asked for from several threads

    def windows(self, client: EmbeddedClient, model: str) -> tuple[Window, ...]:
        """As they were recorded."""
        return self.trace.windows

    def server_options(self) -> list[str]:
        """The head, checked against its SHA-256, and room for the rows of the largest request."""
        from evalgate.traces.layout import FORMAT

        head = self.trace.head
        assert head is not None
        FORMAT.check(head, self.trace.manifest.files[head.name])
        longest = max(len(window.ids) for window in self.trace.windows)
        width = self.states.size * (4 if self.states.dtype == "float32" else 2)
        most = _LEAST_BODY + max(longest, BATCH_TOKENS) * width
        return ["--head", f"{HEAD}={head.absolute()}", "--max-body-bytes", str(most)]

    def identity(self) -> dict[str, Any]:
        """The manifest's checksum covers every file."""
        return {"trace": self.trace.manifest.checksum, "hidden": True}

    def table(self, client: EmbeddedClient, models: Sequence[str], part: Sequence[Window]) -> pa.Table:
        """See `Recorded`: exact, of all candidates at once. Raises MismatchError or ScoreError."""
        with self._lock:
            batch = concatenate([self.rows(window) for window in part])
        return with_alternatives(client, models, part, reference=HEAD, hidden=travelling(batch, self.states))

    def columns(self, client: EmbeddedClient, model: str, part: Sequence[Window]) -> Columns:
        """Nothing: `table` asks for all candidates at once."""
        raise NotImplementedError

    def finished(self, table: pa.Table) -> tuple[pa.Table, list[str]]:
        """The table as it is, and how far what the head gives here is from what was recorded.

        Raises ScoreError where it is further than another machine can explain.
        """
        first = table.column("candidate")[0].as_py()
        mine = _of(table, first)
        windows, positions = (mine.column(name).to_numpy() for name in ("window", "position"))
        recorded: Mapping[str, Any] = self._recorded_sides(windows, positions)
        off = np.abs(mine.column("ref_nll").to_numpy() - recorded["nll"])
        entropy = np.abs(mine.column("ref_entropy").to_numpy() - recorded["entropy"])
        worst = int(np.argmax(off))
        if not float(off[worst]) <= MOST_OFF:
            raise ScoreError(
                f"window {windows[worst]}, position {positions[worst]}: the trace's hidden states give a "
                f"log-probability {off[worst]:.3g} nats off what was recorded: run `evalgate trace verify` on "
                f"{self.trace.folder}",
                window=int(windows[worst]),
                position=int(positions[worst]),
            )
        notes = list(self.trace.meta.notes)
        if off.any() or entropy.any():
            notes.append(
                "replayed here, the reference's log-probabilities are at most "
                f"{off.max():.2g} nats ({off.mean():.2g} on average) off what was recorded: another machine, build or "
                "batch of rows gives other last bits"
            )
        else:
            notes.append("replayed here, the reference gives what was recorded to the last bit")
        return table, notes

    def rows(self, window: Window) -> PositionBatch:
        """The rows of a window's scored positions. Raises MismatchError where one was not recorded."""
        return self._rows.of(window)

    def _recorded_sides(self, windows: Any, positions: Any) -> Mapping[str, Any]:
        """nll and entropy [n] float32 as they were recorded, at these positions."""
        places, nll, entropy = [], [], []
        for batch in self.trace.shards():
            places.append(np.stack([batch.window, batch.position], axis=1).astype(np.int64))
            nll.append(-batch.logprob)
            entropy.append(batch.entropy)
        keys = np.concatenate(places) @ np.array([1 << 32, 1])
        order = np.argsort(keys)
        wanted = windows.astype(np.int64) * (1 << 32) + positions
        at = order[np.searchsorted(keys, wanted, sorter=order)]
        return {"nll": np.concatenate(nll)[at], "entropy": np.concatenate(entropy)[at]}


def travelling(batch: PositionBatch, states: HiddenStates) -> HiddenRows:
    """The hidden rows of a batch as the server takes them."""
    if batch.hidden is None:
        raise ScoreError("the rows have no hidden states")
    raw = np.ascontiguousarray(batch.hidden).view(np.uint8).reshape(len(batch), -1)
    return HiddenRows(raw, states.dtype)


def _of(table: pa.Table, candidate: str) -> pa.Table:
    import pyarrow.compute as pc

    return table.filter(pc.equal(table.column("candidate").cast("string"), candidate))
