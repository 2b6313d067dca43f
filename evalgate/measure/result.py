"""From scores to a run: its summary and manifest."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from evalgate.core import SourceInfo, counted
from evalgate.endpoints.settings import EndpointSettings
from evalgate.errors import ScoreError
from evalgate.measure import noise
from evalgate.measure.inputs import Inputs
from evalgate.measure.request import RunRequest
from evalgate.store.runs import Run

if TYPE_CHECKING:
    import pyarrow as pa

    from evalgate import summary as s
    from evalgate.measure.contract import TableScores
    from evalgate.summary import Group, Noise

_NEIGHBOURS = "greedy_match_length"


def summed_up(
    request: RunRequest,
    inputs: Inputs,
    scores: TableScores,
    identity: dict[str, Any],
    *,
    floors: Sequence[noise.Itself],
    token_texts: dict[int, str] | None,
    began: float,
) -> Run:
    """The run of these scores, not yet on disk. floors: each model against itself. began: by time.monotonic()."""
    from evalgate import summary as s
    from evalgate.measure.modes import mode_notes
    from evalgate.stats.caveats import caveats
    from evalgate.stats.ranking import ranking
    from evalgate.stats.summarize import HEADLINE, summarize

    sources = inputs.sources
    reference = sources[request.reference.spec] if request.reference else None
    _check_possible(scores.table)
    by_name = {sources[spec].name: sources[spec] for spec in request.candidate_specs}
    tie = reference.noise_floor if reference else None
    said = caveats(scores.table, kind=request.kind, noise_floor=tie)
    groups = summarize(
        scores.table,
        kind=request.kind,
        noise_floor=tie,
        confidence=request.confidence,
    )
    if request.positions is not None:
        groups = [(name, _unordered(one), [_unordered(d) for d in many]) for name, one, many in groups]
    ranked = (
        ranking(scores.table, HEADLINE[request.kind], noise_floor=tie, confidence=request.confidence)
        if len(groups) > 1
        else None
    )
    means = {
        name: one.metrics[HEADLINE[request.kind]] for name, one, _ in groups if HEADLINE[request.kind] in one.metrics
    }
    summary = s.Summary(
        evalgate_version=inputs.versions["evalgate"],
        kind=request.kind,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=request.seed,
        corpus=_corpus(inputs, scores),
        reference=s.Source(**asdict(reference)) if reference else None,
        comparisons=[
            s.Comparison(
                candidate=s.Source(**asdict(by_name[name])),
                overall=overall,
                domains=domains,
                noise=_noise(request, reference, floors, name, overall, domains),
            )
            for name, overall, domains in groups
        ],
        ranking=ranked,
        seconds=time.monotonic() - began,
        versions=dict(inputs.versions),
        notes=[
            *_notes(request, inputs),
            *said,
            *mode_notes(means, ranked),
            *inputs.notes,
            *scores.notes,
        ],
    )
    manifest = _manifest(request, inputs, identity, created=summary.created)
    return Run(
        summary=summary,
        table=scores.table,
        manifest=manifest,
        token_texts=token_texts,
        alternatives_table=scores.alternatives,
    )


def _check_possible(table: pa.Table) -> None:
    """Refuse scores that no pair of models can have, new or resumed. Raises ScoreError."""
    from evalgate.metrics import check_table

    try:
        check_table(table)
    except ScoreError as error:
        raise ScoreError(
            f"the token-score table {error.message}: measure again with --no-resume, and report it if it happens again",
            **error.context,
        ) from None


def _corpus(inputs: Inputs, scores: TableScores) -> s.Corpus:
    from evalgate import summary as s

    corpus = inputs.corpus
    skipped = [*corpus.skipped, *inputs.skipped]
    return s.Corpus(
        name=corpus.name,
        hash=corpus.hash,
        documents=len(corpus.documents),
        tokens=sum(len(w.ids) for w in scores.windows),
        skipped=[s.SkippedDocument(name=x.name, reason=x.reason) for x in skipped],
        window_preset=inputs.policy.preset,
        context=inputs.policy.context,
        stride=inputs.policy.stride,
        limit=inputs.limit,
    )


def _noise(
    request: RunRequest,
    reference: SourceInfo | None,
    floors: Sequence[noise.Itself],
    candidate: str,
    overall: Group,
    domains: Sequence[Group],
) -> Noise | None:
    """The noise floor of one candidate's figures; None where it was not measured."""
    if reference is None or not floors:
        return None
    return noise.noise(
        floors,
        reference=reference.name,
        candidate=candidate,
        overall=overall,
        domains=domains,
        tie=reference.noise_floor,
        confidence=request.confidence,
    )


def _manifest(request: RunRequest, inputs: Inputs, identity: dict[str, Any], *, created: str) -> dict[str, Any]:
    """Every input that changes a number; keys of endpoints are left out."""
    return {
        "request": {
            **asdict(replace(request, endpoint=EndpointSettings())),
            "endpoint": request.endpoint.public(),
            "out": str(request.out) if request.out else None,
        },
        "identity": identity,
        "seed": request.seed,
        "noise_floor": {spec: info.noise_floor for spec, info in inputs.sources.items()},
        "created": created,
    }


def _unordered(group: Group) -> Group:
    """A group without the metric that counts neighbouring positions: a sample of positions has no neighbours."""
    return group.model_copy(update={"metrics": {n: m for n, m in group.metrics.items() if n != _NEIGHBOURS}})


def _notes(request: RunRequest, inputs: Inputs) -> list[str]:
    notes, limit = [], inputs.limit
    if request.positions is not None:
        notes.append(f"{request.positions:,} positions were sampled, each document by its share (seed {request.seed})")
    if request.limit is None and limit is not None:
        notes.append(f"{inputs.corpus.name} is cut to {counted(limit, 'window')} by default: --limit N measures more")
    return notes
