"""What continuations cost against one prompt-logprobs request, HTTP included: `python benchmarks/continuations.py`.

Each round scores two fresh windows with the embedded server, the first through `prompt_logprobs` (one request),
the second through `continuation` (one prompt per position, --listed of them per request); no window is seen
twice, so that neither finds more in the prefix cache than its own positions. Printed: seconds and requests of
each, the ratio of the medians, and the largest difference of a chosen token's logprob between the two (nats),
measured on one more window.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

from evalgate.core import Window
from evalgate.corpora import load_corpus
from evalgate.dialects import get
from evalgate.dialects.base import Ask, Capabilities, WindowScores
from evalgate.endpoints.channel import Channel
from evalgate.endpoints.settings import EndpointSettings
from evalgate.server.client import EmbeddedClient
from evalgate.server.process import EmbeddedServer

ABLE = Capabilities(forced="allowed_token_ids", logprob_token_ids=True, tie_order="id")


class Took(NamedTuple):
    """One window's cost (HTTP included) and answer."""

    seconds: float
    requests: int
    scores: WindowScores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64, help="requests sent together")
    parser.add_argument("--listed", type=int, default=512, help="prefixes of one request; 1 = a request each")
    parser.add_argument("--top-k", type=int, default=20)
    options = parser.parse_args()
    with EmbeddedServer([options.model], options=["--max-logprobs", str(options.top_k)]) as server:
        client = EmbeddedClient(server)
        (info,) = client.models().values()
        windows = fresh_windows(client, info.name, options.tokens)
        settings = EndpointSettings(concurrency=options.concurrency, timeout=3600)
        channel = Channel(server.url, settings, key=server.key, trust_env=False)

        def score(dialect: str, window: Window) -> Took:
            ask = Ask(
                info.name,
                options.top_k,
                ABLE,
                vocab_size=info.vocab_size,
                batch=options.batch,
                listed=options.listed,
            )
            before, began = channel.asked, time.perf_counter()
            found = channel.drive(get(dialect).score_window(window, ask))
            return Took(time.perf_counter() - began, channel.asked - before, found)

        same = next(windows)
        one, other = (score(dialect, same).scores.rows for dialect in ("prompt_logprobs", "continuation"))
        apart = max(abs(a.chosen.low - b.chosen.low) for a, b in zip(one, other, strict=True))
        seconds: dict[str, list[float]] = {"prompt_logprobs": [], "continuation": []}
        requests = dict.fromkeys(seconds, 0)
        for _ in range(options.rounds):
            for dialect, times in seconds.items():
                took = score(dialect, next(windows))
                times.append(took.seconds)
                requests[dialect] += took.requests
        channel.close()
        client.close()
    medians = {dialect: statistics.median(times) for dialect, times in seconds.items()}
    ratio = medians["continuation"] / medians["prompt_logprobs"]
    print(
        json.dumps(
            {
                "tokens": options.tokens,
                "listed": options.listed,
                "seconds": seconds,
                "requests": requests,
                "ratio": ratio,
                "largest_difference": apart,
            }
        )
    )


def fresh_windows(client: EmbeddedClient, model: str, tokens: int) -> Iterator[Window]:
    """Windows of `tokens` tokens cut from the Python texts, each shown once."""
    cut = client.tokenize(model, load_corpus("python").documents)
    stream = [token for document in cut for token in document.ids]
    for index, start in enumerate(range(0, len(stream) - tokens, tokens)):
        ids = tuple(stream[start : start + tokens])
        yield Window(index, f"window {index}", "bench", ids, 1, tokens, (1,) * tokens)


if __name__ == "__main__":
    main()
