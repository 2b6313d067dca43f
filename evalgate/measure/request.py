"""The request for a measurement, and the protocols of its observer and judge."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from evalgate.endpoints.budget import Budget
from evalgate.endpoints.settings import EndpointSettings
from evalgate.errors import UsageError
from evalgate.server.cluster import Cluster
from evalgate.specs import SourceSpec, parse, split_conversion
from evalgate.store.remote import Place

if TYPE_CHECKING:
    import pyarrow as pa

DEFAULT_CONTEXT = 512
NAMED_LIMIT = 64  # windows of a corpus that comes with evalgate where no limit is given
OVERLAP_K = 10
DEQUANTIZED = "dequantized"  # the conversion that unpacks weights


@dataclass(frozen=True)
class RunRequest:
    """A measurement to be made; see `evalgate kl --help` for what each option means.

    reference: None for a perplexity run. candidates: the models under test. data: None = evalgate's
    own corpus. context: None = 512, or the models' context where that is shorter. out: None = no folder.
    endpoint: how sides that we do not hold are asked. positions: a sample of that many, None = all.
    noise_floor: measure it (see evalgate.measure.noise). shuffle: show the documents in seeded random order.
    memory: what models loaded here may take, as `8GiB` or `80%`; None = what is free.
    cache: keep the reference's hidden states, and use those that are kept (evalgate.store.hidden).
    check: check models loaded here even where a check of the same weights, versions and machine is remembered.
    load_mode: "dequantized" unpacks the weights of candidates that are loaded here, "both" measures them in both modes.
    revision: branch, tag or commit of hub ids. allow_pickle, trust_remote_code: what a load may run. python: an
    interpreter to load models with. allow_template: go on where a chat is shown and chat templates differ.
    ray: address of the Ray cluster whose workers load and score the models, None = here.
    workers, num_cpus, num_gpus: see `evalgate.server.cluster.Cluster`.
    """

    kind: Literal["kl", "agree", "ppl"]
    reference: SourceSpec | None
    candidates: tuple[SourceSpec, ...]
    data: str | None = None
    split: str | None = None
    text_column: str | None = None
    split_on: str | None = None
    windows: str = "disjoint"
    context: int | None = None
    stride: int | None = None
    limit: int | None = None
    seed: int = 0
    confidence: float = 0.95
    device: str = "auto"
    logits: Literal["float32", "model"] = "float32"
    out: Place | None = None
    resume: bool = True
    overwrite: bool = False
    endpoint: EndpointSettings = field(default_factory=EndpointSettings)
    positions: int | None = None
    budget: Budget = field(default_factory=Budget)
    noise_floor: bool = False
    shuffle: bool = False
    check: bool = False
    memory: str | None = None
    cache: bool = True
    load_mode: Literal["native", "dequantized", "both"] = "native"
    revision: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False
    python: str | None = None
    allow_template: bool = False
    ray: str | None = None
    workers: int = 1
    num_cpus: float = 1.0
    num_gpus: float = 0.0

    def __post_init__(self) -> None:
        if self.load_mode != "native":
            object.__setattr__(self, "candidates", in_mode(self.candidates, self.load_mode))

    @property
    def server_options(self) -> list[str]:
        """Options of `python -m serve` for how models that are loaded here are read."""
        named = {"--allow-pickle": self.allow_pickle, "--trust-remote-code": self.trust_remote_code}
        revision = ["--revision", self.revision] if self.revision is not None else []
        memory = ["--memory", self.memory] if self.memory is not None else []
        return [*revision, *memory, *(option for option, asked in named.items() if asked)]

    @classmethod
    def of(
        cls, kind: Literal["kl", "agree", "ppl"], reference: str | None, candidates: Sequence[str], **options: Any
    ) -> RunRequest:
        """The request for specs as a user writes them. Raises UsageError for one that cannot be read."""
        parsed = tuple(parse(spec) for spec in candidates)
        return cls(kind, None if reference is None else parse(reference), parsed, **options)

    @property
    def models(self) -> list[SourceSpec]:
        """All models, the reference first, without repeats."""
        return list(dict.fromkeys([*([self.reference] if self.reference else []), *self.candidates]))

    @property
    def specs(self) -> list[str]:
        """The specs of `models`."""
        return [model.spec for model in self.models]

    @property
    def cluster(self) -> Cluster | None:
        """Where models are loaded, None = in a child of this process."""
        return None if self.ray is None else Cluster(self.ray, self.workers, self.num_cpus, self.num_gpus)

    @property
    def reference_spec(self) -> str | None:
        """The reference's spec."""
        return None if self.reference is None else self.reference.spec

    @property
    def candidate_specs(self) -> list[str]:
        """The candidates' specs."""
        return [candidate.spec for candidate in self.candidates]


def in_mode(candidates: Sequence[SourceSpec], mode: str) -> tuple[SourceSpec, ...]:
    """The candidates as a load mode has them: those that are loaded here with `@dequantized`, or with and without.

    Raises UsageError where none is loaded here, or one is converted already. What is in the mode stays as it is.
    """
    found: list[SourceSpec] = []
    for candidate in candidates:
        source, conversion = split_conversion(candidate.spec)
        if candidate.kind != "embedded" or conversion == DEQUANTIZED:
            found.append(candidate)
            continue
        if conversion:
            raise UsageError(
                f"--load-mode {mode} is for quantized checkpoints and {candidate.spec} is converted: leave one out"
            )
        found += [candidate] if mode == "both" else []
        found.append(parse(f"{source}@{DEQUANTIZED}"))
    if not any(candidate.kind == "embedded" for candidate in candidates):
        raise UsageError(f"--load-mode {mode} is for candidates that are loaded here and none is: leave it out")
    return tuple(dict.fromkeys(found))


class Judge(Protocol):
    """May end a measurement early (evalgate.gate.sequential)."""

    def begin(self, expected: dict[str, int], *, domains: dict[str, str], noise_floor: float | None) -> None:
        """Called once, before scoring: positions and domain by document, and the reference's noise floor in nats."""

    def take(self, table: pa.Table) -> bool:
        """Called with the rows of each batch; True ends the measurement."""


class TextCheck(Protocol):
    """Refuses a text that cannot be judged (evalgate.gate.foresight), before models are loaded."""

    def __call__(self, cut: Literal["domain", "document"], names: Collection[str], /) -> None:
        """Called with the names of the text's domains, then of its documents. Raises UsageError."""


def check_text(check: TextCheck | None, documents: Sequence[tuple[str, str]] | None) -> None:
    """Show a check the names and domains of documents, where there is one and they are known. Raises UsageError."""
    if check is not None and documents is not None:
        check("domain", {domain for _, domain in documents})
        check("document", {name for name, _ in documents})


class Observer(Protocol):
    """Watches a measurement, to show its progress."""

    def stage(self, text: str) -> None:
        """A stage before scoring begins."""

    def start(self, *, windows: int, positions: int) -> None:
        """Scoring begins. windows, positions: totals."""

    def advance(self, *, windows: int, positions: int, running: dict[str, float]) -> None:
        """A batch is done: its counts, and by candidate the mean so far (KL, or nll in a perplexity run)."""

    def finish(self) -> None:
        """The measurement is done."""


class _Silent:
    def stage(self, text: str) -> None: ...
    def start(self, *, windows: int, positions: int) -> None: ...
    def advance(self, *, windows: int, positions: int, running: dict[str, float]) -> None: ...
    def finish(self) -> None: ...


def silent() -> Observer:
    """An observer that says nothing."""
    return _Silent()
