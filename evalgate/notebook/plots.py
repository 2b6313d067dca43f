"""`run.plot`: the plots of report.html as plotly figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from evalgate.errors import UsageError
from evalgate.metrics import get, split_candidates
from evalgate.notebook import drawing
from evalgate.stats import series
from evalgate.stats.slices import By

if TYPE_CHECKING:
    from evalgate.metrics import Scores
    from evalgate.store.runs import Run
    from evalgate.summary import Comparison

Drawn = TypeVar("Drawn")
_NAMES = {cut: f"by_{'class' if cut == 'token' else cut}" for cut in get_args(By)}
_MISSING = {"token": "the texts of all its tokens", "entropy": "the reference's entropies"}


class Plots:
    """Plotly figures of one run. Each method returns a `plotly.graph_objects.Figure`, which a notebook shows.

    Every method takes `candidate`: the spec or name of one, None = all of them in one figure. Where only bounds of a
    metric are known the plot shows the bounds, and says so. Intervals have the run's confidence, and those of the
    parts of one candidate hold together. A dashed line is the noise floor.

    Raises:
        UsageError: plotly is not installed, there is no such candidate or metric, or the run does not have what the
            plot shows.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def __repr__(self) -> str:
        return f"Plots({', '.join(f'{name}()' for name in self.names())})"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The plots that there are."""
        return tuple(name for name in vars(cls) if not name.startswith("_") and name != "names")

    def kl(self, candidate: str | None = None) -> Any:
        """How KL is distributed over positions, on a logarithmic axis."""
        return self.distribution("kl", candidate)

    def distribution(self, metric: str, candidate: str | None = None) -> Any:
        """How any metric that is not negative is distributed over positions, on a logarithmic axis."""
        if get(metric).support[0] < 0:
            raise UsageError(f"{metric} has both signs, which a logarithmic axis has not: use another plot")
        shown = self._each(candidate, lambda scores: series.distribution(scores, metric))
        return drawing.distributions(shown, self._means(metric, shown), self._floors(metric, candidate))

    def by_position(self, metric: str = "kl", candidate: str | None = None) -> Any:
        """A metric's mean by position in the window, in ranges that double."""
        return self._profile("position", metric, candidate)

    def by_entropy(self, metric: str = "kl", candidate: str | None = None) -> Any:
        """A metric's mean by the entropy of the reference: how sure it was."""
        return self._profile("entropy", metric, candidate)

    def by_domain(self, metric: str = "kl", candidate: str | None = None) -> Any:
        """A metric's mean by domain."""
        return self._profile("domain", metric, candidate)

    def by_class(self, metric: str = "kl", candidate: str | None = None) -> Any:
        """A metric's mean by class of token: word, number, code, punctuation, whitespace, other scripts."""
        return self._profile("token", metric, candidate)

    def by_document(self, metric: str = "kl", candidate: str | None = None) -> Any:
        """A metric's mean by document."""
        return self._profile("document", metric, candidate)

    def calibration(self, of: Literal["entropy", "probability"] = "entropy", candidate: str | None = None) -> Any:
        """Whether a model is as sure as it is right.

        entropy: what each side pays for the text (nll) against what it expects to pay. probability: the candidate's
        probability of the actual token against the reference's. The diagonal is perfect.
        """
        if of not in ("entropy", "probability"):
            raise UsageError(f"there is no calibration of {of!r}: choose entropy or probability")
        level = self._confidence
        if of == "probability":
            wanted = self._each(candidate, lambda s: series.probability_calibration(s, confidence=level))
            return drawing.calibrations(wanted)
        found = self._each(candidate, lambda s: series.entropy_calibration(s, "candidate", confidence=level))
        if self._run.summary.reference is not None:
            scores = self._scores(candidate)[0]
            if scores.complete("ref_entropy") and scores.complete("ref_nll"):
                found.insert(0, series.entropy_calibration(scores, "reference", confidence=level))
        return drawing.calibrations(found)

    def delta_p(self, candidate: str | None = None) -> Any:
        """How the probability of the actual token changes, both signs, on a logarithmic axis to either side."""
        return drawing.signed(self._each(candidate, series.delta_p_distribution))

    def running(self, metric: str = "kl", candidate: str | None = None) -> Any:
        """A metric's mean and its interval as documents arrive."""
        level = self._confidence
        shown = self._ends(metric, candidate, lambda s, end: series.running(s, metric, series=end, confidence=level))
        return drawing.runnings(shown, self._floors(metric, candidate))

    @property
    def _confidence(self) -> float:
        """That of the run's own intervals."""
        groups = (comparison.overall for comparison in self._run.summary.comparisons)
        figures = (f for g in groups for m in g.metrics.values() for f in m.statistics.values())
        return next((figure.confidence for figure in figures if figure.method != "none"), 0.95)

    def _profile(self, by: By, metric: str, candidate: str | None) -> Any:
        texts, level = self._run.token_texts, self._confidence
        for scores in self._scores(candidate):
            known = series.cuts_of(scores, texts)
            if by not in known:
                choice = ", ".join(_NAMES[cut] for cut in known)
                raise UsageError(f"this run does not hold {_MISSING[by]}: choose one of {choice}")
        shown = self._ends(
            metric,
            candidate,
            lambda s, end: series.profile(s, by, metric, series=end, token_texts=texts, confidence=level),
        )
        return drawing.profiles(shown, self._floors(metric, candidate))

    def _scores(self, candidate: str | None) -> list[Scores]:
        """The scores of the candidates that are meant, in the summary's order."""
        summary = self._run.summary
        floor = summary.reference.noise_floor if summary.reference else None
        by_name = {scores.candidate: scores for scores in split_candidates(self._run.table, noise_floor=floor)}
        return [by_name[one.candidate.name] for one in self._comparisons(candidate)]

    def _comparisons(self, candidate: str | None) -> list[Comparison]:
        known = self._run.summary.comparisons
        if candidate is None:
            return list(known)
        found = [one for one in known if candidate in (one.candidate.name, one.candidate.spec)]
        if not found:
            names = ", ".join(one.candidate.spec for one in known)
            raise UsageError(f"there is no candidate {candidate!r} in this run: choose one of {names}")
        return found[:1]

    def _each(self, candidate: str | None, made: Callable[[Scores], Drawn]) -> list[Drawn]:
        drawing.plotly()
        return [made(scores) for scores in self._scores(candidate)]

    def _ends(self, metric: str, candidate: str | None, made: Callable[[Scores, str], Drawn]) -> list[Drawn]:
        """The same for the primary series of a metric, or for each end of it that is known."""
        drawing.plotly()
        found = []
        for scores in self._scores(candidate):
            ends = series.ends_of(scores, metric)
            if not ends:
                raise UsageError(f"candidate {scores.candidate!r} has no scores for {metric}: choose another metric")
            found += [made(scores, end) for end in ends]
        return found

    def _floors(self, metric: str, candidate: str | None) -> list[series.NoiseFloor]:
        summary = self._run.summary
        return [series.noise_floor(summary, one, metric) for one in self._comparisons(candidate)]

    def _means(self, metric: str, shown: list[series.Distribution]) -> dict[str, float]:
        """The summary's mean of each distribution, or of the end that it shows, by candidate."""
        names = {"low": "mean_low", "high": "mean_high"}
        found = {}
        for one in shown:
            comparison = next(c for c in self._run.summary.comparisons if c.candidate.name == one.candidate)
            statistics = comparison.overall.metrics[metric].statistics
            figure = statistics.get(names.get(one.series, "mean"))
            if figure is not None:
                found[one.candidate] = figure.value
        return found
