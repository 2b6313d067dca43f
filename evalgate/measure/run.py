"""From a request to a stored run: the one skeleton of every measurement."""

from __future__ import annotations

from evalgate.measure.comparable import check_comparable
from evalgate.measure.contract import Kept, Measurement, Outcome, Scored
from evalgate.measure.kinds import measurement_of
from evalgate.measure.request import Judge, Observer, RunRequest, silent
from evalgate.store.runs import Run

__all__ = ["Judge", "Observer", "RunRequest", "carry_out", "run", "silent"]


def run(request: RunRequest, *, observer: Observer | None = None, judge: Judge | None = None) -> Run:
    """The stored run that a request asks for; on disk where it names `out`. judge: may end the measurement early.

    Raises the errors of evalgate.errors. Nothing is left behind then but the windows that were answered, which the
    same request takes over.
    """
    return carry_out(measurement_of(request, judge), observer or silent())


def carry_out(measurement: Measurement[Kept, Scored, Outcome], watch: Observer) -> Outcome:
    """The outcome of a measurement, sealed: a run, or a recording (evalgate.measure.record).

    The kinds are in evalgate.measure.kinds; evalgate.measure.contract says what each step gives.
    """
    measurement.check()  # refuse what cannot be honoured while it costs nothing
    measurement.read(watch)  # a text or recording that is not there is named before models are loaded
    with measurement.open(watch) as sources:  # load models, start servers, probe endpoints
        check_comparable(sources)
        inputs = measurement.windows(watch)  # cut the text; all sources are shown the same windows
        with measurement.resume(inputs) as kept:  # what an interrupted measurement has answered already
            watch.start(windows=len(inputs.windows), positions=sum(len(w.positions) for w in inputs.windows))
            scores = measurement.score(inputs, kept, watch)
            outcome = measurement.sum_up(inputs, scores, watch)  # figures with intervals, noise floor, notes
            outcome = measurement.seal(outcome, scores, kept)  # whole on disk, or not at all
    watch.finish()
    return outcome
