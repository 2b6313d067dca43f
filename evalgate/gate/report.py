"""The one JSON document of a gate: what `evalgate gate --json` prints and every CI report is made from.

Built by `evalgate.gate.judge`, rendered by the reports. Its JSON schema is published as docs/gate.schema.json
(`evalgate schema gate`).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from evalgate.core import NO_METHOD, NOT_APPLICABLE, Interval, Verdict
from evalgate.errors import FAIL, PASS, UNDECIDED

SCHEMA_VERSION = 2
EXIT_CODES = {"pass": PASS, "fail": FAIL, "undecided": UNDECIDED}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RuleVerdict(_Model):
    """One rule on one candidate.

    low and high are the interval that decided, at `confidence`; null where that end is open, or where there is no
    interval and `method` is "none".
    """

    rule: str = Field(description="the rule's name, or its text")
    text: str = Field(description="the rule in words: figure, comparison, limit")
    figure: str = Field(description="what was measured, in words")
    metric: str
    statistic: str
    unit: str
    verdict: Verdict | Literal["not applicable"] = Field(
        description="not applicable: it compares with a baseline run, and there is none yet"
    )
    on_undecided: Verdict = Field(default="undecided", description="what it counts as when undecided")
    proven: bool = Field(default=True, description="false: a pass that says only that a fail is not proven")
    reason: str = Field(description="one sentence")
    value: float | None = Field(description="null where only bounds are known")
    low: float | None
    high: float | None
    confidence: float = Field(description="of this interval: above the policy's where several rules are corrected")
    method: str
    label: str = Field(default="", description="what the interval speaks of where it is less: 'within this text'")
    min: float | None
    max: float | None
    exactness: Literal["exact", "estimated", "bounded"]
    documents: int
    positions: int

    @property
    def counts_as(self) -> Verdict:
        """What it is for the gate: undecided as the policy says, and what is not applicable does not fail."""
        if self.verdict == NOT_APPLICABLE:
            return "pass"
        return self.on_undecided if self.verdict == "undecided" else self.verdict

    @property
    def interval(self) -> Interval:
        """The interval that decided."""
        return Interval(self.low, self.high, self.confidence, self.method, self.label)


class Change(_Model):
    """A figure beside the baseline run's, on the same positions."""

    metric: str
    statistic: str
    unit: str
    better: Literal["lower", "higher", "zero"]
    value: float
    baseline: float
    difference: float = Field(description="value minus baseline")
    low: float | None = Field(description="lower end of the difference's interval")
    high: float | None

    @property
    def interval(self) -> Interval:
        """The difference's interval."""
        unknown = self.low is None and self.high is None
        return Interval(self.low, self.high, method=NO_METHOD if unknown else "paired")


class CandidateVerdict(_Model):
    """Every rule on one candidate; the verdict is fail if any rule fails, else undecided if any is."""

    candidate: str
    verdict: Verdict
    rules: list[RuleVerdict]
    changes: list[Change] = Field(default_factory=list, description="against the baseline run, where one is given")
    headline: str = Field(
        default="", description="what the run found of it, in one sentence; empty where that is not known"
    )


class Stopped(_Model):
    """How a sequential gate ended."""

    documents: int = Field(description="documents scored when the verdict fell")
    of: int = Field(description="documents of the corpus")
    seed: int = Field(description="of the order of the documents")


class Unmeasured(_Model):
    """Why a gate has no verdict on the candidates."""

    type: str = Field(description="class of the error")
    message: str = Field(description="one sentence: what is wrong and what to do")
    exit_code: int
    context: dict[str, Any] = Field(default_factory=dict)


class GateReport(_Model):
    """A policy's verdict on a run, or why there is none."""

    schema_version: int = SCHEMA_VERSION
    evalgate_version: str
    created: str = Field(description="UTC, ISO 8601")
    policy: str
    policy_hash: str = Field(description="xxh3-128 of the policy's rules and settings")
    confidence: float
    correction: Literal["none", "holm"]
    population: Literal["documents", "corpus"] = Field(
        default="documents", description="what verdicts speak of: documents like these, or these documents alone"
    )
    on_undecided: Verdict
    verdict: Verdict | Literal["cannot measure"] = Field(description="after on_undecided")
    exit_code: int
    reference: str | None
    baseline: str | None = Field(description="baseline run folder")
    run: str | None = Field(description="run folder that was judged")
    corpus: str
    documents: int
    positions: int
    candidates: list[CandidateVerdict]
    sequential: Stopped | None = None
    notes: list[str] = Field(default_factory=list)
    error: Unmeasured | None = Field(default=None, description="where the verdict is: cannot measure")
