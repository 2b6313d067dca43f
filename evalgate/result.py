"""From a token-score table to a run: its identity, summary, manifest and folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from evalgate import noise
from evalgate.core import SourceInfo, Window, WindowPolicy
from evalgate.endpoints.settings import EndpointSettings
from evalgate.request import OVERLAP_K, RunRequest
from evalgate.runs import Run, write_run
from evalgate.windows import WindowSet

if TYPE_CHECKING:
    import pyarrow as pa

    from evalgate.corpora.corpus import Corpus
    from evalgate.summary import Group

_NEIGHBOURS = "greedy_match_length"


def finished_run(
    request: RunRequest,
    table: pa.Table,
    sources: dict[str, SourceInfo],
    corpus: Corpus,
    cutting: WindowSet,
    chosen: WindowPolicy,
    limit: int | None,
    identity: dict[str, Any],
    versions: dict[str, str],
    began: float,
    *,
    notes: Sequence[str] = (),
    floors: Sequence[noise.Itself] = (),
    token_texts: dict[int, str] | None = None,
) -> Run:
    """Summarize the table, and write the folder if one is asked for."""
    from evalgate import summary as s
    from evalgate.stats.summarize import summarize

    reference = sources[request.reference] if request.reference else None
    by_name = {sources[spec].name: sources[spec] for spec in request.candidates}
    groups = summarize(
        table,
        kind=request.kind,
        noise_floor=reference.noise_floor if reference else None,
        seed=request.seed,
        confidence=request.confidence,
    )
    if request.positions is not None:
        groups = [(name, _unordered(one), [_unordered(d) for d in many]) for name, one, many in groups]
    skipped = [*corpus.skipped, *cutting.skipped]
    summary = s.Summary(
        evalgate_version=versions["evalgate"],
        kind=request.kind,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=request.seed,
        corpus=s.Corpus(
            name=corpus.name,
            hash=corpus.hash,
            documents=len(corpus.documents),
            tokens=sum(len(w.ids) for w in cutting.windows),
            skipped=[s.SkippedDocument(name=x.name, reason=x.reason) for x in skipped],
            window_preset=chosen.preset,
            context=chosen.context,
            stride=chosen.stride,
            limit=limit,
        ),
        reference=s.Source(**asdict(reference)) if reference else None,
        comparisons=[
            s.Comparison(
                candidate=s.Source(**asdict(by_name[name])),
                overall=overall,
                domains=domains,
                noise=noise.noise(
                    floors,
                    reference=reference.name,
                    candidate=name,
                    overall=overall,
                    tie=reference.noise_floor,
                    seed=request.seed,
                    confidence=request.confidence,
                )
                if reference and floors
                else None,
            )
            for name, overall, domains in groups
        ],
        seconds=time.monotonic() - began,
        versions=versions,
        notes=[*_notes(request, limit), *notes],
    )
    manifest = {
        "request": {
            **asdict(replace(request, endpoint=EndpointSettings())),
            "endpoint": request.endpoint.public(),
            "out": str(request.out) if request.out else None,
        },
        "identity": identity,
        "seed": request.seed,
        "noise_floor": {spec: info.noise_floor for spec, info in sources.items()},
        "created": summary.created,
    }
    if request.out is None:
        return Run(summary=summary, table=table, manifest=manifest, token_texts=token_texts)
    return write_run(
        request.out,
        manifest=manifest,
        table=table,
        summary=summary,
        token_texts=token_texts,
        overwrite=request.overwrite,
    )


def _unordered(group: Group) -> Group:
    """A group without the metric that counts neighbouring positions: a sample of positions has no neighbours."""
    return group.model_copy(update={"metrics": {n: m for n, m in group.metrics.items() if n != _NEIGHBOURS}})


def _notes(request: RunRequest, limit: int | None) -> list[str]:
    notes = []
    if request.positions is not None:
        notes.append(f"{request.positions:,} positions were sampled, each document by its share (seed {request.seed})")
    if request.limit is None and limit is not None:
        notes.append(f"the built-in corpus is cut to {limit} windows by default: --limit N measures more")
    return notes


def identity_of(
    request: RunRequest,
    sources: dict[str, SourceInfo],
    corpus: Corpus,
    chosen: WindowPolicy,
    limit: int | None,
    versions: dict[str, str],
    windows: Sequence[Window],
) -> dict[str, Any]:
    """Everything that changes a number of the token-score table.

    The windows stand for the whole way from text to tokens: merges, templates, BOS. The measured noise floors are
    left out: they differ a little from load to load.
    """
    return {
        "kind": "ppl" if request.reference is None else "pair",
        "reference": request.reference,
        "candidates": list(request.candidates),
        "sources": {spec: asdict(replace(info, noise_floor=None, kl_floor=None)) for spec, info in sources.items()},
        "corpus": corpus.hash,
        "windows": asdict(chosen),
        "shown": _shown_hash(windows),
        "limit": limit,
        "positions": None if request.positions is None else [request.positions, request.seed],
        "shuffle": request.seed if request.shuffle else None,
        "overlap_k": OVERLAP_K,
        "versions": versions,
    }


def _shown_hash(windows: Sequence[Window]) -> str:
    """xxh3-128 over what is shown and scored, window by window."""
    from xxhash import xxh3_128

    state = xxh3_128()
    for window in windows:
        state.update(repr(window).encode())
    return str(state.hexdigest())
