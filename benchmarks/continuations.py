"""What continuations cost against one prompt-logprobs request, HTTP included: `python -m benchmarks.continuations`.

Windows of several lengths are scored with the embedded server by sides that take turns. None is seen twice, so that no
side finds more in the prefix cache than its own positions:

one        `prompt_logprobs`, one request
listed     `continuation`, one prompt per position, 512 of them a request: they wait together and share one forward
requests   the same, a request each, 16 at once: those that happen to wait together share a forward
in turn    the same, a request each, one after the other: each finds the one before it in the prefix cache
uncached   the same, and every prompt begins with a token of its own, so that nothing is shared (some of the positions,
           spread over the window; the time is that of as many as all)

Doubling the window doubles the positions and the tokens of one forward; `--size full` goes to 4096. `listed` and `one`
must give the same logprobs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import result, timing
from benchmarks.result import Result
from evalgate.core import Window
from evalgate.corpora import load_corpus
from evalgate.dialects import get
from evalgate.dialects.base import Ask, Capabilities, Request
from evalgate.dialects.base import WindowScores as Scored
from evalgate.dialects.one_token import PATH, fields
from evalgate.endpoints.channel import Channel
from evalgate.endpoints.settings import EndpointSettings
from evalgate.server.client import EmbeddedClient
from evalgate.server.process import EmbeddedServer

ABLE = Capabilities(forced="allowed_token_ids", logprob_token_ids=True, tie_order="id", token_id_keys=True)


class Sizes(NamedTuple):
    """windows: tokens of each, ascending. apart: the longest whose positions are also asked one after the other."""

    windows: tuple[int, ...]
    apart: int
    uncached: int = 16  # positions that are asked without anything shared


SIZES = {
    "tiny": Sizes((16, 32), 16, 4),
    "quick": Sizes((128, 256, 512), 128),
    "full": Sizes((128, 256, 512, 1024, 2048, 4096), 512),
}


def main() -> None:
    parser = result.parser(__doc__, runs=3)
    parser.add_argument("--model", help="default: demo; for tiny sizes a tiny random model")
    parser.add_argument("--top-k", type=int, default=20)
    options = parser.parse_args()
    sizes = SIZES[options.size]
    found = Result(
        name="continuations", size=options.size, settings={"windows": str(sizes.windows), "k": options.top_k}
    )
    with tempfile.TemporaryDirectory() as folder:
        spec = options.model or ("demo" if options.size != "tiny" else _tiny(Path(folder)))
        with EmbeddedServer([spec], options=["--max-logprobs", str(options.top_k)]) as server:
            measure(found, server, sizes, options.runs, options.top_k)
    found.publish(options)


def _tiny(folder: Path) -> str:
    from serve.selftest.tiny import checkpoint

    return str(checkpoint(folder))


def measure(found: Result, server: EmbeddedServer, sizes: Sizes, runs: int, k: int) -> None:
    """All sides on all windows."""
    client = EmbeddedClient(server)
    (info,) = client.models().values()
    ask = Ask(info.name, k, ABLE, vocab_size=info.vocab_size, batch=64)
    together = Channel(server.url, EndpointSettings(concurrency=16, timeout=3600), key=server.key, trust_env=False)
    alone = Channel(server.url, EndpointSettings(concurrency=1, timeout=3600), key=server.key, trust_env=False)
    listed: dict[int, list[float]] = {}
    for tokens in sizes.windows:
        windows = fresh_windows(client, info.name, tokens)

        def scored(dialect: str, ask: Ask, channel: Channel, window: Window) -> Scored:
            return channel.drive(get(dialect).score_window(window, ask))

        def timed(dialect: str, ask: Ask, channel: Channel, windows: Iterator[Window]) -> float:
            return timing.seconds(partial(scored, dialect, ask, channel, next(windows)))

        many = replace(ask, listed=512)
        same = next(windows)
        one, other = (scored(d, many, together, same).rows for d in ("prompt_logprobs", "continuation"))
        apart = max(abs(a.chosen.low - b.chosen.low) for a, b in zip(one, other, strict=True))
        sides: dict[str, Callable[[], float]] = {
            "one": partial(timed, "prompt_logprobs", ask, together, windows),
            "listed": partial(timed, "continuation", many, together, windows),
            "requests": partial(timed, "continuation", ask, together, windows),
        }
        if tokens <= sizes.apart:
            sides["in turn"] = partial(timed, "continuation", ask, alone, windows)
            sides["uncached"] = partial(uncached, alone, ask, windows, sizes.uncached)
        times = timing.interleaved(sides, runs)
        listed[tokens] = times["listed"]
        found.figure(f"{tokens} tokens, one request", times["one"], "s")
        found.figure(f"{tokens} tokens, largest difference of a logprob", apart, "nats")
        for side in (side for side in sides if side != "one"):
            found.ratio(f"{tokens} tokens, {side} to one", times[side], times["one"], better="lower")
        if tokens // 2 in listed:
            name = f"{tokens} tokens to {tokens // 2}, listed"
            found.ratio(name, times["listed"], listed[tokens // 2], better="lower", goal=2.3)
    for channel in (together, alone):
        channel.close()
    client.close()


def uncached(channel: Channel, ask: Ask, windows: Iterator[Window], positions: int) -> float:
    """Seconds that all positions of a window would take where no prompt shares a token with another one."""
    window = next(windows)
    every = len(window.ids) - 1
    places = [1 + i * every // positions for i in range(positions)]
    began = time.perf_counter()
    for number, place in enumerate(places):
        prompt = [3 + number, *window.ids[1:place]]
        reply = channel.send(Request("POST", PATH, fields(ask, prompt)))
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {reply.body[:200]!r}")
    return (time.perf_counter() - began) * every / positions


def fresh_windows(client: EmbeddedClient, model: str, tokens: int) -> Iterator[Window]:
    """Windows of `tokens` tokens cut from the Python texts, each shown once; their first token numbers them."""
    cut = client.tokenize(model, load_corpus("python").documents)
    stream = [token for document in cut for token in document.ids]
    starts = range(0, len(stream) - tokens, tokens)
    for index in range(len(stream)):
        start = starts[index % len(starts)]
        ids = (stream[index % len(stream)], 3 + index % 200, *stream[start : start + tokens - 2])
        yield Window(index, f"window {index}", "bench", ids, 1, tokens, (1,) * tokens)


if __name__ == "__main__":
    main()
