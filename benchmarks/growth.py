"""How time grows with what is asked, on tiny random models: pair scoring, and prompt logprobs for the width.

    python -m benchmarks.growth [--size quick|full] [--runs 5] [--json FILE]

One thing grows, everything else stays: windows (positions), tokens of a window, ids of the vocabulary, candidates,
and the number k of listed ids (width). Each is measured at 1, 2 and 4 times its smallest size, in turn. The exponent is
that of time against size, by least squares: 1 is linear. A window's attention is quadratic, but the heads are most of
the work; candidates share their reference, and a list is a small part of a row: their exponents are below 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import result, timing

if TYPE_CHECKING:
    from serve.engine.runtime import ModelRuntime


@dataclass(frozen=True)
class Case:
    """Sizes of one measurement. windows: how many, of `tokens` ids each, every position but the first scored."""

    windows: int
    tokens: int
    vocabulary: int
    candidates: int = 1
    width: int = 64


CASES = {
    "tiny": Case(2, 16, 512, width=4),
    "quick": Case(8, 128, 16_384),
    "full": Case(32, 256, 32_768),
}
STEPS = (1, 2, 4)
GOALS = {"windows": 1.1, "tokens": 1.3, "vocabulary": 1.15, "candidates": 1.0, "width": 0.5}
UNITS = {
    "windows": "window",
    "tokens": "token of a window",
    "vocabulary": "1,000 ids of the vocabulary",
    "candidates": "candidate",
    "width": "id in a list",
}


def main() -> None:
    options = result.parser(__doc__).parse_args()
    measured(options).publish(options)


def measured(options: argparse.Namespace) -> result.Result:
    base = CASES[options.size]
    found = result.Result(name="growth", size=options.size, settings=vars(base))
    models = {n: runtimes(n, base.tokens * max(STEPS), base.candidates) for n in {base.vocabulary * s for s in STEPS}}
    for _ in range(max(STEPS) - 1):  # more candidates, at the base vocabulary alone
        models[base.vocabulary] += runtimes(base.vocabulary, base.tokens * max(STEPS), 0)
    for name in GOALS:
        cases = {step: replace(base, **{name: getattr(base, name) * step}) for step in STEPS}
        work = lists if name == "width" else scores
        sides = {str(step): partial(timing.seconds, work(models[c.vocabulary], c)) for step, c in cases.items()}
        took = timing.interleaved(sides, options.runs, warm=1)
        sizes = {step: getattr(case, name) for step, case in cases.items()}
        for step in STEPS:
            scale = 1000 if name == "vocabulary" else 1
            each = 1000 * median(took[str(step)]) / (sizes[step] / scale)
            found.figure(f"{name} {sizes[step]:,}: time per {UNITS[name]}", each, "ms")
        exponents = [
            timing.exponent({size: took[str(step)][i] for step, size in sizes.items()}) for i in range(options.runs)
        ]
        found.figure(f"exponent in {name}", exponents, "", most=GOALS[name])
        found.ratio(f"time at 4 times the {name}", took["4"], took["1"], better="lower")
    return found


def runtimes(vocabulary: int, context: int, candidates: int) -> list[ModelRuntime]:
    """A random reference and as many candidates, ready to score."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from serve.config import EngineConfig, ModelSpec
    from serve.engine.runtime import ModelRuntime
    from serve.models.load import describe
    from tests.serve.tiny_models import byte_level

    found = []
    for number in range(1 + candidates):
        torch.manual_seed(number)
        config = LlamaConfig(  # of each its own: a runner changes its model's
            vocab_size=vocabulary,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=context,
        )
        loaded = describe(LlamaForCausalLM(config), byte_level(), spec=ModelSpec(f"random{number}"))
        found.append(ModelRuntime(loaded, EngineConfig(device="cpu", max_logprobs=-1), kv_memory=1 << 28))
    return found


def texts(case: Case) -> list[tuple[int, ...]]:
    """Different windows of ids that every vocabulary has."""
    return [tuple(3 + (w * 7919 + i * 104729) % 500 for i in range(case.tokens)) for w in range(case.windows)]


def scores(models: list[Any], case: Case) -> Callable[[], None]:
    """Exact pair scoring of the case."""
    from serve.engine.pair import ScoreJob, ScoreWindow

    windows = [ScoreWindow(ids, tuple(range(1, len(ids)))) for ids in texts(case)]

    def work() -> None:
        job = ScoreJob(models[0], models[1 : 1 + case.candidates], windows, 10, on_end=lambda _: None)
        while not job.finished:
            job.advance()
        assert len(job.columns()["kl"]) == case.candidates * case.windows * (case.tokens - 1)

    return work


def lists(models: list[Any], case: Case) -> Callable[[], None]:
    """Prompt logprobs of the case's windows, `width` ids a position, none of it cached."""
    from serve.engine.sequence import Ask, Finished, RowScores, Sequence

    model = models[0]
    asks = [Ask(ids, 0, prompt_logprobs=case.width) for ids in texts(case)]

    def work() -> None:
        model.scheduler.cache.clear()
        ended: list[Finished | Exception] = []
        rows: list[RowScores] = []
        for ask in asks:
            model.scheduler.add(Sequence(ask, rows.extend, lambda *_: None, ended.append))
        while len(ended) < len(asks):
            model.step()
        failed = [outcome for outcome in ended if isinstance(outcome, Exception)]
        if failed:
            raise failed[0]
        assert len(rows) >= case.windows * (case.tokens - 1)

    return work


if __name__ == "__main__":
    main()
