"""How much faster two workers of a Ray cluster score than one, with one thread each, on a random model.

    python -m benchmarks.ray_workers [--size quick|full] [--runs 2] [--json FILE]

A worker is a server of its own, so it begins with an import of torch and the loading of its models. That is a figure
of its own; the ratio is of rates once every worker has answered, as they last in a long run. It needs two free cores.
The tables of all runs must be the same to the last byte.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import result

if TYPE_CHECKING:
    from evalgate.core import Window

SIZES = {  # hidden size, layers, batches of 4,096 tokens
    "tiny": (32, 1, 4),
    "quick": (384, 6, 10),
    "full": (768, 12, 40),
}
GOAL = 1.7
_WORDS = "the quick brown fox jumps over a lazy dog and hello world there user says assistant hi wörld "


def main() -> None:
    options = result.parser(__doc__, runs=1).parse_args()
    if find_spec("ray") is None:
        result.skip("Ray is not installed: pip install 'evalgate-lm[ray]'")
    if len(os.sched_getaffinity(0)) < 2:
        result.skip("two workers need two cores")
    measured(options).publish(options)


def measured(options: argparse.Namespace) -> result.Result:
    hidden, layers, count = SIZES[options.size]
    found = result.Result(
        name="ray_workers", size=options.size, settings={"hidden": hidden, "layers": layers, "batches": count}
    )
    rates: dict[int, list[float]] = {1: [], 2: []}
    firsts: dict[int, list[float]] = {1: [], 2: []}
    tables = set()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EVALGATE_CACHE"] = f"{folder}/cache"
        model, text = _model(Path(folder, "model"), hidden, layers), _text(Path(folder, "text.jsonl"), count)
        for _ in range(options.runs):
            for workers in rates:
                arrivals, digest = _scored(model, text, workers, count)
                rates[workers].append((len(arrivals) - workers) / (arrivals[-1] - arrivals[workers - 1]))
                firsts[workers].append(arrivals[workers - 1])
                tables.add(digest)
    if len(tables) > 1:
        raise SystemExit("the tables of these runs differ: the number of workers changed a number")
    for workers, values in rates.items():
        found.figure(f"{workers} workers, one thread each", [4096 * value for value in values], "tokens/s")
        found.figure(f"{workers} workers: until each has answered once", firsts[workers], "s")
    found.ratio("two workers to one", rates[2], rates[1], goal=GOAL)
    found.notes.append(f"the tables of all {2 * options.runs} runs are the same to the last byte")
    return found


def _scored(model: str, text: str, workers: int, count: int) -> tuple[list[float], str]:
    """Seconds from the begin of scoring to each batch's answer, and the digest of the table."""
    from evalgate.measure.run import RunRequest, run
    from evalgate.server import cluster
    from evalgate.store.runs import TOKENS

    arrivals: list[float] = []
    real = cluster.Pool.answers

    def timed(pool: cluster.Pool, batches: Mapping[int, Sequence[Window]]) -> Generator[tuple[int, Any], None, None]:
        began = time.perf_counter()
        for answer in real(pool, batches):
            arrivals.append(time.perf_counter() - began)
            yield answer

    with tempfile.TemporaryDirectory() as folder:
        cluster.Pool.answers = timed  # type: ignore[method-assign]
        try:
            request = RunRequest.of(
                "kl",
                model,
                [f"{model}@bf16"],
                data=text,
                context=512,
                limit=8 * count,
                out=Path(folder, "run"),
                device="cpu",
                ray="local",
                workers=workers,
            )
            run(request, page=False)
        finally:
            cluster.Pool.answers = real  # type: ignore[method-assign]
        return arrivals, hashlib.sha256(Path(folder, "run", TOKENS).read_bytes()).hexdigest()


def _model(folder: Path, hidden: int, layers: int) -> str:
    """A random Llama, saved with a tokenizer of bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.serve.tiny_models import byte_level

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_level(bos=True).save_pretrained(folder)
    return str(folder)


def _text(path: Path, count: int) -> str:
    """Documents that fill `count` batches of eight windows of 512 tokens."""
    import json
    import random

    draw, words = random.Random(0), _WORDS.split()
    with path.open("w", encoding="utf-8") as file:
        for number in range(4 * count):
            text = " ".join(draw.choice(words) for _ in range(1500))
            file.write(json.dumps({"id": f"d{number}", "text": text}) + "\n")
    return str(path)


if __name__ == "__main__":
    main()
