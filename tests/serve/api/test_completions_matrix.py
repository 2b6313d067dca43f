"""What each k means in each field: exact shapes and values against the model's own float64 log-softmax."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from tests.serve.serving import Served, ranked, served

LIMIT = 7
PROMPT = [262, 223, 290, 40, 77, 101, 5, 260]
MESSAGES = [{"role": "user", "content": "hello wörld"}]
KS = (None, 0, 1, 5, LIMIT, LIMIT + 1, -1)
NEW = 5
VOCABULARY = 304
NEAR = 2e-5


@pytest.fixture(scope="module", params=[LIMIT, -1], ids=["limit", "whole"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[Served, int]]:
    with served(max_logprobs=request.param) as found:
        yield found, request.param


def allowed(k: int | None, limit: int) -> bool:
    return k is None or limit == -1 or 0 <= k <= limit


def check_ids(ids: list[int], row: torch.Tensor, token: int, k: int) -> None:
    """The token first, then the rest of the top k, likeliest first (where the truth tells them apart)."""
    width = VOCABULARY if k == -1 else k
    order = ranked(row)
    top = [i for i in ids if i in set(order[:width])] if token not in order[:width] else sorted(ids, key=order.index)
    assert ids[0] == token and len(set(ids)) == len(ids) == len({token, *order[:width]})
    assert len(top) == width or abs(float(row[order[width - 1]] - row[order[width]])) < NEAR
    values = [float(row[i]) for i in ids[1:]]
    assert all(a >= b - NEAR for a, b in pairwise(values))


def check_rank(rank: int, row: torch.Tensor, token: int) -> None:
    """The rank, up to ties that only float64 sees."""
    assert abs(float(row[ranked(row)[rank - 1]] - row[token])) < NEAR


def check_entry(entry: dict[str, Any], row: torch.Tensor, token: int, k: int) -> None:
    check_ids([int(key) for key in entry], row, token, k)
    for key, item in entry.items():
        assert item["logprob"] == pytest.approx(float(row[int(key)]), abs=NEAR)
        check_rank(item["rank"], row, int(key))


def check_prompt(entries: Any, truth: torch.Tensor, ids: list[int], k: int | None) -> None:
    if k is None:
        assert entries is None
        return
    assert len(entries) == len(ids) and entries[0] is None
    for at in range(1, len(ids)):
        check_entry(entries[at], truth[at - 1], ids[at], k)


def check_legacy(logprobs: Any, truth: torch.Tensor, ids: list[int], first: int, k: int) -> None:
    """Legacy lists written as token_id:N; ids: prompt and generated; the lists begin at token `first`."""
    shown = ids[first:]
    assert logprobs["tokens"] == [f"token_id:{i}" for i in shown]
    assert logprobs["token_ids"] == shown
    for at, token in enumerate(shown, start=first):
        value, top, rank = (logprobs[name][at - first] for name in ("token_logprobs", "top_logprobs", "ranks"))
        if at == 0:
            assert value is top is rank is None
            continue
        row = truth[at - 1]
        assert value == pytest.approx(float(row[token]), abs=NEAR)
        check_rank(rank, row, token)
        check_ids([int(key.removeprefix("token_id:")) for key in top], row, token, k)
        for key, logprob in top.items():
            assert logprob == pytest.approx(float(row[int(key.split(":")[1])]), abs=NEAR)


def joined_legacy(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The one choice of a stream as the whole reply would have it."""
    choices = [c for chunk in chunks for c in chunk["choices"]]
    whole = dict(choices[0])
    whole["text"] = "".join(c["text"] for c in choices)
    whole["finish_reason"] = choices[-1]["finish_reason"]
    whole["stop_reason"] = choices[-1]["stop_reason"]
    whole["token_ids"] = [t for c in choices for t in c["token_ids"]]
    if choices[0]["logprobs"] is not None:
        whole["logprobs"] = {key: [v for c in choices for v in c["logprobs"][key]] for key in choices[0]["logprobs"]}
    return whole


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("temperature", [0, 2])
@pytest.mark.parametrize("echo", [False, True], ids=["bare", "echo"])
def test_completions_logprobs(server: tuple[Served, int], echo: bool, temperature: float, stream: bool) -> None:
    at, limit = server
    for k, prompt_k in product(KS, (None, 0, 5, LIMIT + 1)):
        if k not in (None, 5) and prompt_k not in (None, 5):
            continue
        body: dict[str, Any] = {
            "prompt": PROMPT,
            "max_tokens": NEW,
            "temperature": temperature,
            "seed": 5,
            "echo": echo,
        }
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True}
        body |= {name: v for name, v in (("logprobs", k), ("prompt_logprobs", prompt_k)) if v is not None}
        if not (allowed(k, limit) and allowed(prompt_k, limit)):
            error = at.post("/v1/completions", body | {"stream": stream}, status=400)["error"]
            assert error["param"] == ("logprobs" if not allowed(k, limit) else "prompt_logprobs")
            continue
        choice = joined_legacy(at.stream("/v1/completions", body)) if stream else at.complete(**body)["choices"][0]
        ids = PROMPT + choice["token_ids"]
        truth = at.truth(ids)
        assert len(choice["token_ids"]) == NEW
        if temperature == 0:
            assert choice["token_ids"] == [ranked(truth[i])[0] for i in range(len(PROMPT) - 1, len(ids) - 1)]
        check_prompt(choice.get("prompt_logprobs"), truth, PROMPT, prompt_k)
        if k is None:
            assert choice["logprobs"] is None
        else:
            check_legacy(choice["logprobs"], truth, ids, 0 if echo else len(PROMPT), k)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("temperature", [0, 2])
def test_chat_top_logprobs(server: tuple[Served, int], temperature: float, stream: bool) -> None:
    at, limit = server
    for k, prompt_k in [*((k, None) for k in KS), *((5, k) for k in KS), ("off", None), ("off", 0)]:
        body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": NEW, "temperature": temperature, "seed": 5}
        body |= {"ignore_eos": True, "return_token_ids": True}
        if k != "off":
            body |= {"logprobs": True} | ({} if k is None else {"top_logprobs": k})
        if prompt_k is not None:
            body["prompt_logprobs"] = prompt_k
        if not (k == "off" or allowed(k, limit)) or not allowed(prompt_k, limit):
            error = at.post("/v1/chat/completions", body | {"stream": stream}, status=400)["error"]
            assert error["param"] == ("prompt_logprobs" if not allowed(prompt_k, limit) else "top_logprobs")
            continue
        if stream:
            chunks = at.stream("/v1/chat/completions", body)
            reply = chunks[0]
            parts = [c["choices"][0]["logprobs"] for c in chunks]
            entries = [e for part in parts if part for e in part["content"]] if k != "off" else None
            assert k != "off" or not any(parts)
            tokens = [t for c in chunks for t in c["choices"][0].get("token_ids", [])]
        else:
            reply = at.chat(**body)
            entries = (reply["choices"][0]["logprobs"] or {}).get("content")
            tokens = reply["choices"][0]["token_ids"]
        prompt = reply["prompt_token_ids"]
        truth = at.truth(prompt + tokens)
        check_prompt(reply.get("prompt_logprobs"), truth, prompt, prompt_k)
        if k == "off":
            assert entries is None
            continue
        assert entries is not None and [e["id"] for e in entries] == tokens and len(tokens) == NEW
        for at_token, entry in enumerate(entries, start=len(prompt)):
            row = truth[at_token - 1]
            width = VOCABULARY if k == -1 else (k or 0)
            top = [t["id"] for t in entry["top_logprobs"]]
            assert len(set(top)) == width
            for i, token in enumerate(top, start=1):
                check_rank(i, row, token)
            assert [t["rank"] for t in entry["top_logprobs"]] == list(range(1, width + 1))
            for item in (entry, *entry["top_logprobs"]):
                assert item["logprob"] == pytest.approx(float(row[item["id"]]), abs=NEAR)
            check_rank(entry["rank"], row, entry["id"])


def test_absent_asks_for_no_reduction(server: tuple[Served, int], monkeypatch: pytest.MonkeyPatch) -> None:
    from serve.engine import rows

    widths: list[list[int]] = []
    real = rows.begin_scores

    def counted(download: Any, logits: Any, tokens: Any, at: list[int], ks: list[int], *rest: Any) -> Any:
        widths.append(list(ks))
        return real(download, logits, tokens, at, ks, *rest)

    monkeypatch.setattr(rows, "begin_scores", counted)
    at, _ = server
    at.complete(prompt=PROMPT, max_tokens=3)
    at.chat(messages=MESSAGES, max_tokens=3)
    assert widths == []
    fresh = PROMPT[::-1]  # nothing of it is cached with its scores
    at.complete(prompt=fresh, max_tokens=2, logprobs=3, prompt_logprobs=1, ignore_eos=True)
    assert [1] * (len(fresh) - 1) + [3, 3] == [k for row in widths for k in row]
    assert len(widths) == 2  # prompt rows and the first token share one call


def test_sampling_fields_never_change_a_reported_value(server: tuple[Served, int]) -> None:
    at, _ = server
    fields: dict[str, Any] = {"temperature": 3, "top_p": 0.7, "top_k": 9, "min_p": 0.01, "seed": 1}
    fields |= {"presence_penalty": 1.5, "frequency_penalty": -1, "repetition_penalty": 1.7, "logit_bias": {"9": 30}}
    body = {"prompt": PROMPT, "max_tokens": 8, "logprobs": 5, "prompt_logprobs": 5, "ignore_eos": True}
    choice = at.complete(**body, **fields, return_token_ids=True, return_tokens_as_token_ids=True)["choices"][0]
    assert 9 in choice["token_ids"]
    ids = PROMPT + choice["token_ids"]
    truth = at.truth(ids)
    check_prompt(choice["prompt_logprobs"], truth, PROMPT, 5)
    check_legacy(choice["logprobs"], truth, ids, len(PROMPT), 5)
