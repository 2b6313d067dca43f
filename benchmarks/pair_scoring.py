"""Exact pair scoring beside the script that everybody writes, and beside what the models' matrix products alone take.

    python -m benchmarks.pair_scoring [--size quick|full] [--windows N] [--context N] [--runs 5] [--profile]

All see the same windows of the Python texts on the demo model in float32 against its int8 rounding:

script  runs both models with transformers, a window at a time, takes log_softmax over [positions, vocabulary] and sums
        p (log p - log q)
ours    the engine's pair scoring: 18 columns a position
limit   nothing but the products: every linear layer of both bodies over the tokens of a batch, and both heads over the
        scored rows of a tile, in the same shapes, with the weights of the models
preset  ours, with the second half of each window scored, as `--windows llama.cpp` does
four    ours, with four candidates at once, against four times `ours` (on the first windows alone)

They run in turn in one process, `--runs` rounds after one that does not count; a ratio is the median of those of the
rounds. The script and the engine must agree on the mean KL. Memory is the peak of the first round over what was there
before. --profile prints what each part of `ours` takes of its processor time instead, on one thread.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks import result, timing

if TYPE_CHECKING:
    from serve.engine.pair import ScoreWindow
    from serve.engine.runtime import ModelRuntime
    from serve.models.load import LoadedModel

SIZES = {"tiny": (2, 16), "quick": (4, 256), "full": (16, 512)}  # windows, tokens
FOUR_WINDOWS = 2


def main() -> None:
    parser = result.parser(__doc__)
    parser.add_argument("--windows", type=int, help="how many windows, in place of the size's")
    parser.add_argument("--context", type=int, help="tokens of a window, in place of the size's")
    parser.add_argument("--profile", action="store_true", help="print what each part takes of the processor time")
    options = parser.parse_args()
    count, context = SIZES[options.size]
    candidates = 1 if options.profile else 4
    sides = Sides(
        options.windows or count, options.context or context, tiny=options.size == "tiny", candidates=candidates
    )
    if options.profile:
        print("\n".join(sides.profile()))
    else:
        measured(options, sides).publish(options)


def measured(options: argparse.Namespace, sides: Sides) -> result.Result:
    """Figures and ratios of all sides."""
    settings = {"windows": len(sides.windows), "context": len(sides.windows[0].ids)}
    found = result.Result(name="pair_scoring", size=options.size, settings=settings)
    script_kl, script_memory = timing.memory_over(sides.script)
    ours_kl, ours_memory = timing.memory_over(sides.ours)
    works = {
        "script": sides.script,
        "limit": sides.limit,
        "ours": sides.ours,
        "preset": sides.preset,
        "one": sides.one,
        "four": sides.four,
    }
    took = timing.interleaved({name: _seconds(work) for name, work in works.items()}, options.runs, warm=1)
    positions = sum(len(window.positions) for window in sides.windows)
    for name in ("script", "ours", "limit"):
        found.figure(f"{name}: positions a second", [positions / seconds for seconds in took[name]], "positions/s")
    found.figure("script: peak memory over the weights", script_memory, "MiB")
    found.figure("ours: peak memory over the weights", ours_memory, "MiB")
    found.figure("mean KL of ours differs from the script's by", abs(ours_kl - script_kl) / script_kl, "of itself")
    found.ratio("ours to the script", took["script"], took["ours"], goal=1.5)
    found.ratio("ours to the limit", took["limit"], took["ours"], goal=0.75)
    found.ratio("half the positions to all", took["preset"], took["ours"], better="lower", goal=0.75)
    found.ratio("four candidates to four runs", took["four"], [4 * t for t in took["one"]], better="lower", goal=0.84)
    return found


def _processor(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _seconds(work: Callable[[], object]) -> Callable[[], float]:
    return lambda: timing.seconds(work)


class Sides:
    """Everything that is measured, over the same windows. tiny: of random models with a small vocabulary."""

    def __init__(self, count: int, context: int, *, tiny: bool, candidates: int = 4) -> None:
        from serve.engine.kernels import kernels, why_not
        from serve.engine.pair import ScoreWindow

        if kernels() is None:  # a server has compiled them before it answers
            raise SystemExit(f"the reductions are not compiled here: {why_not() or 'numba is missing'}")
        self.loaded, self.runtimes = _tiny() if tiny else _demo(candidates)
        ids = [[3 + (w * 7919 + i * 31) % 250 for i in range(context)] for w in range(count)]
        if not tiny:
            ids = _texts(self.loaded[0].tokenizer, count, context)
        self.windows = [ScoreWindow(tuple(each), tuple(range(1, len(each)))) for each in ids]
        self._bodies = [_linear(model.model) for model in self.loaded]
        self._heads = [model.model.get_output_embeddings().weight for model in self.loaded]

    def script(self) -> float:
        """Both models' whole logits, window by window; the mean KL."""
        import torch

        total, positions = 0.0, 0
        with _own_attention(self.loaded), torch.inference_mode():
            for window in self.windows:
                tokens = torch.tensor([window.ids])
                ref, cand = (model.model for model in self.loaded)
                p = torch.log_softmax(ref(input_ids=tokens, use_cache=False).logits[0, :-1].float(), -1)
                q = torch.log_softmax(cand(input_ids=tokens, use_cache=False).logits[0, :-1].float(), -1)
                total += float((p.exp() * (p - q)).sum(-1).sum())
                positions += len(window.positions)
        return total / positions

    def ours(self) -> float:
        """The engine's pair scoring; the mean KL."""
        return self._score(self.windows, self.runtimes[1:2])

    def preset(self) -> float:
        """The second half of each window."""
        half = [w._replace(positions=w.positions[len(w.positions) // 2 :]) for w in self.windows]
        return self._score(half, self.runtimes[1:2])

    def one(self) -> float:
        """One candidate on the first windows."""
        return self._score(self.windows[:FOUR_WINDOWS], self.runtimes[1:2])

    def four(self) -> float:
        """Four candidates on the first windows."""
        return self._score(self.windows[:FOUR_WINDOWS], self.runtimes[1:5])

    def limit(self) -> float:
        """The matrix products of `ours` alone."""
        import torch

        from serve.config import EngineConfig
        from serve.engine.pair import next_batch

        rows_per_tile = self.runtimes[0].rows_per_tile
        vocabulary = self.loaded[0].vocab_size
        first = 0
        with torch.inference_mode():
            out = torch.empty((rows_per_tile, vocabulary))
            while first < len(self.windows):
                last = next_batch(self.windows, first, EngineConfig.max_batch_tokens)
                part, first = self.windows[first:last], last
                tokens, scored = sum(len(w.ids) for w in part), sum(len(w.positions) for w in part)
                for weight in (weight for weights in self._bodies for weight in weights):
                    torch.nn.functional.linear(torch.ones((tokens, weight.shape[1])), weight)
                for low in range(0, scored, rows_per_tile):
                    rows = min(rows_per_tile, scored - low)
                    for weight in self._heads:
                        torch.mm(torch.ones((rows, weight.shape[1])), weight.t(), out=out[:rows])
        return 0.0

    def profile(self) -> list[str]:
        """Lines of Markdown: what each part of `ours` takes of its processor time, on one thread."""
        import torch

        torch.set_num_threads(1)
        self.ours()
        parts: dict[str, float] = {}
        with _counting(parts):
            began = time.process_time()
            self.ours()
            whole = time.process_time() - began
        parts["everything else: norms, rotations, activations, copies, columns"] = whole - sum(parts.values())
        alone = {"limit": _processor(self.limit), "script": _processor(self.script), "preset": _processor(self.preset)}
        lines = ["| part | share of the processor time |", "|---|---|"]
        ordered = sorted(parts.items(), key=lambda item: -item[1])
        lines += [f"| {name} | {seconds / whole:.0%} |" for name, seconds in ordered]
        return [*lines, "", *(f"{name}: {seconds / whole:.2f} of the time of ours" for name, seconds in alone.items())]

    def _score(self, windows: list[ScoreWindow], candidates: list[ModelRuntime]) -> float:
        from serve.engine.pair import ScoreJob

        job = ScoreJob(self.runtimes[0], candidates, windows, 10, on_end=lambda _: None)
        while not job.finished:
            job.advance()
        return float(job.columns()["kl"].astype("float64").mean())


@contextmanager
def _own_attention(models: list[LoadedModel]) -> Iterator[None]:
    """Let the models attend as they do without the engine."""
    from serve.engine.interface import select

    ours = [model.model.config._attn_implementation for model in models]
    for model in models:
        select(model.model, "sdpa")
    try:
        yield
    finally:
        for model, name in zip(models, ours, strict=True):
            select(model.model, name)


@contextmanager
def _counting(parts: dict[str, float]) -> Iterator[None]:
    """Add up the processor seconds of the parts of pair scoring, on one thread, while inside the block."""
    import torch

    from serve.engine import attention, kernels
    from serve.engine.head import Head

    places: list[tuple[Any, str, Callable[[tuple[Any, ...]], str]]] = [
        (Head, "logits", lambda _: "output heads (matrix products)"),
        (torch.nn.Linear, "forward", lambda _: "linear layers of the bodies (matrix products)"),
        (attention, "_attend", lambda _: "attention"),
        (kernels, "run", lambda given: f"compiled sums: {_SUMS[given[0]]}"),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in places]

    def counted(work: Callable[..., Any], title: Callable[[tuple[Any, ...]], str]) -> Callable[..., Any]:
        def timed(*given: Any, **options: Any) -> Any:
            began = time.process_time()
            try:
                return work(*given, **options)
            finally:
                key = title(given)
                parts[key] = parts.get(key, 0.0) + time.process_time() - began

        return timed

    for (owner, name, title), (_, _, work) in zip(places, kept, strict=True):
        setattr(owner, name, counted(work, title))
    try:
        yield
    finally:
        for owner, name, work in kept:
            setattr(owner, name, work)


_SUMS = {
    "marginal": "lists, log-sum-exps, entropies",
    "pair": "divergences",
    "side": "log-sum-exps, entropies",
    "top": "lists",
}


def _demo(candidates: int) -> tuple[list[LoadedModel], list[ModelRuntime]]:
    """The demo model and its int8 rounding, and both ready to score, with further candidates."""
    from serve.config import EngineConfig, ModelSpec
    from serve.engine.runtime import ModelRuntime
    from serve.models.conversions._base import copy_sharing
    from serve.models.load import load_models

    ref, cand = load_models([ModelSpec("demo"), ModelSpec("demo", "int8")], device="cpu")
    more = [
        replace(cand, model=copy_sharing(cand.model, {}), name=f"{cand.name} {n}") for n in range(2, candidates + 1)
    ]
    config = EngineConfig(device="cpu", remember_checks=True)
    return [ref, cand], [ModelRuntime(m, config, kv_memory=1 << 26) for m in (ref, cand, *more)]


def _tiny() -> tuple[list[LoadedModel], list[ModelRuntime]]:
    from serve.config import EngineConfig
    from serve.engine.runtime import ModelRuntime
    from tests.serve.architectures import built, loaded, perturbed

    ref = copy.deepcopy(built("llama"))
    models = [loaded(m, str(n)) for n, m in enumerate([ref, *(perturbed(ref, by=0.02 * n) for n in range(1, 5))])]
    return models[:2], [ModelRuntime(m, EngineConfig(device="cpu"), kv_memory=1 << 22) for m in models]


def _texts(tokenizer: Any, count: int, context: int) -> list[list[int]]:
    """Windows of `context` ids, each the beginning of a Python text, or of what is left of one."""
    from evalgate.corpora import load_corpus
    from serve.models.tokenizer import encode_text, prefix_ids

    found: list[list[int]] = []
    for document in load_corpus("python").documents:
        ids = [*prefix_ids(tokenizer), *encode_text(tokenizer, document.text).ids]
        found += [ids[low : low + context] for low in range(0, len(ids) - context + 1, context)]
        if len(found) >= count:
            return found[:count]
    raise SystemExit(f"the Python texts have {len(found)} windows of {context} tokens: ask for fewer")


def _linear(model: Any) -> list[Any]:
    import torch

    head = model.get_output_embeddings()
    return [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]


if __name__ == "__main__":
    main()
