"""Bodies that nobody meant: no 5xx, no hang, replies as the schema says, and right answers afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.serving import Served, served
from tests.stuck import STUCK

pytestmark = pytest.mark.slow

schemathesis = pytest.importorskip("schemathesis", reason="needs the 'clients' extra")

IDS = [262, 223, 290, 40]
QUIET = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as found:
        before = found.complete(prompt=IDS, max_tokens=4, temperature=0, logprobs=2, prompt_logprobs=2)["choices"]
        yield found
        after = found.complete(prompt=IDS, max_tokens=4, temperature=0, logprobs=2, prompt_logprobs=2)["choices"]
        assert json.dumps(after)[:40] == json.dumps(before)[:40]
        assert after[0]["logprobs"]["token_ids"] == before[0]["logprobs"]["token_ids"]
        assert after[0]["logprobs"]["token_logprobs"] == pytest.approx(
            before[0]["logprobs"]["token_logprobs"], abs=1e-5
        )


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
token = st.integers(-2, 306)
some_text = st.text(max_size=12) | st.sampled_from(["hello", "wörld 日本", "<s>", "\x00", "a" * 400])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(-1, 6) | st.sampled_from([10**30, 300]),
    "n": st.integers(0, 3),
    "logprobs": st.integers(-2, 22) | st.booleans(),
    "top_logprobs": st.integers(-2, 22),
    "prompt_logprobs": st.integers(-2, 22),
    "echo": st.booleans(),
    "stream": st.booleans(),
    "stop": some_text | st.lists(some_text, max_size=3),
    "stop_token_ids": st.lists(token, max_size=3),
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(-1, 4),
    "seed": st.integers(),
    "temperature": st.floats(),
    "top_p": st.floats(),
    "top_k": st.integers(-2, 400),
    "min_p": st.floats(-0.1, 1.1),
    "presence_penalty": st.floats(-3, 3),
    "frequency_penalty": st.floats(-3, 3),
    "repetition_penalty": st.floats(0, 200),
    "logit_bias": st.dictionaries(token.map(str) | st.text(max_size=3), st.floats(-120, 120), max_size=3),
    "allowed_token_ids": st.lists(token, max_size=3),
    "logprob_token_ids": st.lists(token, max_size=3) | st.lists(st.lists(token, max_size=2), max_size=9),
    "tools": st.lists(any_json, max_size=2),
    "user": any_json,
    "chat_template_kwargs": any_json,
    "continue_final_message": st.booleans(),
    "stream_options": any_json,
}
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", ""]) | any_json},
        optional={"content": some_text | any_json, "tool_calls": any_json, "name": any_json},
    ),
    max_size=3,
)
prompts = (
    some_text
    | st.lists(some_text, max_size=3)
    | st.lists(token, max_size=9)
    | st.lists(st.lists(token, max_size=4), max_size=3)
)
completion = st.fixed_dictionaries({"prompt": prompts | any_json}, optional=FIELDS)
CHAT_FIELDS = {name: values for name, values in FIELDS.items() if name != "max_tokens"}
chat = st.fixed_dictionaries({"messages": messages, "max_tokens": st.integers(0, 5)}, optional=CHAT_FIELDS)


def check(server: Served, path: str, body: Any) -> None:
    data = json.dumps(body).encode()  # NaN and Infinity too, as careless clients write them
    reply = server.http.post(path, content=data, headers={"Content-Type": "application/json"}, timeout=STUCK)
    assert reply.status_code in (200, 400, 404, 413), (reply.status_code, reply.text, body)
    if reply.headers["content-type"].startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
        assert events.pop() == "[DONE]"
        assert all("error" not in json.loads(event) for event in events), (reply.text, body)
        return
    answer = json.loads(reply.text, parse_constant=lambda name: pytest.fail(f"{name} in a reply"))
    assert ("error" in answer) == (reply.status_code != 200)


@settings(QUIET, max_examples=250)
@given(body=completion)
def test_completions(server: Served, body: Any) -> None:
    check(server, "/v1/completions", body)


@settings(QUIET, max_examples=200)
@given(body=chat)
def test_chat(server: Served, body: Any) -> None:
    check(server, "/v1/chat/completions", body)


@settings(QUIET, max_examples=80)
@given(path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]), body=any_json)
def test_anything(server: Served, path: str, body: Any) -> None:
    check(server, path, body)


@pytest.mark.hypothesis
@pytest.mark.filterwarnings("default")
def test_schema(server: Served) -> None:
    """Generated from the OpenAPI schema: no server error, and status, type and body as the schema says."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    schema.validate()
    checks = [
        schemathesis.checks.not_a_server_error,
        schemathesis.checks.CHECKS.get_one("status_code_conformance"),
        schemathesis.checks.CHECKS.get_one("content_type_conformance"),
        schemathesis.checks.CHECKS.get_one("response_schema_conformance"),
    ]
    seen: set[str] = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        seen.add(operation.path)

        @settings(QUIET, max_examples=25)
        @given(case=operation.as_strategy(), stream=st.booleans())
        def run(case: Any, stream: bool) -> None:
            if isinstance(case.body, dict):
                if "stream" in case.body:
                    case.body["stream"] = stream  # else almost always null or absent
                for name in ("max_tokens", "max_completion_tokens", "n"):
                    if isinstance(case.body.get(name), int):
                        case.body[name] = min(case.body[name], 3)
                if case.path == "/v1/chat/completions" and case.body.get("max_tokens") is None:
                    case.body |= {"max_tokens": 2, "max_completion_tokens": None}
            case.call_and_validate(checks=checks, timeout=STUCK)

        run()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/score", "/tokenize", "/metrics"} <= seen


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/completions",
            {"prompt": IDS, "echo": True, "logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True},
        ),
        ("/v1/completions", {"prompt": "ab", "n": 2, "seed": 1, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True}),
        ("/v1/chat/completions", {"n": 2, "seed": 1, "stream_options": {"include_usage": True}}),
    ],
)
def test_schema_of_streams(server: Served, path: str, body: dict[str, Any]) -> None:
    """Every event of a stream is what the schema says, and an event of another shape would not be."""
    operation = schemathesis.openapi.from_url(f"{server.url}/openapi.json")[path]["POST"]
    if path.startswith("/v1/chat"):
        body = {**body, "messages": [{"role": "user", "content": "hi"}]}
    case = operation.Case(
        body={**body, "max_tokens": 4, "ignore_eos": True, "stream": True}, media_type="application/json"
    )
    case.call_and_validate()
    broken = case.call()
    assert broken.headers["content-type"][0].startswith("text/event-stream") and broken.content.count(b"data: ") > 4
    broken.content = broken.content.replace(b'"created":', b'"made":')
    with pytest.raises(schemathesis.core.failures.FailureGroup, match="SSE event violates schema"):
        case.validate_response(broken)
