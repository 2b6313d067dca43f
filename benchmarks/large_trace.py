"""A recorded reference of millions of positions: how fast it is written, read and verified, and what a position takes.

    python -m benchmarks.large_trace [--size quick|full] [--runs 3] [--json FILE]

The trace is fabricated: windows of 512, K = 64 likeliest ids and M = 16 drawn ones a position, in shards of 16 windows.
Each part runs in a process of its own, in turn:

write   `TraceWriter`: every row checked, every shard on disk and listed before the next
read    every shard, its digest and rows checked, one in memory at a time
verify  `evalgate verify` of the folder: digests, rows, and that every window has its positions

The exponent is that of the time to verify against positions. Memory is the most that a process had resident.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import result, timing

if TYPE_CHECKING:
    from evalgate.core import Window
    from evalgate.traces import PositionBatch, TraceMeta

WINDOWS = {"tiny": (4, 8, 16), "quick": (128, 256, 512), "full": (2_500, 5_000, 10_000)}
TOKENS, TOP_K, DRAWN, VOCABULARY, SHARD = 512, 64, 16, 50_000, 16


def main() -> None:
    options = _parser().parse_args()
    if options.side:
        print(json.dumps({"write": write, "read": read, "verify": verified}[options.side](options)))
    else:
        measured(options).publish(options)


def _parser() -> argparse.ArgumentParser:
    made = result.parser(__doc__, runs=3)
    made.add_argument("--side", choices=("write", "read", "verify"), help=argparse.SUPPRESS)
    made.add_argument("--windows", type=int, help=argparse.SUPPRESS)
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return made


def measured(options: argparse.Namespace) -> result.Result:
    sizes = WINDOWS[options.size]
    settings = {"windows": sizes[-1], "tokens": TOKENS, "top_k": TOP_K, "tail_samples": DRAWN, "shard": SHARD}
    found = result.Result(name="large_trace", size=options.size, settings=settings)

    def child(side: str, windows: int, folder: Path) -> dict[str, float]:
        arguments = ["--side", side, "--windows", str(windows), "--folder", str(folder)]
        return dict(timing.child("large_trace", arguments))

    rounds = []
    with tempfile.TemporaryDirectory() as place:
        folders = {count: Path(place, str(count)) for count in sizes}
        written = {count: child("write", count, folder) for count, folder in folders.items()}
        for _ in range(options.runs):
            reads = child("read", sizes[-1], folders[sizes[-1]])
            rounds.append((reads, {count: child("verify", count, folder) for count, folder in folders.items()}))
    largest = sizes[-1]
    positions = largest * (TOKENS - 1)
    found.figure("bytes a position on disk", written[largest]["bytes"] / positions, "B")
    found.figure("write, positions a second", positions / written[largest]["seconds"], "1/s")
    found.figure("read, positions a second", [positions / reads["seconds"] for reads, _ in rounds], "1/s")
    found.figure("verify, positions a second", [positions / v[largest]["seconds"] for _, v in rounds], "1/s")
    found.figure(f"peak memory to write {positions:,} positions", written[largest]["mib"], "MiB")
    found.figure(f"peak memory to verify {positions:,} positions", [v[largest]["mib"] for _, v in rounds], "MiB")
    exponents = [timing.exponent({count: v[count]["seconds"] for count in sizes}) for _, v in rounds]
    found.figure("exponent of the time to verify", exponents, "", most=1.1)
    doubled = [v[sizes[2]]["seconds"] / v[sizes[1]]["seconds"] for _, v in rounds]
    found.ratio("time to verify twice the positions", doubled, better="lower", goal=2.2)
    verify_times, read_times = [v[largest]["seconds"] for _, v in rounds], [reads["seconds"] for reads, _ in rounds]
    found.ratio("verify over read", verify_times, read_times, better="lower")
    return found


def write(options: argparse.Namespace) -> dict[str, float]:
    """Seconds to write a fabricated trace, without those to make it up; its bytes."""
    from evalgate.traces import TraceWriter

    windows = fabricated_windows(options.windows)
    spent = 0.0

    def work() -> None:
        nonlocal spent
        began = time.perf_counter()
        writer = TraceWriter(options.folder, meta(), windows=windows)
        spent += time.perf_counter() - began
        for shard in shards(windows):
            began = time.perf_counter()
            writer.append(shard)
            spent += time.perf_counter() - began
        began = time.perf_counter()
        writer.finish()
        spent += time.perf_counter() - began

    _, mib = timing.peak_memory(work)
    size = sum(path.stat().st_size for path in options.folder.iterdir())
    return {"seconds": spent, "bytes": size, "mib": mib}


def read(options: argparse.Namespace) -> dict[str, float]:
    """Seconds to read all shards."""
    from evalgate.traces import read_trace

    def work() -> int:
        return sum(len(shard) for shard in read_trace(options.folder).shards())

    began = time.perf_counter()
    rows, mib = timing.peak_memory(work)
    seconds = time.perf_counter() - began
    assert rows == options.windows * (TOKENS - 1)
    return {"seconds": seconds, "mib": mib}


def verified(options: argparse.Namespace) -> dict[str, float]:
    """Seconds to verify the folder, which must be intact."""
    from evalgate.traces import verify

    began = time.perf_counter()
    problems, mib = timing.peak_memory(lambda: verify(options.folder))
    seconds = time.perf_counter() - began
    assert not problems, problems[0]
    return {"seconds": seconds, "mib": mib}


def meta() -> TraceMeta:
    """What a recorded trace would say of itself."""
    from evalgate.core import SourceInfo, WindowPolicy
    from evalgate.traces import TraceMeta

    source = SourceInfo("ref", "ref", "embedded", VOCABULARY, TOKENS, weights_hash="w", tokenizer_hash="t")
    policy = WindowPolicy("disjoint", TOKENS, TOKENS)
    return TraceMeta(source, "fabricated", "c", policy, top_k=TOP_K, tail_samples=DRAWN)


def fabricated_windows(count: int) -> list[Window]:
    """Windows of random ids; four make a document."""
    from evalgate.core import Window

    random = np.random.default_rng(0)
    sizes = (4,) * TOKENS
    return [
        Window(
            i, f"document{i // 4}", "prose", tuple(random.integers(0, VOCABULARY, TOKENS).tolist()), 1, TOKENS, sizes
        )
        for i in range(count)
    ]


def shards(windows: list[Window]) -> Iterator[PositionBatch]:
    """Rows of every SHARD windows, as a reference could have said them: Zipf's law over the listed ids."""
    from evalgate.traces import PositionBatch

    random = np.random.default_rng(1)
    for low in range(0, len(windows), SHARD):
        part = windows[low : low + SHARD]
        n = len(part) * (TOKENS - 1)
        token = np.array([w.ids[p] for w in part for p in w.positions], np.int32)
        first = random.integers(0, VOCABULARY, n)
        # distinct ids: a run from a random one, then the tail's from the run's end on
        listed = (first[:, None] + np.arange(TOP_K)) % VOCABULARY
        drawn = (first[:, None] + random.integers(TOP_K, VOCABULARY - 1, (n, DRAWN))) % VOCABULARY
        weights = np.arange(1, TOP_K + 1) ** -random.uniform(0.9, 2.5, n)[:, None]
        mass = random.uniform(0.001, 0.02, n)
        logprobs = np.log(weights / weights.sum(1, keepdims=True) * (1 - mass)[:, None])
        rank = np.where((listed == token[:, None]).any(1), (listed == token[:, None]).argmax(1) + 1, TOP_K + 1)
        floor = np.minimum(logprobs[:, -1], np.log(mass / 1000))
        yield PositionBatch(
            window=np.repeat(np.array([w.index for w in part], np.int32), TOKENS - 1),
            position=np.tile(np.arange(1, TOKENS, dtype=np.int32), len(part)),
            token=token,
            bytes=np.full(n, 4, np.int32),
            logprob=np.take_along_axis(np.c_[logprobs, floor], rank[:, None] - 1, 1)[:, 0].astype(np.float32),
            rank=rank.astype(np.int32),
            entropy=-(np.exp(logprobs) * logprobs).sum(1).astype(np.float32),
            top_ids=listed.astype(np.int32),
            top_logprobs=logprobs.astype(np.float32),
            tail_mass=mass.astype(np.float32),
            tail_ids=drawn.astype(np.int32),
            tail_logprobs=(floor[:, None] - random.exponential(1.0, (n, DRAWN))).astype(np.float32),
        )


if __name__ == "__main__":
    main()
