"""Recording a reference, for candidates that come later: the same skeleton as a run's."""

from __future__ import annotations

from evalgate.measure.kinds.recording import (
    Recording,
    RecordRequest,
    recording_of,
)
from evalgate.measure.request import Observer
from evalgate.measure.run import carry_out

__all__ = ["RecordRequest", "Recording", "record"]


def record(request: RecordRequest, *, observer: Observer) -> Recording:
    """The recording of the one model of `request.text`: a trace, or llama.cpp's logits file.

    Raises UsageError for options that do not go together or a taken `out`, MismatchError where an unfinished recording
    in `out` is another one's, and the errors of the corpus, the server and the disk. What was recorded before an error
    stays, and the same request goes on after it; a logits file appears only when it is whole.
    """
    return carry_out(recording_of(request), observer)
