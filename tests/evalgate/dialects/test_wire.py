"""Recorded and documented replies read to the numbers they hold, written here by hand."""

from __future__ import annotations

import math

import pytest

from evalgate.core import Message
from evalgate.dialects import get
from evalgate.dialects.base import Ask, Capabilities, ChatPrefix, Place, WindowScores
from evalgate.dialects.body import read_body
from evalgate.dialects.findings import Question
from evalgate.errors import EndpointError, EvalgateError, ScoreError
from evalgate.probe.probe import probe
from tests.evalgate.dialects.drive import DEMO, IDS, Words, drive, recorded, reply_of, window_of

# Position -> logprob of the actual token, from vLLM's recording.
VLLM = {
    1: -2.8929741382598877,
    2: -9.68598747253418,
    3: -0.8795190453529358,
    4: -5.072862148284912,
    5: -1.3238043785095215,
    6: -2.4307992458343506,
    7: -0.8078584671020508,
}


def ask(k: int = 3, **more: object) -> Ask:
    return Ask("gemma", k, vocabulary=DEMO, **more)  # type: ignore[arg-type]


def from_recording(dialect: str, name: str, asked: Ask, **window: int) -> WindowScores:
    scores, _ = drive(
        get(dialect).score_window(window_of(**window), asked),
        lambda request: reply_of(recorded(name)["reply"], recorded(name)["status"]),
    )
    assert isinstance(scores, WindowScores)
    return scores


def test_vllm_prompt_logprobs() -> None:
    scores = from_recording("prompt_logprobs", "vllm-0.32-completions-prompt_logprobs", ask())
    assert {r.position: r.chosen.low for r in scores.rows} == VLLM
    by = {r.position: r for r in scores.rows}
    assert by[1].top_ids == (184, 198, 255999)  # the actual token, rank 5, is beside the three best
    assert by[1].rank is None and (by[1].rank_low, by[1].rank_high) == (4, 5)
    assert by[5].top_ids == (236764, 563, 815) and by[5].rank == 2
    assert by[4].top_ids == (506, 496, 4257)  # a tie at -4.0729: ascending id, not the server's order
    mass = sum(math.exp(v) for v in (-0.8225, -5.0729, -4.0729, -4.0729))
    assert by[4].tail == pytest.approx(1 - mass, abs=1e-3)
    mass = math.exp(-0.8078584671020508) + math.exp(-1.0578584671020508) + math.exp(-2.307858467102051)
    assert by[7].tail == pytest.approx(1 - mass, abs=1e-12)
    assert by[3].top1 == 529 and not scores.text_keyed and scores.censored == 0


def test_prompt_logprobs_request_has_no_stream_and_asks_for_ids() -> None:
    _, asked = drive(
        get("prompt_logprobs").score_window(window_of(), ask()),
        lambda r: reply_of(recorded("vllm-0.32-completions-prompt_logprobs")["reply"]),
    )
    (request,) = asked
    assert (request.method, request.path) == ("POST", "/v1/completions")
    assert request.json is not None
    assert request.json["prompt"] == list(IDS) and request.json["prompt_logprobs"] == 3
    assert "stream" not in request.json


@pytest.mark.parametrize(("name", "k"), [("completions-echo", 3), ("completions-echo-max0", 1)])
def test_vllm_echo(name: str, k: int) -> None:
    asked = ask(k, capabilities=Capabilities(max_tokens_zero="max0" in name))
    scores = from_recording("echo", f"vllm-0.32-{name}", asked)
    assert {r.position: r.chosen.low for r in scores.rows} == VLLM
    assert scores.text_keyed
    assert scores.rows[1].top_ids[0] == 236743 and scores.rows[1].top_logprobs[0] == -1.1859873533248901


def test_wanted_ids_and_a_subset_of_positions() -> None:
    asked = ask(positions=(5, 7), wanted={5: (815, 1), 7: (532,)})
    scores = from_recording("prompt_logprobs", "vllm-0.32-completions-prompt_logprobs", asked)
    assert [r.position for r in scores.rows] == [5, 7]
    known, unknown = scores.rows[0].wanted
    assert known.known and known.low == -2.1988043785095215
    assert not unknown.known and (unknown.low, unknown.high) == (-math.inf, -2.1988043785095215)


def test_vllm_over_its_limit_says_what_to_change() -> None:
    with pytest.raises(EndpointError, match=r"window 3.*/v1/completions.*max allowed: 64.*--max-logprobs 128"):
        from_recording("prompt_logprobs", "vllm-0.32-completions-prompt_logprobs-minus1", ask(128))


@pytest.mark.parametrize(
    "message",
    [
        "prompt_logprobs must be in 0..20; the server's limit is set by --max-logprobs",
        "logprobs must be -1 or 0..304",
        "prompt_logprobs: -1 (the whole vocabulary) needs a server started with --max-logprobs -1",
    ],
)
def test_our_own_server_over_its_limit_says_what_to_change(message: str) -> None:
    with pytest.raises(EndpointError, match="ask for a smaller k") as caught:
        read_body(reply_of({"error": {"message": message, "code": 400}}, 400), Place("/v1/completions"), k=64)
    assert "--max-logprobs 64" in str(caught.value) and "does not score prompts" not in str(caught.value)


def test_llama_server_that_ignores_echo_is_refused() -> None:
    for name in ("echo", "echo-max0"):
        with pytest.raises(EndpointError, match="echo was ignored"):
            from_recording("echo", f"llama-server-b11434-completions-{name}", ask(1))


def test_llama_server_that_ignores_prompt_logprobs_is_refused() -> None:
    with pytest.raises(EndpointError, match="ignores that field"):
        from_recording("prompt_logprobs", "llama-server-b11434-completions-prompt_logprobs", ask())


def test_llama_server_native() -> None:
    scores = from_recording("llamacpp", "llama-server-b11434-completion-native", ask(5), score_from=7)
    (row,) = scores.rows
    assert row.chosen.low == -0.8710616230964661 and row.rank == 1
    assert row.top_ids == (236761, 236764, 532, 837, 568)
    assert row.top_logprobs[4] == -4.700674533843994
    assert not scores.text_keyed


def test_continuation_reads_both_shapes() -> None:
    vllm = from_recording("continuation", "vllm-0.32-completions-one-token", ask(5), score_from=7)
    assert vllm.rows[0].chosen.low == -0.8078584671020508 and not vllm.text_keyed
    assert vllm.rows[0].top_ids == (236761, 236764, 532, 837, 607)
    llama = from_recording("continuation", "llama-server-b11434-completions-one-token", ask(5), score_from=7)
    assert llama.rows[0].chosen.low == -0.8794746398925781 and llama.rows[0].top_ids[4] == 568


def test_continuation_forced_keeps_the_raw_number() -> None:
    asked = ask(2, capabilities=Capabilities(forced="allowed_token_ids"))
    name = "vllm-0.32-completions-forced-token"
    scores, requests = drive(
        get("continuation").score_window(window_of(score_from=7), asked), lambda r: reply_of(recorded(name)["reply"])
    )
    assert requests[0].json is not None and requests[0].json["allowed_token_ids"] == [236761]
    assert scores.rows[0].chosen.low == -0.8078584671020508


def test_openai_with_a_sampled_token_outside_the_top() -> None:
    # The recorded reply at temperature 2: " NIV" was sampled, the actual token "." is listed.
    words = Words(DEMO.words | {77: b" NIV"})
    asked = Ask("gemma", 3, vocabulary=words)
    scores = from_recording("openai", "vllm-0.32-completions-temp2", asked, score_from=7)
    (row,) = scores.rows
    assert row.chosen.low == -0.8078584671020508 and row.top_ids == (236761, 236764, 532) and row.rank == 1


def test_openai_sends_only_its_own_fields() -> None:
    _, requests = drive(
        get("openai").score_window(
            window_of(score_from=7), Ask("gemma", 3, vocabulary=Words(DEMO.words | {77: b" NIV"}))
        ),
        lambda r: reply_of(recorded("vllm-0.32-completions-temp2")["reply"]),
    )
    assert set(requests[0].json or ()) == {"model", "prompt", "max_tokens", "temperature", "logprobs"}


@pytest.mark.parametrize("name", ["logprobs-0", "logprobs-minus1", "prompt_logprobs-minus1"])
def test_llama_server_without_logprobs_is_refused(name: str) -> None:
    with pytest.raises(EndpointError, match="no logprobs"):
        from_recording("continuation", f"llama-server-b11434-completions-{name}", ask(0), score_from=7)


def test_vllm_logprobs_zero_gives_the_chosen_token_alone() -> None:
    scores = from_recording("continuation", "vllm-0.32-completions-logprobs-0", ask(0), score_from=7)
    assert scores.rows[0].chosen.low == -0.8078584671020508 and scores.rows[0].top_ids == ()


# The documented example of SGLang's /generate: "the capital of France is", logprob_start_len 1, three best.
SGLANG_IDS = (1782, 6722, 315, 9625, 374)
SGLANG = {
    "text": " Paris",
    "meta_info": {
        "prompt_tokens": 5,
        "input_token_logprobs": [
            [None, 6722, None],
            [-0.58203125, 315, None],
            [-3.53125, 9625, None],
            [-2.84375, 374, None],
        ],
        "input_top_logprobs": [
            None,
            [[-0.58203125, 315, None], [-2.140625, 3283, None], [-3.765625, 374, None]],
            [[-1.0390625, 279, None], [-3.53125, 9625, None], [-3.96875, 5616, None]],
            [[-2.09375, 13, None], [-2.34375, 58883, None], [-2.40625, 11, None]],
        ],
        "input_token_ids_logprobs": [
            None,
            [[-9.5, 9370, None], [-12.0, 1, None]],
            [[-8.5, 9370, None], [-11.0, 1, None]],
            [[-7.5, 9370, None], [-10.0, 1, None]],
        ],
    },
}


def test_sglang() -> None:
    asked = Ask("m", 3, wanted={3: (9370,), 4: (1, 13)})
    window = window_of(SGLANG_IDS, score_from=2)
    scores, requests = drive(get("sglang").score_window(window, asked), lambda r: reply_of(SGLANG))
    assert requests[0].path == "/generate" and requests[0].json is not None
    assert requests[0].json["logprob_start_len"] == 1 and requests[0].json["token_ids_logprob"] == [1, 13, 9370]
    assert {r.position: r.chosen.low for r in scores.rows} == {2: -0.58203125, 3: -3.53125, 4: -2.84375}
    assert scores.rows[0].rank == 1 and scores.rows[1].rank == 2
    assert scores.rows[2].rank is None and scores.rows[2].rank_low == 4  # beside the three best
    assert scores.rows[2].top_ids == (13, 58883, 11)
    assert [s.low for s in scores.rows[1].wanted] == [-8.5]
    assert [s.low for s in scores.rows[2].wanted] == [-10.0, -2.09375]


def test_tensorrt_llm_is_one_off() -> None:
    maps = recorded("vllm-0.32-completions-prompt_logprobs")["reply"]["choices"][0]["prompt_logprobs"]
    shifted = {"choices": [{"index": 0, "text": "", "prompt_logprobs": [*maps[1:], {"5": {"logprob": -0.1}}]}]}
    scores, _ = drive(get("tensorrt_llm").score_window(window_of(), ask()), lambda r: reply_of(shifted))
    assert {r.position: r.chosen.low for r in scores.rows} == VLLM
    with pytest.raises(EvalgateError, match="use the dialect 'tensorrt_llm'"):
        drive(get("prompt_logprobs").score_window(window_of(), ask()), lambda r: reply_of(shifted))
    straight = {"choices": [{"index": 0, "text": "", "prompt_logprobs": maps}]}
    with pytest.raises(ScoreError, match="use the dialect 'prompt_logprobs'"):
        drive(get("tensorrt_llm").score_window(window_of(), ask()), lambda r: reply_of(straight))
    filled = {"choices": [{"index": 0, "text": "", "prompt_logprobs": [{"7": {"logprob": -1.0}}, *maps[1:]]}]}
    with pytest.raises(ScoreError, match="not token i\\+1"):
        drive(get("tensorrt_llm").score_window(window_of(), ask()), lambda r: reply_of(filled))


def test_tensorrt_llm_without_the_actual_token_is_censored() -> None:
    row = {"7": {"logprob": -1.0}, "8": {"logprob": -2.0}}
    body = {"choices": [{"index": 0, "text": "", "prompt_logprobs": [row, row]}], "usage": {"prompt_tokens": 3}}
    scores, _ = drive(get("tensorrt_llm").score_window(window_of((1, 7, 9)), Ask("m", 2)), lambda r: reply_of(body))
    assert scores.rows[0].chosen.low == -1.0
    assert not scores.rows[1].chosen.known and scores.rows[1].chosen.high == -2.0


def chat_body(prompt_tokens: int | None, top: list[tuple[str, float]]) -> dict[str, object]:
    items = [{"token": t, "bytes": list(t.encode()), "logprob": lp} for t, lp in top]
    choice = {"index": 0, "message": {}, "logprobs": {"content": [items[0] | {"top_logprobs": items}]}}
    usage = {} if prompt_tokens is None else {"usage": {"prompt_tokens": prompt_tokens}}
    return {"choices": [choice], **usage}


def test_chat_prefill_sends_the_prefix_and_matches_by_bytes() -> None:
    asked = ask(2, chat=ChatPrefix((Message("user", "Where?"),), 3), positions=(4, 5))
    window = window_of(IDS[:6])
    scores, requests = drive(
        get("chat").score_window(window, asked),
        lambda r: reply_of(
            chat_body(
                4 if len((r.json or {})["messages"][-1]["content"]) == 3 else 5, [(" France", -0.5), (" is", -1.5)]
            )
        ),
    )
    assert [r.json["messages"][-1] for r in requests if r.json] == [
        {"role": "assistant", "content": " of"},
        {"role": "assistant", "content": " of France"},
    ]
    assert all(r.json and r.json["continue_final_message"] for r in requests)
    assert [r.chosen.low for r in scores.rows] == [-0.5, -1.5]


def test_chat_with_another_template_is_refused_and_one_bad_prefix_is_censored() -> None:
    asked = ask(2, chat=ChatPrefix((Message("user", "Where?"),), 3), positions=(4, 5))
    window = window_of(IDS[:6])
    top = [(" France", -0.5), (" is", -1.5)]
    with pytest.raises(ScoreError, match="another chat template"):
        drive(get("chat").score_window(window, asked), lambda r: reply_of(chat_body(9, top)))
    scores, _ = drive(get("chat").score_window(window, asked), lambda r: reply_of(chat_body(5, top)))
    assert not scores.rows[0].chosen.known and (scores.rows[0].chosen.low, scores.rows[0].chosen.high) == (-math.inf, 0)
    assert scores.rows[1].chosen.low == -1.5
    with pytest.raises(EndpointError, match="cannot be checked"):
        drive(get("chat").score_window(window, asked), lambda r: reply_of(chat_body(None, top)))


def test_llama_server_other_recordings() -> None:
    forced = ask(2, capabilities=Capabilities(forced="allowed_token_ids"))
    scores = from_recording("continuation", "llama-server-b11434-completions-forced-token", forced, score_from=7)
    assert scores.rows[0].chosen.low == -0.8710623979568481 and scores.rows[0].top_ids == (236761, 236764)
    scores = from_recording("continuation", "llama-server-b11434-completions-temp2", ask(3), score_from=7)
    assert scores.rows[0].chosen.low == -0.8710616230964661 and scores.rows[0].rank == 1
    assert scores.rows[0].top_logprobs == (-0.8710616230964661, -0.9985488057136536, -2.239515542984009)


@pytest.mark.parametrize(
    ("dialect", "name", "says"),
    [
        ("echo", "vllm-0.32-completions-echo-batch", "exactly one choice"),
        ("echo", "llama-server-b11434-completions-echo-batch", "exactly one choice"),
        ("continuation", "vllm-0.32-completions-logprobs-minus1", "--max-logprobs 3"),
        ("llamacpp", "vllm-0.32-completion-native", "/completion: (refused|failed)"),
    ],
)
def test_recorded_replies_that_are_no_answer(dialect: str, name: str, says: str) -> None:
    with pytest.raises(EndpointError, match=says):
        from_recording(dialect, name, ask(3), score_from=7)


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("vllm-0.32-chat-logprobs", EndpointError, "--trust-request-chat-template"),
        ("llama-server-b11434-chat-logprobs", ScoreError, "2 generated tokens"),
    ],
)
def test_recorded_chat_replies(name: str, kind: type[EvalgateError], says: str) -> None:
    window = window_of((2,) * 25 + (818,), score_from=25)  # 25 prompt tokens, as the recording says
    asked = ask(2, chat=ChatPrefix((), 25))
    record = recorded(name)
    with pytest.raises(kind, match=says):
        drive(get("chat").score_window(window, asked), lambda r: reply_of(record["reply"], record["status"]))


@pytest.mark.parametrize(("server", "agrees"), [("llama-server-b11434", "agrees"), ("vllm-0.32", "differs")])
def test_recorded_tokenize(server: str, agrees: str) -> None:
    """vLLM was asked without add_special_tokens: false there, and its ids start with BOS."""
    body = recorded(f"{server}-tokenize")["reply"]
    question = Question("gemma", IDS, "The capital of France is", local_ids=(818, 5279, 529, 7001, 563))
    certificate, _ = drive(
        probe(question), lambda r: reply_of(body) if r.path == "/tokenize" else reply_of({"error": "no"}, 404)
    )
    assert certificate.tokenizer == agrees
    assert certificate.context_length == body.get("max_model_len")
