"""Recording a reference, for candidates that come later: the same skeleton as a run's."""

from __future__ import annotations

from dataclasses import replace

from evalgate.errors import UsageError
from evalgate.measure.kinds.recording import (
    Recording,
    RecordRequest,
    recording_of,
)
from evalgate.measure.request import Observer
from evalgate.measure.run import carry_out
from evalgate.store.remote import Url, check_url, publish, staging, unstage
from evalgate.traces.layout import FORMAT, MANIFEST

_PARTS = (".parquet", ".safetensors")  # what a trace is made of, besides its manifest

__all__ = ["RecordRequest", "Recording", "record"]


def record(request: RecordRequest, *, observer: Observer) -> Recording:
    """The recording of the one model of `request.text`: a trace, or llama.cpp's logits file.

    What goes to a URL is recorded in the cache folder, where an unfinished one is resumed, and copied when it is whole.

    Raises UsageError for options that do not go together or a taken `out`, MismatchError where an unfinished recording
    in `out` is another one's, and the errors of the corpus, the server and the disk. What was recorded before an error
    stays, and the same request goes on after it; a logits file appears only when it is whole.
    """
    if not isinstance(request.out, Url):
        return carry_out(recording_of(request), observer)
    url, here = request.out, staging(request.out)
    if request.format != "trace":
        raise UsageError(f"--out {url} is a URL, and a logits file is written on this machine: give a path")
    check_url(url, FORMAT, own=lambda name: name.endswith(_PARTS), overwrite=None)
    if (here / MANIFEST).is_file():
        raise UsageError(f"{here} holds a whole trace, whose copy to {url} failed: copy it from there, or remove it")
    made = carry_out(recording_of(replace(request, out=here)), observer)
    observer.stage(f"copying the trace to {url}")
    publish(here, url, FORMAT, wrote=f"the trace is whole in {here}: copy it from there")
    unstage(url)
    return replace(made, out=url)
