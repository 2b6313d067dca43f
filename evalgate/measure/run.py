"""From a request to a stored run: the one skeleton of every measurement."""

from __future__ import annotations

from evalgate.measure.comparable import check_comparable
from evalgate.measure.contract import Kept, Measurement, Outcome, Scored
from evalgate.measure.kinds import measurement_of
from evalgate.measure.pace import Timer
from evalgate.measure.page import leave_page
from evalgate.measure.request import Judge, Observer, RunRequest, TextCheck, check_text, silent
from evalgate.store.runs import Run

__all__ = ["Judge", "Observer", "RunRequest", "TextCheck", "carry_out", "run", "silent"]


def run(
    request: RunRequest,
    *,
    observer: Observer | None = None,
    judge: Judge | None = None,
    text_check: TextCheck | None = None,
    page: bool = True,
) -> Run:
    """The stored run that a request asks for; on disk where it names `out`. judge: may end the measurement early.
    text_check: may refuse the text before models are loaded. page: leave report.html in its folder too.

    Raises the errors of evalgate.errors. Nothing is left behind then but the windows that were answered, which the
    same request takes over.
    """
    watch = observer or silent()
    found = carry_out(measurement_of(request, judge), watch, text_check)
    if page and (missing := leave_page(found)):
        watch.stage(missing)
    return found


def carry_out(
    measurement: Measurement[Kept, Scored, Outcome], watch: Observer, text_check: TextCheck | None = None
) -> Outcome:
    """The outcome of a measurement, sealed: a run, or a recording (evalgate.measure.record).

    The kinds are in evalgate.measure.kinds; evalgate.measure.contract says what each step gives.
    """
    measurement.check()  # refuse what cannot be honoured while it costs nothing
    measurement.read(watch)  # a text or recording that is not there is named before models are loaded
    check_text(text_check, measurement.documents())
    timer = Timer()
    with measurement.open(watch) as sources:  # load models, start servers, probe endpoints
        check_comparable(sources)
        inputs = measurement.windows(watch)  # cut the text; all sources are shown the same windows
        shown = [(window.document, window.domain) for window in inputs.windows]
        check_text(text_check, shown)  # a limit may have left parts of the text out
        with measurement.resume(inputs) as kept:  # what an interrupted measurement has answered already
            new = measurement.is_new(kept)
            timer.lap()
            watch.start(windows=len(inputs.windows), positions=sum(len(w.positions) for w in inputs.windows))
            scores = measurement.score(inputs, kept, watch)
            timer.lap()
            outcome = measurement.sum_up(inputs, scores, watch)  # figures with intervals, noise floor, notes
            outcome = measurement.seal(outcome, scores, kept)  # whole on disk, or not at all
            if new:
                timer.remember(measurement.described(), scores.windows)
    watch.finish()
    return outcome
