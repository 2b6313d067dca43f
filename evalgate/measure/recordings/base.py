"""What a recorded reference gives a run: its windows, and its rows compared with candidates that are asked for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from evalgate.core import Document, SourceInfo, Window, WindowPolicy
from evalgate.measure.alternatives import Likeliest, with_lists
from evalgate.store.alternatives import LIST_COLUMNS, SIDES
from evalgate.table import build, column_type

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from evalgate.corpora.corpus import Corpus
    from evalgate.server.client import EmbeddedClient

OVERLAP_K = 10
ROW_BYTES = 256 << 20  # of whole rows asked for at once

Columns = Mapping[str, "NDArray[Any]"]


class Recorded(ABC):
    """A reference that was recorded."""

    info: SourceInfo
    policy: WindowPolicy
    corpus: str
    corpus_hash: str

    documents: Sequence[tuple[str, str]] | None = None  # name and domain of each, None = not recorded

    @abstractmethod
    def windows(self, client: EmbeddedClient, model: str) -> tuple[Window, ...]:
        """The windows it brings; `model` is a candidate, for what the recording does not say."""

    @abstractmethod
    def columns(self, client: EmbeddedClient, model: str, part: Sequence[Window]) -> Columns:
        """Wide columns of one candidate, a value per position of `part`; NaN = not known (integers: -1).

        LIST_COLUMNS besides, [n, k] of each side: what is known of its likeliest ids (evalgate.measure.alternatives).
        """

    @abstractmethod
    def finished(self, table: pa.Table) -> tuple[pa.Table, list[str]]:
        """The token-score table of the whole run from the wide one, and what a reader must know."""

    def server_options(self) -> list[str]:
        """What the server of the candidates is started with besides, for this recording."""
        return []

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What changes numbers."""

    def text(self, windows: Sequence[Window]) -> Corpus:
        """The recorded text as far as it is known: its hash, and names and domains of its documents."""
        from evalgate.corpora.corpus import Corpus

        documents = {window.document: Document(window.document, window.domain) for window in windows}
        return Corpus(self.corpus, tuple(documents.values()), (), self.corpus_hash)

    def table(self, client: EmbeddedClient, models: Sequence[str], part: Sequence[Window]) -> pa.Table:
        """The wide token-score table of `part`: candidate after candidate, windows and positions in order.

        With the likeliest ids of both sides at the worst positions (evalgate.measure.alternatives.with_lists).
        """
        import pyarrow as pa

        return pa.concat_tables([_table(name, part, self.columns(client, name, part)) for name in models])


def split_positions(window: Window, most: int) -> list[Window]:
    """The window once per group of at most `most` of its scored positions, cut after the group's last position."""
    found = []
    for low in range(0, len(window.positions), most):
        group = window.positions[low : low + most]
        start, end = group[0], group[-1] + 1
        chosen = frozenset(group)
        mask = tuple(p in chosen for p in range(start, end)) if window.mask else ()
        part = replace(window, ids=window.ids[:end], bytes_per_token=window.bytes_per_token[:end], mask=mask)
        found.append(replace(part, score_from=start, score_to=end))
    return found


def whole_rows(client: EmbeddedClient, model: str, window: Window, vocab_size: int) -> NDArray[np.float32]:
    """A candidate's logits [positions, vocabulary] at one window's scored positions, asked for in bounded replies."""
    most = max(1, ROW_BYTES // (4 * vocab_size))
    parts = [client.rows(model, [part]) for part in split_positions(window, most)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _table(candidate: str, part: Sequence[Window], columns: Columns) -> pa.Table:
    scores = {name: _with_nulls(name, values) for name, values in columns.items() if name not in LIST_COLUMNS}
    sides = {s: Likeliest(columns[f"{s}_top_ids"], columns[f"{s}_top_logprobs"]) for s in SIDES}
    return with_lists(build([candidate], part, scores), sides)


def _with_nulls(name: str, values: NDArray[Any]) -> pa.Array:
    """The values as a column; NaN, and a negative count or id, become null."""
    import pyarrow as pa

    kind = column_type(name)
    if pa.types.is_integer(kind):
        return pa.array(values, kind, mask=values < 0)
    return pa.array(values.astype(np.float32), mask=np.isnan(values))
