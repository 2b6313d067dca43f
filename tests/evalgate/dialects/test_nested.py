"""Many prefixes in one request: the same scores as one request each, and every fault of a list."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalgate.dialects import get
from evalgate.dialects.base import Ask, Capabilities, Reply, Request, WindowScores
from evalgate.errors import EndpointError, ScoreError
from tests.evalgate.dialects import fakes as servers
from tests.evalgate.dialects.drive import drive, reply_of, window_of
from tests.evalgate.dialects.fakes import BOS, WORDS

IDS = (BOS, 5, 9, 30, 12, 7, 22, 31, 9, 3, 3, 17)
ABLE = {
    "named": Capabilities(forced="allowed_token_ids", logprob_token_ids=True),
    "forced": Capabilities(forced="allowed_token_ids"),
    "biased": Capabilities(forced="logit_bias"),
    "neither": Capabilities(),
    "texts": Capabilities(token_id_keys=False, return_token_ids=False),
}


def scores(ask: Ask, ids: tuple[int, ...] = IDS, name: str = "continuation") -> tuple[WindowScores, list[Request]]:
    return drive(get(name).score_window(window_of(ids), ask), servers.SERVERS[name](step=0.0).answer)


@settings(max_examples=30, deadline=None)
@given(
    ids=st.lists(st.sampled_from([2, 5, 9, 30, 31, 32, 33, 38]), min_size=1, max_size=9),
    k=st.integers(1, 5),
    listed=st.integers(2, 12),
    batch=st.integers(1, 3),
    descending=st.booleans(),
    able=st.sampled_from(sorted(ABLE)),
    wanted=st.lists(st.integers(0, 39), max_size=4, unique=True),
)
def test_lists_say_what_single_requests_say(
    ids: list[int], k: int, listed: int, batch: int, descending: bool, able: str, wanted: list[int]
) -> None:
    whole = (BOS, *ids)
    asked = Ask(
        "m",
        k,
        capabilities=ABLE[able],
        vocabulary=WORDS,
        batch=batch,
        descending=descending,
        wanted={len(ids): tuple(wanted)} if wanted else {},
    )
    one, _ = scores(asked, whole)
    many, _ = scores(replace(asked, listed=listed), whole)
    if able == "named":  # a second reply names what was not listed, with a forced token as without
        assert all(row.chosen.known for row in many.rows)
    assert many == one


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.sampled_from([2, 5, 9, 30, 31, 32, 33, 38]), min_size=1, max_size=9),
    listed=st.integers(1, 12),
    at_once=st.sampled_from([1, 4, 32]),
    able=st.sampled_from(sorted(ABLE)),
    wanted=st.dictionaries(st.integers(1, 9), st.lists(st.integers(0, 39), max_size=9, unique=True)),
)
def test_no_window_takes_more_requests_than_are_set_aside_for_it(
    ids: list[int], listed: int, at_once: int, able: str, wanted: dict[int, list[int]]
) -> None:
    whole = (BOS, *ids)
    named = {i: tuple(tokens) for i, tokens in wanted.items() if i < len(whole)}
    asked = Ask("m", 1, capabilities=ABLE[able], vocabulary=WORDS, listed=listed, wanted=named)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evalgate.dialects.nested.NAMED_AT_ONCE", at_once)
        for name in ("continuation", "openai"):
            _, requests = scores(asked, whole, name)
            assert len(requests) <= get(name).most_requests(window_of(whole), asked)


def test_a_window_takes_few_requests() -> None:
    asked = Ask("m", 6, capabilities=ABLE["named"], vocabulary=WORDS, listed=64)
    _, requests = scores(asked)
    assert len(requests) == 2
    assert [len(p) for p in requests[0].json["prompt"]] == list(range(1, len(IDS)))
    assert "return_token_ids" not in requests[0].json
    _, requests = scores(replace(asked, listed=4, capabilities=ABLE["neither"]))
    assert [len(r.json["prompt"]) for r in requests] == [4, 4, 3]
    _, requests = scores(replace(asked, k=1, capabilities=ABLE["forced"]))
    forced = [r.json["allowed_token_ids"] for r in requests[1:]]
    assert len(forced) == len({t for (t,) in forced}) <= len(set(IDS[1:]))


def test_openai_lists_carry_no_field_of_others() -> None:
    asked = Ask("m", 5, capabilities=ABLE["named"], vocabulary=WORDS, listed=64)
    many, requests = scores(asked, name="openai")
    assert many == scores(replace(asked, listed=1), name="openai")[0]
    assert [set(r.json) for r in requests] == [{"model", "prompt", "max_tokens", "temperature", "logprobs"}]


def spoilt(change: Callable[[dict[str, Any]], None], error: type[Exception], match: str) -> None:
    fake = servers.vllm(step=0.0)

    def answer(request: Request) -> Reply:
        body = json.loads(fake.answer(request).body)
        change(body)
        return reply_of(body)

    asked = Ask("m", 6, capabilities=ABLE["named"], vocabulary=WORDS, listed=64)
    with pytest.raises(error, match=match):
        drive(get("continuation").score_window(window_of(IDS), asked), answer)


def test_faults_of_lists() -> None:
    spoilt(lambda b: b["choices"].pop(3), EndpointError, "one choice for each")
    spoilt(lambda b: b["choices"][3].update(index=4), EndpointError, "one choice for each")
    spoilt(lambda b: b["choices"].append(dict(b["choices"][0])), EndpointError, "one choice for each")
    spoilt(lambda b: b["usage"].update(prompt_tokens=b["usage"]["prompt_tokens"] + 11), ScoreError, "adds")
    spoilt(lambda b: b["usage"].update(prompt_tokens=b["usage"]["prompt_tokens"] - 1), ScoreError, "cuts prompts")
    spoilt(lambda b: b["choices"][2].update(prompt_token_ids=[9]), ScoreError, "other token ids.*")
    spoilt(lambda b: b["choices"][2].update(logprobs=None), EndpointError, "no logprobs")
    spoilt(lambda b: b["choices"][5]["logprobs"]["token_logprobs"].__setitem__(0, 0.4), ScoreError, "position 6")


def test_choices_may_come_in_any_order() -> None:
    fake = servers.vllm(step=0.0)

    def answer(request: Request) -> Reply:
        body = json.loads(fake.answer(request).body)
        body["choices"].reverse()
        return reply_of(body)

    asked = Ask("m", 6, capabilities=ABLE["named"], vocabulary=WORDS, listed=64)
    found, _ = drive(get("continuation").score_window(window_of(IDS), asked), answer)
    assert found == scores(asked)[0]


def test_a_list_whose_forced_token_is_ignored() -> None:
    fake = servers.vllm(step=0.0, forced=())
    asked = Ask("m", 1, capabilities=ABLE["forced"], vocabulary=WORDS, listed=64)
    with pytest.raises(ScoreError, match="ignores that field"):
        drive(get("continuation").score_window(window_of(IDS), asked), fake.answer)
