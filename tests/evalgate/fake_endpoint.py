"""A small honest endpoint on loopback: the next token's distribution is a pure function of the prefix.

It speaks prompt_logprobs, continuations with a forced token, /tokenize in our server's shape (one byte = one token)
and /v1/models. `die_after` answers it falls silent: connections are cut until it is revived.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

VOCAB = 256
MODEL = "fake"


def logprobs(prefix: tuple[int, ...], *, salt: int = 0, noise: float = 0.0) -> np.ndarray:
    """[VOCAB] float64; `noise` perturbs the logits of salt 0 by a fixed amount per prefix."""
    base = np.random.default_rng(abs(hash((0, prefix)))).normal(scale=3.0, size=VOCAB)
    if salt:
        base = base + noise * np.random.default_rng(abs(hash((salt, prefix)))).normal(size=VOCAB)
    shifted = base - base.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


class Fake:
    """asked: (path, body) of every answered POST to /v1/completions. overload: replies 429 to send first."""

    def __init__(self, *, salt: int = 0, noise: float = 0.0, scoring: bool = True) -> None:
        self.salt, self.noise, self.scoring = salt, noise, scoring
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.overload: list[str] = []
        self.limits: dict[str, str] = {}  # headers of every reply
        self.die_after: int | None = None
        self.unanswered: list[tuple[Any, ...]] = []  # prompts that were cut off
        self.lock = threading.Lock()
        self.url = ""

    def row(self, prefix: tuple[int, ...], k: int, token: int | None) -> dict[str, dict[str, Any]]:
        values = logprobs(prefix, salt=self.salt, noise=self.noise)
        best = np.lexsort((np.arange(VOCAB), -values))
        ranks = {int(t): i + 1 for i, t in enumerate(best)}
        ids = ([] if token is None else [token]) + [int(t) for t in best[:k]]
        return {str(t): {"logprob": float(values[t]), "rank": ranks[t]} for t in dict.fromkeys(ids)}

    def generated(self, prompt: tuple[int, ...], body: dict[str, Any]) -> list[int]:
        """max_tokens tokens at temperature 1."""
        random = np.random.default_rng(body["seed"])
        ids = prompt
        for _ in range(body["max_tokens"]):
            p = np.exp(logprobs(ids, salt=self.salt, noise=self.noise))
            ids = (*ids, int(random.choice(VOCAB, p=p / p.sum())))
        return list(ids[len(prompt) :])

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/v1/models":
            return 200, {"data": [{"id": MODEL, "max_model_len": 4096}]}
        if path == "/tokenize" and "prompt" in body:
            tokens = list(body["prompt"].encode())
            details = {"bytes": [1] * len(tokens)} if body.get("return_details") else {}
            return 200, {"count": len(tokens), "max_model_len": 4096, "tokens": tokens, **details}
        if path != "/v1/completions" or not isinstance(body["prompt"][0], int | list):
            return 404, {"error": {"message": f"no {path}"}}
        if unknown := set(body) & {"echo", "logit_bias", "logprob_token_ids"}:
            return 400, {"error": {"message": f"{unknown} is not supported"}}
        if "prompt_logprobs" in body and not self.scoring:
            return 400, {"error": {"message": "prompt_logprobs is not supported"}}
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        return 200, {
            "choices": [self.choice(i, tuple(p), body) for i, p in enumerate(prompts)],
            "usage": {"prompt_tokens": sum(map(len, prompts))},
        }

    def choice(self, index: int, prompt: tuple[int, ...], body: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"index": index, "text": "", "finish_reason": "length", "logprobs": None}
        if body.get("return_token_ids"):
            found["prompt_token_ids"] = list(prompt)
        if body.get("max_tokens", 1) > 1 and body["temperature"]:
            found["token_ids"] = self.generated(prompt, body)
            return found
        if (k := body.get("prompt_logprobs")) is not None:
            rows = [self.row(prompt[:i], k, prompt[i]) for i in range(1, len(prompt))]
            found["prompt_logprobs"] = [None, *rows]
        if (k := body.get("logprobs")) is not None:
            found["logprobs"] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
            tokens: list[int] = []
            for _ in range(body.get("max_tokens", 1)):  # greedy
                row = self.row((*prompt, *tokens), k, None)
                token = body.get("allowed_token_ids", [int(next(iter(row)))])[0]
                row = self.row((*prompt, *tokens), k, token)
                found["logprobs"]["tokens"].append(f"token_id:{token}")
                found["logprobs"]["token_logprobs"].append(row[str(token)]["logprob"])
                found["logprobs"]["top_logprobs"].append({f"token_id:{t}": v["logprob"] for t, v in row.items()})
                tokens.append(token)
            if body.get("return_token_ids"):
                found["token_ids"] = tokens
        return found


@contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    """The fake on a free port; `fake.url` is its root."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else each reply's body waits 40 ms for the acknowledgement of its header

        def log_message(self, *args: object) -> None: ...

        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: dict[str, Any]) -> None:
            with fake.lock:
                fake.headers.append({k.lower(): v for k, v in self.headers.items()})
                if fake.die_after is not None and len(fake.asked) >= fake.die_after:
                    self.close_connection = True
                    fake.unanswered.append(tuple(body.get("prompt", ())))
                    return None
                if self.path == "/v1/completions" and fake.overload:
                    return self._send(429, {"error": {"message": "slow down"}}, {"Retry-After": fake.overload.pop()})
                status, found = fake.answer(self.path, body)
                if self.path == "/v1/completions" and status == 200:
                    fake.asked.append(body)
            return self._send(status, found, {})

        def _send(self, status: int, found: dict[str, Any], headers: dict[str, str]) -> None:
            data = json.dumps(found).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **fake.limits, **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
