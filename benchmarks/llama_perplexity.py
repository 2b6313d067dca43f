"""evalgate against llama-perplexity on two GGUF files: `python benchmarks/llama_perplexity.py REF CAND --data TEXT`.

Both compare the same windows (`--windows llama.cpp`), start-up and loading included: evalgate in one command, the
program of llama.cpp in two, with a file of logits between them. Printed: seconds of each and their ratio, what lies on
the disk afterwards, both mean KLs (nats). Use float32 files to see the same arithmetic on both sides: llama.cpp also
rounds what it multiplies quantized matrices with.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> None:
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory() as place:
        mine, theirs = _evalgate(options, Path(place)), _llama_perplexity(options, Path(place))
    ratio = theirs["seconds"] / mine["seconds"]
    print(json.dumps({"evalgate": mine, "llama-perplexity": theirs, "ratio": round(ratio, 2)}, indent=2))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ref", help="a GGUF file")
    parser.add_argument("cand", help="another of the same vocabulary")
    parser.add_argument("--data", required=True, help="a text file of at least windows * context tokens")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2, help="of llama-perplexity; evalgate takes all cores")
    parser.add_argument("--program", default=shutil.which("llama-perplexity"), help="llama-perplexity")
    return parser


def _evalgate(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    out = place / "run"
    command = [sys.executable, "-m", "evalgate", "kl", "--ref", options.ref, "--cand", options.cand]
    command += ["--data", options.data, "--windows", "llama.cpp", "--context", str(options.context)]
    command += ["--limit", str(options.windows), "--out", str(out), "--no-resume", "--json"]
    seconds, printed = _timed(command)
    summary = json.loads(printed)
    kl = summary["comparisons"][0]["overall"]["metrics"]["kl"]["statistics"]["mean"]["value"]
    return {"seconds": seconds, "bytes": _size(out), "mean_kl": kl}


def _llama_perplexity(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    if options.program is None:
        raise SystemExit("name llama-perplexity with --program")
    shared = [options.program, "-c", str(options.context), "-b", str(options.context), "-t", str(options.threads)]
    base = place / "base.kld"
    chunks = ["--chunks", str(options.windows)]
    one, _ = _timed([*shared, "-m", options.ref, "-f", options.data, *chunks, "--save-all-logits", str(base)])
    two, printed = _timed([*shared, "-m", options.cand, "--kl-divergence-base", str(base), "--kl-divergence"])
    found = re.search(r"Mean +KLD: +(-?[\d.]+)", printed)
    kl = float(found[1]) if found else None
    return {"seconds": round(one + two, 1), "bytes": base.stat().st_size, "mean_kl": kl}


def _timed(command: list[str]) -> tuple[float, str]:
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {done.returncode}: {done.stderr[-500:]}")
    return round(time.perf_counter() - start, 1), done.stdout


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
