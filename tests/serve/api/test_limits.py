"""What a server does with requests that ask for too much, come from elsewhere, or come too early or too late."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from serve.api import asks
from serve.config import ServerConfig
from serve.errors import BadRequest, ServeError
from serve.models import templates
from serve.models.spans import encoding_lock
from tests.serve import tiny_models as tiny
from tests.serve.serving import Served, served, wide_llama

CHAT = [{"role": "user", "content": "hello"}]
RENDERING = {"chat": CHAT, "tools": None, "variables": {}, "prompt": False, "spans": False}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as found:
        yield found


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 'a'*10**8 }}", "too much memory"),
        ("{{ 'a'*10**7 }}", "makes 10000000 characters"),
        ("{{ 'a'*10**10 }}", "too much memory"),
        ("{{ 'a'|center(10**10) }}", "too much memory"),
        (
            "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
            "too much memory",
        ),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes too long"),
    ],
)
def test_a_template_bomb_is_refused(template: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next rendering works again, whatever became of the process."""
    monkeypatch.setattr(templates, "START_SECONDS", 1000.0)  # a loaded machine
    monkeypatch.setattr(templates, "SECONDS", 0.5 if "long" in why else 1000.0)
    with pytest.raises(BadRequest, match=why) as caught:
        templates.render_foreign({**RENDERING, "template": template})
    assert caught.value.param == "messages"
    monkeypatch.setattr(templates, "SECONDS", 1000.0)
    assert templates.render_foreign({**RENDERING, "template": "{{ messages[0].content }}"}).text == "hello"


def test_templates_of_requests_are_off_unless_asked_for() -> None:
    assert not ServerConfig().trust_request_templates


def test_a_text_that_must_be_too_long_is_refused_before_it_is_tokenized(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(map(len, server.tokenizer.get_vocab()))
    text = "a" * (256 * longest + 1)
    with encoding_lock(server.engine.model(None).loaded.tokenizer):  # tokenizing would wait here
        for path, body in (
            ("/v1/completions", {"prompt": text}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ("/tokenize", {"prompt": text}),
            ("/tokenize", {"content": ["a", text]}),
            ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
        ):
            error = server.post(path, body, status=400)["error"]
            assert "more than fit the context of tiny (256 tokens)" in error["message"], path
            assert ("--long-texts" in error["message"]) == (path == "/tokenize")


def test_a_server_for_whole_documents_tokenizes_long_texts() -> None:
    with served(long_texts=True) as server:
        longest = max(map(len, server.tokenizer.get_vocab()))
        text = "a " * (256 * longest)
        assert sum(server.post("/tokenize", {"prompt": text, "return_details": True})["bytes"]) == len(text)


def test_each_tokenizer_has_a_lock_of_its_own() -> None:
    one, two = tiny.byte_level(), tiny.byte_level()
    assert encoding_lock(one) is encoding_lock(one) is not encoding_lock(two)


def test_replies_are_bounded_in_listed_tokens(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asks, "MOST_ENTRIES", 1000)
    prompts = [[5] * 40] * 3
    assert len(server.complete(prompt=prompts, max_tokens=0, prompt_logprobs=7)["choices"]) == 3  # 3 x 40 x 8 = 960
    for body in (
        {"prompt": prompts, "max_tokens": 0, "prompt_logprobs": 8},
        {"prompt": prompts, "max_tokens": 0, "logprobs": 8, "echo": True},
        {"prompt": [5], "n": 8, "max_tokens": 20, "logprobs": 6},
    ):
        error = server.post("/v1/completions", body, status=400)["error"]
        assert re.search(r"lists 1,\d\d\d tokens and one reply may list 1,000", error["message"])
        assert error["param"] in ("logprobs", "prompt_logprobs")
    chat = {"messages": CHAT, "prompt_logprobs": 20, "max_tokens": 1}
    long = [{"role": "user", "content": "hello " * 60}]
    assert server.post("/v1/chat/completions", {**chat, "messages": long}, status=400)["error"]["param"] == (
        "prompt_logprobs"
    )
    body = {"prompt": [5], "n": 8, "max_tokens": 20, "logprobs": 6, "ignore_eos": True}
    assert server.stream("/v1/completions", body)  # a stream holds nothing back


def test_bodies_that_trickle_hold_no_place() -> None:
    """More clients than places, each sending a byte now and then: others are answered; the slow ones get 408."""
    with served(max_concurrent_requests=2, body_seconds=1.0) as server:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        slow = [socket.create_connection(address) for _ in range(6)]
        try:
            for one in slow:
                one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
            time.sleep(0.2)
            assert server.complete(prompt="a", max_tokens=1)["usage"]["completion_tokens"] == 1
            for one in slow:
                one.settimeout(30)
                assert one.recv(4096).startswith(b"HTTP/1.1 408")
        finally:
            for one in slow:
                one.close()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost", 200),
        ("[::1]:{port}", 200),
        ("evil.example", 403),
        ("evil.example:{port}", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_another_hosts_name_is_refused_without_a_key(server: Served, host: str, status: int) -> None:
    name = host.format(port=server.url.rpartition(":")[2])
    assert server.http.get("/v1/models", headers={"Host": name}).status_code == status


def test_with_a_key_any_name_will_do() -> None:
    with served(api_key="k") as server:
        assert server.http.get("/v1/models", headers={"Host": "models.example"}).status_code == 200


def test_health_tells_that_the_engine_has_failed() -> None:
    with served() as server:
        assert server.http.get("/health").status_code == 200
        server.engine._failure = ServeError("the engine stopped: a broken pool")
        try:
            reply = server.http.get("/health")
            assert reply.status_code == 503 and "a broken pool" in reply.json()["error"]["message"]
        finally:
            server.engine._failure = None


def test_one_model_is_named_by_its_path(server: Served) -> None:
    listed = server.http.get("/v1/models").json()["data"][0]
    assert server.http.get("/v1/models/tiny").json() == listed
    assert server.http.get("/v1/models/org/other").status_code == 404


def test_token_counters_exist_before_the_first_request() -> None:
    with served() as server:
        text = server.http.get("/metrics").text
    for name in ("prompt", "generated", "cached"):
        assert f'evalgate_{name}_tokens_total{{model="tiny"}} 0.0' in text


def test_fields_that_change_nothing_are_taken_with_their_harmless_values(server: Served) -> None:
    harmless = {"store": False, "service_tier": "auto", "metadata": {"a": "b"}, "user": "me", "prompt_cache_key": "x"}
    server.complete(prompt="a", max_tokens=1, **harmless)
    server.chat(messages=CHAT, max_tokens=1, functions=None, function_call=None, **harmless)
    for field, value in (("store", True), ("service_tier", "flex"), ("functions", [{"name": "f"}])):
        body = {"messages": CHAT, field: value}
        assert server.post("/v1/chat/completions", body, status=400)["error"]["param"] == field


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "logprobs", True),
        ("/v1/completions", "prompt_logprobs", True),
        ("/v1/chat/completions", "logprobs", 1),
        ("/v1/chat/completions", "top_logprobs", True),
    ],
)
def test_logprobs_of_the_other_kind_are_refused(server: Served, path: str, field: str, value: object) -> None:
    body = {"prompt": "a"} if "chat" not in path else {"messages": CHAT}
    assert server.post(path, {**body, field: value}, status=400)["error"]["param"] == field


def test_tokenize_takes_the_prompt_under_either_name(server: Served) -> None:
    wanted = server.http.post("/tokenize", json={"prompt": "hello"}).json()
    for body in ({"content": "hello"}, {"prompt": "hello", "content": "hello"}):
        assert server.http.post("/tokenize", json=body).json() == wanted
    reply = server.http.post("/tokenize", json={"prompt": "hello", "content": "other"})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "content"


def test_while_models_load_health_answers_503_and_names_may_be_given(tmp_path: Path) -> None:
    folder = tiny.save(wide_llama(), tmp_path / "m")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "serve", str(folder), "--port", str(port), "--device", "cpu"]
    process = subprocess.Popen([*command, "--served-model-name", "mine"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == f"serve: loading {folder}\n"
        seen, said = [], set()
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=500) as http:
            while not seen or seen[-1] != 200:
                reply = http.get("/health")
                seen.append(reply.status_code)
                if reply.status_code == 503:
                    said.add(reply.json()["error"]["message"])
                    assert reply.headers["retry-after"] == "1"
                time.sleep(0.02)
            assert set(seen) == {503, 200}
            assert said and all(message.startswith("loading the models") for message in said)
            card = http.get("/v1/models/mine").json()
            assert card["id"] == "mine" and card["evalgate"]["spec"] == str(folder)
    finally:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--served-model-name", "a", "--served-model-name", "b"], "2 --served-model-name for 1 models"),
        (["--revision", "main"], "--revision is for models of the hub"),
    ],
)
def test_names_and_revisions_that_do_not_fit_are_refused(tmp_path: Path, options: list[str], says: str) -> None:
    folder = tiny.save(tiny.llama(), tmp_path / "m")
    command = [sys.executable, "-m", "serve", str(folder), "--port", "0", "--device", "cpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_names_that_would_move_the_cursor_are_escaped(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "serve",
        str(tmp_path / "x\x1b]0;owned\x07\u202e"),
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and r"x\x1b]0;owned\x07\u202e" in done.stderr and "\x1b" not in done.stderr
