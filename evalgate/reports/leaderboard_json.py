"""The leaderboard as JSON: what `sweep.json` holds, and its schema."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from evalgate.reports import Report

if TYPE_CHECKING:
    from evalgate.leaderboard import Leaderboard


def render(board: Leaderboard) -> str:
    """The document as JSON. Raises ScoreError where a figure is not a number."""
    from evalgate.store.documents import dump

    return dump(board.model_dump(mode="python"), name="sweep")


def schema() -> str:
    """The JSON schema of the document."""
    from evalgate.leaderboard import Leaderboard

    return json.dumps(Leaderboard.model_json_schema(), indent=2) + "\n"


REPORT = Report("sweep", render)
