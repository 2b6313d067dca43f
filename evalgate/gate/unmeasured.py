"""The document of a gate that ended in an error, so that no earlier verdict is left standing in its place."""

from __future__ import annotations

from datetime import UTC, datetime

from evalgate.core import CANNOT_MEASURE, VERSION
from evalgate.gate.judge import policy_hash
from evalgate.gate.policy import Policy, Settings
from evalgate.gate.report import GateReport, Unmeasured


def unmeasured(
    error: Unmeasured, *, name: str, policy: Policy | None = None, reference: str | None = None, run: str | None = None
) -> GateReport:
    """The report of an error. name: the policy's, which is known even where `policy` could not be read (None)."""
    settings = Settings() if policy is None else policy.policy
    return GateReport(
        evalgate_version=VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        policy=name,
        policy_hash="" if policy is None else policy_hash(policy),
        confidence=settings.confidence,
        correction=settings.correction,
        population=settings.population,
        on_undecided=settings.on_undecided,
        verdict=CANNOT_MEASURE,
        exit_code=error.exit_code,
        reference=reference,
        baseline=None,
        run=run,
        corpus="",
        documents=0,
        positions=0,
        candidates=[],
        error=error,
    )
