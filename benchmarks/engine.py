"""What the engine's ways cost, as ratios measured in one run: `python benchmarks/engine.py [SPEC] [--tokens 512]`.

- one-token continuations of every prefix of a window, waiting together, against one prompt-logprobs request of it
- the same continuations one after the other, each over the prefix cache
- the prompt-logprobs request again on a warm cache
- decoding for 8 at once with k = 20 for one of them, and for all, against none
- --deterministic against the packed backend: prefill and decode
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable

from serve.config import EngineConfig, ModelSpec
from serve.engine.loop import Engine
from serve.engine.sequence import Ask, Finished


def run(engine: Engine, asks: list[Ask]) -> float:
    """Seconds to answer all, submitted together."""
    left = threading.Semaphore(0)
    failed: list[Exception] = []

    def on_end(outcome: Finished | Exception) -> None:
        if isinstance(outcome, Exception):
            failed.append(outcome)
        left.release()

    model = engine.model(None)
    go = threading.Event()
    engine.call(lambda: go.wait(60) and None)  # what is submitted waits together
    for ask in asks:
        engine.submit(model, ask, on_prompt=lambda _: None, on_token=lambda *_: None, on_end=on_end)
    began = time.perf_counter()
    go.set()
    for _ in asks:
        left.acquire()
    if failed:
        raise failed[0]
    return time.perf_counter() - began


def cold(engine: Engine) -> None:
    """Empty the prefix cache."""
    done = threading.Event()

    def clear() -> None:
        engine.model(None).scheduler.cache.clear()
        done.set()

    engine.call(clear)
    done.wait()


def started(spec: str, *, deterministic: bool) -> Engine:
    engine = Engine.load([ModelSpec.parse(spec)], EngineConfig(deterministic=deterministic))
    engine.start()
    return engine


def best(times: int, make: Callable[[], float]) -> float:
    """The fastest of several runs: what the machine's other work adds is left out."""
    return min(make() for _ in range(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", nargs="?", default="demo")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--times", type=int, default=2)
    options = parser.parse_args()
    text = tuple(2 + (i * 7919) % 20011 for i in range(options.tokens))
    engine = started(options.spec, deterministic=False)

    def fresh(asks: list[Ask]) -> float:
        cold(engine)
        return run(engine, asks)

    def in_turn() -> float:
        cold(engine)
        return sum(run(engine, [Ask(text[:n], 1, logprobs=20)]) for n in range(1, few + 1))

    few = min(64, options.tokens)
    prompt = Ask(text, 0, prompt_logprobs=20)
    fresh([prompt])
    scored = best(options.times, lambda: fresh([prompt]))
    nested = best(options.times, lambda: fresh([Ask(text[:n], 1, logprobs=20) for n in range(1, len(text) + 1)]))
    turn = best(options.times, in_turn)
    fresh([prompt])
    warm = best(options.times, lambda: run(engine, [prompt]))
    print(f"one prompt-logprobs request of {len(text)} tokens: {scored:.3f} s")
    print(f"  {len(text)} one-token continuations that wait together: {nested / scored:.2f} times that")
    print(f"  one after the other: {turn / few * len(text) / scored:.2f} times (from the first {few})")
    print(f"  again on a warm cache: {warm / scored:.4f} times")

    def decode(asking: int) -> float:
        return fresh([Ask(text[i : i + 16], 16, logprobs=20 if i < asking else None) for i in range(8)])

    none = best(options.times, lambda: decode(0))
    one, every = best(options.times, lambda: decode(1)), best(options.times, lambda: decode(8))
    print(f"8 sequences of 16 new tokens, none asks for logprobs: {none:.3f} s")
    print(f"  one asks for k = 20: {one / none:.2f} times; all do: {every / none:.2f} times")
    long, single = (
        best(options.times, lambda: fresh([Ask(text, 1)])),
        best(options.times, lambda: fresh([Ask(text[:16], 16)])),
    )
    engine.stop()
    engine = started(options.spec, deterministic=True)
    fresh([prompt])
    print("--deterministic against without:")
    print(f"  prompt logprobs of {len(text)} tokens: {best(options.times, lambda: fresh([prompt])) / scored:.2f} times")
    print(f"  prefill of {len(text)} tokens: {best(options.times, lambda: fresh([Ask(text, 1)])) / long:.2f} times")
    print(f"  decode of one: {best(options.times, lambda: fresh([Ask(text[:16], 16)])) / single:.2f} times")
    print(f"  decode of 8: {best(options.times, lambda: decode(0)) / none:.2f} times")
    engine.stop()


if __name__ == "__main__":
    main()
