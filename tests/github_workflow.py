"""A small evaluator of what GitHub runs: the expressions of `if:` and `${{ }}`, and which steps of a job run in order.

Of the expression language it knows what docs/ci uses: strings, dotted names, `&& || ! == !=`, brackets, and the
functions always, success, failure, cancelled and hashFiles. Anything else is an error, so that a test notices it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TOKEN = re.compile(r"\s*(&&|\|\||==|!=|!|\(|\)|,|'(?:[^']|'')*'|[A-Za-z_][\w.-]*)")
_STATUS = re.compile(r"\b(always|success|failure|cancelled)\s*\(")


@dataclass
class Expressions:
    """Evaluates expressions. values: by dotted name, "" where absent. failed: whether a step before has failed."""

    values: Mapping[str, Any]
    folder: Path
    failed: bool = False
    _left: list[str] = field(default_factory=list)

    def condition(self, text: str | None) -> bool:
        """Whether a step with this `if:` runs; without a status function GitHub puts `success() &&` before it."""
        if text is None:
            return not self.failed
        text = str(text).strip().removeprefix("${{").removesuffix("}}")
        return bool(self.value(text)) and (bool(_STATUS.search(text)) or not self.failed)

    def filled(self, text: str) -> str:
        """The text with every `${{ }}` replaced."""
        return re.sub(r"\$\{\{(.*?)\}\}", lambda m: str(self.value(m[1])), text)

    def value(self, text: str) -> Any:
        """The value of an expression."""
        self._left = list(_tokens(text))
        found = self._either()
        assert not self._left, f"left over in {text!r}: {self._left}"
        return found

    def _either(self) -> Any:
        found = self._both()
        while self._take("||"):
            other = self._both()
            found = found or other
        return found

    def _both(self) -> Any:
        found = self._compared()
        while self._take("&&"):
            other = self._compared()
            found = found and other
        return found

    def _compared(self) -> Any:
        found = self._one()
        if self._take("=="):
            return _same(found, self._one())
        if self._take("!="):
            return not _same(found, self._one())
        return found

    def _one(self) -> Any:
        token = self._left.pop(0)
        if token == "!":
            return not self._one()
        if token == "(":
            found = self._either()
            assert self._take(")")
            return found
        if token.startswith("'"):
            return token[1:-1].replace("''", "'")
        if self._take("("):
            arguments = []
            while not self._take(")"):
                arguments.append(self._either())
                self._take(",")
            return self._called(token, arguments)
        return self.values.get(token, "")

    def _called(self, name: str, arguments: list[Any]) -> Any:
        known: dict[str, Callable[..., Any]] = {
            "always": lambda: True,
            "success": lambda: not self.failed,
            "failure": lambda: self.failed,
            "cancelled": lambda: False,
            "hashFiles": self._hash,
        }
        return known[name](*arguments)

    def _hash(self, pattern: str) -> str:
        found = sorted(path for path in self.folder.glob(pattern) if path.is_file())
        return hashlib.sha256(b"".join(path.read_bytes() for path in found)).hexdigest() if found else ""

    def _take(self, token: str) -> bool:
        if self._left[:1] == [token]:
            self._left.pop(0)
            return True
        return False


def _tokens(text: str) -> Iterator[str]:
    at, text = 0, text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match, f"cannot read {text[at:]!r}"
        yield match[1]
        at = match.end()


def _same(a: Any, b: Any) -> bool:
    """GitHub compares strings without case."""
    return str(a).lower() == str(b).lower()


def run_steps(
    steps: list[dict[str, Any]],
    carry_out: Callable[[dict[str, Any], Expressions], bool],
    values: Mapping[str, Any],
    folder: Path,
) -> dict[str, str]:
    """Run the steps that run; name -> "success", "failure" or "skipped". carry_out: does one, False = it failed."""
    expressions = Expressions(values, folder)
    outcomes = {}
    for number, step in enumerate(steps):
        name = step.get("name") or step.get("uses") or str(number)
        if not expressions.condition(step.get("if")):
            outcomes[name] = "skipped"
            continue
        done = carry_out(step, expressions)
        outcomes[name] = "success" if done else "failure"
        expressions.failed = expressions.failed or not done
    return outcomes
