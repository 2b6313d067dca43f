"""The one JSON document of a run: what `--json` prints and `summary.json` holds.

Built by `evalgate.stats.summarize` from the token-score table alone, rendered by every report. Its JSON
schema is published as docs/summary.schema.json (`evalgate schema`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from evalgate.core import Figure, Interval, counted

SCHEMA_VERSION = 1
_NAMES = 20  # keys of a dict that a repr shows


class Published(BaseModel):
    """A part of a published document: frozen, with no field but its own, and without NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def __repr__(self) -> str:
        """The fields, each cut short: a notebook shows what a cell ends in."""
        return shortened(f"{type(self).__name__}({', '.join(f'{name}={_short(value)}' for name, value in self)})")

    __str__ = __repr__


def shortened(text: str, most: int = 1000) -> str:
    """The text, cut where it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 4]}...)"


def _short(value: object) -> str:
    if isinstance(value, StoredFigure):
        return repr(value)
    if isinstance(value, Published):
        return f"{type(value).__name__}(...)"
    if isinstance(value, list) and value:
        return f"[{counted(len(value), 'item')}]"
    if isinstance(value, dict) and value:
        names = ", ".join(list(map(str, value))[:_NAMES]) + ", ..." * (len(value) > _NAMES)
        return f"{{{names}}}"
    return shortened(repr(value), 80)


class StoredFigure(Published):
    """One figure with its interval. A null end is open; where `method` is 'none' there is no interval."""

    value: float
    low: float | None = Field(description="lower end of the interval, null where open")
    high: float | None = Field(description="upper end of the interval, null where open")
    se: float | None = Field(description="standard error, clustered by document; null where unknown")
    confidence: float = 0.95
    method: str = Field(
        description="how the interval was made: 'clustered-t', 'test-inversion', ...; 'none' = there is none"
    )
    label: str = Field("", description="what the interval speaks of where it is less: 'within this text'")

    @classmethod
    def of(cls, figure: Figure) -> StoredFigure:
        """A figure as a summary holds it.

        Raises:
            ScoreError: only bounds of it are known.
        """
        interval = figure.interval
        return cls(
            value=figure.known,
            low=interval.low,
            high=interval.high,
            se=figure.se,
            confidence=interval.confidence,
            method=interval.method,
            label=interval.label,
        )

    @property
    def interval(self) -> Interval:
        """The figure's interval."""
        return Interval(self.low, self.high, self.confidence, self.method, self.label)

    @property
    def figure(self) -> Figure:
        """The figure itself; how many values and documents it rests on stands in its group."""
        return Figure(self.value, self.interval, self.se)


class MetricSummary(Published):
    """One metric over one set of positions.

    `statistics` maps a statistic's name to its figure: mean, median, p1, p5, p10, p90, p95, p99, p99.9,
    max, min, rms, or the metric's own (perplexity, ratio).
    """

    metric: str
    unit: str = Field(description="nats, fraction, tokens, bits per byte, ...")
    exactness: Literal["exact", "estimated", "bounded"]
    statistics: dict[str, StoredFigure]


class Group(Published):
    """A set of positions: everything, or one domain."""

    name: str = Field(description="overall, or the domain")
    positions: int = Field(description="scored positions")
    documents: int = Field(description="documents that they come from")
    windows: int = Field(description="windows that they come from")
    bytes: int = Field(description="UTF-8 bytes of the scored text")
    metrics: dict[str, MetricSummary]


class LayerKind(Published):
    """Layers of one kind that are stored alike."""

    kind: str = Field(description="the layers' name without their numbers: 'self_attn.q_proj'; vectors are 'norms'")
    layers: int = Field(description="how many there are")
    parameters: int = Field(description="weights of the architecture; 0 where not known")
    bytes: int = Field(description="as stored, scales included; of a conversion, as its format would take them")
    scheme: str = Field(description="how the weights are stored")
    activations: str = Field("", description="how inputs are rounded while it computes; empty where they are not")
    dequantized: bool = Field(False, description="whether the weights were unpacked on load")

    @property
    def bits(self) -> float | None:
        """Bits per weight; None where it is not known how many weights there are."""
        return 8 * self.bytes / self.parameters if self.parameters else None


class Source(Published):
    """A model or endpoint as it was measured."""

    spec: str = Field(description="as it was named on the command line")
    name: str = Field(description="what the table calls it")
    kind: Literal["embedded", "endpoint", "trace"] = Field(description="loaded here, asked over HTTP, or recorded")
    vocab_size: int = Field(description="token ids that it gives a probability to")
    context_length: int = Field(description="tokens that it takes at most")
    weights_hash: str = Field("", description="of the weights; empty where they are not known")
    tokenizer_hash: str = Field("", description="of the tokenizer; empty where it is not known")
    dtype: str = Field("", description="type of the weights in memory")
    compute_dtype: str = Field("", description="what the layers compute in")
    compute_reason: str = Field("", description="why they compute in that type; empty where not known")
    logits_dtype: str = Field("", description="what the output head computes in")
    load_mode: str = Field("", description="how the weights came to be: 'as stored', 'GGUF dequantized to float32'")
    scheme: str = Field("", description="conversion on load; empty where there is none")
    backend: str = Field("", description="how sequences share a forward pass: packed, padded, tiled or alone, and why")
    attention: str = Field("", description="the attention kernel")
    noise_floor: float | None = Field(None, description="nats; margins at or below it are ties, not decisions")
    kl_floor: float | None = Field(None, description="nats; mean KL of the model against itself in its load check")
    template_hash: str = Field("", description="of the chat template; empty where there is none or it is not known")
    layers: list[LayerKind] = Field(
        default_factory=list, description="what each kind of layer is made of, the largest first; empty where not known"
    )
    load_seconds: float | None = Field(
        None, description="of reading the model with its conversion; null where not counted"
    )
    extra: dict[str, str] = Field(
        default_factory=dict, description="what else is known, an endpoint's certificate among it"
    )


class Noise(Published):
    """The noise floor: what the metrics say of a model against itself, under other conditions of computing.

    figures: metric -> statistic -> the floor, the worst of the sides and conditions. domains: domain -> the same of its
    positions. excess: how far the comparison's own figure is worse than its floor (lower is better: figure minus floor;
    higher: floor minus figure; zero: by size).
    """

    conditions: list[str] = Field(description="what was changed, and on which model")
    windows: int = Field(description="windows that were measured again")
    positions: int = Field(description="positions that were measured again")
    figures: dict[str, dict[str, StoredFigure]]
    domains: dict[str, dict[str, dict[str, StoredFigure]]] = Field(
        default_factory=dict, description="empty in runs of earlier versions"
    )
    excess: dict[str, dict[str, StoredFigure]]


class Comparison(Published):
    """One candidate against the reference (or one model alone, in a perplexity run)."""

    candidate: Source
    overall: Group
    domains: list[Group]
    noise: Noise | None = Field(default=None, description="null where the noise floor was not measured")


class Place(Published):
    """The places that a candidate can have among the others, 1 = the best."""

    candidate: str = Field(description="its name, as in its source")
    best: int = Field(description="one more than how many candidates are proven better")
    worst: int = Field(description="how many candidates there are, less those proven worse")
    tied: list[str] = Field(description="candidates that cannot be told apart from it")

    @property
    def text(self) -> str:
        """`2`, or `1-3` where it cannot be told apart from others."""
        return str(self.best) if self.best == self.worst else f"{self.best}-{self.worst}"


class RankedPair(Published):
    """Two candidates, the one with the better figure first."""

    first: str = Field(description="the candidate with the better figure")
    second: str = Field(description="the other")
    difference: StoredFigure | None = Field(
        description="first minus second, paired by document, at the confidence of Holm's step; null where only bounds "
        "are known"
    )
    better: Literal["first", "second", "neither"] = Field(description="what is proven of the two")


class Ranking(Published):
    """The candidates, best first by the mean of one metric, and which of them cannot be told apart."""

    metric: str
    confidence: float = Field(description="that no pair is called different that is not, all pairs together (Holm)")
    places: list[Place] = Field(description="best first")
    pairs: list[RankedPair]

    def place(self, candidate: str) -> Place:
        """The place of a candidate. Raises KeyError for one that does not take part."""
        return {place.candidate: place for place in self.places}[candidate]


class SkippedDocument(Published):
    """A document that gave no scored position, and why."""

    name: str = Field(description="the document's name")
    reason: str = Field(description="a short phrase")


class Corpus(Published):
    """What text was shown, and how it was cut."""

    name: str
    hash: str = Field(description="xxh3-128 of names, domains and texts in order")
    documents: int = Field(description="documents that the text has")
    tokens: int = Field(description="tokens of the windows that were shown")
    skipped: list[SkippedDocument]
    window_preset: str = Field(description="disjoint, sliding, llama.cpp or lm-eval")
    context: int = Field(description="tokens of a full window")
    stride: int = Field(description="tokens by which windows advance")
    limit: int | None = Field(None, description="windows asked for with --limit; null = all")


class Summary(Published):
    """Everything a run says."""

    schema_version: int = SCHEMA_VERSION
    evalgate_version: str = Field(description="that measured")
    kind: Literal["kl", "agree", "ppl"] = Field(description="the command that measured")
    created: str = Field(description="UTC, ISO 8601")
    seed: int = Field(description="of everything that was drawn")
    corpus: Corpus
    reference: Source | None = Field(description="null in a perplexity run")
    comparisons: list[Comparison]
    ranking: Ranking | None = Field(
        default=None, description="null with a single candidate, and in runs of earlier versions"
    )
    seconds: float = Field(description="from start to end")
    versions: dict[str, str] = Field(description="of Python and the packages that numbers depend on")
    notes: list[str] = Field(default_factory=list, description="what a reader must know beside the figures")
