"""`make presets`: the run that the policy presets rest on, measured again, and the presets made of it.

The demo model against its bfloat16 and int8 copies, and against its own float32 weights quantized once more to Q8_0 and
Q4_0 (linear layers; norms and the embedding stay as they are) with the gguf package's quantizer. Offline. The summary
goes to reports/presets, the policies to evalgate/gate/presets. `--render` makes the policies of the stored summary.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np

import evalgate
from evalgate.cli.progress import observer
from evalgate.reports import json, terminal
from serve.models.demo import demo_path

if TYPE_CHECKING:
    from evalgate.summary import Comparison, Summary

FOLDER = Path(__file__).parent / "presets"
WINDOWS = 16
QUANTIZED = {"demo-q8_0.gguf": gguf.GGMLQuantizationType.Q8_0, "demo-q4_0.gguf": gguf.GGMLQuantizationType.Q4_0}
KEPT = "token_embd.weight"  # also the output head
POLICIES = Path(evalgate.__file__).parent / "gate" / "presets"
PRESETS = {
    "lossless": (["demo@bf16"], "a change of kernels or of the compute dtype"),
    "8bit": (["demo@int8", "demo-q8_0.gguf"], "weights in 8 bits"),
    "4bit": (["demo-q4_0.gguf"], "weights in 4 bits, rounded without calibration"),
}
ROOM = 1.5  # a limit is the far end of the measured interval, times this
CLIP = 4


def main() -> None:
    """Measure, or with --render read the stored summary; then write summary, block, page and policies."""
    parser = argparse.ArgumentParser(description="Measure what the policy presets rest on, and write them.")
    parser.add_argument(
        "--render", action="store_true", help="measure nothing: write the policies of the stored summary"
    )
    summary = published() if parser.parse_args().render else measure()
    FOLDER.mkdir(exist_ok=True)
    texts = {
        FOLDER / "summary.json": json.render(summary),
        FOLDER / "block.txt": terminal.render(summary),
        FOLDER / "README.md": page(summary),
        **{POLICIES / f"policy-{name}.toml": policy(name, summary) for name in PRESETS},
    }
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
        sys.stderr.write(f"wrote {path}\n")


def measure() -> Summary:
    """Quantize and measure, now."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        for name, kind in QUANTIZED.items():
            requantize(demo_path(), Path(name), kind)
        watch = observer(sys.stderr, noun="KL")
        candidates = ["demo@bf16", "demo@int8", *QUANTIZED]
        return evalgate.compare("demo", candidates, data="python", limit=WINDOWS, observer=watch).summary


def published() -> Summary:
    """The summary as reports/presets holds it."""
    from evalgate.summary import Summary

    return Summary.model_validate_json((FOLDER / "summary.json").read_bytes())


def policy(name: str, summary: Summary) -> str:
    """The preset as TOML: limits from the far ends of the intervals of its schemes, the worst of them, with ROOM."""
    schemes, what = PRESETS[name]
    sides = [c for c in summary.comparisons if c.candidate.spec in schemes]
    documents, positions = sides[0].overall.documents, sides[0].overall.positions
    kl, tail = (far(sides, "kl", statistic) for statistic in ("mean", "p99"))
    missed = 1 - min(interval(c, "top1_agreement", "mean")[1] for c in sides)
    drift = max(max(map(abs, interval(c, "nll", "difference")[1:])) for c in sides)
    measured = f"{positions:,} positions of {documents} documents of `--data python`, context {summary.corpus.context}"
    against = " and ".join(schemes)
    text = (
        f"The limits come from one measured run, reports/presets (evalgate {summary.evalgate_version}, "
        f"{summary.created[:10]}): the demo model, Gemma 3 270M, against {against}; {measured}. Each is the "
        f"far end of the 95 % interval, times {ROOM}. A larger model loses less: measure your own with `evalgate kl`, "
        "and tighten them."
    )
    source = textwrap.fill(text, 110, initial_indent="# ", subsequent_indent="# ")
    return f"""# {name}: {what}.
#
{source}

[policy]
name = "{name}"
confidence = 0.95
on_undecided = "undecided"
# A document counts as at most {CLIP} limits (docs/statistics.md).
clip = {CLIP}

# measured: {", ".join(shown(c, "kl", "mean") for c in sides)}
[[rules]]
metric = "kl"
max = {up(kl * ROOM)}

# measured: {", ".join(shown(c, "kl", "p99") for c in sides)}
[[rules]]
metric = "kl"
statistic = "p99"
max = {up(tail * ROOM)}

# measured: {", ".join(shown(c, "top1_agreement", "mean") for c in sides)}
[[rules]]
metric = "top1_agreement"
min = {math.floor((1 - missed * ROOM) * 1000) / 1000}

# measured: {", ".join(shown(c, "nll", "difference") for c in sides)}
[[rules]]
metric = "nll"
statistic = "difference"
min = -{up(drift * ROOM)}
max = {up(drift * ROOM)}
"""


def interval(comparison: Comparison, metric: str, statistic: str) -> tuple[float, float, float]:
    """Value, low and high of a figure."""
    figure = comparison.overall.metrics[metric].statistics[statistic]
    if figure.low is None or figure.high is None:
        raise SystemExit(f"{metric} {statistic} of {comparison.candidate.spec} has no interval: measure more windows")
    return figure.value, figure.low, figure.high


def far(sides: list[Comparison], metric: str, statistic: str) -> float:
    """The largest upper end."""
    return max(interval(c, metric, statistic)[2] for c in sides)


def shown(comparison: Comparison, metric: str, statistic: str) -> str:
    """A measured figure with its interval."""
    value, low, high = interval(comparison, metric, statistic)
    return f"{comparison.candidate.spec} {value:.3g} [{low:.3g}, {high:.3g}]"


def up(value: float) -> float:
    """Rounded up to two significant digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.2g}")


def page(summary: Summary) -> str:
    """The page beside the summary."""
    rows = "".join(
        f"| {c.candidate.spec} | {interval(c, 'kl', 'mean')[0]:.3g} | {interval(c, 'kl', 'p99')[0]:.3g} | "
        f"{interval(c, 'top1_agreement', 'mean')[0]:.1%} | {interval(c, 'nll', 'difference')[0]:.3g} |\n"
        for c in summary.comparisons
    )
    shape = summary.comparisons[0].overall
    return f"""# What the presets rest on

The demo model against four copies of itself, {shape.positions:,} positions of {shape.documents} documents of the
texts that come with Python (`--data python`). The GGUF files are its own float32 weights quantized once more; they
come from weights that had 4 to 8 bits already, and the model is small, so that Q4_0 loses far more here than it does
on a larger model.

| candidate | mean KL | 99 % KL | same top-1 | NLL difference |
|---|---|---|---|---|
{rows}
`evalgate policy init --preset NAME` writes a preset, with the figures that its limits come from. Made by `make presets`
([make_presets.py](../make_presets.py)); intervals are in [block.txt](block.txt) and [summary.json](summary.json).
"""


def requantize(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write `source` again with every matrix but the embedding dequantized and quantized to `kind`."""
    reader = PlainReader(source)
    writer = gguf.GGUFWriter(target, arch=str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        if len(tensor.shape) < 2 or tensor.name == KEPT:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class PlainReader(gguf.GGUFReader):
    """A reader over a plain array: slicing a memory map once per vocabulary entry takes most of a load's time."""

    @property
    def data(self) -> np.ndarray:
        """The file's bytes."""
        return self._plain

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._plain = np.asarray(mapped)


if __name__ == "__main__":
    main()
