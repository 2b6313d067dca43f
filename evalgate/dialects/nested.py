"""Many prefixes of a window in one request: a list of prompts, which a server that shares prefixes computes once.

No field forces another token for each prompt of a list. So the k alternatives are read first, and positions whose
token is not among them are asked about again: by `logprob_token_ids`, several positions at once, or with the token
forced, all positions of the same token at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from typing import NamedTuple

from evalgate.core import Window, counted
from evalgate.dialects.base import Ask, Exchange, Place, PositionScore, Reply, Request
from evalgate.dialects.body import all_choices, check_prompt, prompt_tokens, read_body
from evalgate.dialects.generated import Generated, read_generated
from evalgate.dialects.generation import forcing
from evalgate.dialects.one_token import PATH, completed, fields, named
from evalgate.dialects.rows import Entry, score_position
from evalgate.dialects.stepwise import Step, check_forced, chunks, finished, ordered
from evalgate.errors import ScoreError

NAMED_AT_ONCE = 32  # ids that one request names: each prompt of it answers for all of them


class Again(NamedTuple):
    """A second request. forced: the token that every prompt of it is to generate, None = ids are named."""

    positions: tuple[int, ...]
    request: Request
    forced: int | None


def nested_window(window: Window, ask: Ask) -> Exchange:
    """Score a window with `ask.listed` prefixes per request. Raises as `continuation.score_window` does."""
    first = dict(zip(ordered(window, ask), (yield from _first(window, ask)), strict=True))
    steps = {i: _step(window, ask, i, found) for i, found in first.items()}
    for again, found in (yield from _again(window, ask, {i: step.row for i, step in steps.items()})):
        for position, generated in zip(again.positions, found, strict=True):
            known = _told(generated, again, window, ask, position)
            steps[position] = _better(window, ask, position, first[position], known)
    return finished(window, ask, list(steps.values()))


def most_again(window: Window, ask: Ask) -> int:
    """Most requests that are sent a second time, were nothing that is wanted among the k best."""
    positions, able = ask.positions_in(window), ask.capabilities
    if able.logprob_token_ids:
        ids = sum(1 + len(ask.wanted.get(i, ())) for i in positions)
        full = 2 * ids // (NAMED_AT_ONCE + 1)  # each with the next one's first position holds over NAMED_AT_ONCE ids
        return min(len(positions), full + len(positions) // ask.listed + 1)
    if able.forced:
        return sum(-(-count // ask.listed) for count in Counter(window.ids[i] for i in positions).values())
    return 0


def _first(window: Window, ask: Ask) -> Generator[tuple[Request, ...], tuple[Reply, ...], list[Generated]]:
    """The generated token and its alternatives of every asked position, in the order sent."""
    lists = list(chunks(ordered(window, ask), ask.listed))
    found: list[Generated] = []
    for start in range(0, len(lists), ask.batch):
        some = lists[start : start + ask.batch]
        replies = yield tuple(_request(window, ask, positions, {}) for positions in some)
        for positions, reply in zip(some, replies, strict=True):
            found += _read(window, ask, positions, reply)
    return found


def _again(
    window: Window, ask: Ask, rows: Mapping[int, PositionScore]
) -> Generator[tuple[Request, ...], tuple[Reply, ...], list[tuple[Again, list[Generated]]]]:
    """What is asked a second time, with the answers."""
    asked = list(_named_requests(window, ask, rows) if ask.capabilities.logprob_token_ids else ())
    if not ask.capabilities.logprob_token_ids and ask.capabilities.forced:
        asked = list(_forced_requests(window, ask, rows))
    answers: list[tuple[Again, list[Generated]]] = []
    for start in range(0, len(asked), ask.batch):
        some = asked[start : start + ask.batch]
        replies = yield tuple(again.request for again in some)
        pairs = zip(some, replies, strict=True)
        answers += [(again, _read(window, ask, again.positions, reply)) for again, reply in pairs]
    return answers


def _named_requests(window: Window, ask: Ask, rows: Mapping[int, PositionScore]) -> Iterator[Again]:
    """Positions with something unlisted, as many together as name at most NAMED_AT_ONCE ids."""
    together: list[int] = []
    union: set[int] = set()

    def made() -> Again:
        more = {"logprob_token_ids": sorted(union)}
        return Again(tuple(together), _request(window, ask, tuple(together), more), None)

    for position, row in rows.items():
        missing = {score.token for score in (row.chosen, *row.wanted) if not score.known}
        if not missing or row.unmatched:
            continue
        if together and (len(union | missing) > NAMED_AT_ONCE or len(together) == ask.listed):
            yield made()
            together, union = [], set()
        together.append(position)
        union |= missing
    if together:
        yield made()


def _forced_requests(window: Window, ask: Ask, rows: Mapping[int, PositionScore]) -> Iterator[Again]:
    """Positions whose token is not listed, those of one token together."""
    missing: dict[int, list[int]] = {}
    for position, row in rows.items():
        if not row.chosen.known:
            missing.setdefault(window.ids[position], []).append(position)
    for token, positions in missing.items():
        for some in chunks(tuple(positions), ask.listed):
            yield Again(some, _request(window, ask, some, forcing(token, ask.capabilities.forced)), token)


def _request(window: Window, ask: Ask, positions: tuple[int, ...], more: Mapping[str, object]) -> Request:
    prompts = [list(window.ids[:i]) for i in positions]
    return Request("POST", PATH, {**fields(ask, prompts, prompt_ids=False), **more})


def _read(window: Window, ask: Ask, positions: tuple[int, ...], reply: Reply) -> list[Generated]:
    """One generated token for each prefix, in the order sent; ScoreError where other prompts were read."""
    place = Place(PATH, window.index)
    body = read_body(reply, place, k=ask.k)
    choices = all_choices(body, len(positions), place)
    sent, seen = sum(positions), prompt_tokens(body, place)
    if seen is not None and seen != sent:
        raise place.error(
            ScoreError,
            f"{counted(sent, 'token')} of {counted(len(positions), 'prompt')} were sent and {seen} were read: "
            "the server cuts prompts or adds tokens of its own",
        )
    for position, choice in zip(positions, choices, strict=True):
        check_prompt({}, choice, window.ids[:position], place.at(position))
    return [read_generated(c, ask, place.at(i)) for i, c in zip(positions, choices, strict=True)]


def _step(window: Window, ask: Ask, position: int, found: Generated) -> Step:
    here = Place(PATH, window.index, position)
    row = score_position(window.ids[position], found.entries, ask, here, text_keyed=found.text_keyed)
    return Step(row, found.text_keyed)


def _told(found: Generated, again: Again, window: Window, ask: Ask, position: int) -> dict[int, float]:
    """id -> logprob of what the second reply adds; ScoreError where another token than the forced one came."""
    if again.forced is None:
        return named(found)
    place = Place(PATH, window.index, position)
    own = check_forced(found.entries[0], again.forced, ask.capabilities.forced, place)
    return named(Generated([own], found.text_keyed))


def _better(window: Window, ask: Ask, position: int, first: Generated, known: Mapping[int, float]) -> Step:
    """The position scored again with what a second reply told about its token and the wanted ids."""
    token, entries = window.ids[position], list(first.entries)
    if token in known:
        entries.insert(0, Entry(frozenset({token}), known[token], True))
    step = _step(window, ask, position, Generated(entries, first.text_keyed))
    return step._replace(row=completed(step.row, known, Place(PATH, window.index, position)))
