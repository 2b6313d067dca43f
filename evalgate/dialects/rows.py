"""One position's listed entries -> its scores: sentinels, duplicates, ranks, bounds and tail mass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from evalgate.core import LEAST_LOGPROB, Window
from evalgate.dialects.base import Ask, Place, PositionScore, Score, WindowScores
from evalgate.errors import ScoreError

ROUNDING = 1e-4  # nats: a logprob this far above 0, or two of one id this far apart, is rounding
TAIL_ROUNDING = 1e-3  # probability: listed mass this far above 1 is rounding
ANY: frozenset[int] = frozenset()
_UNLISTED = "not among the listed alternatives"


@dataclass(frozen=True, slots=True)
class Entry:
    """One listed alternative. ids: the one id it is, the several it may be, or ANY (unreadable text).

    beside: the actual or generated token, which is listed whether it is among the k best or not. text: the
    text it came as, "" where it came as an id.
    """

    ids: frozenset[int]
    logprob: float
    beside: bool = False
    text: str = ""


def as_id(value: object, place: Place) -> int:
    """A token id from the wire; ScoreError for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise place.error(ScoreError, f"{value!r} stands where a token id should be")
    return value


def as_logprob(value: object, place: Place) -> float:
    """A logprob from the wire, rounding above 0 taken off; sentinels pass. ScoreError for anything else."""
    if value is None:
        raise place.error(ScoreError, "the logprob is missing (null)")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise place.error(ScoreError, f"{value!r} stands where a logprob should be")
    if not math.isfinite(value):
        raise place.error(ScoreError, f"the logprob is {value}: the server's logits are not finite")
    if value > ROUNDING:
        raise place.error(
            ScoreError,
            f"the logprob is {value}, above 0: the server returns something else (vLLM: --logprobs-mode raw_logprobs)",
        )
    return min(float(value), 0.0)


def is_sentinel(logprob: float) -> bool:
    """Whether a value stands for -inf or "below what is shown": -9999 (vLLM), -3.4e38 (llama-server), a mask, -100."""
    return logprob <= LEAST_LOGPROB or logprob == -100.0


def score_position(
    token: int,
    entries: Sequence[Entry],
    ask: Ask,
    place: Place,
    *,
    server_rank: int | None = None,
    text_keyed: bool = False,
) -> PositionScore:
    """Scores of the position at `place`, whose actual token is `token`.

    `entries`: the k best and possibly the actual or generated token besides or twice. `server_rank`: the
    server's rank of the actual token; an upper bound unless its tie order is known. Raises ScoreError for
    conflicting duplicates, too few entries, masked alternatives, a rank or a mass that cannot be.
    """
    if place.position is None:
        raise ValueError("score_position needs a place with a position")
    unique, repeats = _unique(_normalised(entries, ask), token, place)
    real = [e for e in unique if not is_sentinel(e.logprob)]
    sentinels = tuple(e.logprob for e in unique if is_sentinel(e.logprob))
    if sentinels and len(real) == 1 and real[0].logprob == 0.0:
        raise place.error(
            ScoreError,
            "every alternative is masked: the server returns logprobs after sampling filters; "
            "start vLLM with --logprobs-mode raw_logprobs",
        )
    merged = _merged(entries, ask, place, text_keyed=text_keyed)
    top = _top(real, ask.k, merged)
    bound = min((e.logprob for e in top if not (merged and e.beside)), default=0.0)
    chosen = _score(token, unique, repeats, bound, merged)
    complete = not merged and not sentinels and all(len(e.ids) == 1 for e in top)
    rank, low, high = _rank(chosen, top, complete, server_rank, ask, place)
    named = [e for e in top if len(e.ids) == 1]
    return PositionScore(
        position=place.position,
        chosen=chosen,
        rank=rank,
        rank_low=low,
        rank_high=high,
        top_ids=tuple(_id(e) for e in named),
        top_logprobs=tuple(e.logprob for e in named),
        unmatched=tuple(e.logprob for e in top if len(e.ids) != 1),
        merged=merged,
        wanted=tuple(_score(w, unique, repeats, bound, merged) for w in ask.wanted.get(place.position, ())),
        tail=tail_without(1.0, (e.logprob for e in real), place, excess=ask.capabilities.excess),
        sentinels=sentinels,
    )


def unscored(token: int, ask: Ask, position: int, why: str) -> PositionScore:
    """A position that the endpoint cannot be asked about: nothing is known but that logprob <= 0."""
    wanted = tuple(Score(w, -math.inf, 0.0, why) for w in ask.wanted.get(position, ()))
    return PositionScore(position, Score(token, -math.inf, 0.0, why), None, 1, None, (), (), (), True, wanted, 1.0, ())


def window_scores(window: Window, ask: Ask, rows: Sequence[PositionScore], *, text_keyed: bool) -> WindowScores:
    """The finished window; ScoreError unless there is one row per asked position, in order."""
    asked = ask.positions_in(window)
    got = tuple(row.position for row in rows)
    if got != asked:
        missing = sorted(set(asked) - set(got))
        raise ScoreError(f"window {window.index}: positions {missing or got} are missing or out of order")
    return WindowScores(window.index, window.document, ask.k, tuple(rows), text_keyed)


def _id(entry: Entry) -> int:
    (only,) = entry.ids
    return only


def _order(entry: Entry) -> tuple[float, int]:
    return -entry.logprob, min(entry.ids, default=-1)


def _merged(entries: Sequence[Entry], ask: Ask, place: Place, *, text_keyed: bool) -> bool:
    """Whether one text may hide several of the k best; ScoreError where fewer than k came for no such reason.

    Only a text that several tokens have can hide one. The actual token takes a place of its own among the
    texts when it is outside the k best, so as the worst of exactly k it may stand for a hidden one.
    """
    expected = ask.k if ask.vocab_size is None else min(ask.k, ask.vocab_size)
    listed = [e for e in entries if not e.beside]
    count = len({e.ids for e in listed if len(e.ids) == 1}) + sum(len(e.ids) != 1 for e in listed)
    worst = min((e.logprob for e in listed), default=0.0)
    at_the_end = any(e.beside and e.logprob <= worst for e in entries)
    if text_keyed and any(len(e.ids) != 1 for e in entries) and count <= expected - (not at_the_end):
        return True
    if count < expected:
        raise place.error(ScoreError, f"{count} alternatives came and {expected} were asked for")
    return False


def _normalised(entries: Sequence[Entry], ask: Ask) -> Sequence[Entry]:
    """The entries with the excess taken off where they are the whole vocabulary, by id; else as they are."""
    if not ask.capabilities.excess or ask.vocab_size is None:
        return entries
    found = {_id(e): e.logprob for e in entries if len(e.ids) == 1 and not is_sentinel(e.logprob)}
    if len(found) < ask.vocab_size:
        return entries
    off = math.log(math.fsum(map(math.exp, found.values())))
    return [e if is_sentinel(e.logprob) else replace(e, logprob=min(e.logprob - off, 0.0)) for e in entries]


def _unique(entries: Sequence[Entry], token: int, place: Place) -> tuple[list[Entry], list[Entry]]:
    """(one entry per token, tokens listed besides first; the entries that only repeat one of those)."""
    by_id: dict[int, Entry] = {}
    for entry in sorted((e for e in entries if len(e.ids) == 1), key=lambda e: not e.beside):
        first = by_id.setdefault(_id(entry), entry)
        masked = is_sentinel(first.logprob) and is_sentinel(entry.logprob)
        if abs(first.logprob - entry.logprob) > ROUNDING and not masked:
            which = "the actual token" if _id(entry) == token else f"token {_id(entry)}"
            raise place.error(
                ScoreError, f"{which} is listed twice with different logprobs, {first.logprob} and {entry.logprob}"
            )
    besides = [e for e in entries if e.beside]
    repeats = _repeats(entries, besides)
    vague = [_narrowed(e, besides) for e in entries if len(e.ids) != 1 and not any(e is r for r in repeats)]
    return [*by_id.values(), *(e for e in vague if len(e.ids) != 1 or _id(e) not in by_id)], repeats


def _repeats(entries: Sequence[Entry], besides: Sequence[Entry]) -> list[Entry]:
    """Ambiguous entries that are a token listed besides, seen again: same number and same text, once each."""
    found: list[Entry] = []
    for b in besides:
        same = (e for e in entries if not e.beside and len(e.ids) != 1 and e.logprob == b.logprob)
        again = next((e for e in same if (b.ids and b.ids <= e.ids) or (not e.ids and e.text == b.text)), None)
        if again is not None:
            found.append(again)
    return found


def _narrowed(entry: Entry, besides: Sequence[Entry]) -> Entry:
    """An ambiguous entry without the ids whose own logprob is known to be another one."""
    left = entry.ids.difference(*(b.ids for b in besides if len(b.ids) == 1))
    return replace(entry, ids=left) if left else entry


def _top(real: Sequence[Entry], k: int, merged: bool) -> list[Entry]:
    """The k best in order. Where some are hidden, a token listed besides may be outside: it needs a worse one."""
    ordered = sorted(real, key=_order)
    if merged:
        worst = min((e.logprob for e in ordered if not e.beside), default=0.0)
        ordered = [e for e in ordered if not e.beside or e.logprob >= worst]
    return ordered[:k]


def _score(token: int, unique: Sequence[Entry], repeats: Sequence[Entry], bound: float, merged: bool) -> Score:
    """A number where the id is certain. A text that the token shares may be its own, or hide it where texts merged."""
    maybe: list[float] = []
    for entry in unique:
        if entry.ids == {token}:
            if is_sentinel(entry.logprob):
                return Score(token, -math.inf, bound, f"the server sent {entry.logprob}")
            return Score(token, entry.logprob, entry.logprob)
        if len(entry.ids) != 1 and (token in entry.ids or not entry.ids):
            maybe.append(bound if is_sentinel(entry.logprob) else entry.logprob)
    if merged and any(token in e.ids or not e.ids for e in repeats):
        maybe.append(0.0)
    if maybe:
        high = 0.0 if merged else max([*maybe, bound])
        return Score(token, -math.inf, high, "its text may be another token's")
    return Score(token, -math.inf, bound, _UNLISTED)


def _rank(
    chosen: Score, top: Sequence[Entry], complete: bool, server_rank: int | None, ask: Ask, place: Place
) -> tuple[int | None, int, int | None]:
    """(rank or None, lowest, highest or None)."""
    if not chosen.known:
        unlisted = complete and chosen.why == _UNLISTED
        return None, 1 + (sum(e.logprob > top[-1].logprob for e in top) if unlisted else 0), None
    larger = sum(e.logprob > chosen.low for e in top)
    if server_rank is not None and server_rank < larger + 1:
        raise place.error(
            ScoreError, f"the actual token's rank is {server_rank} but {larger} listed tokens are more likely"
        )
    inside = next((i for i, e in enumerate(top) if e.ids == {chosen.token}), None)
    decided = complete and inside is not None
    whole = ask.vocab_size is not None and len(top) == ask.vocab_size
    if decided and inside is not None and (chosen.low > top[-1].logprob or whole or ask.capabilities.tie_order == "id"):
        return inside + 1, inside + 1, inside + 1
    if server_rank is not None and ask.capabilities.tie_order == "id":
        return server_rank, server_rank, server_rank
    return None, larger + 1, server_rank


def tail_without(tail: float, logprobs: Iterable[float], place: Place, *, excess: float = 0.0) -> float:
    """`tail` less the mass of `logprobs`; rounding below 0 is clamped, more is a ScoreError. excess: known, in nats."""
    left = tail - math.fsum(math.exp(v) for v in logprobs)
    if left < -max(TAIL_ROUNDING, math.expm1(excess)):
        raise place.error(
            ScoreError, f"the listed probabilities add up to {1.0 - left:.6f}: these are not log-probabilities"
        )
    return max(left, 0.0)
