"""Recorded references: what `--ref` can name besides a model, a trace or llama.cpp's logits file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from evalgate.errors import InputError
from evalgate.measure.recordings.base import Recorded
from evalgate.specs import SourceSpec
from evalgate.store.remote import is_url

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from evalgate.core import Window
    from evalgate.measure.request import RunRequest
    from evalgate.server.client import EmbeddedClient

__all__ = ["AskRecorded", "Recorded", "ShownMean", "is_recorded", "open_recorded", "shown_mean"]


class ShownMean(NamedTuple):
    """A running mean of progress. column: of the table as it is scored. noun: what stands after `mean`."""

    column: str
    noun: str

    def values(self, table: pa.Table) -> NDArray[np.float64]:
        """What the mean is of, a value a row; NaN where it is not known."""
        import numpy as np
        import pyarrow.compute as pc

        if self.column == "top1_agreement" and self.column not in table.column_names:  # both top choices in its place
            agrees = pc.equal(table.column("ref_top1"), table.column("cand_top1"))
            return np.asarray(agrees.to_numpy(), dtype=np.float64)
        return np.asarray(table.column(self.column).to_numpy(), dtype=np.float64)


def is_recorded(source: SourceSpec | None) -> bool:
    """Whether a spec names a trace, or a file that starts as llama.cpp's logits files do."""
    return source is not None and (source.kind == "trace" or _is_logits_file(source.spec))


def shown_mean(request: RunRequest) -> ShownMean:
    """The mean that progress shows for a request: never a bound as if it were a value."""
    if request.kind == "ppl":
        return ShownMean("cand_nll", "nll")
    bounded = any(model.remote for model in request.models) or (
        request.reference is not None and _is_logits_file(request.reference.spec)
    )
    column, words = ("kl", "KL") if request.kind == "kl" else ("top1_agreement", "agreement")
    return ShownMean(f"{column}_low", f"{words}, at least") if bounded else ShownMean(column, words)


def open_recorded(source: SourceSpec | None) -> Recorded:
    """The recorded reference of that spec, for which `is_recorded` holds.

    Raises InputError naming what is missing, cut or altered.
    """
    spec = str(source)
    if _is_logits_file(spec):
        from evalgate.measure.recordings.logits_file import RecordedLogits

        return RecordedLogits(spec)
    from evalgate.measure.recordings.hidden import RecordedHidden
    from evalgate.measure.recordings.trace import RecordedTrace
    from evalgate.traces import read_trace

    try:
        found = is_url(spec) or Path(spec).is_dir()
    except OSError as error:
        raise InputError(f"cannot read {spec}: {error.strerror}", file=spec) from error
    if not found:
        raise InputError(f"there is no trace {spec}: record one with `evalgate record --ref SOURCE --out {spec}`")
    trace = read_trace(spec)
    return RecordedTrace(trace, spec) if trace.meta.hidden is None else RecordedHidden(trace, spec)


@dataclass
class AskRecorded:
    """Asks for `Recorded.table` of these candidates. Sent to another machine it opens the recording there."""

    source: SourceSpec | None
    names: Sequence[str]
    recorded: Recorded | None

    def __getstate__(self) -> dict[str, object]:
        return vars(replace(self, recorded=None))

    def __call__(self, client: EmbeddedClient, windows: Sequence[Window]) -> pa.Table:
        """The table of some windows. Raises as `open_recorded`."""
        if self.recorded is None:
            self.recorded = open_recorded(self.source)
        return self.recorded.table(client, self.names, windows)


def _is_logits_file(spec: str) -> bool:
    from evalgate.traces.llamacpp_logits import MAGIC

    path = Path(spec)
    try:
        if not path.is_file():  # raises where a folder above may not be searched
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False
