"""Options that several commands share, each declared once.

`RunOptions` and `MeasureOptions` become a `RunRequest` field by field, by name. So a new run option is a field here and
a field there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from evalgate.cli import help as panels
from evalgate.cli.command import OptionGroup
from evalgate.cli.completion import (
    complete_data,
    complete_device,
    complete_limit,
    complete_metric,
    complete_policy,
    complete_run,
    complete_source,
)
from evalgate.errors import UsageError
from evalgate.specs import SourceSpec, parse
from evalgate.store.remote import place

if TYPE_CHECKING:
    from evalgate.endpoints.budget import Budget
    from evalgate.measure.request import RunRequest
    from evalgate.store.remote import Place

RUNS = Path("runs")


def given(ctx: typer.Context, name: str) -> bool:
    """Whether a parameter was typed, even with its default as the value."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def new_folder(name: str) -> Path:
    """runs/NAME-UTC TIME, with a number where taken."""
    stem = f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    number, folder = 1, RUNS / stem
    while folder.exists():
        number += 1
        folder = RUNS / f"{stem}-{number}"
    return folder


def _confidence(value: float) -> float:
    if not 0 < value < 1:
        raise UsageError(f"--confidence {value} is outside (0, 1): write 0.95 for 95 %", confidence=value)
    return value


def _budget(text: str) -> Budget:
    from evalgate.endpoints.budget import Budget

    return Budget.parse(text)


def _once(specs: list[SourceSpec] | None) -> list[SourceSpec] | None:
    """Refuse a model that is named twice."""
    twice = sorted(spec.spec for spec in specs or () if (specs or []).count(spec) > 1)
    if twice:
        raise UsageError(f"{twice[0]} is given twice: name each model once", spec=twice[0])
    return specs


_REFERENCE = typer.Option(
    "--ref",
    metavar="SPEC",
    parser=parse,
    autocompletion=complete_source,
    rich_help_panel=panels.MODELS,
    help="The reference: a folder, hub id, FILE.gguf, URL or demo.",
)
_CANDIDATES = typer.Option(
    "--cand",
    metavar="SPEC",
    parser=parse,
    callback=_once,
    autocompletion=complete_source,
    rich_help_panel=panels.MODELS,
    help="A model under test; repeat for several.",
)
Reference = Annotated[SourceSpec, _REFERENCE]
OptionalReference = Annotated[SourceSpec | None, _REFERENCE]
Candidates = Annotated[list[SourceSpec], _CANDIDATES]
OptionalCandidates = Annotated[list[SourceSpec] | None, _CANDIDATES]
Models = Annotated[
    list[SourceSpec],
    typer.Option(
        "--model",
        metavar="SPEC",
        parser=parse,
        callback=_once,
        autocompletion=complete_source,
        rich_help_panel=panels.MODELS,
        help="A model to measure; repeat for several.",
    ),
]
OptionalPolicyFile = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="POLICY",
        autocompletion=complete_policy,
        rich_help_panel=panels.JUDGE,
        help="A TOML file, or lossless, 8bit or 4bit.",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="DATA",
        autocompletion=complete_data,
        rich_help_panel=panels.TEXT,
        help="A file, folder, URL, datasets id or -. Default: our own.",
    ),
]
Seed = Annotated[
    int, typer.Option(min=0, metavar="N", rich_help_panel=panels.COMPUTING, help="Seed of everything that is drawn.")
]
Confidence = Annotated[
    float,
    typer.Option(
        metavar="P",
        callback=_confidence,
        rich_help_panel=panels.COMPUTING,
        help="Coverage of the intervals, between 0 and 1.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        autocompletion=complete_device,
        rich_help_panel=panels.COMPUTING,
        help="Where models loaded here run: auto, cpu, cuda, cuda:1.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", rich_help_panel=panels.OUTPUT, help="Print one JSON document instead of text.")
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", "--no-progress", rich_help_panel=panels.RUNNING, help="Show no progress.")
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", rich_help_panel=panels.OUTPUT, help="Say what would be done, and do nothing."),
]
RunFolder = Annotated[
    Any, typer.Argument(metavar="RUN", parser=place, autocompletion=complete_run, help="A run folder, or its URL.")
]
MetricName = Annotated[
    str, typer.Option("--metric", metavar="NAME", autocompletion=complete_metric, help="Which metric.")
]
CandidateName = Annotated[
    str | None, typer.Option("--candidate", metavar="NAME", help="Only this candidate, where the run has several.")
]
NoiseFloor = Annotated[
    bool,
    typer.Option(
        "--noise-floor",
        rich_help_panel=panels.COMPUTING,
        help="Measure each model against itself: batch shapes, repeats, a restart.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class RunOptions(OptionGroup):
    """What a run shows to which device: the options of kl, agree, ppl, gate and record."""

    data: Data = None
    split: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel=panels.MORE_TEXT, help="Split of a datasets id.")
    ] = None
    text_column: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel=panels.MORE_TEXT, help="Column that holds the text.")
    ] = None
    split_on: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            rich_help_panel=panels.MORE_TEXT,
            help="A line that matches begins a new document; none: keep texts whole. Default: wikitext titles.",
        ),
    ] = None
    windows: Annotated[
        Literal["disjoint", "sliding", "llama.cpp", "lm-eval"],
        typer.Option(metavar="PRESET", rich_help_panel=panels.TEXT, help="disjoint, sliding, llama.cpp, lm-eval"),
    ] = "disjoint"
    context: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="TOKENS",
            rich_help_panel=panels.TEXT,
            help="Tokens of a window. Default: 512, or what the model has.",
        ),
    ] = None
    stride: Annotated[
        int | None,
        typer.Option(min=1, metavar="TOKENS", rich_help_panel=panels.MORE_TEXT, help="Advance of sliding windows."),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="WINDOWS",
            rich_help_panel=panels.TEXT,
            help="Measure this many windows; intervals widen.",
        ),
    ] = None
    positions: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=panels.MORE_TEXT,
            help="Measure a sample of N positions, each document by its share.",
        ),
    ] = None
    seed: Seed = 0
    device: Device = "auto"
    logits: Annotated[
        Literal["float32", "model"],
        typer.Option(
            rich_help_panel=panels.COMPUTING,
            help="float32: compute logits in float32 whatever the weights; model: in the model's own dtype.",
        ),
    ] = "float32"
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            rich_help_panel=panels.COMPUTING,
            help="What models loaded here may take (8GiB, 80%); larger ones are streamed from disk.",
        ),
    ] = None
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            rich_help_panel=panels.COMPUTING,
            help="Check models loaded here even where the same check is remembered.",
        ),
    ] = False
    load_mode: Annotated[
        Literal["native", "dequantized", "both"],
        typer.Option(
            rich_help_panel=panels.MORE_MODELS,
            help="Quantized candidates as they load, with their weights unpacked, or both.",
        ),
    ] = "native"
    revision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", rich_help_panel=panels.MORE_MODELS, help="Branch, tag or commit of models of the hub."
        ),
    ] = None
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle", rich_help_panel=panels.MORE_MODELS, help="Read pickled weights, which can run code."
        ),
    ] = False
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            rich_help_panel=panels.MORE_MODELS,
            help="Run the Python code that a checkpoint brings.",
        ),
    ] = False
    python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            rich_help_panel=panels.MORE_MODELS,
            help="Load models with another Python interpreter, that of GPTQ for one.",
        ),
    ] = None
    allow_template: Annotated[
        bool,
        typer.Option(
            "--allow-template",
            rich_help_panel=panels.MORE_MODELS,
            help="Show chats although a candidate's chat template differs from the reference's.",
        ),
    ] = False
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--no-resume",
            rich_help_panel=panels.RUNNING,
            help="Resume an interrupted run of the same inputs.",
        ),
    ] = True

    def request(
        self,
        kind: Literal["kl", "agree", "ppl"],
        reference: SourceSpec | None,
        candidates: list[SourceSpec],
        **more: Any,
    ) -> RunRequest:
        """The request for these options; one whose value is None keeps the request's default. more: other fields."""
        from evalgate.measure.request import RunRequest

        named = {field.name: getattr(self, field.name) for field in fields(self)}
        typed = {name: value for name, value in named.items() if value is not None}
        return RunRequest(
            kind=kind,
            reference=reference,
            candidates=tuple(candidates),
            **(typed | more),
        )


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(RunOptions):
    """The same with what a run folder and endpoints need: the options of kl, agree, ppl and gate."""

    budget: Annotated[
        Any,
        typer.Option(
            metavar="LIMIT",
            parser=_budget,
            rich_help_panel=panels.ENDPOINTS,
            help="Stop asking endpoints at requests=N or seconds=S.",
        ),
    ] = None
    out: Annotated[
        Any,
        typer.Option(
            metavar="FOLDER",
            parser=place,
            rich_help_panel=panels.OUTPUT,
            help="Run folder, or a URL. Default: runs/KIND-TIME.",
        ),
    ] = None
    cache: Annotated[
        bool,
        typer.Option(
            "--cache/--no-cache",
            rich_help_panel=panels.RUNNING,
            help="Keep the reference's hidden states, so that it runs once.",
        ),
    ] = True
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", rich_help_panel=panels.RUNNING, help="Replace the run that the folder holds."),
    ] = False

    ray: Annotated[
        str | None,
        typer.Option(
            metavar="local|ADDRESS",
            rich_help_panel=panels.COMPUTING,
            help="Load and score models on a Ray cluster: local, auto or HOST:PORT.",
        ),
    ] = None
    workers: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=panels.COMPUTING, help="Workers of --ray.")
    ] = 1
    num_cpus: Annotated[
        float,
        typer.Option(metavar="N", rich_help_panel=panels.COMPUTING, help="CPUs, and so threads, of a worker."),
    ] = 1.0
    num_gpus: Annotated[
        float,
        typer.Option(metavar="N", rich_help_panel=panels.COMPUTING, help="GPUs of a worker; 0.5: half of one."),
    ] = 0.0

    def run_folder(self, name: str) -> Place:
        """`--out`, or runs/NAME-UTC TIME with a number where taken; checked before anything is measured."""
        from evalgate.store.runs import check_target

        if self.out is not None:
            check_target(self.out, overwrite=self.overwrite)
            out: Place = self.out
            return out
        return new_folder(name)


FORMS = {  # option -> report, by what is shown
    "summary": {"full": "terminal", "markdown": "markdown", "csv": "csv"},
    "sweep": {"full": "leaderboard_full", "markdown": "leaderboard_markdown", "csv": "leaderboard_csv"},
}


@dataclass(frozen=True, kw_only=True)
class DocumentOptions(OptionGroup):
    """What is printed in place of the screen: the options of kl, agree, ppl, sweep and show."""

    full: Annotated[
        bool,
        typer.Option("--full", rich_help_panel=panels.OUTPUT, help="Print every figure, not only what fits a screen."),
    ] = False
    json: Json = False
    markdown: Annotated[
        bool,
        typer.Option(
            "--markdown", rich_help_panel=panels.OUTPUT, help="Print Markdown for a model card or a pull request."
        ),
    ] = False
    csv: Annotated[
        bool, typer.Option("--csv", rich_help_panel=panels.OUTPUT, help="Print every figure as a row of CSV.")
    ] = False

    def report(self, format: str | None = None, *, document: str = "summary") -> str | None:
        """The report that is asked for, None = the screen. format: that of --format. document: what is shown.

        Raises:
            UsageError: two documents are asked for, or there is no report of that name.
        """
        from evalgate.reports import get, of

        if format is not None and (document != "summary" or format not in of("run")):
            get(document, format)
        names = {"json": "json", **FORMS[document]}
        asked = {f"--{flag}": name for flag, name in names.items() if getattr(self, flag)}
        asked |= {} if format is None else {f"--format {format}": format}
        if len(set(asked.values())) > 1:
            raise UsageError(f"{' and '.join(asked)} ask for {len(asked)} documents: give one of them")
        return next(iter(asked.values()), None)


@dataclass(frozen=True, kw_only=True)
class LimitOptions(OptionGroup):
    """Limits on the command line."""

    max: Annotated[
        list[str] | None,
        typer.Option(
            "--max",
            metavar="METRIC=VALUE",
            autocompletion=complete_limit,
            rich_help_panel=panels.JUDGE,
            help="A limit: kl=0.01, kl.p99=0.1. Repeatable.",
        ),
    ] = None
    min: Annotated[
        list[str] | None,
        typer.Option(
            "--min",
            metavar="METRIC=VALUE",
            autocompletion=complete_limit,
            rich_help_panel=panels.JUDGE,
            help="A limit from below: top1=0.97. Repeatable.",
        ),
    ] = None
