"""A run of millions of positions: written, read back and checked, and summed up; how time and memory grow with it.

    python -m benchmarks.large_run [--size quick|full] [--runs 3] [--json FILE]

The run is fabricated: documents of about 2,000 tokens in 8 domains, windows of 512, every column of an exact pair. Each
part runs in a process of its own:

write  the run folder, with its digests
sum    `read_run`, which checks every digest, and `summarize`: every metric with intervals, overall and by domain

Memory is the most that the whole process had resident, the table of 100 bytes a position included. The exponent is that
of time against positions, by least squares: 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import result, timing

if TYPE_CHECKING:
    import pyarrow as pa

POSITIONS = {
    "tiny": (2_000, 4_000, 8_000),
    "quick": (625_000, 1_250_000, 2_500_000),
    "full": (2_500_000, 5_000_000, 10_000_000),
}
GIB = 2.0  # of memory that 10 million positions may take
WINDOW = 512
_DOMAINS = tuple(f"domain{number}" for number in range(8))
_CHUNK = 1 << 18  # rows fabricated at once


def main() -> None:
    options = _parser().parse_args()
    if options.side == "write":
        print(json.dumps(write(options.positions, Path(options.folder))))
    elif options.side == "sum":
        print(json.dumps(sum_up(Path(options.folder))))
    else:
        measured(options).publish(options)


def _parser() -> argparse.ArgumentParser:
    made = result.parser(__doc__, runs=3)
    made.add_argument("--side", choices=("write", "sum"), help=argparse.SUPPRESS)
    made.add_argument("--positions", type=int, help=argparse.SUPPRESS)
    made.add_argument("--folder", help=argparse.SUPPRESS)
    return made


def measured(options: argparse.Namespace) -> result.Result:
    sizes = POSITIONS[options.size]
    found = result.Result(name="large_run", size=options.size, settings={"positions": sizes[-1], "window": WINDOW})
    rounds: list[dict[int, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as place:
        folders = {positions: Path(place, str(positions)) for positions in sizes}
        written = {
            n: timing.child("large_run", ["--side", "write", "--positions", str(n), "--folder", str(folder)])
            for n, folder in folders.items()
        }
        for _ in range(options.runs):
            sums = {n: timing.child("large_run", ["--side", "sum", "--folder", str(f)]) for n, f in folders.items()}
            rounds.append(sums)
    largest = sizes[-1]
    million = largest / 1e6
    found.figure("write, million positions a second", million / written[largest]["seconds"], "M/s")
    found.figure("bytes a position on disk", written[largest]["bytes"] / largest, "B")
    found.figure("read and check, million positions a second", [million / r[largest]["read"] for r in rounds], "M/s")
    found.figure("sum up, million positions a second", [million / r[largest]["sum"] for r in rounds], "M/s")
    for n in sizes:
        found.figure(f"sum up {n:,} positions", [r[n]["sum"] for r in rounds], "s")
        most = GIB * 1024 if n >= 10_000_000 else None
        found.figure(f"peak memory at {n:,} positions", [r[n]["mib"] for r in rounds], "MiB", most=most)
    exponents = [timing.exponent({n: r[n]["sum"] for n in sizes}) for r in rounds]
    found.figure("exponent of the time to sum up", exponents, "", most=1.1)
    doubled = [r[sizes[2]]["sum"] / r[sizes[1]]["sum"] for r in rounds]
    found.ratio("time for twice the positions", doubled, better="lower", goal=2.2)
    found.ratio(
        "sum up over reading", [r[largest]["sum"] for r in rounds], [r[largest]["read"] for r in rounds], better="lower"
    )
    return found


def write(positions: int, folder: Path) -> dict[str, float]:
    """Seconds to write a fabricated run folder, and its bytes."""
    from evalgate.store.runs import write_run
    from tests.evalgate.sample_run import source, summary

    table = fabricated(positions)
    # its figures are those of the first rows: what the folder says is not read here, and making it is timed apart
    document = summary(table.slice(0, 2 * WINDOW), reference=source("ref"))
    began = time.perf_counter()
    write_run(folder, manifest={"seed": 0}, table=table, summary=document)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "bytes": sum(path.stat().st_size for path in folder.iterdir())}


def sum_up(folder: Path) -> dict[str, float]:
    """Seconds to read a run folder and to sum its table up, and the peak of resident memory, MiB."""
    from evalgate.stats.summarize import summarize
    from evalgate.store.runs import read_run

    def work() -> tuple[float, float]:
        began = time.perf_counter()
        table = read_run(folder).table
        read = time.perf_counter()
        ((_, overall, _),) = summarize(table, kind="kl", noise_floor=1e-6)
        assert overall.positions == table.num_rows
        return read - began, time.perf_counter() - read

    (read, summed), mib = timing.peak_memory(work)
    return {"read": read, "sum": summed, "mib": mib}


def fabricated(positions: int, *, seed: int = 0) -> pa.Table:
    """The table of one candidate: see the module's text. Documents differ, positions of one are alike."""
    import pyarrow as pa

    from evalgate.table import schema

    random = np.random.default_rng(seed)
    lengths = np.maximum(random.lognormal(log(2000) - 0.32, 0.8, positions // 500 + 8).astype(np.int64), 16)
    starts = np.r_[0, np.cumsum(lengths)]
    count = int(np.searchsorted(starts, positions))
    windows = np.r_[0, np.cumsum(-(-lengths // (WINDOW - 1)))]  # of the documents before
    effect = np.exp(random.normal(0, 0.6, count))
    names = {
        "candidate": pa.array(["candidate"]),
        "domain": pa.array(_DOMAINS),
        "document": pa.array([f"{_DOMAINS[d % len(_DOMAINS)]}/{d:06d}" for d in range(count)]),
    }
    parts = []
    for low in range(0, positions, _CHUNK):
        rows = np.arange(low, min(low + _CHUNK, positions))
        document = np.searchsorted(starts, rows, side="right") - 1
        inside = rows - starts[document]
        columns: dict[str, Any] = {
            "candidate": np.zeros(len(rows), np.int32),
            "domain": document % len(_DOMAINS),
            "document": document,
            "window": windows[document] + inside // (WINDOW - 1),
            "position": 1 + inside % (WINDOW - 1),
            "token": random.integers(0, 50_000, len(rows)),
            "bytes": random.integers(1, 9, len(rows)),
            **_scores(random, effect[document]),
        }
        arrays = [_array(columns[field.name], names.get(field.name), field.type) for field in schema(pair=True)]
        parts.append(pa.table(arrays, schema=schema(pair=True)))
    return pa.concat_tables(parts)


def _array(values: Any, names: pa.Array | None, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    if names is not None:
        return pa.DictionaryArray.from_arrays(pa.array(values.astype(np.int32)), names)
    return pa.array(values.astype(np.int32 if pa.types.is_integer(kind) else np.float32))


def _scores(random: np.random.Generator, effect: np.ndarray) -> dict[str, np.ndarray]:
    """What two nearly equal models give; effect [n]: of the row's document."""
    n = len(effect)
    kl = 0.002 * effect * random.lognormal(-1.0, 1.4, n)
    moved = random.normal(0, np.sqrt(2 * kl))
    entropy = random.gamma(1.3, 1.2, n)
    ref_nll = random.exponential(entropy + 0.05)
    margin = random.exponential(1.5, n)
    differs = margin < np.abs(moved)
    top1 = random.integers(0, 50_000, n)
    ranks = random.geometric(0.5, (2, n))
    return {
        "ref_nll": ref_nll,
        "ref_entropy": entropy,
        "ref_top1": top1,
        "ref_margin": margin,
        "ref_rank": ranks[0],
        "cand_nll": np.abs(ref_nll + moved),
        "cand_entropy": np.abs(entropy + 0.3 * moved),
        "cand_top1": np.where(differs, top1 + 1, top1),
        "cand_margin": np.abs(margin - np.abs(moved)),
        "cand_rank": ranks[1],
        "kl": kl,
        "reverse_kl": kl * random.lognormal(0, 0.1, n),
        "js": np.minimum(kl / 4, log(2)),
        "tv": np.minimum(np.sqrt(kl / 2), 1.0),
        "regret": np.where(differs, margin, 0.0),
        "topk_overlap": 1 - random.integers(0, 4, n) / 10,
        "ref_rank_of_cand_top1": 1 + differs,
        "cand_rank_of_ref_top1": 1 + differs,
    }


if __name__ == "__main__":
    main()
