"""Soak: `python benchmarks/soak.py [--seconds 600] [--clients 64]`, run from the repository's root.

Clients mix everything that the server does over a tiny model with a small KV memory, so that prefixes are evicted
and sequences preempted; a third of their requests leave early. Every reply is compared with one stored before,
when the server was idle. Fails (exit 1) on a wrong reply, an error, or a leak of pages, nodes or memory; the last
result is in reports/soak/last.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.serve.serving import Served, served

OUT = Path(__file__).parents[1] / "reports" / "soak" / "last.json"
NEAR = 2e-5  # nats between two replies to one request: float32 in other batches
GROWTH = 64 << 20  # bytes of memory that the second half of the run may add
Work = tuple[str, dict[str, Any]]


def works() -> list[Work]:
    """Requests of every kind: prompts that share prefixes, nested ones, scored, sampled, streamed, several choices."""
    rng = random.Random(1)
    text = [rng.randrange(3, 300) for _ in range(120)]
    made: list[Work] = []
    for n in range(4, 120, 6):
        made.append(("/v1/completions", {"prompt": text[:n], "max_tokens": 1, "logprobs": 5, "temperature": 0}))
    for n in (10, 50, 110):
        body = {"prompt": text[:n], "max_tokens": 0, "echo": True, "logprobs": 3, "temperature": 0}
        made += [("/v1/completions", body), ("/v1/completions", {**body, "max_tokens": 6, "prompt_logprobs": 5})]
    for i in range(12):
        prompt = [*text[: rng.randrange(40)], *(rng.randrange(3, 300) for _ in range(rng.randrange(1, 60)))]
        fields = {"temperature": 1.0, "seed": i, "n": 1 + i % 3, "top_p": 0.9} if i % 2 else {"temperature": 0}
        made.append(("/v1/completions", {"prompt": prompt, "max_tokens": 4 + 3 * i, "logprobs": i % 4, **fields}))
        made.append(
            ("/v1/completions", {"prompt": prompt, "max_tokens": 40, "stream": True, "seed": 3, "temperature": 0})
        )
    for i in range(6):
        chat = {"messages": [{"role": "user", "content": f"question {i}"}], "max_tokens": 12, "temperature": 0}
        made.append(("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": i}))
        made.append(("/v1/chat/completions", {**chat, "stream": True}))
    made.append(("/tokenize", {"prompt": "some words"}))
    return made


def essence(reply: str, *, stream: bool) -> Any:
    """What must be equal: everything but ids, times and what the cache had."""
    if stream:
        lines = [json.loads(x[6:]) for x in reply.splitlines() if x.startswith("data: {")]
        if any("error" in line for line in lines):
            raise ValueError(f"a stream ended in an error: {reply[-300:]}")
        texts: dict[int, str] = {}
        for choice in (choice for line in lines for choice in line["choices"]):
            piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
        return texts
    body = json.loads(reply)
    for key in ("id", "created"):
        body.pop(key, None)
    body.get("usage", {}).pop("prompt_tokens_details", None)
    return body


def same(a: Any, b: Any) -> bool:
    """Equal, numbers within NEAR."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= NEAR
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


class Soak:
    """Clients over one server, and what they saw."""

    def __init__(self, server: Served, every: list[Work]) -> None:
        self.server, self.every = server, every
        self.stored: list[Any] = []
        self.answered = self.left = 0
        self.wrong: list[str] = []

    async def store(self, http: httpx2.AsyncClient) -> None:
        """Every request once, alone."""
        for path, body in self.every:
            reply = await http.post(path, json=body)
            reply.raise_for_status()
            self.stored.append(essence(reply.text, stream=bool(body.get("stream"))))

    async def client(self, http: httpx2.AsyncClient, number: int, until: float) -> None:
        """One client: a random request after the other, a third of them given up."""
        rng = random.Random(number)
        while time.monotonic() < until:
            which = rng.randrange(len(self.every))
            path, body = self.every[which]
            leaves = rng.random() < 1 / 3
            try:
                async with asyncio.timeout(rng.random() * 0.3 if leaves else 120):
                    reply = await http.post(path, json=body)
            except TimeoutError:
                self.left += 1
                if not leaves:
                    self.wrong.append(f"{path} {body}: no answer in 120 s")
                continue
            self.answered += 1
            got = essence(reply.text, stream=bool(body.get("stream"))) if reply.status_code == 200 else reply.text
            if not same(got, self.stored[which]):
                self.wrong.append(f"{path} {body}: {str(got)[:500]} instead of {str(self.stored[which])[:500]}")


def memory() -> int:
    """Resident bytes of this process (the server runs in it)."""
    for line in Path("/proc/self/status").read_text().splitlines() if Path("/proc/self/status").exists() else ():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


async def soak(server: Served, seconds: float, clients: int) -> dict[str, Any]:
    """Run the clients; returns the result."""
    run = Soak(server, works())
    limits = httpx2.Limits(max_connections=clients)
    async with httpx2.AsyncClient(base_url=server.url, limits=limits, timeout=None) as http:
        await run.store(http)
        began = time.monotonic()
        tasks = [asyncio.create_task(run.client(http, i, began + seconds)) for i in range(clients)]
        await asyncio.sleep(seconds / 2)
        halfway = memory()
        await asyncio.gather(*tasks)
        await asyncio.sleep(2)  # the server notices within half a second that a client has gone
    scheduler = server.engine.model(None).scheduler
    done, problems = threading.Event(), list(run.wrong[:20])

    def inspect() -> None:
        try:
            server.engine.check_integrity()
            if scheduler.busy:
                problems.append(f"{len(scheduler.unfinished)} sequences are left")
            scheduler.cache.clear()
            if scheduler.pool.used or scheduler.cache.score_bytes or list(scheduler.cache.nodes()):
                problems.append(f"{scheduler.pool.used} pages are left in the empty cache")
        except ValueError as error:
            problems.append(str(error))
        done.set()

    server.engine.call(inspect)
    if not done.wait(60):
        problems.append("the engine does not answer")
    grown = memory() - halfway
    if grown > GROWTH:
        problems.append(f"memory grew by {grown >> 20} MiB in the second half")
    return {
        "seconds": seconds,
        "clients": clients,
        "answered": run.answered,
        "left_early": run.left,
        "wrong": len(run.wrong),
        "steps": server.engine.steps,
        "memory_halfway_mib": halfway >> 20,
        "memory_growth_mib": round(grown / (1 << 20), 1),
        "problems": problems,
        "python": platform.python_version(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=64)
    options = parser.parse_args()
    tokens = 600  # of KV memory: 2 layers x keys and values x 2 heads x 8 numbers x 4 bytes
    with served(kv_memory=tokens * 2 * 2 * 2 * 8 * 4, max_batch_tokens=128, check_idle=True) as server:
        result = asyncio.run(soak(server, options.seconds, options.clients))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
