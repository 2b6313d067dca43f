"""What the engine's ways cost, as ratios of sides that are measured in turn: `python -m benchmarks.engine [SPEC]`.

- decode: with logprobs of 1, 5 and 20 against without, for 1, 8 and 32 streams
- mixed batches: what one row that asks for 20 alternatives, or for the whole vocabulary, does to plain ones
- bytes that leave the device in a step of decoding, and waits for it (on a CPU, which has none, both are of what would)
- prompt logprobs of 0, 1, 20 and 1024 alternatives against a prefill that computes all logits
- the largest gap of a plain stream beside a long prompt whose tokens are scored, against one whose tokens are not
- one-token continuations of every prefix of a window, waiting together, against one prompt-logprobs request of it
- --deterministic against the packed backend: prefill, prompt logprobs and decode
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import result, timing
from benchmarks.result import Result
from serve.config import EngineConfig, ModelSpec
from serve.engine.loop import Engine
from serve.engine.rows import StepRows
from serve.engine.sequence import Ask, Finished, RowScores
from serve.engine.transfer import Download


class Sizes(NamedTuple):
    """tokens: of a prompt. new: tokens that a stream generates. long: tokens of the prompt beside a stream."""

    tokens: int
    new: int
    long: int
    streams: tuple[int, ...] = (1, 8, 32)
    ks: tuple[int, ...] = (1, 5, 20)
    prompt_ks: tuple[int, ...] = (0, 1, 20, 1024)


SIZES = {
    "tiny": Sizes(24, 2, 60, (1, 2), (5,), (0, 20)),
    "quick": Sizes(256, 12, 2000),
    "full": Sizes(512, 32, 2000),
}


def main() -> None:
    parser = result.parser(__doc__, runs=3)
    parser.add_argument("spec", nargs="?", help="default: demo; for tiny sizes a tiny random model")
    options = parser.parse_args()
    sizes = SIZES[options.size]
    settings = {name: value if isinstance(value, int) else str(value) for name, value in sizes._asdict().items()}
    found = Result(name="engine", size=options.size, settings=settings)
    with tempfile.TemporaryDirectory() as folder:
        spec = options.spec or ("demo" if options.size != "tiny" else _tiny(Path(folder)))
        with started(spec) as bench:
            bench.decode(found, sizes, options.runs)
            bench.mixed(found, sizes, options.runs)
            bench.prompts(found, sizes, options.runs)
            bench.gaps(found, sizes, options.runs)
            with started(spec, deterministic=True) as fixed:
                deterministic(found, bench, fixed, sizes, options.runs)
    found.publish(options)


def _tiny(folder: Path) -> str:
    from serve.selftest.tiny import checkpoint

    return str(checkpoint(folder))


def tokens(n: int, vocabulary: int, first: int = 0) -> tuple[int, ...]:
    """Ids that no other text of the benchmark begins with."""
    return tuple(2 + ((i + first) * 7919 + first) % (min(vocabulary, 20_013) - 2) for i in range(n))


class Bench:
    """A started engine with one model."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.model = engine.model(None)
        self.text = partial(tokens, vocabulary=self.model.head.vocab_size)

    def run(self, asks: Sequence[Ask], heard: Callable[[int], None] = lambda _: None) -> float:
        """Seconds to answer all, submitted together to a cold cache. heard: called with the number of a token's ask."""
        left = threading.Semaphore(0)
        failed: list[Exception] = []

        def on_end(outcome: Finished | Exception) -> None:
            if isinstance(outcome, Exception):
                failed.append(outcome)
            left.release()

        def on_token(number: int, token: int, row: RowScores | None) -> None:
            heard(number)

        go = threading.Event()

        def hold() -> None:
            self.model.scheduler.cache.clear()
            go.wait(60)

        self.engine.call(hold)  # what is submitted waits together
        for number, ask in enumerate(asks):
            self.engine.submit(
                self.model, ask, on_prompt=lambda _: None, on_token=partial(on_token, number), on_end=on_end
            )
        began = time.perf_counter()
        go.set()
        for _ in asks:
            left.acquire()
        if failed:
            raise failed[0]
        return time.perf_counter() - began

    def streams(self, count: int, new: int, ks: Sequence[int | None]) -> list[Ask]:
        """Short prompts that generate `new` tokens; k by stream, None = no scores."""
        return [Ask(self.text(8, first=100 * i), new, logprobs=k) for i, k in zip(range(count), ks, strict=True)]

    def decode(self, found: Result, sizes: Sizes, runs: int) -> None:
        """Streams with and without logprobs."""
        for count in sizes.streams:
            sides: dict[str, Callable[[], float]] = {
                str(k): partial(self.run, self.streams(count, sizes.new, [k] * count)) for k in (None, *sizes.ks)
            }
            times = timing.interleaved(sides, runs, warm=1)
            found.figure(f"decode, {count} streams", [count * sizes.new / t for t in times["None"]], "tokens/s")
            for k in sizes.ks:
                goal = 0.95 if (count, k) == (32, 5) else None
                found.ratio(f"decode, {count} streams, logprobs={k} to off", times["None"], times[str(k)], goal=goal)
        count = sizes.streams[-1]
        for k in (None, *sizes.ks):
            with counted() as seen:
                self.run(self.streams(count, sizes.new, [k] * count))
            ((copies, size, steps),) = seen
            found.figure(f"off the device a step, {count} streams, logprobs={k}", size / steps, "bytes")
            found.ratio(f"waits a step, {count} streams, logprobs={k}", [copies / steps], better="lower", goal=1.0)

    def mixed(self, found: Result, sizes: Sizes, runs: int) -> None:
        """One row that asks for much among plain ones."""
        count = min(8, sizes.streams[-1])
        plain: list[int | None] = [None] * (count - 1)
        sides: dict[str, Callable[[], float]] = {
            str(k): partial(self.run, self.streams(count, sizes.new, [*plain, k])) for k in (None, 20, -1)
        }
        times = timing.interleaved(sides, runs, warm=1)
        found.ratio(f"{count} streams, one asks for 20, to none", times["20"], times["None"], better="lower", goal=1.04)
        found.ratio(
            f"{count} streams, one asks for the whole vocabulary, to none", times["-1"], times["None"], better="lower"
        )

    def prompts(self, found: Result, sizes: Sizes, runs: int) -> None:
        """Prompt logprobs and continuations against a prefill that computes all logits."""
        text = self.text(sizes.tokens)
        ks = [k for k in sizes.prompt_ks if k <= self.model.head.vocab_size]

        def every_prefix() -> float:
            return self.run([Ask(text[:n], 1, logprobs=20) for n in range(1, len(text) + 1)])

        sides: dict[str, Callable[[], float]] = {
            "prefill": lambda: self.run([Ask(text, 1)]),
            "logits": lambda: self.run([Ask(text, 1)]) + self._head(sizes.tokens - 1),
            **{f"k={k}": partial(self.run, [Ask(text, 0, prompt_logprobs=k)]) for k in ks},
            "continuations": every_prefix,
        }
        times = timing.interleaved(sides, runs, warm=1)
        found.figure(f"prefill of {sizes.tokens} tokens", [sizes.tokens / t for t in times["prefill"]], "tokens/s")
        for k in ks:
            goal = 1.25 if k == 20 else None
            name = f"prompt logprobs, k={k}, to a prefill with all logits"
            found.ratio(name, times[f"k={k}"], times["logits"], better="lower", goal=goal)
        found.ratio(
            "continuations that wait together to prompt logprobs", times["continuations"], times["k=20"], better="lower"
        )

    def _head(self, rows: int) -> float:
        """Seconds that the logits of so many more rows take, on the engine's thread."""
        import torch

        weight = next(self.model.loaded.model.parameters())
        size = getattr(self.model.loaded.model.get_output_embeddings(), "weight", weight).shape[1]
        hidden = torch.ones((self.model.rows_per_tile, size), dtype=weight.dtype, device=weight.device)
        took: list[float] = []
        done = threading.Event()

        def multiply() -> None:
            began = time.perf_counter()
            with torch.inference_mode():
                for low in range(0, rows, self.model.rows_per_tile):
                    self.model.tile(hidden[: rows - low])
            took.append(time.perf_counter() - began)
            done.set()

        self.engine.call(multiply)
        done.wait()
        return took[0]

    def gaps(self, found: Result, sizes: Sizes, runs: int) -> None:
        """The largest time between two tokens of a plain stream beside a long prompt."""
        long = self.text(min(sizes.long, self.model.context_length - 1), first=5)

        def gap(k: int | None) -> float:
            at: list[float] = []

            def heard(number: int) -> None:
                if number == 0:
                    at.append(time.perf_counter())

            stream = Ask(self.text(8), max(8, 2 * sizes.new))
            beside = Ask(long, 1) if k is None else Ask(long, 0, prompt_logprobs=k)
            self.run([stream, beside], heard)
            return max(b - a for a, b in pairwise(at))

        sides: dict[str, Callable[[], float]] = {"plain": lambda: gap(None), "scored": lambda: gap(20)}
        times = timing.interleaved(sides, runs)
        found.figure(f"largest gap beside a prompt of {len(long)} tokens", times["plain"], "s")
        found.ratio(
            "largest gap beside prompt logprobs to beside the same prompt",
            times["scored"],
            times["plain"],
            better="lower",
        )


def deterministic(found: Result, packed: Bench, fixed: Bench, sizes: Sizes, runs: int) -> None:
    """`--deterministic` against the packed backend, in turn."""
    text = packed.text(sizes.tokens)
    cases = {
        "prefill": [Ask(text, 1)],
        "prompt logprobs": [Ask(text, 0, prompt_logprobs=20)],
        "decode of 1": packed.streams(1, sizes.new, [None]),
        "decode of 8": packed.streams(8, sizes.new, [None] * 8),
    }
    for name, asks in cases.items():
        times = timing.interleaved(
            {"packed": partial(packed.run, asks), "fixed": partial(fixed.run, asks)}, runs, warm=1
        )
        goal = 2.0 if name == "prefill" else None
        found.ratio(f"--deterministic, {name}, to without", times["fixed"], times["packed"], better="lower", goal=goal)


@contextmanager
def started(spec: str, *, deterministic: bool = False) -> Iterator[Bench]:
    """An engine over a model, started."""
    config = EngineConfig(deterministic=deterministic, max_logprobs=-1, remember_checks=True)
    engine = Engine.load([ModelSpec.parse(spec)], config)
    engine.start()
    try:
        yield Bench(engine)
    finally:
        engine.stop()


@contextmanager
def counted() -> Iterator[list[tuple[int, int, int]]]:
    """After the block: (copies from the device, bytes of them, steps that have rows)."""
    seen: list[tuple[int, int, int]] = []
    copies: list[int] = []
    steps: list[int] = []
    fetch, answers = Download.fetch, StepRows.answers

    def fetching(self: Download) -> Any:
        copies.append(self.bytes)
        return fetch(self)

    def answering(self: StepRows) -> Any:
        steps.append(1)
        return answers(self)

    Download.fetch, StepRows.answers = fetching, answering  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Download.fetch, StepRows.answers = fetch, answers  # type: ignore[method-assign]
        seen.append((len(copies), sum(copies), len(steps)))


if __name__ == "__main__":
    main()
