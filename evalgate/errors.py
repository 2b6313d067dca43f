"""Every error evalgate raises on purpose.

    EvalgateError                    exit 2   cannot measure
    ├── UsageError                   exit 2   the command line, the policy or an argument is wrong
    ├── InputError                   exit 2   a file, corpus or document cannot be used
    ├── SourceError                  exit 2   a model or endpoint cannot be reached, loaded or trusted
    │   ├── ServerError              exit 2   the embedded server failed to start or died
    │   └── EndpointError            exit 2   an endpoint answered with an error or nonsense
    ├── MismatchError                exit 2   the two sides cannot be compared (vocabulary, length)
    ├── ScoreError                   exit 2   a score is missing, non-finite or out of place
    └── Interrupted                  exit 130 the user stopped the run

Each message is one sentence that says what is wrong and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable

from evalgate.printable import printable

PASS, FAIL, CANNOT_MEASURE, UNDECIDED, INTERRUPTED = 0, 1, 2, 3, 130


class EvalgateError(Exception):
    """Base class. `context` holds where it happened (window, position, endpoint, file) for `--json`."""

    exit_code = CANNOT_MEASURE

    def __init__(self, message: str, **context: object) -> None:
        # It may quote what an endpoint or a file says, of which no line may pass for one of ours.
        self.message = printable(" ".join(part.strip() for part in message.splitlines()))
        super().__init__(self.message)
        self.context = context


class UsageError(EvalgateError):
    """An option, argument or policy key is wrong."""


class InputError(EvalgateError):
    """A file, corpus or document cannot be used."""


class SourceError(EvalgateError):
    """A model or endpoint cannot be reached, loaded or trusted."""


class ServerError(SourceError):
    """The embedded scoring server failed to start, answered with an error or died."""


class EndpointError(SourceError):
    """An endpoint answered with an error or with something that is not an answer."""


class MismatchError(EvalgateError):
    """Reference and candidate cannot be compared position by position."""


class ScoreError(EvalgateError):
    """A score is missing, non-finite or not where it should be; names window, position and source."""


class Interrupted(EvalgateError):
    """The user stopped the run (Ctrl-C or SIGTERM)."""

    exit_code = INTERRUPTED


def choose(word: object, known: Iterable[str], *, most: int = 20) -> str:
    """What to write in the place of a word that is not known: `did you mean kl?`, or `use one of kl, js`.

    It ends a message. Names that differ in upper case, `-` and `_` alone count as alike. most: how many names are
    listed before a `...`.
    """
    names = list(known)
    close = closest(str(word), names)
    if close is not None:
        return f"did you mean {close}?"
    return f"use one of {', '.join(names[:most])}{', ...' if len(names) > most else ''}"


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known name that is most like the word; None where none is alike."""
    from difflib import get_close_matches

    folded: dict[str, str] = {}
    for name in known:
        folded.setdefault(_folded(name), name)
    found = get_close_matches(_folded(word), folded, n=1)
    return folded[found[0]] if found else None


def _folded(name: str) -> str:
    return name.casefold().replace("_", "-")
