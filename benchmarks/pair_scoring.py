"""Exact pair scoring against the script that everybody writes: time and peak memory, as ratios in one run.

    python benchmarks/pair_scoring.py [--windows 4] [--context 256]

The script runs both models with transformers on one window at a time, takes log_softmax over
[positions, vocabulary] and sums p (log p - log q). Both see the same windows of the built-in corpus on the
demo model against its int8 rounding, and must agree on the mean KL. Each side runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

_STATUS = Path("/proc/self/status")


def main() -> None:
    options = _parser().parse_args()
    if options.side:
        print(json.dumps({"naive": naive, "ours": ours}[options.side](options.windows, options.context)))
        return
    got = {}
    for side in ("naive", "ours"):
        command = [sys.executable, __file__, "--side", side, *_arguments(options)]
        got[side] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"{side:5}  {got[side]['seconds']:7.1f} s  {got[side]['mib']:6.0f} MiB over the weights  {got[side]}")
    naive_side, our_side = got["naive"], got["ours"]
    difference = abs(naive_side["kl"] - our_side["kl"]) / naive_side["kl"]
    print(f"mean KL differs by {difference:.1e} of itself")
    print(f"ratio naive / ours: time {naive_side['seconds'] / our_side['seconds']:.2f}, ", end="")
    print(f"memory {naive_side['mib'] / our_side['mib']:.2f}; ours gives 18 columns, the script one")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--side", choices=("naive", "ours"), help=argparse.SUPPRESS)
    return parser


def _arguments(options: argparse.Namespace) -> list[str]:
    return ["--windows", str(options.windows), "--context", str(options.context)]


def _windows(tokenizer: object, count: int, context: int) -> list[list[int]]:
    from evalgate.corpora import load_corpus
    from serve.models.tokenizer import bos_id, encode_text

    found = []
    for document in load_corpus(None).documents:
        ids = [bos_id(tokenizer), *encode_text(tokenizer, document.text).ids][:context]
        if len(ids) == context:
            found.append(ids)
        if len(found) == count:
            break
    return found


def _load() -> tuple[object, object, object]:
    from serve.config import ModelSpec
    from serve.models.load import load_models

    ref, cand = load_models([ModelSpec("demo"), ModelSpec("demo", "int8")], device="cpu")
    return ref, cand, ref.tokenizer


def _memory(key: str) -> float:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def _measured(run: object) -> dict[str, float]:
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    kl = run()  # type: ignore[operator]
    return {"kl": kl, "seconds": time.perf_counter() - start, "mib": _memory("VmHWM") - before}


def naive(count: int, context: int) -> dict[str, float]:
    """Both models' whole logits, window by window."""
    import torch

    ref, cand, tokenizer = _load()
    windows = _windows(tokenizer, count, context)

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

    return _measured(run)


def ours(count: int, context: int) -> dict[str, float]:
    """The engine's pair scoring."""
    from serve.config import EngineConfig
    from serve.engine.pair import ScoreJob, ScoreWindow
    from serve.engine.runtime import ModelRuntime

    ref, cand, tokenizer = _load()
    windows = [ScoreWindow(tuple(ids), tuple(range(1, len(ids)))) for ids in _windows(tokenizer, count, context)]
    ready = [ModelRuntime(m, EngineConfig(), kv_memory=1 << 26) for m in (ref, cand)]

    def run() -> float:
        job = ScoreJob(ready[0], ready[1:], windows, 10, on_end=lambda _: None)
        while not job.finished:
            job.advance()
        return float(job.columns()["kl"].astype("float64").mean())

    return _measured(run)


if __name__ == "__main__":
    main()
