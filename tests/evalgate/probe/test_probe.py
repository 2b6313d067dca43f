"""The probe against scripted servers, one for each kind the wire notes know."""

from __future__ import annotations

import json
from typing import Any

import pytest

from evalgate.dialects import names
from evalgate.dialects.findings import Question
from evalgate.errors import EndpointError, UsageError
from evalgate.probe.behaviour import tie_order
from evalgate.probe.certificate import Certificate
from evalgate.probe.probe import probe
from tests.evalgate.dialects import fakes as servers
from tests.evalgate.dialects.drive import drive, recorded, reply_of
from tests.evalgate.dialects.fakes import VOCAB, WORDS, Fake

IDS = (5, 9, 12, 7, 22, 18, 3)
QUESTION = Question("m", IDS, "w5 w9 w12", local_ids=(5, 9, 12), vocabulary=WORDS)


def certify(fake: Fake) -> Certificate:
    certificate, _ = drive(probe(QUESTION), fake.answer)
    assert isinstance(certificate, Certificate)
    return certificate


# Server -> what its certificate must say.
EXPECTED: dict[str, dict[str, Any]] = {
    "vllm": {
        "best": "prompt_logprobs",
        "prompt_logprobs": True,
        "off_by_one": False,
        "echo": True,
        "max_tokens_zero": True,
        "entries": "k+1",
        "largest_k": 20,
        "k_is_limit": True,
        "forced": "allowed_token_ids",
        "logprob_token_ids": True,
        "token_id_keys": True,
        "return_token_ids": True,
        "temperature_scaled": False,
        "temperature": 0.0,
        "context_length": 2048,
        "tie_order": "other",
        "tokenizer": "agrees",
        "bos_added": False,
        "cached_difference": 0.0,
        "batch_difference": 0.0,
    },
    "sglang": {
        "best": "sglang",
        "dialects": ("sglang", "echo", "continuation", "openai", "chat"),
        "prompt_logprobs": False,
        "echo": True,
        "temperature_scaled": True,
        "ids_on_wire": True,
    },
    "llamacpp": {
        "best": "llamacpp",
        "echo": False,
        "prompt_logprobs": False,
        "dialects": ("llamacpp", "continuation", "openai", "chat"),
        "ids_on_wire": True,
        "token_id_keys": False,
        "forced": "logit_bias",
        "temperature_scaled": False,
        "largest_k": VOCAB,
    },
    "openai": {
        "best": "openai",
        "largest_k": 5,
        "k_is_limit": True,
        "ids_on_wire": False,
        "forced": "",
        "tokenizer": "unknown",
        "context_length": None,
    },
    "mini_sglang": {
        "best": "openai",
        "largest_k": 5,
        "echo": False,
        "return_token_ids": False,
        "dialects": ("continuation", "openai", "chat"),
    },
    "pegainfer": {"best": "prompt_logprobs", "tie_order": "id", "forced": "", "logprob_token_ids": False},
    "tensorrt_llm": {"best": "tensorrt_llm", "prompt_logprobs": True, "off_by_one": True},
}


@pytest.mark.parametrize("server", EXPECTED)
def test_certificates(server: str) -> None:
    certificate = certify(getattr(servers, server)())
    assert {k: getattr(certificate, k) for k in EXPECTED[server]} == EXPECTED[server]
    assert certificate.best in names()
    assert json.loads(json.dumps(certificate.to_dict()))["best"] == certificate.best
    assert certificate.sentinels == ()


def test_capabilities_follow_the_certificate() -> None:
    able = certify(servers.vllm(limit=23)).capabilities()
    assert able.max_logprobs == 23 and able.forced == "allowed_token_ids" and able.tie_order == "unknown"
    assert certify(servers.pegainfer()).capabilities().tie_order == "id"


@pytest.mark.parametrize("limit", [1, 7, 19, 20, 21, 33])
def test_the_largest_k_is_found(limit: int) -> None:
    certificate = certify(servers.vllm(limit=max(limit, 5)))
    assert (certificate.largest_k, certificate.k_is_limit) == (max(limit, 5), True)


def test_echo_that_is_ignored_is_noted() -> None:
    assert any("echo is accepted and ignored" in note for note in certify(servers.llamacpp()).notes)


def test_a_cache_that_moves_the_digits_is_measured() -> None:
    assert certify(servers.llamacpp()).cached_difference == pytest.approx(0.01)
    assert certify(servers.vllm()).cached_difference == 0.0


@pytest.mark.parametrize("noise", [0.0, 0.04, 0.25])
def test_a_longer_prefix_over_a_cached_shorter_one_is_measured(noise: float) -> None:
    """A request sent again says 0; a run asks growing prefixes, whose numbers move."""
    certificate = certify(servers.llamacpp(cache_noise=0.0, growth_noise=noise))
    assert certificate.cached_difference == pytest.approx(noise, abs=1e-12)
    assert certificate.speculative == "not seen"


def test_the_floor_of_whole_windows_is_that_of_the_dialect_that_is_used() -> None:
    """prompt_logprobs takes nothing from the cache of generated tokens."""
    assert certify(servers.vllm(cache_noise=0.1)).cached_difference == 0.0
    question = Question("m", IDS, "w5 w9 w12", local_ids=(5, 9, 12), vocabulary=WORDS, dialect="continuation")
    found, _ = drive(probe(question), servers.vllm(cache_noise=0.1).answer)
    assert found.cached_difference == pytest.approx(0.1)


def test_a_server_that_adds_bos_gets_no_id_dialect() -> None:
    certificate = certify(servers.vllm(adds_bos=True))
    assert certificate.bos_added is True and certificate.best in ("", "chat")
    assert any("adds a BOS" in note for note in certificate.notes)


def test_another_tokenizer_is_seen() -> None:
    question = Question("m", IDS, "w5 w9 w12", local_ids=(5, 9, 13), vocabulary=WORDS)
    certificate, _ = drive(probe(question), servers.vllm().answer)
    assert certificate.tokenizer == "differs"


def test_a_server_without_logprobs_has_no_dialect() -> None:
    certificate = certify(Fake(shape="none", chat=False, tokenizer=False))
    assert all(note.startswith("/") for note in certificate.notes)  # the path, and no window
    assert certificate.best == "" and certificate.largest_k == 0 and not certificate.ids_accepted
    assert certificate.notes


def test_a_wrong_key_and_a_dead_server_are_errors() -> None:
    for status in (401, 503):
        with pytest.raises(EndpointError, match="/v1/models"):
            drive(probe(QUESTION), lambda r, status=status: reply_of({"error": "no"}, status))  # type: ignore[misc]


def test_too_short_a_text_is_refused() -> None:
    with pytest.raises(UsageError, match="4 tokens"):
        drive(probe(Question("m", (1, 2, 3), "x")), servers.vllm().answer)


def test_order_of_ties() -> None:
    up, down = [("token_id:3", -1.0), ("token_id:5", -1.0)], [("token_id:5", -1.0), ("token_id:3", -1.0)]
    assert tie_order([up, up]) == "unknown"
    assert tie_order([up, up, up]) == "id"
    assert tie_order([up, up, up, down]) == "other"


def test_sentinels_are_reported() -> None:
    fake = servers.llamacpp()

    def answer(request: Any) -> Any:
        reply = fake.answer(request)
        if request.path == "/v1/chat/completions":
            body = json.loads(reply.body)
            body["choices"][0]["logprobs"]["content"][0]["top_logprobs"][1]["logprob"] = -9999.0
            return reply_of(body)
        return reply

    certificate, _ = drive(probe(QUESTION), answer)
    assert certificate.sentinels == (-9999.0,)


def test_recorded_llama_server_is_not_taken_for_a_prompt_scorer() -> None:
    """Every completions request gets the recorded reply that ignored echo and prompt_logprobs."""
    body = recorded("llama-server-b11434-completions-prompt_logprobs")["reply"]

    def answer(request: Any) -> Any:
        return reply_of(body) if request.path == "/v1/completions" else reply_of({"error": "no"}, 404)

    ids = (2, 818, 5279, 529, 7001, 563, 9079, 236761)
    certificate, _ = drive(probe(Question("gemma", ids, "x")), answer)
    assert not certificate.prompt_logprobs and not certificate.echo and certificate.best == "continuation"
