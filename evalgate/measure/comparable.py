"""Whether sources can be compared position by position: one vocabulary, and contexts that take the windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evalgate.core import SourceInfo, Window, counted
from evalgate.errors import MismatchError


def check_comparable(sources: Sequence[SourceInfo]) -> None:
    """Raise MismatchError unless all share one vocabulary: the same ids for the same tokens, as many output rows."""
    for other in sources[1:]:
        lead = sources[0]
        if other.extra.get("vocabulary_hash") != lead.extra.get("vocabulary_hash"):
            raise MismatchError(
                f"{lead.name} and {other.name} have different vocabularies (by content), so that their tokens cannot "
                "be compared one by one: compare bits_per_byte of two `evalgate ppl` runs instead"
            )
        if other.vocab_size != lead.vocab_size:
            raise MismatchError(
                f"{lead.name} has {lead.vocab_size} output rows and {other.name} has {other.vocab_size}: cutting to "
                "the smaller one would renormalise silently, so pad or export both alike"
            )


def with_known_vocabulary(recorded: SourceInfo, candidate: SourceInfo) -> SourceInfo:
    """The recorded reference, with the candidate's vocabulary hash where it has none of its own (a logits file)."""
    known = {"vocabulary_hash": candidate.extra.get("vocabulary_hash", "")}
    return replace(recorded, extra={**known, **recorded.extra})


def check_contexts(windows: Sequence[Window], sources: Sequence[SourceInfo]) -> None:
    """Raise MismatchError where a recorded window is longer than a model's context."""
    longest = max(len(window.ids) for window in windows)
    for source in sources:
        if longest - 1 > source.context_length:  # the last token is only predicted
            raise MismatchError(
                f"the recording has windows of {counted(longest, 'token')}, more than the context of {source.name} "
                f"({source.context_length}): record one with a shorter --context"
            )


def check_length(windows: Sequence[Window], longest: int | None) -> None:
    """Raise MismatchError where a recorded window is longer than the sides take. longest: None = not known."""
    length = max(len(window.ids) for window in windows)
    if longest is not None and length > longest:
        raise MismatchError(
            f"the recording has windows of {counted(length, 'token')} and the candidates take {longest} at most: "
            "record one with a shorter --context"
        )
