"""What hostile requests and replies cost: `python benchmarks/bombs.py`, run from the repository's root.

Each is sent to a server of its own, over a tiny model, while another client asks for a completion five times a second.
Shown: how the bomb was answered, the server's peak memory over idle (with its children), and the longest that the other
client waited. The last rows are replies to evalgate itself, with the command's peak memory over a reply of a few bytes.
Exit code 1 where memory grows by 1 GiB or the other client waits for 5 seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import http.server
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.serve.tiny_models import byte_level, save

GIB = 1 << 30
WAIT = 5.0  # seconds
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
Attack = Callable[[str], str]


def model() -> Any:
    """A random Llama with a context of 512 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=304, max_position_embeddings=512, **sizes))


def chat_template(template: str) -> Attack:
    """Four requests at once, each with a template of its own."""

    def attack(url: str) -> str:
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template": template, "max_tokens": 1}
        return posted(url, "/v1/chat/completions", [body] * 4)

    return attack


def text(characters: int) -> Attack:
    """Eight prompts at once that no context holds."""
    return lambda url: posted(url, "/v1/completions", [{"prompt": "some words " * (characters // 11)}] * 8)


def listed(prompts: int, k: int) -> Attack:
    """One request for the k likeliest ids at every position of many prompts."""
    body = {"prompt": [[5] * 400] * prompts, "max_tokens": 1, "prompt_logprobs": k}
    return lambda url: posted(url, "/v1/completions", [body])


def trickle(url: str) -> str:
    """560 connections, each of which sends a byte of its body a second for 20 seconds."""
    port = int(url.rpartition(":")[2])
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(560)]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
    for one in slow:
        one.sendall(head)
    for _ in range(20):
        time.sleep(1)
        for one in slow:
            with contextlib.suppress(OSError):
                one.sendall(b" ")
    for one in slow:
        one.close()
    return "held for 20 s"


SERVER: dict[str, Attack] = {
    "chat template of 10^8 characters": chat_template("{{ 'a'*10**8 }}"),
    "chat template that loops 10^10 times": chat_template(LOOPS),
    "text of 2 MB": text(2_000_000),
    "text of 20 MB": text(20_000_000),
    "256 prompts of 400 tokens, prompt_logprobs 20": listed(256, 20),
    "the most that one reply may list: 62 such prompts": listed(62, 20),
    "560 connections that trickle": trickle,
}


def posted(url: str, path: str, bodies: list[dict[str, Any]]) -> str:
    """Send them all at once; the statuses, with the seconds until the last answer."""
    began, statuses = time.monotonic(), [0] * len(bodies)

    def send(place: int) -> None:
        with httpx2.Client(timeout=300, trust_env=False) as client:
            statuses[place] = client.post(url + path, json=bodies[place]).status_code

    threads = [threading.Thread(target=send, args=(n,)) for n in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return f"{', '.join(map(str, sorted(set(statuses))))} after {time.monotonic() - began:.1f} s"


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[str, int]]:
    """URL and process id of a server over the tiny model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "serve", str(folder), "--port", str(port), "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--trust-request-chat-template"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(OSError, httpx2.HTTPError):
                if httpx2.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            time.sleep(0.2)
        yield url, process.pid
    finally:
        process.kill()
        process.wait()


class Watch:
    """Another client of the server, and the server's memory, meanwhile."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid = url, pid
        self.longest, self.refused, self.peak = 0.0, 0, 0
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._ask), threading.Thread(target=self._weigh)]

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        body = {"prompt": "hello", "max_tokens": 1}
        with httpx2.Client(timeout=300, trust_env=False) as client:
            while not self._end.is_set():
                began = time.monotonic()
                with contextlib.suppress(httpx2.HTTPError):
                    self.refused += client.post(f"{self.url}/v1/completions", json=body).status_code != 200
                self.longest = max(self.longest, time.monotonic() - began)
                self._end.wait(0.2)

    def _weigh(self) -> None:
        while not self._end.is_set():
            self.peak = max(self.peak, memory(self.pid))
            self._end.wait(0.02)


def memory(pid: int) -> int:
    """Resident bytes of a process and its children."""
    total = 0
    with contextlib.suppress(OSError):
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for thread in Path(f"/proc/{pid}/task").iterdir():  # a child is listed with the thread that started it
            total += sum(memory(int(child)) for child in (thread / "children").read_text().split())
    return total


def attacked(attack: Attack, folder: Path) -> tuple[str, int, float, int]:
    """How it was answered, the memory over idle, and how the other client fared (longest wait, refusals)."""
    with serving(folder) as (url, pid):
        httpx2.post(f"{url}/v1/completions", json={"prompt": "warm", "max_tokens": 2}, trust_env=False)
        idle = memory(pid)
        with Watch(url, pid) as watch:
            answer = attack(url)
            time.sleep(0.5)
    return answer, watch.peak - idle, watch.longest, watch.refused


class Reply(http.server.BaseHTTPRequestHandler):
    """Answers everything with `kind`: small, a gzip bomb of 2 GB, or zeros without end."""

    kind = "small"
    bomb = b""

    def do_GET(self) -> None:
        """As POST."""
        self.do_POST()

    def do_POST(self) -> None:
        """Send it, for as long as the client listens."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        with contextlib.suppress(OSError):
            if self.kind == "endless":
                self.end_headers()
                while True:
                    self.wfile.write(bytes(1 << 20))
            body = b"{}" if self.kind == "small" else self.bomb
            self.send_header("Content-Length", str(len(body)))
            if self.kind == "gzip":
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def probed(kind: str) -> tuple[str, int]:
    """`evalgate probe` of a server that answers so: its exit code, and its peak memory."""
    handler = type("Handler", (Reply,), {"kind": kind})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        began, peak = time.monotonic(), 0
        process = subprocess.Popen(
            [sys.executable, "-m", "evalgate", "probe", f"{url}#m"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        while process.poll() is None:
            peak = max(peak, memory(process.pid))
            time.sleep(0.02)
        assert process.stderr is not None
        said = process.stderr.read().decode().strip().splitlines()
        server.shutdown()
    return f"exit {process.returncode} after {time.monotonic() - began:.1f} s: {said[-1] if said else ''}", peak


def main() -> int:
    """Throw every bomb; print a Markdown table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    failed = False
    print("| bomb | answer | MiB over idle | other client waited | refused |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as place:
        folder = save(model(), Path(place) / "tiny", byte_level(bos=True))
        for name, attack in SERVER.items():
            answer, grown, longest, refused = attacked(attack, folder)
            failed |= grown >= GIB or longest >= WAIT
            print(f"| {name} | {answer} | {grown >> 20} | {longest:.1f} s | {refused} |", flush=True)
    Reply.bomb = gzip.compress(bytes(2 << 30), 9)
    _, idle = probed("small")
    for kind, name in (
        ("gzip", f"reply of {len(Reply.bomb) / 1e6:.0f} MB that unpacks to 2 GiB"),
        ("endless", "reply without end"),
    ):
        answer, peak = probed(kind)
        failed |= peak - idle >= GIB
        print(f"| {name} | {answer} | {(peak - idle) >> 20} | | |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
