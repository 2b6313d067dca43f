"""The JSON report: one document, `evalgate.summary.Summary`, and its published schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evalgate.reports import Report
from evalgate.store.documents import dump

if TYPE_CHECKING:
    from evalgate.summary import Summary

SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"


def render(summary: Summary) -> str:
    """The summary as one JSON document; raises ScoreError for a non-finite figure."""
    return dump(summary.model_dump(mode="python"), name="summary")


def gate_schema() -> str:
    """The JSON schema of a gate's document, as docs/gate.schema.json publishes it."""
    from evalgate.gate.report import GateReport

    body: dict[str, Any] = GateReport.model_json_schema(mode="serialization")
    return dump({"$schema": SCHEMA_ID, **body}, name="schema")


def schema() -> str:
    """The JSON schema of that document, as docs/summary.schema.json publishes it."""
    from evalgate.summary import Summary

    body: dict[str, Any] = Summary.model_json_schema(mode="serialization")
    return dump({"$schema": SCHEMA_ID, **body}, name="schema")


REPORT = Report("summary", render)
