"""A model whose weights are streamed from disk, held to a third of them in memory, beside the same model in memory.

    python -m benchmarks.streaming [--size quick] [--json FILE] [--folder FOLDER]

A deep random Llama is written to disk (40 layers and 2.1 GB in float32 with `--size full`), and scored against itself
rounded to int8 on the same windows:

resident  both models in memory
streamed  within 0.35 of the weights: the kernel refuses memory beyond that (RLIMIT_DATA), and the largest resident size
          over what Python and torch take before is measured besides
killed    the same, killed at 30 and at 80 % of what `streamed` took, and resumed: the time of all three together

Each runs in a process of its own. The columns of all three must be the same to the last bit. The ratio compares what
`streamed` takes with reading each weight once for each model, from files that are in no cache, and computing as
`resident` does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import result

_ROOT = Path(__file__).parents[1]
_SHAPES = {  # layers, width, windows, tokens of a window
    "tiny": (4, 64, 8, 64),
    "quick": (40, 512, 4, 256),
    "full": (40, 1024, 6, 256),
}
PART = 0.35
KILLED_AT = (0.3, 0.8)


def main() -> None:
    parser = result.parser(__doc__, runs=1)
    parser.add_argument("--folder", type=Path, help="where the model is written and kept; default: a temporary one")
    parser.add_argument("--side", choices=("resident", "streamed"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(scored(options.folder, options.size, streamed=options.side == "streamed")))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = (options.folder or Path(scratch)) / f"streaming-{options.size}"
        if not (folder / "config.json").exists():
            _write(folder, options.size)
        found = result.Result(name="streaming", size=options.size)
        measure(found, folder, Path(scratch), options)
    found.publish(options)


def measure(found: result.Result, folder: Path, scratch: Path, options: argparse.Namespace) -> None:
    """Run all sides and keep what they gave."""
    files = sorted(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    runs: dict[str, list[Any]] = {"resident": [], "streamed": [], "reading": []}
    for number in range(options.runs):
        runs["reading"].append(_read_time(files))
        for side in ("resident", "streamed"):
            _forget(files)
            runs[side].append(_side(side, folder, scratch / f"{side}{number}", options.size))
    digests = {run["digest"] for side in ("resident", "streamed") for run in runs[side]}
    took = min(run["process"] for run in runs["streamed"])
    killed = _killed(folder, scratch / "killed", options.size, [part * took for part in KILLED_AT])
    if len(digests | {killed["digest"]}) > 1:
        found.failed = "the columns of streamed and resident weights differ"
    found.settings = {"weights_bytes": size, "memory_bytes": int(PART * size), "windows": _SHAPES[options.size][2]}
    found.figure("weights", size / 1e9, "GB")
    found.figure("reading the files once", list(runs["reading"]), "s")
    found.figure("disk", [size / 1e9 / seconds for seconds in runs["reading"]], "GB/s")
    for side in ("resident", "streamed"):
        found.figure(f"{side}: scoring", [run["seconds"] for run in runs[side]], "s")
        found.figure(f"{side}: peak over the start", [run["peak"] / (1 << 20) for run in runs[side]], "MiB")
    found.figure("streamed: bytes read", [run["read"] / 1e9 for run in runs["streamed"]], "GB")
    found.figure("killed twice and resumed: batches computed", killed["computed"], f"of {killed['batches']}")
    found.ratio(
        "time of streamed to reading once for each model + resident",
        [run["seconds"] for run in runs["streamed"]],
        [run["seconds"] + 2 * reading for run, reading in zip(runs["resident"], runs["reading"], strict=True)],
        better="lower",
        goal=1.3,
    )
    found.ratio(
        "peak of streamed to the weights",
        [run["peak"] for run in runs["streamed"]],
        size,
        better="lower",
        goal=PART,
    )
    found.notes.append(
        "columns of resident, streamed and resumed are the same to the last bit" if not found.failed else ""
    )


def _side(side: str, folder: Path, cache: Path, size: str) -> Any:
    began = time.monotonic()
    done = subprocess.run(_command(side, folder, size), check=True, stdout=subprocess.PIPE, cwd=_ROOT, env=_env(cache))
    return {**json.loads(done.stdout.splitlines()[-1]), "process": time.monotonic() - began}


def _killed(folder: Path, cache: Path, size: str, after: list[float]) -> Any:
    """The streamed side, killed after so many seconds each time, then run to its end over what was left."""
    for seconds in after:
        child = subprocess.Popen(
            _command("streamed", folder, size), stdout=subprocess.DEVNULL, cwd=_ROOT, env=_env(cache)
        )
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.wait()
    return _side("streamed", folder, cache, size)


def _command(side: str, folder: Path, size: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.streaming", "--side", side, "--size", size, "--folder", str(folder)]


def _env(cache: Path) -> dict[str, str]:
    return {**os.environ, "EVALGATE_CACHE": str(cache)}


def _write(folder: Path, size: str) -> None:
    """A deep random model, and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    layers, width, _, _ = _SHAPES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=(11 * width // 4) // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 64),
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="500MB")
    vocabulary = {chr(0x100 + number): number for number in range(4096)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, chr(0x100)))).save_pretrained(
        folder
    )


def _read_time(files: list[Path]) -> float:
    """Seconds to read all files once, none of them in the cache of the system."""
    _forget(files)
    buffer = bytearray(16 << 20)
    began = time.monotonic()
    for path in files:
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.monotonic() - began


def _forget(files: list[Path]) -> None:
    """Take files out of the system's cache."""
    for path in files:
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def scored(folder: Path, size: str, *, streamed: bool) -> dict[str, Any]:
    """One side in this process: seconds of scoring, peak of memory over the start, and a hash of all columns."""
    import torch

    from serve.config import EngineConfig, ModelSpec
    from serve.engine import kernels
    from serve.engine.loop import Engine
    from serve.engine.pair import ScoreJob, ScoreWindow
    from serve.engine.streamedjobs import announce, forget

    _, _, windows, tokens = _SHAPES[size]
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    generator = torch.Generator().manual_seed(1)
    shown = [torch.randint(0, 4096, (tokens,), generator=generator).tolist() for _ in range(windows)]
    kernels.kernels()
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))  # threads and their memory are there from the start
    import transformers.models.llama.modeling_llama

    del transformers
    before = _memory("VmRSS")
    limit = int(PART * weights)
    if streamed and size != "tiny":  # refused beyond that, not hoped
        most = _memory("VmData") + limit
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    Path("/proc/self/clear_refs").write_text("5")
    config = EngineConfig(
        device="cpu",
        memory=f"{int(0.8 * limit)}" if streamed else f"{16 * weights}",
        tile_bytes=8 << 20,
        max_batch_tokens=1024,
        kv_memory=64 << 20,
    )
    engine = Engine.load([ModelSpec(str(folder)), ModelSpec(str(folder), "int8")], config)
    models = list(engine.models.values())
    assert all((model.streamed is not None) == streamed for model in models)
    for model in models:
        model.config = config
    jobs = [ScoreWindow(tuple(ids), tuple(range(1, tokens))) for ids in shown]
    job = ScoreJob(models[0], models[1:], jobs, 10, on_end=lambda _: None)
    began = time.monotonic()
    while not job.finished:
        announce(job)
        job.advance()
    seconds = time.monotonic() - began
    digest = hashlib.sha256()
    for name, values in sorted(job.columns().items()):
        digest.update(name.encode() + values.tobytes())
    forget(job)
    rows = [model.streamed.rows.computed for model in models if model.streamed is not None]
    return {
        "seconds": seconds,
        "peak": _memory("VmHWM") - before,
        "digest": digest.hexdigest(),
        "computed": sum(rows),
        "batches": 2 * -(-windows * tokens // 1024),
        "read": sum(
            {id(m.streamed.stream._skeleton): m.streamed.stream.bytes_read for m in models if m.streamed}.values()
        ),
    }


def _memory(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    main()
