"""Every dialect, found by itself: the right number or the right error, never a wrong number."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalgate.core import Message, Window
from evalgate.dialects import get, names
from evalgate.dialects.base import Ask, Capabilities, ChatPrefix, Reply, Request, WindowScores
from evalgate.errors import EndpointError, EvalgateError, ScoreError, UsageError
from tests.evalgate.dialects.drive import Words, drive, reply_of, window_of
from tests.evalgate.dialects.fakes import BOS, SERVERS, WORDS, Fake, best, truth

IDS = (BOS, 5, 9, 30, 12, 7, 22, 31, 9, 3)
K = {"openai": 5, "chat": 5}
ANY_ERROR = (ScoreError, EndpointError)


def fake_for(name: str, **more: Any) -> Fake:
    return SERVERS[name](**more)


def window_for(name: str, ids: tuple[int, ...] = IDS) -> Window:
    # The fake's chat template reads words, so a chat window is made of them.
    return window_of(tuple(t if t != 30 and t != 31 else 11 for t in ids) if name == "chat" else ids)


def ask_for(name: str, k: int | None = None, **more: Any) -> Ask:
    chat = ChatPrefix((), 1) if name == "chat" else None
    return Ask("m", K.get(name, 6) if k is None else k, vocabulary=WORDS, chat=chat, **more)


def run(name: str, fake: Fake, ask: Ask, window: Window | None = None) -> WindowScores:
    scores, _ = drive(get(name).score_window(window or window_for(name), ask), fake.answer)
    assert isinstance(scores, WindowScores)
    return scores


def check(scores: WindowScores, ids: tuple[int, ...], k: int, step: float) -> None:
    """Against the float64 truth: numbers are right, intervals hold the truth, tops are the true tops."""
    for row in scores.rows:
        lp = truth(ids[: row.position], step=step)
        for score in (row.chosen, *row.wanted):
            assert score.low - 1e-9 <= lp[score.token] <= score.high + 1e-9
            assert score.known == (score.low == score.high)
        for token, value in zip(row.top_ids, row.top_logprobs, strict=True):
            assert value == pytest.approx(lp[token], abs=1e-12)
        assert len(row.top_ids) + len(row.unmatched) <= k
        assert list(row.top_logprobs) == sorted(row.top_logprobs, reverse=True)
        order = best(lp, len(lp))
        if row.rank is not None:
            assert order.index(row.chosen.token) + 1 == row.rank
        assert row.rank_low <= order.index(row.chosen.token) + 1
        assert row.rank_high is None or order.index(row.chosen.token) + 1 <= row.rank_high
        if row.top1 is not None:
            assert lp[row.top1] == lp.max()
        if not row.merged and not row.unmatched and len(row.top_ids) == k:
            assert sorted(lp[list(row.top_ids)]) == pytest.approx(sorted(lp[best(lp, k)]))
            listed = set(row.top_ids) | {s.token for s in (row.chosen, *row.wanted) if s.known}
            tail = 1 - np.exp(lp[list(listed)]).sum()
            tied = math.exp(lp[order[k - 1]]) if step else 0.0  # one more entry, tied with the last of the k
            assert any(row.tail == pytest.approx(t, abs=1e-9) for t in (tail, tail - tied))


def test_every_dialect_has_a_server_here() -> None:
    assert set(names()) == set(SERVERS)


@pytest.mark.parametrize("name", names())
def test_right_numbers(name: str) -> None:
    for step in (0.0, 0.5):
        fake, window = fake_for(name, step=step), window_for(name)
        scores = run(name, fake, ask_for(name), window)
        assert tuple(r.position for r in scores.rows) == window.positions
        check(scores, window.ids, scores.k, step)


@settings(max_examples=20, deadline=None)
@given(
    ids=st.lists(st.sampled_from([2, 5, 9, 30, 31, 32, 33, 34, 35]), min_size=2, max_size=9),
    k=st.integers(1, 5),
    step=st.sampled_from([0.0, 1.0, 3.0]),
    start=st.integers(0, 3),
)
@pytest.mark.parametrize("name", names())
def test_never_a_wrong_number(name: str, ids: list[int], k: int, step: float, start: int) -> None:
    whole = (BOS, *ids)
    if name == "chat":
        whole = tuple(t if t < 30 else 11 for t in whole)
    wanted = {len(whole) - 1: (3, *range(30, 37), whole[-1])}
    window = window_of(whole, score_from=min(1 + start, len(whole) - 1))
    fake = fake_for(name, step=step)
    check(run(name, fake, ask_for(name, k, wanted=wanted), window), whole, k, step)


@pytest.mark.parametrize("name", names())
def test_subset_batches_and_k_zero(name: str) -> None:
    scores = run(name, fake_for(name), ask_for(name, positions=(2, 6), batch=1))
    assert [r.position for r in scores.rows] == [2, 6]
    if name != "llamacpp" and name != "tensorrt_llm":
        zero = run(name, fake_for(name), ask_for(name, 0))
        assert all(r.top_ids == () for r in zero.rows)


def test_batches_are_as_large_as_asked() -> None:
    exchange = get("continuation").score_window(window_for("continuation"), ask_for("continuation", batch=4))
    requests, sizes, fake = next(exchange), [], fake_for("continuation")
    with pytest.raises(StopIteration):
        while True:
            sizes.append(len(requests))
            requests = exchange.send(tuple(fake.answer(r) for r in requests))
    assert sizes == [4, 4, 1]


def test_forced_and_wanted_leave_nothing_censored() -> None:
    asked = ask_for(
        "continuation",
        2,
        capabilities=Capabilities(forced="allowed_token_ids", logprob_token_ids=True),
        wanted=dict.fromkeys(range(1, len(IDS)), (3, 8, 38)),
    )
    scores = run("continuation", fake_for("continuation", step=0.0), asked)
    assert scores.censored == 0 and all(s.known for r in scores.rows for s in r.wanted)
    check(scores, IDS, 2, 0.0)
    native = Capabilities(forced="logit_bias")
    assert run("llamacpp", fake_for("llamacpp"), ask_for("llamacpp", 2, capabilities=native)).censored == 0


@pytest.mark.parametrize(("name", "field"), [("continuation", "allowed_token_ids"), ("llamacpp", "logit_bias")])
def test_a_server_that_ignores_the_forced_token(name: str, field: Any) -> None:
    with pytest.raises(ScoreError, match=f"forced through {field}"):
        run(name, fake_for(name, forced=()), ask_for(name, capabilities=Capabilities(forced=field)))


@pytest.mark.parametrize("name", sorted(set(names()) - {"chat"}))  # chat sends text: its own tests
def test_truncated_prompt(name: str) -> None:
    with pytest.raises(ScoreError, match=r"window 3.*/.*(truncated|cut)"):
        run(name, fake_for(name, cuts=1), ask_for(name))


@pytest.mark.parametrize("name", ["continuation", "echo", "openai", "prompt_logprobs", "tensorrt_llm"])
def test_added_bos(name: str) -> None:
    with pytest.raises(ScoreError, match="BOS"):
        run(name, fake_for(name, adds_bos=True), ask_for(name))


def test_k_over_the_limit() -> None:
    with pytest.raises(EndpointError, match="--max-logprobs 30"):
        run("prompt_logprobs", fake_for("prompt_logprobs"), ask_for("prompt_logprobs", 30))
    with pytest.raises(EndpointError, match="at most 20 alternatives"):
        asked = ask_for("echo", 30, capabilities=Capabilities(max_logprobs=20))
        run("echo", fake_for("echo"), asked)
    with pytest.raises(EndpointError, match="at most 5"):
        run("openai", fake_for("openai"), ask_for("openai", 6))


# Faults of a whole reply -> what the message must say.
BROKEN: dict[str, tuple[Callable[[Reply], Reply], str]] = {
    "html": (lambda r: Reply(200, {}, b"<html>login</html>"), "HTML"),
    "redirect": (lambda r: Reply(302, {"location": "https://elsewhere/v1"}, b""), "redirects to https://elsewhere/v1"),
    "empty": (lambda r: Reply(200, {}, b""), "empty"),
    "cut": (lambda r: Reply(200, {}, r.body[: len(r.body) // 2]), "cut"),
    "list": (lambda r: reply_of([1]), "JSON list"),
    "error in a 200": (lambda r: reply_of({"error": {"message": "boom"}}), "boom"),
    "error object": (lambda r: reply_of({"object": "error", "message": "boom"}), "boom"),
    "500": (lambda r: reply_of({"error": {"message": "boom"}}, 500), "server's log"),
    "500 -inf": (lambda r: reply_of({"message": "Out of range float values are not JSON compliant"}, 500), "-inf"),
    "401": (lambda r: reply_of({"error": {"message": "no"}}, 401), "API key"),
    "404": (lambda r: reply_of({"detail": "Not Found"}, 404), "check the URL"),
    "context": (lambda r: reply_of({"message": "maximum context length is 8"}, 400), "--context"),
    "nothing in it": (lambda r: reply_of({"id": "x"}), "."),
}


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("name", names())
def test_broken_replies(name: str, fault: str) -> None:
    change, says = BROKEN[fault]
    fake = fake_for(name)
    with pytest.raises(EndpointError, match=f"window 3.*/[a-z].*: .*{says}"):
        drive(get(name).score_window(window_for(name), ask_for(name)), lambda r: change(fake.answer(r)))


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every logprob in a reply that belongs to a scored position."""
    found: list[tuple[Any, ...]] = []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        if isinstance(value, float):
            found.append((*path, key))
        found += places(value, (*path, key))
    return found


def put(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = value


def faulty(name: str, value: str) -> list[bytes]:
    """A good last reply with one logprob replaced, one variant for each of its logprobs."""
    fake, sent = fake_for(name), []

    def keep(request: Request) -> Reply:
        sent.append(fake.answer(request))
        return sent[-1]

    drive(get(name).score_window(window_for(name), ask_for(name)), keep)
    body = json.loads(sent[-1].body)
    mark = 123456.5
    variants = []
    for path in places(body):
        changed = copy.deepcopy(body)
        put(changed, path, mark)
        variants.append(json.dumps(changed).replace(str(mark), value).encode())
    return variants


def with_last(name: str, last: bytes) -> WindowScores:
    """The dialect's result when its last reply is `last`."""
    fake, window = fake_for(name), window_for(name)
    prompt_scoring = get(name).prompt_scoring
    final = len(window.ids) - 1

    def answer(request: Request) -> Reply:
        fields = request.json or {}
        size = len(fields.get("prompt") or ())
        if name == "chat":
            size = 1 + len(" ".join(m["content"] for m in fields["messages"]).split())
        return Reply(200, {}, last) if prompt_scoring or size == final else fake.answer(request)

    scores, _ = drive(get(name).score_window(window, ask_for(name)), answer)
    assert isinstance(scores, WindowScores)
    return scores


def ignored(name: str, body: bytes) -> bool:
    """Whether the replaced value is one that no position needs (what follows the window)."""
    body_ = json.loads(body.replace(b"NaN", b"0").replace(b"-Infinity", b"0"))
    plain = json.loads(faulty_free(name))
    choices = [c.get("choices", [{}])[0] for c in (body_, plain)]
    if name == "echo":
        kept = [json.dumps([c["logprobs"][n][:-1] for n in ("token_logprobs", "top_logprobs")]) for c in choices]
        return kept[0] == kept[1]
    if name == "tensorrt_llm":
        kept = [json.dumps(c["prompt_logprobs"][:-1]) for c in choices]
        return kept[0] == kept[1]
    return False


def faulty_free(name: str) -> bytes:
    fake, sent = fake_for(name), []

    def keep(request: Request) -> Reply:
        sent.append(fake.answer(request))
        return sent[-1]

    drive(get(name).score_window(window_for(name), ask_for(name)), keep)
    return sent[-1].body


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "0.5", "null", '"x"', "true"])
@pytest.mark.parametrize("name", names())
def test_a_bad_number_anywhere_is_an_error(name: str, value: str) -> None:
    tried = 0
    for body in faulty(name, value)[:60]:
        if value not in ("NaN", "-Infinity") and ignored(name, body):
            continue
        tried += 1
        with pytest.raises(ANY_ERROR, match=r"window 3.*/[a-z]"):
            with_last(name, body)
    assert tried > 3


@pytest.mark.parametrize("value", ["-9999.0", "-3.4028234663852886e+38", "-100.0", "-1e4", "-1001.5"])
@pytest.mark.parametrize("name", names())
def test_sentinels_are_censored_never_numbers(name: str, value: str) -> None:
    """Either the two copies of one logprob disagree (an error), or the sentinel shows as an interval."""
    seen = 0
    for body in faulty(name, value)[:40]:
        if ignored(name, body):
            continue
        try:
            scores = with_last(name, body)
        except ScoreError as error:
            assert "listed twice" in error.message or "alternatives" in error.message or "rank" in error.message
            continue
        numbers = [
            v for r in scores.rows for v in (*r.top_logprobs, *r.unmatched, *(s.high for s in (r.chosen, *r.wanted)))
        ]
        assert min(numbers) > -50.0
        seen += len(scores.sentinels)
    assert seen > 0


def test_duplicates_that_disagree() -> None:
    row = {"token_id:3": -1.0, "token_id:03": -2.0}
    logprobs = {"tokens": ["token_id:1", "token_id:3"], "token_logprobs": [None, -1.0], "top_logprobs": [None, row]}
    body = {"choices": [{"index": 0, "logprobs": logprobs}], "usage": {"prompt_tokens": 2}}
    with pytest.raises(ScoreError, match=r"position 1.*listed twice"):
        drive(get("echo").score_window(window_of((1, 3)), Ask("m", 1)), lambda r: reply_of(body))


def test_mass_above_one() -> None:
    row = {"3": {"logprob": -0.1}, "4": {"logprob": -0.1}}
    body = {"choices": [{"index": 0, "prompt_logprobs": [None, row]}]}
    with pytest.raises(ScoreError, match=r"add up to 1.8"):
        drive(get("prompt_logprobs").score_window(window_of((1, 3)), Ask("m", 2)), lambda r: reply_of(body))


@pytest.mark.parametrize("above", [0.0, 5e-4])
def test_a_tiny_negative_tail_is_clamped(above: float) -> None:
    row = {"3": {"logprob": math.log(0.5)}, "4": {"logprob": math.log(0.5 + above)}}
    body = {"choices": [{"index": 0, "prompt_logprobs": [None, row]}]}
    scores, _ = drive(get("prompt_logprobs").score_window(window_of((1, 3)), Ask("m", 2)), lambda r: reply_of(body))
    assert scores.rows[0].tail == pytest.approx(0.0, abs=1e-12) and scores.rows[0].tail >= 0.0


def test_a_rank_that_cannot_be() -> None:
    row = {"3": {"logprob": -3.0, "rank": 1}, "4": {"logprob": -1.0, "rank": 1}}
    body = {"choices": [{"index": 0, "prompt_logprobs": [None, row]}]}
    with pytest.raises(ScoreError, match="rank is 1"):
        drive(get("prompt_logprobs").score_window(window_of((1, 3)), Ask("m", 2)), lambda r: reply_of(body))


def test_processed_logprobs_are_refused() -> None:
    top = {"token_id:3": 0.0, "token_id:4": -9999.0}
    logprobs = {"tokens": ["token_id:3"], "token_logprobs": [0.0], "top_logprobs": [top]}
    body = {"choices": [{"index": 0, "logprobs": logprobs}]}
    with pytest.raises(ScoreError, match="raw_logprobs"):
        drive(get("continuation").score_window(window_of((1, 3)), Ask("m", 2)), lambda r: reply_of(body))


def echo_of(tokens: list[str], values: list[float | None], tops: list[Any], usage: int) -> Reply:
    logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
    return reply_of({"choices": [{"index": 0, "logprobs": logprobs}], "usage": {"prompt_tokens": usage}})


def test_echo_with_shifted_swapped_or_missing_tokens() -> None:
    window = window_of((5, 9, 7))
    good_tops = [None, {" w9": -1.0}, {" w7": -1.0}]

    def score(tokens: list[str], values: list[float | None], tops: list[Any], usage: int = 3) -> WindowScores:
        scores, _ = drive(
            get("echo").score_window(window, Ask("m", 1, vocabulary=WORDS)),
            lambda r: echo_of(tokens, values, tops, usage),
        )
        assert isinstance(scores, WindowScores)
        return scores

    assert score([" w5", " w9", " w7"], [None, -1.0, -1.0], good_tops).rows[1].chosen.low == -1.0
    with pytest.raises(ScoreError, match=r"position 1.*shifted"):
        score([" w5", " w7", " w9"], [None, -1.0, -1.0], good_tops)
    with pytest.raises(ScoreError, match="off by one"):
        score([" w5", " w9", " w7"], [-1.0, -1.0, -1.0], good_tops)
    with pytest.raises(ScoreError, match="not as long"):
        score([" w5", " w9", " w7"], [None, -1.0], good_tops)
    with pytest.raises(ScoreError, match=r"position 2.*alternatives are missing"):
        score([" w5", " w9", " w7"], [None, -1.0, -1.0], [None, {" w9": -1.0}, None])
    with pytest.raises(ScoreError, match=r"2 tokens came back"):
        score([" w5", " w9"], [None, -1.0], good_tops[:2])


def test_a_repeated_token_does_not_hide_a_cut_prompt() -> None:
    logprobs = {"tokens": [" w5"] * 4, "token_logprobs": [None, -1.0, -1.0, -1.0], "top_logprobs": [None] * 4}
    body = {"choices": [{"index": 0, "logprobs": logprobs, "finish_reason": "length"}]}
    with pytest.raises(ScoreError, match="cut"):
        drive(
            get("echo").score_window(window_of((5, 5, 5, 5)), Ask("m", 0, vocabulary=WORDS)), lambda r: reply_of(body)
        )


def test_merged_texts_are_censored_not_guessed() -> None:
    """Two ids of one text: the listed value may be either's."""
    top = {" w1": -0.5, " same": -1.5}
    logprobs = {"tokens": [" w1"], "token_logprobs": [-0.5], "top_logprobs": [top]}
    body = {"choices": [{"index": 0, "logprobs": logprobs}], "usage": {"prompt_tokens": 1}}

    def chosen(token: int, k: int) -> tuple[float, float]:
        scores, _ = drive(
            get("openai").score_window(window_of((5, token)), Ask("m", k, vocabulary=WORDS)), lambda r: reply_of(body)
        )
        row = scores.rows[0]
        assert row.unmatched == (-1.5,) and row.top_ids == (1,)
        return row.chosen.low, row.chosen.high

    assert chosen(30, 2) == chosen(31, 2) == (-math.inf, -1.5)
    assert chosen(30, 3) == (-math.inf, 0.0)  # one of the three is hidden: it may be this one
    assert chosen(7, 2) == (-math.inf, -1.5)


def test_texts_without_a_vocabulary_are_refused() -> None:
    with pytest.raises(EndpointError, match="name the model's tokenizer"):
        run("openai", fake_for("openai"), Ask("m", 3))


def test_openai_bytes_and_unreadable_texts() -> None:
    top = {"bytes:\\xe2\\x80": -0.5, "�": -1.5, " w4": -2.5}
    logprobs = {"tokens": ["bytes:\\xe2\\x80"], "token_logprobs": [-0.5], "top_logprobs": [top]}
    body = {"choices": [{"index": 0, "logprobs": logprobs}]}
    scores, _ = drive(
        get("openai").score_window(window_of((5, 32)), Ask("m", 3, vocabulary=WORDS)), lambda r: reply_of(body)
    )
    assert scores.rows[0].chosen.low == -0.5 and scores.rows[0].unmatched == (-1.5,)


@pytest.mark.parametrize("data", [[0xEF, 0xBF, 0xBD], None])
def test_a_replacement_character_is_any_token_in_bytes_and_in_text(data: list[int] | None) -> None:
    """EF BF BD is what a server sends for bytes that it could not decode: -0.105 is the upper end, not -2.996."""
    words = Words(WORDS.words | {38: "\ufffd"})
    shown = {"token": "\ufffd", "logprob": -0.105} | ({} if data is None else {"bytes": data})
    other = {"token": " w4", "logprob": -2.996} | ({} if data is None else {"bytes": list(b" w4")})
    content = [shown | {"top_logprobs": [shown, other]}]
    body = {"choices": [{"index": 0, "logprobs": {"content": content}}], "usage": {"prompt_tokens": 1}}

    def chosen(token: int) -> Any:
        scores, _ = drive(
            get("openai").score_window(window_of((5, token)), Ask("m", 2, vocabulary=words)), lambda r: reply_of(body)
        )
        return scores.rows[0].chosen

    for token in (32, 38):  # not whole characters, and the replacement character itself
        assert (chosen(token).low, chosen(token).high) == (-math.inf, -0.105)
    assert chosen(4).low == -2.996


def test_wrong_asks_are_user_errors() -> None:
    with pytest.raises(UsageError, match=r"position 40"):
        run("echo", fake_for("echo"), ask_for("echo", positions=(40,)))
    with pytest.raises(UsageError, match="no dialect"):
        get("nope")
    with pytest.raises(UsageError, match="chat documents only"):
        run("chat", fake_for("chat"), Ask("m", 2, vocabulary=WORDS))


def test_chat_scores_only_the_last_turn() -> None:
    asked = Ask("m", 2, vocabulary=WORDS, chat=ChatPrefix((Message("user", " w5 w9"),), 3), positions=(2,))
    with pytest.raises(UsageError, match="last assistant turn"):
        run("chat", fake_for("chat"), asked)


def test_errors_carry_where_they_happened() -> None:
    bodies = itertools.chain([reply_of({"choices": []})])
    with pytest.raises(EvalgateError) as caught:
        drive(get("echo").score_window(window_of((5, 9)), Ask("m", 1)), lambda r: next(bodies))
    assert caught.value.context["window"] == 3 and caught.value.context["endpoint"] == "/v1/completions"


def openai_row(token: int, k: int, top: dict[str, float], generated: str) -> Any:
    logprobs = {"tokens": [generated], "token_logprobs": [top[generated]], "top_logprobs": [top]}
    body = {"choices": [{"index": 0, "logprobs": logprobs}], "usage": {"prompt_tokens": 1}}
    asked = Ask("m", k, vocabulary=WORDS)
    scores, _ = drive(get("openai").score_window(window_of((5, token)), asked), lambda r: reply_of(body))
    return scores.rows[0]


def test_a_generated_token_outside_the_top_is_no_bound() -> None:
    """Three of three texts, one of them the sampled token's: a fourth token may hide behind ' same'."""
    row = openai_row(7, 3, {" w1": -0.5, " same": -1.5, " w4": -20.0}, " w4")
    assert row.merged and (row.chosen.low, row.chosen.high) == (-math.inf, -1.5)
    assert row.top_ids == (1,) and row.top1 is None


def test_an_ambiguous_text_is_the_other_token_when_one_is_known() -> None:
    tokens, values = [" w5", " same"], [None, -3.0]
    reply = echo_of(tokens, values, [None, {" same": -1.5, " w1": -0.5}], 2)
    asked = Ask("m", 2, vocabulary=WORDS, wanted={1: (31,)})
    scores, _ = drive(get("echo").score_window(window_of((5, 30)), asked), lambda r: reply)
    assert scores.rows[0].chosen.low == -3.0
    assert scores.rows[0].wanted[0].low == -1.5 and scores.rows[0].top_ids == (1, 31)


@pytest.mark.parametrize("row", [{"3": {"logprob": -1.0}}, {"3": {"logprob": -1.0}, "4": {"logprob": -2.0}}])
def test_too_few_alternatives(row: dict[str, Any]) -> None:
    body = {"choices": [{"index": 0, "prompt_logprobs": [None, row]}]}
    with pytest.raises(ScoreError, match=f"{len(row)} alternatives came and 3 were asked for"):
        drive(get("prompt_logprobs").score_window(window_of((1, 3)), Ask("m", 3)), lambda r: reply_of(body))
    small = Ask("m", 3, vocab_size=len(row))
    scores, _ = drive(get("prompt_logprobs").score_window(window_of((1, 3)), small), lambda r: reply_of(body))
    assert scores.rows[0].rank == 1


@pytest.mark.parametrize(("value", "fine"), [(5e-5, True), (2e-4, False)])
def test_a_logprob_above_zero(value: float, fine: bool) -> None:
    body = {"choices": [{"index": 0, "prompt_logprobs": [None, {"3": {"logprob": value}}]}]}
    exchange = get("prompt_logprobs").score_window(window_of((1, 3)), Ask("m", 1))
    if fine:
        assert drive(exchange, lambda r: reply_of(body))[0].rows[0].chosen.low == 0.0
    else:
        with pytest.raises(ScoreError, match=r"position 1.*above 0"):
            drive(exchange, lambda r: reply_of(body))


def test_a_tie_with_an_unreadable_token_is_no_repetition() -> None:
    """Found by the property test: the generated token and an undecodable one, equally likely."""
    row = openai_row(32, 3, {" w1": -1.0, "\ufffd": -1.0, " w4": -2.0}, " w1")
    assert row.unmatched == (-1.0,) and (row.chosen.low, row.chosen.high) == (-math.inf, -1.0)
    assert row.top1 is None


def test_a_repeated_text_may_hide_its_other_token() -> None:
    """The actual token 30 is listed; 31 has the same text and may be the one of three that is missing."""
    reply = echo_of([" w5", " same"], [None, -1.0], [None, {" same": -1.0, " w1": -2.0}], 2)
    asked = Ask("m", 3, vocabulary=WORDS, wanted={1: (31, 7)})
    scores, _ = drive(get("echo").score_window(window_of((5, 30)), asked), lambda r: reply)
    other, unlisted = scores.rows[0].wanted
    assert scores.rows[0].chosen.low == -1.0 and (other.low, other.high) == (-math.inf, 0.0)
    assert unlisted.high == -2.0
