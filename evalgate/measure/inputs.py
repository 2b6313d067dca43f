"""What a measurement's numbers depend on, and the identity made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from evalgate.core import VERSION, Skipped, SourceInfo, Window, WindowPolicy
from evalgate.measure.alternatives import KEPT
from evalgate.measure.request import OVERLAP_K, RunRequest
from evalgate.store.alternatives import LISTED

if TYPE_CHECKING:
    from evalgate.corpora.corpus import Corpus


@dataclass(frozen=True)
class Inputs:
    """The opened sources, and the windows that all of them are scored on.

    sources: by spec, the reference first. skipped: documents that gave no window. limit: most windows, None = all.
    versions: of evalgate and the server's packages. notes: what a reader of the figures must know.
    """

    sources: Mapping[str, SourceInfo]
    corpus: Corpus
    windows: tuple[Window, ...]
    skipped: tuple[Skipped, ...]
    policy: WindowPolicy
    limit: int | None
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @cached_property
    def windows_hash(self) -> str:
        """xxh3-128 over the windows, in their order: their ids and which of them are scored."""
        from xxhash import xxh3_128

        state = xxh3_128()
        for window in self.windows:
            state.update(repr(window).encode())
        return str(state.hexdigest())


def versions(server: Mapping[str, str]) -> dict[str, str]:
    """The version of evalgate, and those of the server's packages."""
    return {"evalgate": VERSION, **server}


def identity_of(request: RunRequest, inputs: Inputs) -> dict[str, Any]:
    """Everything that changes a number of the per-position table or of its alternatives.

    The windows stand for the whole way from text to tokens: merges, templates, BOS. The measured noise floors are
    left out: they differ a little from load to load.
    """
    varying: dict[str, Any] = {"noise_floor": None, "kl_floor": None, "load_seconds": None}
    sources = {spec: replace(info, **varying) for spec, info in inputs.sources.items()}
    return {
        "kind": "ppl" if request.reference is None else "pair",
        "reference": request.reference_spec,
        "candidates": request.candidate_specs,
        "sources": {spec: {**asdict(info), "layers": list(map(asdict, info.layers))} for spec, info in sources.items()},
        "corpus": inputs.corpus.hash,
        "windows": asdict(inputs.policy),
        "shown": inputs.windows_hash,
        "limit": inputs.limit,
        "positions": None if request.positions is None else [request.positions, request.seed],
        "shuffle": request.seed if request.shuffle else None,
        "overlap_k": OVERLAP_K,
        "alternatives": {"listed": LISTED, "kept": KEPT},
        "versions": dict(inputs.versions),
    }
