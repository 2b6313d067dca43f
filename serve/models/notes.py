"""Small facts that a cache remembers: one JSON file each, written beside and renamed.

A note that cannot be read, or is about something else, is no note: what it says is found out again.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any


def read_note(note: Path, key: Any) -> Any:
    """What was noted about exactly this key (any JSON value), None where nothing was."""
    try:
        content = json.loads(note.read_text())
        return content["value"] if content["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write_note(note: Path, key: Any, value: Any) -> None:
    """Note a value about a key, in place of an older note of that name. Raises OSError where it cannot be written."""
    note.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=note.parent, delete=False) as stream:
        json.dump({"key": key, "value": value}, stream)
    Path(stream.name).replace(note)
