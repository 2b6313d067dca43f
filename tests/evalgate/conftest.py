"""A stored run's parts, which no test changes."""

from __future__ import annotations

import pytest

from tests.evalgate.sample_run import source, summary, token_table


@pytest.fixture(scope="session")
def table():
    """The scores of two candidates."""
    return token_table(("demo@int8", "demo@bf16"))


@pytest.fixture(scope="session")
def document(table):
    """Their summary."""
    return summary(table, reference=source("demo"))
