"""The class of a token's text: word, number, code, punctuation, whitespace, or another script."""

from __future__ import annotations

import unicodedata
from itertools import pairwise
from typing import Literal, get_args

TokenClass = Literal["word", "number", "code", "punctuation", "whitespace", "other scripts"]
CLASSES: tuple[TokenClass, ...] = get_args(TokenClass)

_CODE = frozenset("{}[]<>=+*/\\|&^~`_#@$;")


def token_class(text: str) -> TokenClass:
    """The class of a token's decoded text, judged without the white space around it.

    Letters outside the Latin script, and bytes that are no whole character (U+FFFD), are other scripts. Code is
    whatever has a programming sign or underscore, a letter beside a digit, or a capital after a small letter.
    """
    core = text.strip()
    if not core:
        return "whitespace"
    letters = [c for c in core if c.isalpha()]
    if "\ufffd" in core or any(not _latin(c) for c in letters):
        return "other scripts"
    digits = any(c.isdigit() for c in core)
    if any(c in _CODE for c in core) or (letters and digits):
        return "code"
    if any(a.islower() and b.isupper() for a, b in pairwise(core)):
        return "code"
    if letters:
        return "word"
    return "number" if digits or any(c.isnumeric() for c in core) else "punctuation"


def _latin(letter: str) -> bool:
    return letter.isascii() or unicodedata.name(letter, "").startswith(("LATIN", "FEMININE", "MASCULINE", "MICRO"))
