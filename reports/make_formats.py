"""Every format on a CPU: `make formats` makes checkpoints of the demo model with each library, and measures them.

The checkpoints are made from the demo model's dequantized weights, by the library's own quantizer and in an environment
of its own where it needs one (a folder of packages over this environment, installed on first use). They are kept in the
cache folder with the environments. A library that cannot be installed, quantize or load is a row with its message.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
if not __package__:
    sys.path.insert(0, str(ROOT))  # makers run in other environments, which do not have evalgate

if TYPE_CHECKING:
    from evalgate.leaderboard import Entry, Leaderboard, Quantity

FOLDER = Path(__file__).parent / "formats"
DOCUMENT, PAGE = "formats.json", "README.md"
WINDOWS, CONTEXT = 9, 128  # one document a domain
KERNEL_WINDOWS = 4  # llama.cpp is asked position by position
CALIBRATION, LENGTH = 16, 128  # texts and tokens
TOGETHER = 3  # formats in memory at once, some of them twice
GGUF_TYPES = ("Q8_0", "Q4_0", "Q2_K")
DONE = "done"  # the file that says that a folder is whole


@dataclass(frozen=True)
class Environment:
    """Packages over this environment. variables: of the process, that its library needs on a small machine."""

    packages: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()


ENVIRONMENTS = {
    "llm-compressor": Environment(("llmcompressor==0.14.0.1",)),
    "auto-round": Environment(("auto-round==0.16.1",)),
    "optimum-quanto": Environment(("optimum-quanto==0.2.7",)),
    "hqq": Environment(("hqq==0.2.8.post1",)),
    "gptqmodel": Environment(
        ("gptqmodel==7.6.0", "optimum==2.3.0"), (("GPTQMODEL_CPU_WORKERS", "2"), ("BUILD_CUDA_EXT", "0"))
    ),
}


@dataclass(frozen=True)
class Format:
    """One checkpoint. make: called as make(plain, target, scheme) in the environment. here: whether it loads without
    that environment. unpacked: whether it is measured with its weights unpacked too."""

    name: str
    environment: str | None
    make: Callable[[Path, Path, str], None]
    scheme: str
    here: bool = True
    unpacked: bool = False
    pickled: bool = False


def _bitsandbytes(plain: Path, target: Path, scheme: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if scheme == "int8":
        how = BitsAndBytesConfig(load_in_8bit=True)
    else:
        how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=scheme, bnb_4bit_compute_dtype=torch.float32)
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=how, dtype=torch.bfloat16).save_pretrained(target)


def _torchao(plain: Path, target: Path, scheme: str) -> None:
    import torch
    import torchao.quantization as quantization
    from transformers import AutoModelForCausalLM, TorchAoConfig

    how = TorchAoConfig(getattr(quantization, f"{scheme}Config")())
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=how, dtype=torch.float32).save_pretrained(target)


def _llm_compressor(plain: Path, target: Path, scheme: str) -> None:
    import datasets
    import torch
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    shown: dict[str, Any] = {}
    if scheme == "FP8":  # the only one here with fixed scales of activations
        ids = _calibration(plain)
        data = datasets.Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(one) for one in ids]})
        shown = {
            "dataset": data,
            "num_calibration_samples": len(ids),
            "max_seq_length": LENGTH,
            "tokenizer": AutoTokenizer.from_pretrained(plain),
        }
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    oneshot(model=model, recipe=recipe, **shown)
    model.save_pretrained(target)


def _auto_round(plain: Path, target: Path, scheme: str) -> None:
    import torch
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(plain)
    made = AutoRound(model, tokenizer, scheme=scheme, iters=0, disable_opt_rtn=True, device_map="cpu")
    made.quantize_and_save(str(target), format="auto_round")
    for file in list(target.glob("*/*")) if not (target / "config.json").exists() else ():
        file.rename(target / file.name)  # it makes a folder of its own below


def _quanto(plain: Path, target: Path, scheme: str) -> None:
    import torch
    from optimum import quanto
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    made = quanto.QuantizedModelForCausalLM.quantize(model, weights=getattr(quanto, scheme), exclude="lm_head")
    made.save_pretrained(target)


def _hqq(plain: Path, target: Path, scheme: str) -> None:
    import torch
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    how = BaseQuantizeConfig(nbits=int(scheme), group_size=64)
    AutoHQQHFModel.quantize_model(model, quant_config=how, compute_dtype=torch.float32, device="cpu")
    AutoHQQHFModel.save_quantized(model, str(target))


def _gptqmodel(plain: Path, target: Path, scheme: str) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig

    how = QuantizeConfig(bits=4, group_size=128, quant_method=scheme)
    model = GPTQModel.load(str(plain), how)
    model.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in _calibration(plain)])
    model.save(str(target))


FORMATS = (
    *(Format(f"bitsandbytes {s}", None, _bitsandbytes, s) for s in ("nf4", "fp4", "int8")),
    *(
        Format(f"torchao {s}", None, _torchao, s, unpacked="Dynamic" in s)
        for s in ("Int8WeightOnly", "Int8DynamicActivationInt8Weight", "Float8WeightOnly", "Int4WeightOnly")
    ),
    *(
        Format(f"compressed-tensors {s}", "llm-compressor", _llm_compressor, s, unpacked="A16" not in s)
        for s in ("W8A16", "W4A16", "W8A8", "FP8", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16")
    ),
    Format("auto-round W4A16", "auto-round", _auto_round, "W4A16", here=False),
    *(Format(f"optimum-quanto {s}", "optimum-quanto", _quanto, s, here=False) for s in ("qint8", "qfloat8")),
    Format("HQQ 4 bits g64", "hqq", _hqq, "4", here=False, pickled=True),
    *(Format(f"gptqmodel {s}", "gptqmodel", _gptqmodel, s, here=False) for s in ("gptq", "awq")),
)


def _calibration(plain: Path) -> list[list[int]]:
    """Token ids of the standard library's own sources, which the shipped corpus does not hold."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(plain)
    folder = Path(os.__file__).parent
    text = "".join((folder / name).read_text(encoding="utf-8") for name in ("argparse.py", "heapq.py", "statistics.py"))
    ids = tokenizer(text[: 12 * CALIBRATION * LENGTH], add_special_tokens=False)["input_ids"]
    return [list(ids[i * LENGTH : (i + 1) * LENGTH]) for i in range(CALIBRATION)]


def main() -> None:
    """Make and measure every format, or with --render write the page anew from what was measured."""
    parser = argparse.ArgumentParser(description="Measure every format that loads on a CPU; writes reports/formats.")
    parser.add_argument("--render", action="store_true", help="measure nothing: write from the stored document")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="formats whose name has this word")
    parser.add_argument("--out", type=Path, default=FOLDER, help="another folder than reports/formats")
    parser.add_argument("--make", nargs="+", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        _make(options.make)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if options.render:
        document = json.loads((options.out / DOCUMENT).read_text(encoding="utf-8"))
    else:
        chosen = [one for one in FORMATS if not options.only or any(word in one.name for word in options.only)]
        document = measure(chosen, kernels=not options.only or "GGUF" in options.only, out=options.out)
    write(document, options.out)
    sys.stderr.write(f"wrote {options.out / PAGE}\n")


def write(document: dict[str, Any], out: Path) -> None:
    """Write the document and its page."""
    (out / DOCUMENT).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (out / PAGE).write_text(page(document), encoding="utf-8")


def measure(formats: list[Format], *, kernels: bool, out: Path) -> dict[str, Any]:
    """The document: rows of formats, rows of llama.cpp's kernels, and what they were measured on.

    Written after each group, so that an interrupted run leaves what it has.
    """
    plain = plain_checkpoint()
    left_out = [one.name for one in FORMATS if one not in formats]
    found: dict[str, Any] = {"formats": [], "kernels": [], "left_out": left_out}
    groups = list(_groups(formats))
    for environment, many in [group for group in groups if group[0] is None]:
        _add(found, environment, many, plain)
        write(found, out)
    for kind in GGUF_TYPES if kernels else ():
        found["kernels"] += _kernels(kind)
        write(found, out)
    for environment, many in [group for group in groups if group[0] is not None]:
        _add(found, environment, many, plain)
        write(found, out)
    return found


def _add(found: dict[str, Any], environment: str | None, many: list[Format], plain: Path) -> None:
    """Make the formats of one group, measure them, and add their rows."""
    failures = make_all(many)
    found["formats"] += [{"name": name, "made": False, "reason": _public(said, [])} for name, said in failures.items()]
    made = [(one, folder_of(one)) for one in many if one.name not in failures]
    if made:
        found["formats"] += list(_measured(environment, made, plain, found))
    if environment is not None:
        found["formats"] += [
            {"name": one.name, "made": True, "reason": _refusal(folder, one), "alone": True} for one, folder in made
        ]


def _groups(formats: list[Format]) -> Iterator[tuple[str | None, list[Format]]]:
    """The formats of one environment, at most TOGETHER at a time: they are in memory together."""
    for environment in dict.fromkeys(None if one.here else one.environment for one in formats):
        many = [one for one in formats if (None if one.here else one.environment) == environment]
        for start in range(0, len(many), TOGETHER):
            yield environment, many[start : start + TOGETHER]


def _measured(
    environment: str | None, many: list[tuple[Format, Path]], plain: Path, meta: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Rows of the checkpoints of one environment, in one sweep."""
    import evalgate
    from evalgate.cli.progress import observer
    from evalgate.errors import EvalgateError

    candidates = {}
    for one, made in many:
        candidates[one.name] = str(made)
        if one.unpacked:
            candidates[f"{one.name}, unpacked"] = f"{made}@dequantized"
    python = None if environment is None else str(interpreter(environment))
    os.environ.update(dict(ENVIRONMENTS[environment].variables) if environment else {})
    try:
        board = evalgate.sweep(
            str(plain),
            candidates,
            limit=WINDOWS,
            context=CONTEXT,
            out=cache()
            / "runs"
            / "-".join(one.name.replace(" ", "-") for one, _ in many),  # an interrupted one goes on
            python=python,
            allow_pickle=any(one.pickled for one, _ in many),
            overwrite=True,  # of another version
            observer=observer(sys.stderr, noun="KL"),
        ).board
    except EvalgateError as error:
        for name in candidates:
            yield {"name": name, "made": True, "reason": _public(str(error), many), "environment": environment}
        return
    meta.setdefault("created", board.created)
    meta.setdefault("positions", board.positions)
    meta.setdefault("documents", board.documents)
    meta.setdefault("corpus", board.corpus.name)
    meta.setdefault("confidence", board.confidence)
    versions = meta.setdefault("versions", {})
    versions[environment or "here"] = board.versions
    order = list(candidates)
    for entry in sorted(board.entries, key=lambda entry: order.index(entry.name)):
        yield _row(entry, many, environment)


def _row(entry: Entry, many: list[tuple[Format, Path]], environment: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": entry.name, "made": True, "environment": environment}
    if not entry.measured or entry.source is None:
        return row | {"reason": _public(entry.reason, many)}
    source = entry.source
    return row | {
        "kl": _figure(entry.kl),
        "top1": _figure(entry.top1),
        "ratio": _figure(entry.ratio),
        "load_mode": source.load_mode,
        "compute": source.compute_dtype,
        "compute_reason": source.compute_reason,
        "backend": source.backend.partition(" ")[0],
        "load_seconds": source.load_seconds,
        "bytes": entry.size.bytes if entry.size else None,
        "bits": entry.size.bits if entry.size else None,
        "activations": sorted({kind.activations for kind in source.layers if kind.activations}),
    }


def _figure(found: Quantity | None) -> dict[str, Any] | None:
    if found is None or found.least is None:
        return None
    one = found.least
    return {"value": one.value, "low": one.low, "high": one.high, "exactness": found.exactness}


def _public(text: str, many: list[tuple[Format, Path]]) -> str:
    """A message without the paths of this machine."""
    for one, made in many:
        text = text.replace(str(made), f"./{one.name.replace(' ', '-')}")
    return text.replace(str(Path.home()), "~").replace(str(ROOT), ".").replace(str(cache()), "CACHE")


def _refusal(made: Path, one: Format) -> str:
    """What a user is told who loads the checkpoint without the environment that it needs."""
    from evalgate.errors import EvalgateError
    from evalgate.server.process import EmbeddedServer

    options = ["--allow-pickle"] if one.pickled else []
    try:
        with EmbeddedServer([str(made)], device="cpu", options=options):
            return "it loads here too"
    except EvalgateError as error:
        return _public(error.message, [(one, made)])


def _kernels(kind: str) -> list[dict[str, Any]]:
    """A GGUF type twice: its weights unpacked, and on llama.cpp's own kernels."""
    import evalgate
    from evalgate.cli.progress import observer
    from reports import make_sweep

    file = make_sweep.gguf_file(kind)
    candidates = {f"{kind}, weights unpacked": str(file), f"{kind}, llama.cpp's kernels": f"llama.cpp:{file}"}
    board: Leaderboard = evalgate.sweep(
        "demo",
        candidates,
        limit=KERNEL_WINDOWS,
        context=CONTEXT,
        out=cache() / "runs" / kind,
        overwrite=True,
        observer=observer(sys.stderr, noun="KL"),
    ).board
    order = list(candidates)
    rows = [_row(entry, [], None) for entry in sorted(board.entries, key=lambda entry: order.index(entry.name))]
    for row in rows:
        row["reason"] = row.get("reason", "").replace(str(file), f"{kind}.gguf")
    return rows


class MakingFailed(Exception):
    """A checkpoint could not be made."""


def cache() -> Path:
    """Where checkpoints and environments are kept."""
    from serve.models.cache import cache_root

    return cache_root() / "formats"


def plain_checkpoint() -> Path:
    """The demo model's dequantized weights as a float32 checkpoint."""
    folder = cache() / "plain"
    if not (folder / DONE).exists():
        from serve.models.demo import demo_path
        from serve.models.gguf import load_gguf

        model, tokenizer, _ = load_gguf(demo_path(), device="cpu")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / DONE).touch()
    return folder


def folder_of(one: Format) -> Path:
    """Where the checkpoint of a format is kept."""
    return cache() / one.name.replace(" ", "-")


def make_all(formats: list[Format]) -> dict[str, str]:
    """Make the checkpoints that are not there yet, one process for each environment; by name, why one was not made."""
    failures: dict[str, str] = {}
    groups: dict[str | None, list[Format]] = {}
    for one in formats:
        if not (folder_of(one) / DONE).exists():
            groups.setdefault(one.environment, []).append(one)
    for environment, many in groups.items():
        try:
            python = Path(sys.executable) if environment is None else interpreter(environment)
        except MakingFailed as error:
            failures |= dict.fromkeys((one.name for one in many), str(error))
            continue
        variables = dict(ENVIRONMENTS[environment].variables) if environment else {}
        command = [str(python), "-P", str(Path(__file__).resolve()), "--make", *(one.name for one in many)]
        with (cache() / f"{environment or 'here'}.log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=log, env={**os.environ, **variables}, cwd=cache(), check=False)
        for one in many:
            said = folder_of(one).with_suffix(".failed")
            if not (folder_of(one) / DONE).exists():
                failures[one.name] = (
                    said.read_text() if said.exists() else f"its quantizer ended the process ({environment})"
                )
    return failures


def _make(names: list[str]) -> None:
    """Make checkpoints in this process, which is in their environment; a failure is left beside as a text."""
    import shutil

    plain = cache() / "plain"
    for name in names:
        one = next(one for one in FORMATS if one.name == name)
        folder = folder_of(one)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            one.make(plain, folder, one.scheme)
        except Exception as error:
            from serve.models.checks import root_cause

            folder.with_suffix(".failed").write_text(root_cause(error)[:600])
            continue
        for file in plain.glob("token*"):
            shutil.copy(file, folder)
        (folder / DONE).touch()


def interpreter(name: str) -> Path:
    """The interpreter of an environment, installed where it is not there yet. Raises MakingFailed where it cannot be.

    Its packages lie over this environment's, so that torch is not installed again.
    """
    folder = cache() / "environments" / name
    python = folder / "bin" / "python"
    if (folder / DONE).exists():
        return python
    sys.stderr.write(f"installing {name}\n")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    below = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "_below.pth").write_text("".join(f"{path}\n" for path in below))
    variables = {**os.environ, **dict(ENVIRONMENTS[name].variables)}
    wanted = [*ENVIRONMENTS[name].packages, "torch==2.13.0"]
    asked = subprocess.run(
        [str(python), "-m", "pip", "install", "-q", "--no-build-isolation", *wanted],
        capture_output=True,
        text=True,
        env=variables,
    )
    if asked.returncode:
        raise MakingFailed(
            f"{' '.join(ENVIRONMENTS[name].packages)} cannot be installed here: {_last_line(asked.stderr)}"
        )
    (folder / DONE).touch()
    return python


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.partition(":")[0]] or lines
    return _public(errors[-1] if errors else "it ended without a message", [])[:400]


def page(document: dict[str, Any]) -> str:
    """The page of reports/formats."""
    rows = [row for row in document["formats"] if not row.get("alone")]
    alone = [row for row in document["formats"] if row.get("alone")]
    measured = [row for row in rows if "kl" in row]
    failed = [row for row in rows if "kl" not in row]
    share = f"{100 * document.get('confidence', 0.95):g} %"
    lines = [
        "# Formats on a CPU",
        "",
        f"Made by `make formats` (reports/make_formats.py), {document.get('created', '')}, on a CPU. Each checkpoint "
        "was made from the demo model (Gemma 3 270M, dequantized to float32, which is the reference too) by the "
        f"library's own quantizer. {document.get('documents', 0)} documents of {document.get('corpus', '')}, "
        f"{document.get('positions', 0):,} positions; {share} intervals. So few documents give wide ones.",
        "",
        "| format | mean KL, nats | same top-1 | perplexity ratio | load mode | computes in | MB | bits/weight "
        "| load, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in measured:
        cells = [
            row["name"],
            _cell(row["kl"]),
            _cell(row["top1"], percent=True),
            _cell(row["ratio"], digits=4),
            row["load_mode"] + (f"; activations {', '.join(row['activations'])}" if row["activations"] else ""),
            row["compute"],
            "" if row["bytes"] is None else f"{row['bytes'] / 1e6:.0f}",
            "" if row["bits"] is None else f"{row['bits']:.2f}",
            "" if row["load_seconds"] is None else f"{row['load_seconds']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "`unpacked` rows are the same checkpoint with `@dequantized` (`--load-mode both`): the error of its weights "
        "alone. What the row above has more is what it rounds while it computes. The load time is that of one read on "
        "a shared machine with two cores, with imports on first use.",
    ]
    if document.get("left_out"):
        lines += ["", f"Not run this time: {', '.join(document['left_out'])}."]
    if failed:
        lines += ["", "## What does not work here", "", "What a user is told:", ""]
        lines += [f"- {row['name']}{'' if row['made'] else ' (not made)'}: {_text(row['reason'])}" for row in failed]
    if alone:
        lines += ["", "## Without the environment that it needs", ""]
        lines += [
            "These were measured with `--python PATH`, the interpreter of an environment with their library. Without "
            "it a user is told:",
            "",
        ]
        lines += [f"- {row['name']}: {_text(row['reason'])}" for row in alone]
    if document["kernels"]:
        lines += ["", *_kernel_section(document["kernels"])]
    versions = document.get("versions", {})
    lines += ["", "## Versions", ""]
    for environment, found in versions.items():
        named = ", ".join(f"{name} {version}" for name, version in sorted(found.items()))
        lines.append(f"- {'this environment' if environment == 'here' else environment}: {named}")
    return "\n".join(lines) + "\n"


def _kernel_section(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## GGUF: its weights, and llama.cpp's kernels",
        "",
        f"The same files twice, on {KERNEL_WINDOWS} windows of {CONTEXT} tokens. Unpacked to float32 a file shows the "
        "error of its weights. llama.cpp computes with packed blocks, and rounds each layer's inputs to 8 bits in "
        "blocks of 32 or 256 on the way: that is the difference, small beside that of 4-bit weights and not beside "
        "Q8_0's. An endpoint lists its likeliest tokens only, so its KL has a lower bound (`>=`) and no value.",
        "",
        "| file | mean KL, nats | same top-1 | perplexity ratio |",
        "|---|---|---|---|",
    ]
    for row in rows:
        if "kl" in row:
            cells = (_cell(row["kl"]), _cell(row["top1"], percent=True), _cell(row["ratio"], digits=4))
            lines.append(f"| {row['name']} | {' | '.join(cells)} |")
        else:
            lines.append(f"| {row['name']} | {_text(row['reason'])} | | |")
    return lines


def _cell(figure: dict[str, Any] | None, *, percent: bool = False, digits: int = 3) -> str:
    if figure is None:
        return ""

    def shown(value: float | None) -> str:
        if value is None:
            return "open"
        return f"{100 * value:.1f}" if percent else f"{value:.{digits}g}"

    least = ">= " if figure["exactness"] == "bounded" else ""
    interval = (
        ""
        if figure["low"] is None and figure["high"] is None
        else f" [{shown(figure['low'])}, {shown(figure['high'])}]"
    )
    return f"{least}{shown(figure['value'])}{' %' if percent else ''}{interval}"


def _text(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    main()
