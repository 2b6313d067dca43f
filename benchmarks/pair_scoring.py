"""Exact pair scoring beside the script that everybody writes, and beside what the models' matrix products alone take.

    python benchmarks/pair_scoring.py [--windows 4] [--context 256] [--runs 5] [--json FILE]

All see the same windows of the Python texts on the demo model in float32 against its int8 rounding:

script  runs both models with transformers, a window at a time, takes log_softmax over [positions, vocabulary] and sums
        p (log p - log q)
ours    the engine's pair scoring: 18 columns a position
limit   nothing but the products: every linear layer of both bodies over the tokens of a batch, and both heads over the
        scored rows of a tile, in the same shapes, with the weights of the models

Each runs in a process of its own, in turn, `--runs` times; a ratio is that of medians. The script and the engine must
agree on the mean KL. Memory is the peak over the loaded weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_STATUS = Path("/proc/self/status")
SIDES = ("script", "ours", "limit")


def main() -> None:
    options = _parser().parse_args()
    if options.side:
        measured = {"script": script, "ours": ours, "limit": limit}[options.side](options.windows, options.context)
        print(json.dumps(measured))
        return
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(options.runs):
        for side in SIDES:
            # as a module: from its own folder, numba would take coverage.py beside this file for the package coverage
            command = [sys.executable, "-m", "benchmarks.pair_scoring", "--side", side, *_arguments(options)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=_ROOT)
            runs[side].append(json.loads(done.stdout))
    median = {side: statistics.median(run["seconds"] for run in found) for side, found in runs.items()}
    for side, found in runs.items():
        rate = found[0]["positions"] / median[side]
        spread = ", ".join(f"{run['seconds']:.1f}" for run in found)
        print(f"{side:6}  {rate:6.1f} positions a second  ({spread} s)  {found[0]['mib']:6.0f} MiB over the weights")
    difference = abs(runs["script"][0]["kl"] - runs["ours"][0]["kl"]) / runs["script"][0]["kl"]
    ratios = {
        "ours to the script": median["script"] / median["ours"],
        "ours to the limit": median["limit"] / median["ours"],
    }
    print(f"mean KL differs by {difference:.1e} of itself; {_machine()}")
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    if options.json:
        found = {"machine": _machine(), "ratios": ratios, "runs": runs, **vars(options)}
        Path(options.json).write_text(json.dumps(found, indent=1, default=str) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write every run there")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser


def _arguments(options: argparse.Namespace) -> list[str]:
    return ["--windows", str(options.windows), "--context", str(options.context)]


def _machine() -> str:
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def _windows(tokenizer: Any, count: int, context: int) -> list[list[int]]:
    from evalgate.corpora import load_corpus
    from serve.models.tokenizer import encode_text, prefix_ids

    found = []
    for document in load_corpus("python").documents:
        ids = [*prefix_ids(tokenizer), *encode_text(tokenizer, document.text).ids][:context]
        if len(ids) == context:
            found.append(ids)
        if len(found) == count:
            break
    return found


def _load() -> tuple[Any, Any]:
    from serve.config import ModelSpec
    from serve.models.load import load_models

    ref, cand = load_models([ModelSpec("demo"), ModelSpec("demo", "int8")], device="cpu")
    return ref, cand


def _memory(key: str) -> float:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def _measured(run: Callable[[], float], positions: int) -> dict[str, float]:
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    kl = run()
    seconds = time.perf_counter() - start
    return {"kl": kl, "seconds": seconds, "positions": positions, "mib": _memory("VmHWM") - before}


def script(count: int, context: int) -> dict[str, float]:
    """Both models' whole logits, window by window."""
    import torch

    ref, cand = _load()
    windows = _windows(ref.tokenizer, count, context)

    def run() -> float:
        total, positions = 0.0, 0
        with torch.inference_mode():
            for ids in windows:
                tokens = torch.tensor([ids])
                p = torch.log_softmax(ref.model(input_ids=tokens, use_cache=False).logits[0, :-1].float(), -1)
                q = torch.log_softmax(cand.model(input_ids=tokens, use_cache=False).logits[0, :-1].float(), -1)
                total += float((p.exp() * (p - q)).sum(-1).sum())
                positions += len(ids) - 1
        return total / positions

    return _measured(run, sum(len(ids) - 1 for ids in windows))


def ours(count: int, context: int) -> dict[str, float]:
    """The engine's pair scoring."""
    from serve.config import EngineConfig
    from serve.engine.kernels import kernels, why_not
    from serve.engine.pair import ScoreJob, ScoreWindow
    from serve.engine.runtime import ModelRuntime

    if kernels() is None:  # a server has compiled them before it answers
        raise SystemExit(f"the reductions are not compiled here: {why_not()}")
    ref, cand = _load()
    windows = [ScoreWindow(tuple(ids), tuple(range(1, len(ids)))) for ids in _windows(ref.tokenizer, count, context)]
    config = EngineConfig(remember_checks=True)
    ready = [ModelRuntime(m, config, kv_memory=1 << 26) for m in (ref, cand)]

    def run() -> float:
        job = ScoreJob(ready[0], ready[1:], windows, 10, on_end=lambda _: None)
        while not job.finished:
            job.advance()
        return float(job.columns()["kl"].astype("float64").mean())

    return _measured(run, sum(len(w.positions) for w in windows))


def limit(count: int, context: int) -> dict[str, float]:
    """The matrix products of `ours` alone."""
    import torch

    from serve.config import EngineConfig
    from serve.engine.pair import ScoreWindow, next_batch

    loaded = _load()
    windows = [
        ScoreWindow(tuple(ids), tuple(range(1, len(ids)))) for ids in _windows(loaded[0].tokenizer, count, context)
    ]
    config = EngineConfig()
    bodies = [_linear(model.model) for model in loaded]
    heads = [model.model.get_output_embeddings().weight for model in loaded]
    rows_per_tile = config.tile_bytes // (4 * loaded[0].vocab_size)

    def run() -> float:
        with torch.inference_mode():
            out = torch.empty((rows_per_tile, loaded[0].vocab_size))
            for tokens, scored in _batches(windows, next_batch, config.max_batch_tokens):
                for weights in bodies:
                    for weight in weights:
                        torch.nn.functional.linear(torch.ones((tokens, weight.shape[1])), weight)
                for low in range(0, scored, rows_per_tile):
                    rows = min(rows_per_tile, scored - low)
                    for weight in heads:
                        torch.mm(torch.ones((rows, weight.shape[1])), weight.t(), out=out[:rows])
        return 0.0

    return _measured(run, sum(len(w.positions) for w in windows))


def _linear(model: Any) -> list[Any]:
    import torch

    head = model.get_output_embeddings()
    return [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]


def _batches(windows: list[Any], next_batch: Callable[..., int], budget: int) -> Iterator[tuple[int, int]]:
    """Tokens and scored rows of each batch that the engine makes of the windows."""
    first = 0
    while first < len(windows):
        last = next_batch(windows, first, budget)
        part = windows[first:last]
        yield sum(len(w.ids) for w in part), sum(len(w.positions) for w in part)
        first = last


if __name__ == "__main__":
    main()
