"""`evalgate verify`: is an endpoint serving the model it names?

Tokens are drawn from the reference at temperature 1 and scored on both sides: with r = q/p of the drawn token,
mean(r - 1 - ln r) estimates KL(reference || endpoint) without bias and with non-negative terms (Schulman,
"Approximating KL divergence", 2020), from chosen tokens alone. The other way round, tokens drawn from the
endpoint estimate KL(endpoint || reference). The lists that come along give a certain lower bound. The verdict
holds the figures against a tolerance with one-sided intervals clustered by document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Figure, Limits, Window, counted
from evalgate.corpora import load_corpus
from evalgate.dialects.base import WindowScores
from evalgate.endpoints.settings import EndpointSettings
from evalgate.endpoints.source import EndpointSource
from evalgate.errors import EndpointError, UsageError
from evalgate.measure.bounds import known_ids, pair_columns
from evalgate.measure.checks import check_applies
from evalgate.measure.sides import Sides, Stages, opened
from evalgate.measure.unseen import MOST_UNSEEN, Differing, differing, documents_needed
from evalgate.metrics import Series, mean
from evalgate.specs import SourceSpec
from evalgate.stats.intervals import Sample
from evalgate.stats.rare import RareEvents
from evalgate.windows import cut, policy

Floats = NDArray[np.float64]
Verdict = Literal["same", "different", "undecided"]
REPEATED = 4  # every so many windows are asked twice, for the noise floor
ASSUMED = (
    "the endpoint answers these requests as it answers others",
    "its log-probabilities are those of the model that generates",
    "prompts of different documents are independent",
)


@dataclass(frozen=True)
class VerifyRequest:
    """What to verify. prompts: how many are drawn. prompt_tokens, new_tokens: lengths. tolerance: nats of mean KL
    that other kernels and dtypes may cause. alarm: probability of calling the same model different.
    """

    reference: SourceSpec
    candidate: SourceSpec
    prompts: int
    data: str | None = None
    prompt_tokens: int = 64
    new_tokens: int = 16
    tolerance: float = 0.02
    alarm: float = 0.01
    seed: int = 0
    device: str = "auto"
    endpoint: EndpointSettings = field(default_factory=EndpointSettings)


@dataclass(frozen=True)
class DrawnMean:
    """A mean over drawn tokens, nats, whose interval misses on each side with the probability asked for.

    only_different: a lower bound, which can prove a difference and never sameness.
    """

    name: str
    figure: Figure
    only_different: bool = False


@dataclass(frozen=True)
class Verification:
    """The verdict and what it rests on. floor: largest change of a logprob when the endpoint was asked again.

    differing: documents above the tolerance, and the share that may be unseen; None where nothing could be compared.
    """

    verdict: Verdict
    reason: str
    evidence: tuple[DrawnMean, ...]
    agreement: float | None
    floor: float | None
    tolerance: float
    alarm: float
    requests: int
    dialect: str
    assumed: tuple[str, ...]
    notes: tuple[str, ...]
    differing: Differing | None = None

    def document(self) -> dict[str, Any]:
        """The verification as `verify --json` prints it."""
        evidence = [
            {
                "name": e.name,
                "value": e.figure.value,
                "low": e.figure.low,
                "high": e.figure.high,
                "positions": e.figure.n,
                "documents": e.figure.documents,
                "only_different": e.only_different,
            }
            for e in self.evidence
        ]
        return {**asdict(self), "evidence": evidence}


def verify(request: VerifyRequest, *, watch: Stages) -> Verification:
    """Draw, score both ways, decide. Raises UsageError for options that make no sense and the errors of `opened`."""
    _check(request)
    corpus = load_corpus(request.data)
    models = [request.reference, request.candidate]
    with opened(models, request.endpoint, device=request.device, logits="float32", watch=watch) as sides:
        watch.stage(f"tokenizing {counted(len(corpus.documents), 'document')}")
        prompts = _prompts(request, sides, sides.tokenize(corpus.documents))
        ref, cand = sides.sources[request.reference.spec], sides.sources[request.candidate.spec]
        watch.stage(f"drawing {len(prompts)} continuations from each side and scoring them on both")
        forward = _drawn(ref, prompts, request)
        backward = _drawn(cand, prompts, request)
        notes = [*sides.notes]
        if forward is None:
            raise EndpointError(f"{request.reference} does not return the ids of the tokens it generates: load it here")
        if backward is None:
            notes.append("the endpoint does not return the ids of what it generates: only the reference was sampled")
        return _decided(request, sides, forward, backward or [], notes)


def _check(request: VerifyRequest) -> None:
    if not request.candidate.remote:
        raise UsageError(f"{request.candidate} is loaded here and needs no verification: use `evalgate kl`")
    if request.prompts < 2:
        raise UsageError("--prompts must be at least 2: an interval needs two documents")
    if not 0 < request.alarm < 0.5 or request.tolerance <= 0:
        raise UsageError("--false-alarm lies in (0, 0.5) and --tolerance is above 0 nats")
    local = ["--device"] if request.device != "auto" else []
    check_applies(request.endpoint, [request.reference, request.candidate], local=local)


def _prompts(request: VerifyRequest, sides: Sides, documents: Sequence[Any]) -> list[Window]:
    """Windows to go on from, one per document where there are enough, drawn without replacement."""
    longest = sides.context
    if longest is not None and request.prompt_tokens + request.new_tokens > longest:
        raise UsageError(
            f"prompts and new tokens are longer than the context of {counted(longest, 'token')}: shorten them"
        )
    found = cut(documents, policy("disjoint", context=request.prompt_tokens, stride=None), limit=None, prefix_id=None)
    order = np.random.default_rng(request.seed).permutation(len(found.windows))
    seen: dict[str, int] = {}
    ranked: list[tuple[int, int, Window]] = []
    for i in order:
        window = found.windows[int(i)]
        seen[window.document] = seen.get(window.document, 0) + 1
        ranked.append((seen[window.document], len(ranked), window))
    chosen = [window for _, _, window in sorted(ranked, key=lambda item: item[:2])[: request.prompts]]
    if len(chosen) < request.prompts:
        raise UsageError(
            f"the corpus gives {counted(len(chosen), 'prompt')} and --prompts asks for {request.prompts}: add text"
        )
    return chosen


def _drawn(source: EndpointSource, prompts: Sequence[Window], request: VerifyRequest) -> list[Window] | None:
    """The prompts with what the source generated, only that scored; None where it does not tell the ids."""
    windows = []
    for number, prompt in enumerate(prompts):
        channel = source.channels[number % len(source.channels)]
        new = source.draw(channel, prompt.ids, request.new_tokens, seed=request.seed + number)
        if new is None:
            return None
        if new:
            ids = (*prompt.ids, *new)
            sizes = (1,) * len(ids)
            windows.append(Window(number, prompt.document, prompt.domain, ids, len(prompt.ids), len(ids), sizes))
    return windows


def _score(
    source: EndpointSource, windows: Sequence[Window], others: Sequence[WindowScores] = ()
) -> list[WindowScores]:
    """Scores of the windows; a source that takes given ids is asked for those that `others` named too."""
    count = len(source.channels)
    wanted = [{row.position: tuple(sorted(known_ids(row))) for row in other.rows} for other in others]
    asked = wanted if others and source.follows else [None] * len(windows)
    pairs = enumerate(zip(windows, asked, strict=True))
    return [source.score(source.channels[n % count], window, ids) for n, (window, ids) in pairs]


def _decided(
    request: VerifyRequest, sides: Sides, forward: list[Window], backward: list[Window], notes: list[str]
) -> Verification:
    ref, cand = sides.sources[request.reference.spec], sides.sources[request.candidate.spec]
    q = _score(cand, forward)
    p = _score(ref, forward, q)
    floor = _floor(q[::REPEATED], _score(cand, forward[::REPEATED]))
    by_id = (ref.by_id, cand.by_id)
    quanta = (ref.quantum, cand.quantum)
    columns = [pair_columns(w, a, b, by_id=by_id, quanta=quanta) for w, a, b in zip(forward, p, q, strict=True)]
    found = [_lower_bound(forward, columns)]
    found += _estimates("KL(reference || endpoint), drawn tokens", forward, p, q, notes)
    if backward:
        p_back, q_back = _score(ref, backward), _score(cand, backward)
        found += _estimates("KL(endpoint || reference), drawn tokens", backward, q_back, p_back, notes)
    tests = len(found)
    evidence = tuple(_evidence(*series, alarm=request.alarm / tests, tolerance=request.tolerance) for series in found)
    rare = differing(
        ((values.tolist(), names) for _, values, names, bound in found if not bound),
        tolerance=request.tolerance,
        alarm=request.alarm,
    )
    verdict, reason = decide(evidence, request.tolerance)
    if verdict == "same":
        verdict, reason = unless_rare(reason, rare, alarm=request.alarm)
    known = [a for c in columns for a in c["top1_agreement"] if a is not None]
    return Verification(
        verdict=verdict,
        reason=reason,
        evidence=evidence,
        agreement=float(np.mean(known)) if known else None,
        floor=floor,
        tolerance=request.tolerance,
        alarm=request.alarm,
        requests=sum(channel.asked for channel in cand.channels),
        dialect=cand.dialect,
        assumed=ASSUMED,
        notes=tuple(notes),
        differing=rare,
    )


_Series = tuple[str, Floats, list[str], bool]


def _lower_bound(windows: Sequence[Window], columns: Sequence[dict[str, list[Any]]]) -> _Series:
    values = [v for c in columns for v in c["kl_low"]]
    documents = [w.document for w, c in zip(windows, columns, strict=True) for _ in c["kl_low"]]
    return "KL(reference || endpoint), lower bound from lists", np.array(values), documents, True


def _estimates(
    name: str, windows: Sequence[Window], drawn_from: list[WindowScores], other: list[WindowScores], notes: list[str]
) -> list[_Series]:
    """r - 1 - ln r of every drawn token; nothing where some token's logprob is not known, which is noted."""
    values, documents, unknown = [], [], 0
    for window, a, b in zip(windows, drawn_from, other, strict=True):
        for one, two in zip(a.rows, b.rows, strict=True):
            if not (one.chosen.known and two.chosen.known):
                unknown += 1
                continue
            log_r = two.chosen.low - one.chosen.low
            values.append(float(np.expm1(log_r) - log_r))
            documents.append(window.document)
    if unknown:
        notes.append(f"{name}: left out, since {unknown} drawn tokens have no logprob on one side")
        return []
    return [(name, np.array(values), documents, False)]


def _evidence(
    name: str, values: Floats, documents: list[str], only_different: bool, *, alarm: float, tolerance: float
) -> DrawnMean:
    """The mean with limits that are wrong with probability `alarm` on each side.

    Where fewer than five documents differ, the next one counts as at most ten tolerances away from the others.
    """
    codes = {document: code for code, document in enumerate(dict.fromkeys(documents))}
    indices = np.array([codes[d] for d in documents], dtype=np.int64)
    found = Sample(Series(values), indices, support=(0.0, inf)).figure(
        mean(), confidence=1 - 2 * alarm, rare=RareEvents(Limits(high=tolerance))
    )
    return DrawnMean(name, found, only_different)


def unless_rare(reason: str, rare: Differing | None, *, alarm: float) -> tuple[Verdict, str]:
    """ "same" for this reason, unless too many prompts may go to another model that the sample did not show."""
    if rare is not None and rare.most <= MOST_UNSEEN:
        return "same", reason
    documents, found, most = (0, 0, 1.0) if rare is None else (rare.documents, rare.found, rare.most)
    enough = documents_needed(alarm, found=found)
    return "undecided", (
        f"{found} of {documents} documents differ, so another model may answer up to {most:.1%} of all prompts: "
        f"{enough} documents or more, {found} of them different, would bound that by {MOST_UNSEEN:.0%} (--prompts)"
    )


def _floor(once: Sequence[WindowScores], again: Sequence[WindowScores]) -> float | None:
    moved = [
        abs(a.chosen.low - b.chosen.low)
        for one, two in zip(once, again, strict=True)
        for a, b in zip(one.rows, two.rows, strict=True)
        if a.chosen.known and b.chosen.known
    ]
    return max(moved) if moved else None


def decide(evidence: Sequence[DrawnMean], tolerance: float) -> tuple[Verdict, str]:
    """different: a figure is above the tolerance with its whole interval. same: every estimate is wholly below it."""
    above = next((e for e in evidence if e.figure.low is not None and e.figure.low > tolerance), None)
    if above is not None:
        return (
            "different",
            f"{above.name} is {above.figure.known:.4g} nats, above {tolerance:g} with its whole interval",
        )
    estimates = [e for e in evidence if not e.only_different]
    if estimates and all(e.figure.high is not None and e.figure.high <= tolerance for e in estimates):
        worst = max(estimates, key=lambda e: e.figure.high or 0.0)
        return "same", f"{worst.name} is {worst.figure.known:.4g} nats, below {tolerance:g} with its whole interval"
    if not estimates:
        return "undecided", "a lower bound below the tolerance proves nothing, and no drawn token could be compared"
    return "undecided", "the intervals hold the tolerance: ask more with --prompts"
