"""Running the server: keys, limits, drain, logs, metrics, tokenizer routes, schema."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from serve.__main__ import _listen, main
from serve.config import ModelSpec
from serve.errors import LoadFailed
from serve.models.load import load_models
from serve.models.tokenizer import prefix_ids
from tests.serve.serving import CONTEXT, Served, served, wide_llama
from tests.serve.tiny_models import byte_level, save
from tests.stuck import STUCK

IDS = [262, 223, 290]
KEY = "secret"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(api_key=KEY, max_body_bytes=5000, max_concurrent_requests=2, tokenizer=byte_level(bos=True)) as found:
        yield found


def metric(at: Served, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(at.http.get("/metrics").text)
    samples = [s for f in families for s in f.samples if s.name == name and labels.items() <= s.labels.items()]
    return sum(s.value for s in samples)


def test_key(server: Served) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer ß".encode("latin-1").decode("latin-1")},
    ):
        with httpx2.Client(base_url=server.url, trust_env=False) as client:
            encoded = {k.encode(): v.encode("latin-1") for k, v in headers.items()}
            reply = client.post("/v1/completions", json={"prompt": "a"}, headers=encoded)
            assert reply.status_code == 401 and reply.json()["error"]["type"] == "authentication_error"
            assert client.get("/health").status_code == 200
            assert client.get("/metrics").status_code == 401


def test_body_limit_declared_and_chunked(server: Served) -> None:
    body = json.dumps({"prompt": "a" * 6000}).encode()
    assert server.http.post("/v1/completions", content=body).status_code == 413

    def pieces(data: bytes) -> Iterator[bytes]:
        for at in range(0, len(data), 700):
            yield data[at : at + 700]

    assert server.http.post("/v1/completions", content=pieces(body)).status_code == 413
    small = json.dumps({"prompt": IDS, "max_tokens": 2, "ignore_eos": True}).encode()
    reply = server.http.post("/v1/completions", content=pieces(small), headers={"Content-Type": "application/json"})
    assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 2


def test_too_many_requests_get_429_and_retry_after(server: Served) -> None:
    gate, held = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        gate.wait(STUCK)

    server.engine.call(hold)
    assert held.wait(STUCK)
    codes: list[int] = []

    def ask() -> None:  # again where the other requests below were in the way
        body = {"prompt": IDS, "max_tokens": 1}
        while (code := server.http.post("/v1/completions", json=body).status_code) == 429:
            time.sleep(0.05)
        codes.append(code)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        until = time.monotonic() + STUCK
        while time.monotonic() < until:
            reply = server.http.post("/v1/completions", json={"prompt": IDS, "max_tokens": 0, "model": "none"})
            if reply.status_code == 429:
                break
            time.sleep(0.01)
        assert reply.status_code == 429 and reply.json()["error"]["type"] == "rate_limit_error"
        assert float(reply.headers["Retry-After"]) > 0
        assert server.http.get("/health").status_code == 200
    finally:
        gate.set()
    for thread in threads:
        thread.join(STUCK)
    assert codes == [200, 200]
    server.complete(prompt=IDS, max_tokens=1)


@pytest.mark.parametrize(
    ("prompt", "param", "said"),
    [
        ([-1], "prompt.0", "greater than or equal to 0 (it is -1)"),
        ([1, 2, -3], "prompt.2", "greater than or equal to 0 (it is -3)"),
        ([[1], [2, -7]], "prompt.1.1", "greater than or equal to 0 (it is -7)"),
        ([1, "a"], "prompt.1", "a valid integer or a valid list"),
        (["a", 1], "prompt.1", "a valid string or a valid list"),
        (5, "prompt", "a valid string or a valid list"),
    ],
)
def test_what_is_wrong_with_a_prompt_is_said_of_the_kind_that_was_meant(
    server: Served, prompt: Any, param: str, said: str
) -> None:
    error = server.post("/v1/completions", {"prompt": prompt}, status=400)["error"]
    assert (error["message"], error["param"]) == (f"'{param}': Input should be {said}", param)


def test_errors_have_openai_s_shape(server: Served) -> None:
    bodies = [
        b"{not json",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "\\ud800": 1}',
        b'{"prompt": "a", "seed": 1' + b"0" * 4400 + b"}",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "model": "\\ud800"}',
    ]
    json_body = {"Content-Type": "application/json"}
    cases = [server.http.post("/v1/completions", content=body, headers=json_body) for body in bodies]
    cases += [server.http.get("/nowhere"), server.http.get("/v1/completions")]
    assert [reply.status_code for reply in cases] == [400, 400, 400, 400, 400, 404, 404, 405]
    for reply in cases:
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["code"] == reply.status_code
        assert re.fullmatch(r"[0-9a-f]{32}", reply.headers["x-request-id"])


def test_metrics_count(server: Served) -> None:
    names = ["evalgate_prompt_tokens_total", "evalgate_generated_tokens_total", "evalgate_step_seconds_count"]
    before = [metric(server, name, model="tiny") for name in names]
    done = metric(server, "evalgate_requests_total", path="/v1/completions", status="200")
    cached = metric(server, "evalgate_cached_tokens_total", model="tiny")
    prompt = list(range(60, 90))
    server.complete(prompt=prompt, max_tokens=4, ignore_eos=True)
    list(server.stream("/v1/completions", {"prompt": [*prompt, 7], "max_tokens": 3, "ignore_eos": True}))
    after = [metric(server, name, model="tiny") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)][:2] == [61, 7] and after[2] > before[2]
    assert metric(server, "evalgate_requests_total", path="/v1/completions", status="200") == done + 2
    assert metric(server, "evalgate_cached_tokens_total", model="tiny") == cached + 30
    assert metric(server, "evalgate_kv_tokens_capacity") > metric(server, "evalgate_kv_tokens_used") > 0
    assert metric(server, "evalgate_waiting") == metric(server, "evalgate_running") == 0
    server.http.get("/some/random/path")
    assert "random" not in server.http.get("/metrics").text


def test_tokenize_and_back(server: Served) -> None:
    text = "hello wörld <s> 日本"
    reply = server.post("/tokenize", {"prompt": text, "return_details": True, "return_token_strs": True})
    ids = reply["tokens"]
    assert [ids[0]] == [reply["bos_token_id"]] == reply["prefix_token_ids"] == list(prefix_ids(server.tokenizer))
    assert 0 not in ids[1:]  # <s> in text is text
    assert reply["count"] == len(ids) and reply["max_model_len"] == CONTEXT
    assert sum(reply["bytes"]) == len(text.encode()) and reply["bytes"][0] == 0
    assert len(reply["token_strs"]) == len(ids)
    assert server.post("/detokenize", {"tokens": ids[1:]})["prompt"] == text
    assert server.post("/detokenize", {"tokens": ids})["prompt"] == "<s>" + text
    assert server.post("/detokenize", {"tokens": ids, "skip_special_tokens": True})["prompt"] == text
    assert server.post("/detokenize", {"tokens": []})["prompt"] == ""
    assert server.post("/detokenize", {"tokens": [304]}, status=400)["error"]["param"] == "tokens"
    several = server.post("/tokenize", {"prompt": [text, "a"], "add_special_tokens": False})
    assert several["tokens"] == [ids[1:], server.tokenizer.encode("a", add_special_tokens=False)]
    assert server.post("/tokenize", {"prompt": "<|im_end|>", "add_special_tokens": False})["tokens"] == [2]
    assert server.post("/tokenize", {"prompt": "<|im_end|> ", "add_special_tokens": False})["tokens"] != [2]
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and info["bos_token"] == "<s>" and "im_start" in info["chat_template"]
    assert info["adds_bos"] is True
    assert "version" in server.http.get("/version").json()


def test_schema_is_of_the_routes(server: Served) -> None:
    schema = server.http.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/metrics", "/health"} <= set(
        schema["paths"]
    )
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"] and "4XX" in operation["responses"], path


def test_unknown_parser_is_refused_at_start() -> None:
    with (
        pytest.raises(LoadFailed, match="'nope' is not a tools parser: use one of none, auto, hermes"),
        served(tool_parser="nope"),
    ):
        pass


def test_a_pool_that_holds_nothing_is_refused_at_start() -> None:
    with (
        pytest.raises(
            LoadFailed, match=r"--kv-memory leaves '.*' room for .* 0 tokens and 16 are the least: give 4,096"
        ),
        served(kv_memory=1),
    ):
        pass


@pytest.mark.parametrize("option", ["--max-model-len", "--max-batch-tokens", "--max-logprobs", "--port"])
@pytest.mark.parametrize("value", ["-2", "x", "70000.5"])
def test_sizes_that_mean_nothing_are_refused(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["nowhere", f"{option}={value}"])
    assert ended.value.code == 2 and f"argument {option}: '{value}' is not a " in capsys.readouterr().err


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "", "cpu:0", "meta"])
def test_a_device_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], device: str) -> None:
    assert main(["nowhere", "--port", "0", f"--device={device}"]) == 2
    wanted = f"serve: '{device}' is not a device: use --device auto, cpu, cuda or cuda:N\n"
    assert capsys.readouterr().err == wanted


@pytest.mark.parametrize(
    ("count", "device", "found"), [(0, "cuda", "none"), (1, "cuda:1", "cuda:0"), (4, "cuda:4", "cuda:0 to cuda:3")]
)
def test_a_cuda_device_that_is_not_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, count: int, device: str, found: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    with pytest.raises(LoadFailed) as refused:
        load_models([ModelSpec("nowhere")], device=device)
    assert str(refused.value) == (
        f"there is no CUDA device for --device {device} here (found: {found}): use --device auto or cpu"
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(wide_llama(), tmp_path_factory.mktemp("model"))


def launch(*arguments: str, key: str | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"} | ({"EVALGATE_API_KEY": key} if key else {})
    return subprocess.Popen(
        [sys.executable, "-m", "serve", *arguments], stderr=subprocess.PIPE, text=True, env=environment
    )


def test_a_wider_bind_needs_a_key(checkpoint: Path) -> None:
    process = launch(str(checkpoint), "--host", "0.0.0.0", "--port", "0")
    _, errors = process.communicate(timeout=STUCK)
    assert process.returncode == 2 and "without a key" in errors and "Traceback" not in errors


def test_replies_do_not_wait_for_acknowledgements() -> None:
    async def no_delay() -> int:
        listener = _listen("127.0.0.1", 0)
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = writer.get_extra_info("socket")
            found.set_result(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(accepted, sock=listener):
            with socket.create_connection(listener.getsockname()):
                return await found

    assert asyncio.run(no_delay())


def test_clients_that_leave_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    from serve.api.draining import DrainingServer

    log = logging.getLogger("asyncio")
    before = log.level
    try:
        DrainingServer(FastAPI(), drain_seconds=1, on_exit=lambda: None)
        log.warning("socket.send() raised exception.")
        log.error("Task exception was never retrieved")
    finally:
        log.setLevel(before)
    assert caplog.messages == ["Task exception was never retrieved"]


def test_sigterm_lets_running_requests_finish(checkpoint: Path, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    process = launch(str(checkpoint), "--port", "0", "--access-log", str(log), key=KEY)
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == f"serve: loading {checkpoint}\n"
        line = process.stderr.readline()
        url = re.search(r"http://\S+", line)
        assert url, line + (process.stderr.read() if process.stderr else "")
        with httpx2.Client(
            base_url=url[0], headers={"Authorization": f"Bearer {KEY}"}, trust_env=False, timeout=STUCK
        ) as http:
            assert http.post("/v1/completions", json={"prompt": "a", "best_of": 3}).status_code == 400
            body: dict[str, Any] = {"prompt": IDS, "max_tokens": 240, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as reply:
                lines = reply.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.wait(STUCK) == 0
        assert (process.stderr.read() if process.stderr else "") == ""
    finally:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()
    notes = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(n["method"], n["path"], n["status"]) for n in notes] == [
        ("POST", "/v1/completions", 400),
        ("POST", "/v1/completions", 200),
    ]
    assert all(set(n) == {"time", "id", "client", "method", "path", "status", "seconds", "bytes"} for n in notes)
