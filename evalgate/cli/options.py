"""The options that commands share: one name, one help text and one completion each."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

CONVERSIONS = ("f32", "bf16", "f16", "int8")
_SPECS = (("demo", "Gemma 3 270M from PyPI"), ("llama.cpp:", "a GGUF file on llama.cpp's own kernels"))


class LogitsDtype(str, Enum):
    """How the embedded server computes logits (RunRequest.logits)."""

    FLOAT32 = "float32"
    MODEL = "model"


class WindowPreset(str, Enum):
    """How documents become windows (evalgate.core.WindowPolicy)."""

    DISJOINT = "disjoint"
    SLIDING = "sliding"
    LLAMA_CPP = "llama.cpp"
    LM_EVAL = "lm-eval"


def given(ctx: typer.Context, name: str) -> bool:
    """Whether a parameter was typed, be it with the value that is its default."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def complete_source(incomplete: str) -> list[tuple[str, str]]:
    """Completions of a source spec: known names, files and folders below the typed path, conversions after `@`."""
    source, at, conversion = incomplete.rpartition("@")
    if at:
        return [(f"{source}@{c}", f"converted to {c} on load") for c in CONVERSIONS if c.startswith(conversion)]
    prefix = "llama.cpp:" if incomplete.startswith("llama.cpp:") else ""
    names = [(name, text) for name, text in _SPECS if name.startswith(incomplete)]
    return names + [(prefix + path, "") for path in _source_paths(incomplete.removeprefix(prefix))]


def _source_paths(typed: str) -> list[str]:
    """Folders and model files (.gguf, .trace) whose path starts with what was typed, as it was typed."""
    folder, slash, start = typed.rpartition("/")
    base = Path(folder + slash) if slash else Path()
    if not base.is_dir():
        return []
    found = []
    for path in sorted(base.iterdir()):
        hidden = path.name.startswith(".") and not start.startswith(".")
        if hidden or not path.name.startswith(start):
            continue
        if path.is_dir():
            found.append(f"{folder}{slash}{path.name}/")
        elif path.suffix in (".gguf", ".trace"):
            found.append(f"{folder}{slash}{path.name}")
    return found


def complete_metric(incomplete: str) -> list[str]:
    """Names of metrics that start with what was typed."""
    from evalgate.metrics import registry

    return [name for name in sorted(registry()) if name.startswith(incomplete)]


def complete_policy(incomplete: str) -> list[str]:
    """Completions of a policy: presets, and TOML files and folders below the typed path."""
    folder, slash, _ = incomplete.rpartition("/")
    base = Path(folder + slash) if slash else Path()
    paths = sorted(base.iterdir()) if base.is_dir() else []
    found = [f"{folder}{slash}{p.name}{'/' if p.is_dir() else ''}" for p in paths if p.is_dir() or p.suffix == ".toml"]
    return [name for name in ("lossless", "8bit", "4bit", *found) if name.startswith(incomplete)]


Reference = Annotated[
    str,
    typer.Option(
        "--ref",
        metavar="SPEC",
        autocompletion=complete_source,
        help="The model taken as right: a checkpoint, FILE.gguf, SPEC@bf16, an endpoint URL#MODEL, or demo.",
    ),
]
Candidates = Annotated[
    list[str],
    typer.Option(
        "--cand", metavar="SPEC", autocompletion=complete_source, help="A model under test; repeat for several."
    ),
]
OptionalReference = Annotated[
    str | None,
    typer.Option(
        "--ref",
        metavar="SPEC",
        autocompletion=complete_source,
        help="The model taken as right: a checkpoint, FILE.gguf, SPEC@bf16, an endpoint URL#MODEL, or demo.",
    ),
]
OptionalCandidates = Annotated[
    list[str] | None,
    typer.Option(
        "--cand", metavar="SPEC", autocompletion=complete_source, help="A model under test; repeat for several."
    ),
]
PolicyFile = Annotated[
    str,
    typer.Option(
        "--policy", metavar="POLICY", autocompletion=complete_policy, help="A TOML file, or lossless, 8bit or 4bit."
    ),
]
Models = Annotated[
    list[str],
    typer.Option(
        "--model", metavar="SPEC", autocompletion=complete_source, help="A model to measure; repeat for several."
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="DATA",
        help="Text to show: a file, a folder, a datasets id, or - for standard input. Default: the built-in corpus.",
    ),
]
Split = Annotated[str | None, typer.Option(metavar="NAME", help="Split of a datasets id.")]
TextColumn = Annotated[str | None, typer.Option(metavar="NAME", help="Column that holds the text.")]
Windows = Annotated[WindowPreset, typer.Option(metavar="PRESET", help="disjoint, sliding, llama.cpp or lm-eval.")]
Context = Annotated[
    int | None,
    typer.Option(min=2, metavar="TOKENS", help="Tokens of a full window. Default: 512, or what the model has."),
]
Stride = Annotated[int | None, typer.Option(min=1, metavar="TOKENS", help="Advance of sliding windows.")]
Limit = Annotated[
    int | None, typer.Option(min=1, metavar="WINDOWS", help="Measure this many windows; the intervals widen.")
]
Positions = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Measure a sample of N positions, each document by its share."),
]
BudgetText = Annotated[
    str | None,
    typer.Option("--budget", metavar="LIMIT", help="Stop asking endpoints at requests=N or seconds=S."),
]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Seed of everything that is drawn.")]
Confidence = Annotated[float, typer.Option(metavar="P", help="Coverage of the intervals, between 0 and 1.")]
Logits = Annotated[
    LogitsDtype,
    typer.Option(
        help="float32: heads of embedded models in float32 whatever the weights; model: their own head and dtype."
    ),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="Where embedded models run: auto, cpu, cuda, cuda:1.")]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", file_okay=False, help="Run folder. Default: runs/KIND-TIME."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the block.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", "--no-progress", help="Show no progress.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run that the folder holds.")]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume/--no-resume", help="Go on from the windows that an interrupted run of the same inputs measured."
    ),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
MetricName = Annotated[
    str, typer.Option("--metric", metavar="NAME", autocompletion=complete_metric, help="Which metric.")
]
CandidateName = Annotated[
    str | None, typer.Option("--candidate", metavar="NAME", help="Which candidate, where the run has several.")
]
NoiseFloor = Annotated[
    bool, typer.Option("--noise-floor", help="Measure each model against itself: batch shapes, repeats, a restart.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
