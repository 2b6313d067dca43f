"""Recorded references: what `--ref` can name besides a model, a trace or llama.cpp's logits file."""

from __future__ import annotations

from pathlib import Path

from evalgate.errors import InputError
from evalgate.measure.recordings.base import Recorded
from evalgate.specs import SourceSpec

__all__ = ["Recorded", "is_recorded", "open_recorded"]


def is_recorded(source: SourceSpec | None) -> bool:
    """Whether a spec names a trace, or a file that starts as llama.cpp's logits files do."""
    return source is not None and (source.kind == "trace" or _is_logits_file(source.spec))


def open_recorded(source: SourceSpec | None) -> Recorded:
    """The recorded reference of that spec, for which `is_recorded` holds.

    Raises InputError naming what is missing, cut or altered.
    """
    spec = str(source)
    if _is_logits_file(spec):
        from evalgate.measure.recordings.logits_file import RecordedLogits

        return RecordedLogits(spec)
    from evalgate.measure.recordings.trace import RecordedTrace

    if not Path(spec).is_dir():
        raise InputError(f"there is no trace {spec}: record one with `evalgate record --ref SOURCE --out {spec}`")
    return RecordedTrace(spec)


def _is_logits_file(spec: str) -> bool:
    from evalgate.traces.llamacpp_logits import MAGIC

    path = Path(spec)
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False
