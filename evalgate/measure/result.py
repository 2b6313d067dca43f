"""From a token-score table to a run: its identity, summary, manifest and folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from evalgate.core import SourceInfo, Window, WindowPolicy
from evalgate.endpoints.settings import EndpointSettings
from evalgate.measure import noise
from evalgate.measure.request import OVERLAP_K, RunRequest
from evalgate.store.runs import Run, write_run
from evalgate.windows import WindowSet

if TYPE_CHECKING:
    import pyarrow as pa

    from evalgate.corpora.corpus import Corpus
    from evalgate.measure.scoring import Measured
    from evalgate.summary import Group

_NEIGHBOURS = "greedy_match_length"


@dataclass(frozen=True)
class Setting:
    """Who is shown what. sources: by spec. limit: most windows, None = all. versions: of what ran."""

    sources: Mapping[str, SourceInfo]
    corpus: Corpus
    cutting: WindowSet
    policy: WindowPolicy
    limit: int | None
    versions: dict[str, str]

    def answered(self, table: pa.Table) -> Setting:
        """The same with the windows alone that a table has."""
        asked = set(table.column("window").to_pylist())
        windows = tuple(window for window in self.cutting.windows if window.index in asked)
        return replace(self, cutting=replace(self.cutting, windows=windows))


def finished_run(
    request: RunRequest,
    setting: Setting,
    table: pa.Table,
    identity: dict[str, Any],
    began: float,
    *,
    notes: Sequence[str] = (),
    floors: Sequence[noise.Itself] = (),
    token_texts: dict[int, str] | None = None,
) -> Run:
    """Summarize the table, and write the folder if one is asked for."""
    from evalgate import summary as s
    from evalgate.stats.summarize import summarize

    sources, corpus, cutting, chosen = setting.sources, setting.corpus, setting.cutting, setting.policy
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
        evalgate_version=setting.versions["evalgate"],
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
            limit=setting.limit,
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
        versions=setting.versions,
        notes=[*_notes(request, setting.limit), *notes],
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


def endpoint_notes(request: RunRequest, measured: Measured, *, of: int) -> list[str]:
    """What was not measured of endpoints. of: windows that there were."""
    notes = []
    if not measured.whole:
        notes.append(f"the budget ended after {measured.windows} of {of} windows, drawn at random")
    if request.noise_floor:
        notes.append("the noise floor was not measured: an endpoint cannot be restarted or rebatched from here")
    return notes


def identity_of(request: RunRequest, setting: Setting) -> dict[str, Any]:
    """Everything that changes a number of the token-score table.

    The windows stand for the whole way from text to tokens: merges, templates, BOS. The measured noise floors are
    left out: they differ a little from load to load.
    """
    sources = {spec: replace(info, noise_floor=None, kl_floor=None) for spec, info in setting.sources.items()}
    return {
        "kind": "ppl" if request.reference is None else "pair",
        "reference": request.reference,
        "candidates": list(request.candidates),
        "sources": {spec: asdict(info) for spec, info in sources.items()},
        "corpus": setting.corpus.hash,
        "windows": asdict(setting.policy),
        "shown": _shown_hash(setting.cutting.windows),
        "limit": setting.limit,
        "positions": None if request.positions is None else [request.positions, request.seed],
        "shuffle": request.seed if request.shuffle else None,
        "overlap_k": OVERLAP_K,
        "versions": setting.versions,
    }


def _shown_hash(windows: Sequence[Window]) -> str:
    """xxh3-128 over what is shown and scored, window by window."""
    from xxhash import xxh3_128

    state = xxh3_128()
    for window in windows:
        state.update(repr(window).encode())
    return str(state.hexdigest())
