"""evalgate against llama.cpp's llama-perplexity on two GGUF files, end to end.

    python -m benchmarks.llama_perplexity [REF CAND] [--data TEXT] [--llama-perplexity PATH] [--windows 16 64]
        [--context 512] [--size quick|full] [--runs 1] [--json FILE]

pair  both models on the same windows (`--windows llama.cpp`), start-up and loading included: evalgate in one command,
      the program in two, with a file of logits between them
one   one candidate against that file: `evalgate kl --ref-trace FILE`, and the program's second pass

In turn, at each number of windows (quick: 16; full: 16 and 64). Without REF and CAND the demo model is compared,
written as float32 files: the reference as it is, the candidate with its matrices rounded to int8. Use float32 files to
see the same arithmetic on both sides: llama.cpp also rounds what it multiplies quantized matrices with. Both must agree
on the mean KL. The program is the one of --llama-perplexity, of $LLAMA_PERPLEXITY, or on the path; without one nothing
is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks import result
from evalgate.core import VERSION

WINDOWS = {"tiny": (1,), "quick": (16,), "full": (16, 64)}
GOALS = {16: 1.3, 64: 1.7}  # times as fast as the program's two passes
ONE = 0.7  # times as fast, one candidate against the logits file
APART = 0.02  # of the mean KL: what two programs' float32 kernels may differ by


class Models(NamedTuple):
    """Two GGUF files of one vocabulary, and a text of enough tokens."""

    ref: Path
    cand: Path
    text: Path


class Took(NamedTuple):
    """Seconds, and what was found."""

    seconds: float
    mean_kl: float


def main() -> None:
    options = _parser().parse_args()
    if bool(options.ref) != bool(options.cand):
        sys.exit("name both REF and CAND, or neither")
    if options.ref and not options.data:
        sys.exit("name a text with --data where you name models")
    program = found_program(options.llama_perplexity)
    with tempfile.TemporaryDirectory() as place:
        models = Models(options.ref, options.cand, options.data) if options.ref else demo(Path(place), options)
        measured(program, models, options, Path(place)).publish(options)


def _parser() -> argparse.ArgumentParser:
    made = result.parser(__doc__, runs=1)
    made.add_argument("ref", nargs="?", type=Path, help="a GGUF file")
    made.add_argument("cand", nargs="?", type=Path, help="another of the same vocabulary")
    made.add_argument("--data", type=Path, help="a text file of at least windows * context tokens")
    made.add_argument("--windows", type=int, nargs="+", help="how many; default: by size")
    made.add_argument("--context", type=int, default=512)
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the program")
    made.add_argument("--llama-perplexity", metavar="PATH", help="the program, or $LLAMA_PERPLEXITY")
    return made


def found_program(named: str | None) -> str:
    """The path of llama-perplexity; skips the benchmark where there is none, exits where a named one cannot run."""
    asked = named or os.environ.get("LLAMA_PERPLEXITY")
    found = shutil.which(asked or "llama-perplexity")
    if found is None and asked:
        sys.exit(f"{asked} is not a program: name llama-perplexity with --llama-perplexity or $LLAMA_PERPLEXITY")
    if found is None:
        result.skip("no llama-perplexity: name it with --llama-perplexity or $LLAMA_PERPLEXITY")
    return str(Path(found).resolve())


def measured(program: str, models: Models, options: argparse.Namespace, place: Path) -> result.Result:
    counts = tuple(options.windows or WINDOWS[options.size])
    settings = {"windows": " ".join(map(str, counts)), "context": options.context, "threads": options.threads}
    found = result.Result(name="llama_perplexity", size=options.size, settings={**settings, "models": models.ref.name})
    for count in counts:
        ours: dict[str, list[Took]] = {"pair": [], "one": []}
        theirs: dict[str, list[Took]] = {"pair": [], "one": []}
        size = 0
        for _ in range(options.runs):
            logits = place / "base.kld"
            ours["pair"].append(_pair(models, count, options.context))
            first = _pass(program, models.ref, options, [f"--chunks={count}", "-f", str(models.text)], logits)
            second = _pass(program, models.cand, options, ["--kl-divergence"], logits)
            kl = _mean_kl(second.said)
            theirs["pair"].append(Took(first.seconds + second.seconds, kl))
            theirs["one"].append(Took(second.seconds, kl))
            ours["one"].append(_one(models, logits))
            size = logits.stat().st_size
            logits.unlink()
        for part, title in (("pair", "both models"), ("one", "one candidate against its logits file")):
            mine, its = ([took.seconds for took in side[part]] for side in (ours, theirs))
            found.figure(f"{title}, {count} windows: evalgate", mine, "s")
            found.figure(f"{title}, {count} windows: llama-perplexity", its, "s")
            goal = (GOALS.get(count) if part == "pair" else ONE) if options.size != "tiny" else None
            found.ratio(f"{title}, {count} windows: times as fast", its, mine, goal=goal)
            _check_agreement(ours[part][0].mean_kl, theirs[part][0].mean_kl, title)
        found.figure(f"its logits file of {count} windows", size / 1e6, "MB")
        found.notes.append(f"{count} windows: mean KL {ours['pair'][0].mean_kl:.6f}, {theirs['pair'][0].mean_kl:.6f}")
    return found


def _check_agreement(mine: float, theirs: float, title: str) -> None:
    """The program prints six decimals."""
    if abs(mine - theirs) > APART * abs(theirs) + 2e-6:
        raise RuntimeError(f"{title}: evalgate finds a mean KL of {mine:.6f} and llama-perplexity one of {theirs:.6f}")


def _pair(models: Models, windows: int, context: int) -> Took:
    arguments = ["--ref", str(models.ref), "--cand", str(models.cand), "--data", str(models.text)]
    return _evalgate([*arguments, "--windows", "llama.cpp", "--context", str(context), "--limit", str(windows)])


def _one(models: Models, logits: Path) -> Took:
    return _evalgate(["--ref-trace", str(logits), "--cand", str(models.cand)])


def _evalgate(arguments: list[str]) -> Took:
    with tempfile.TemporaryDirectory() as place:
        out = ["--out", str(Path(place, "run")), "--no-resume", "--json"]
        done = _timed([sys.executable, "-m", "evalgate", "kl", *arguments, *out])
    summary = json.loads(done.said)
    metrics = summary["comparisons"][0]["overall"]["metrics"]
    return Took(done.seconds, metrics["kl"]["statistics"]["mean"]["value"])


class _Done(NamedTuple):
    seconds: float
    said: str


def _pass(program: str, model: Path, options: argparse.Namespace, more: list[str], logits: Path) -> _Done:
    size = ["-c", str(options.context), "-b", str(options.context), "-t", str(options.threads)]
    where = "--save-all-logits" if "-f" in more else "--kl-divergence-base"
    return _timed([program, "-m", str(model), *size, *more, where, str(logits)])


def _timed(command: list[str]) -> _Done:
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with code {done.returncode}: {done.stderr[-1000:]}")
    return _Done(seconds, done.stdout)


def _mean_kl(printed: str) -> float:
    found = re.search(r"Mean +KLD: +(-?[\d.]+)", printed)
    if found is None:
        raise RuntimeError(f"llama-perplexity printed no mean KL: {printed[-500:]}")
    return float(found[1])


def demo(place: Path, options: argparse.Namespace) -> Models:
    """The demo model as float32 GGUF files, in evalgate's cache folder, and a text of its corpora."""
    from evalgate.corpora import load_corpus
    from evalgate.paths import cache_path

    folder = cache_path() / "benchmarks" / VERSION
    ref, cand = folder / "demo-f32.gguf", folder / "demo-int8-f32.gguf"
    if not (ref.exists() and cand.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        write_float32(ref, cand)
    counts = options.windows or WINDOWS[options.size]
    text, wanted = place / "text.txt", 6 * max(counts) * (options.context + 8)  # characters: a token has fewer
    parts: list[str] = []
    for document in load_corpus("python").documents:
        parts.append(document.text)
        if sum(map(len, parts)) > wanted:
            break
    text.write_text("\n".join(parts), encoding="utf-8")
    return Models(ref, cand, text)


def write_float32(ref: Path, cand: Path) -> None:
    """Write the demo's GGUF file anew with every tensor as float32; in `cand`, matrices are rounded to int8 by row."""
    import gguf
    import numpy as np

    from serve.models.demo import demo_path

    reader = gguf.GGUFReader(str(demo_path()))
    for path, rounded in ((ref, False), (cand, True)):
        beside = path.with_suffix(".partial")
        architecture = reader.fields["general.architecture"].contents()
        writer = gguf.GGUFWriter(str(beside), arch=str(architecture))
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
                continue
            kind = field.types[0]
            part = field.types[1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, part)
        writer.add_file_type(int(gguf.LlamaFileType.ALL_F32))
        for tensor in reader.tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            if rounded and values.ndim == 2:
                scale = np.maximum(np.abs(values).max(axis=1, keepdims=True), 1e-12) / 127
                values = (np.round(values / scale) * scale).astype(np.float32)
            writer.add_tensor(tensor.name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        beside.replace(path)


if __name__ == "__main__":
    main()
