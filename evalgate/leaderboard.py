"""The one JSON document of a sweep: what `evalgate sweep --json` prints and `sweep.json` holds.

Built by `evalgate.stats.leaderboard` from the runs of a sweep alone, rendered by every report of a sweep. Its
JSON schema is published as docs/sweep.schema.json (`evalgate schema sweep`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from evalgate.summary import Corpus, Place, Published, RankedPair, Source, StoredFigure

SCHEMA_VERSION = 1


class Quantity(Published):
    """A figure of one candidate. Where only bounds are known `value` is null, and a null `high` is unbounded."""

    value: StoredFigure | None = None
    low: StoredFigure | None = Field(default=None, description="the lower bound, where the figure is bounded")
    high: StoredFigure | None = Field(
        default=None, description="the upper bound, where the figure is bounded and one is known"
    )
    exactness: Literal["exact", "estimated", "bounded"]

    @property
    def least(self) -> StoredFigure | None:
        """The value, or the lower bound where there is none."""
        return self.value or self.low


class Size(Published):
    """How large a candidate's weights are."""

    bytes: int = Field(description="of tensor data, without headers and tokenizers")
    parameters: int | None = Field(description="of the architecture, tied ones once; null where not known")
    bits: float | None = Field(description="bits per weight: 8 * bytes / parameters")
    counted: str = Field(description="what was counted: the file's tensors, or what a conversion would take")
    types: dict[str, int] = Field(default_factory=dict, description="bytes by type of tensor, the largest first")


class Entry(Published):
    """One candidate: its figures, or why there are none."""

    name: str
    spec: str
    place: Place | None = Field(default=None, description="by mean KL, 1 = best; null where it could not be ranked")
    reason: str = Field(default="", description="why it could not be measured")
    run: str | None = Field(default=None, description="its run folder, relative to the sweep's")
    source: Source | None = None
    kl: Quantity | None = Field(default=None, description="mean KL divergence from the reference, nats")
    top1: Quantity | None = Field(
        default=None, description="how often it picks the reference's likeliest token, a fraction"
    )
    ratio: Quantity | None = Field(
        default=None, description="perplexity of the candidate / perplexity of the reference"
    )
    size: Size | None = None
    speed: float | None = Field(
        default=None,
        description="tokens a second of its own forward pass and output head while windows were scored here",
    )
    front: bool = Field(default=False, description="whether no candidate is both smaller and closer to the reference")

    @property
    def measured(self) -> bool:
        """Whether it has figures."""
        return self.kl is not None


class Leaderboard(Published):
    """Everything a sweep says."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["sweep"] = "sweep"
    evalgate_version: str
    created: str = Field(description="UTC, ISO 8601")
    seed: int
    confidence: float
    reference: Source
    corpus: Corpus
    positions: int
    windows: int
    documents: int
    entries: list[Entry] = Field(description="the measured candidates, best first, then those that were not measured")
    pairs: list[RankedPair] = Field(
        default_factory=list,
        description="every two ranked candidates: paired by document, all pairs one family (Holm)",
    )
    seconds: float = Field(description="of all measurements")
    versions: dict[str, str]
    notes: list[str] = Field(default_factory=list, description="what a reader must know beside the figures")

    @property
    def measured(self) -> list[Entry]:
        """The candidates that have figures, best first."""
        return [entry for entry in self.entries if entry.measured]
