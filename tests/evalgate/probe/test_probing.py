"""Speculative decoding, lists of prompts and the order of continuations, against scripted servers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from evalgate.dialects.base import Reply, Request
from evalgate.dialects.findings import Question
from evalgate.probe.certificate import Certificate, Cost
from evalgate.probe.excess import in_nats
from evalgate.probe.ordering import LENGTH, MOST_AT_ONCE, NESTED, cheapest
from evalgate.probe.probe import probe
from tests.evalgate.dialects import fakes as servers
from tests.evalgate.dialects.drive import drive, reply_of
from tests.evalgate.dialects.fakes import WORDS, Fake

IDS = (5, 9, 12, 7, 22, 18, 3, 14, 26, 11, 17, 8)


def certify(fake: Fake, dialect: str = "", answer: Any = None) -> tuple[Certificate, list[Request]]:
    question = Question("m", IDS, "w5 w9 w12", local_ids=(5, 9, 12), vocabulary=WORDS, dialect=dialect)
    return drive(probe(question), answer or fake.answer)


@pytest.mark.parametrize("server", [servers.vllm, servers.llamacpp, servers.pegainfer, servers.tensorrt_llm])
def test_plain_decoding_is_not_suspected(server: Any) -> None:
    found, _ = certify(server())
    assert found.speculative == "not seen"
    # the wire's cached difference moves every number of a second request by as much
    assert found.speculative_difference is not None and found.speculative_difference <= 0.01 + 1e-12


@pytest.mark.parametrize("server", [servers.vllm, servers.llamacpp, servers.pegainfer, servers.tensorrt_llm])
def test_tokens_made_at_once_that_score_otherwise_are_suspected(server: Any) -> None:
    found, _ = certify(server(draft_noise=0.3))
    assert found.speculative == "suspected"
    assert found.speculative_difference == pytest.approx(0.3, abs=0.0101)
    assert any(re.search(r"made at once differ by 0\.(29|3) nats", note) for note in found.notes)


def test_a_difference_within_what_a_cache_changes_is_no_suspicion() -> None:
    assert certify(servers.vllm(draft_noise=0.3, cache_noise=0.1))[0].speculative == "not seen"
    assert certify(servers.vllm(draft_noise=0.5, cache_noise=0.1))[0].speculative == "suspected"


def test_drafts_that_the_reply_counts_are_suspected() -> None:
    found, _ = certify(servers.vllm(tells_drafts=True))
    assert found.speculative == "suspected" and found.speculative_difference == 0.0
    assert any("counts drafted tokens" in note for note in found.notes)


def test_a_greedy_token_that_is_not_the_best_is_suspected() -> None:
    fake = servers.vllm()

    def answer(request: Request) -> Reply:
        reply = fake.answer(request)
        if (request.json or {}).get("max_tokens") != 8:
            return reply
        body = json.loads(reply.body)
        body["choices"][0]["logprobs"]["token_logprobs"][3] -= 0.4  # of the draft model, say
        return reply_of(body)

    found, _ = certify(fake, answer=answer)
    assert found.speculative == "suspected"
    assert any("a greedy token lies 0.4 nats off" in note for note in found.notes)


def test_without_ids_or_generated_tokens_it_is_unknown() -> None:
    assert certify(Fake(shape="none", tokenizer=False))[0].speculative == "unknown"


def test_windows_of_one_request_need_no_order() -> None:
    found, asked = certify(servers.vllm())
    assert (found.prompt_list, found.continuation_costs, found.cheapest) == (1, (), None)
    assert len(asked) < 45


def test_the_order_is_measured_where_it_is_used() -> None:
    found, _ = certify(servers.vllm(extends_only=True), "continuation")
    assert found.prompt_list == 512
    ways = {(c.order, c.at_once, c.listed): c.computed for c in found.continuation_costs}
    assert set(ways) == {
        ("ascending", 1, 1),
        ("descending", 1, 1),
        ("ascending", 4, 1),
        ("ascending", MOST_AT_ONCE, 1),
        ("ascending", 1, NESTED),
    }
    # each prefix but the first finds the one before it; downwards none is found
    assert ways["ascending", 1, 1] == LENGTH
    assert ways["descending", 1, 1] == sum(range(LENGTH - NESTED + 1, LENGTH + 1))
    assert found.cheapest is not None and found.cheapest.order == "ascending"
    assert json.loads(json.dumps(found.to_dict()))["cheapest"]["computed"] == found.cheapest.computed


def test_a_short_context_is_kept_to() -> None:
    _, asked = certify(servers.vllm(max_model_len=20), "continuation")
    assert max(len(p) for r in asked if r.json and isinstance(p := r.json.get("prompt"), list)
               and isinstance(p[0], int)) <= 20  # fmt: skip


@pytest.mark.parametrize(("longest", "found"), [(4, 1), (63, 1), (64, 64), (511, 64), (4096, 512)])
def test_the_longest_list(longest: int, found: int) -> None:
    certificate, _ = certify(servers.vllm(longest_list=longest), "continuation")
    assert certificate.prompt_list == found
    assert not any("too many prompts" in note for note in certificate.notes)


def test_a_list_in_another_order_is_no_list() -> None:
    fake = servers.vllm()

    def answer(request: Request) -> Reply:
        reply = fake.answer(request)
        if len((request.json or {}).get("prompt", "")) < 64:
            return reply
        body = json.loads(reply.body)
        for n, choice in enumerate(body["choices"]):
            choice["index"] = len(body["choices"]) - 1 - n
        return reply_of(body)

    assert certify(fake, "continuation", answer)[0].prompt_list == 1


def cost(order: Any, at_once: int, seconds: float, computed: int | None, listed: int = 1) -> Cost:
    return Cost(order, at_once, listed, seconds, computed)


def test_the_cheapest_computes_little_and_is_quick() -> None:
    slow, wasteful = cost("ascending", 1, 2.0, 100), cost("ascending", 8, 0.5, 900)
    quick = cost("ascending", 4, 1.0, 120)
    assert cheapest([slow, wasteful, quick]) == quick
    untold = cost("ascending", 8, 0.5, None)
    assert cheapest([slow, untold, quick]) == untold
    assert cheapest([]) is None


def test_probabilities_that_add_up_to_more_than_1_are_measured() -> None:
    found, _ = certify(servers.llamacpp(excess=1e-3, cache_noise=0.0))
    assert found.excess == pytest.approx(1e-3, rel=1e-6)
    assert found.capabilities().excess == pytest.approx(2e-3, rel=2e-3)  # counted twice
    assert certify(servers.llamacpp())[0].capabilities().excess == 0.0
    assert certify(servers.vllm())[0].excess is None  # its lists end at 20


@pytest.mark.parametrize("measured", [None, 0.0, 1e-7])
def test_what_float32_leaves_is_no_excess(measured: float | None) -> None:
    assert in_nats(measured) == 0.0
