"""JSON documents as evalgate writes and reads them: UTF-8, indented, and never a NaN or an infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from evalgate.errors import ScoreError


def dump(document: Mapping[str, Any], *, name: str) -> str:
    """The document as JSON text with a final newline; `name` is what an error calls it.

    Raises ScoreError where a value is NaN or infinite, naming its path in the document.
    """
    _refuse_non_finite(document, name)
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def parse(content: bytes) -> Any:
    """What a JSON document that others may have written says.

    Raises ValueError for what is not JSON, nests too deeply, or holds a number or text that `dump` cannot write again.
    """
    try:
        value = json.loads(content, parse_constant=_refused, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except RecursionError:
        raise ValueError("nests too deeply") from None
    return value


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refused(text)


def _refused(text: str) -> float:
    raise ValueError(f"{text[:20]} is not a number")


def _refuse_non_finite(value: Any, path: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ScoreError(f"{path} is {value}, which is not a number: report the run that gave it", path=path)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _refuse_non_finite(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _refuse_non_finite(inner, f"{path}[{index}]")
