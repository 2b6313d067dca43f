"""Text that others wrote (an endpoint's error, a model's name, a run folder), made fit to be shown.

A control character in it could move the cursor, hide or recolor what follows, or reverse how a line reads; a line that
begins with two colons is a command to GitHub's runner, wherever it is printed. Everything shown to a person or a CI
system goes through `printable`: errors when they are made, reports and files where they are rendered, and standard
output as a whole. Escapes are those of JSON, so that a JSON document says the same before and after.
"""

from __future__ import annotations

import re

# C0, DEL, C1; marks and overrides of direction; what has no width or breaks lines unseen (but not the joiners that
# scripts and emoji need); tags; lone surrogates and noncharacters.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ufffe\uffff\U000e0000-\U000e007f\ud800-\udfff]"
)
_LINE = re.compile("[\t\n]")
# What GitHub's runner reads as a command: two colons that begin a line, and its older form anywhere in one.
_COMMAND = re.compile(r"^([^\S\n]*):(?=:)|#(?=#\[)", re.MULTILINE)
_STYLE = re.compile("(\x1b\\[[0-9;]*m)")


def printable(text: str, *, lines: bool = False) -> str:
    """The text, control characters escaped as in `\\u001b`. lines: new lines and tabs are its own, and stay."""
    text = _COMMAND.sub(lambda m: (m[1] or "") + _escaped(m[0][-1]), _CONTROL.sub(lambda m: _escaped(m[0]), text))
    return text if lines else _LINE.sub(lambda m: {"\n": "\\n", "\t": "\\t"}[m[0]], text)


def printable_styled(text: str) -> str:
    """The same for a report with colors of its own: they stay, since names in it were escaped before."""
    parts = _STYLE.split(text)
    return "".join(part if i % 2 else printable(part, lines=True) for i, part in enumerate(parts))


def _escaped(character: str) -> str:
    """As JSON writes it, in pairs of surrogates beyond 16 bits."""
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
