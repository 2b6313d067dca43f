"""The reference of the site, written from the code: commands, policy keys, metrics, columns, files, documents.

`hooks.py` calls `pages` at every build, so that these pages are never older than the code. What a figure or a column
means is taken from docs/semantics.md, which is the contract; a name that is missing there ends the build.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from typer.main import get_command

from evalgate import metrics, reports, table
from evalgate.cli.app import app
from evalgate.gate import kinds, policy
from evalgate.gate.report import GateReport
from evalgate.leaderboard import Leaderboard
from evalgate.store import alternatives, manifest, runs
from evalgate.summary import Summary
from evalgate.traces import layout, tables

ROOT = Path(__file__).resolve().parents[2]
MADE = "This page is written from the code at every build of this site."


def pages() -> dict[str, str]:
    """The pages as Markdown, by their path in the site."""
    return {
        "reference/commands.md": commands(),
        "reference/policy.md": policy_keys(),
        "reference/metrics.md": metrics_page(),
        "reference/columns.md": columns(),
        "reference/files.md": files(),
        "reference/documents.md": documents(),
    }


def commands() -> str:
    """Every command with its arguments and options, from Typer's tree."""
    found = list(_leaves(get_command(app), "evalgate"))
    parts = [
        _page("Commands", f"`evalgate --help` prints the same. {_link('../cli.md', 'The command line')} explains it.")
    ]
    parts.append(
        _table(("command", "does"), [(f"[`{words}`](#{_anchor(words)})", _line(c.help)) for words, c in found])
    )
    for words, command in found:
        parts.append(f"## {words}\n\n{_prose(command.help)}")
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        if arguments:
            rows = [(f"`{_metavar(p)}`", _needed(p), _line(p.help)) for p in arguments]
            parts.append(_table(("argument", "", "meaning"), rows))
        options = [p for p in command.params if p.param_type_name == "option"]
        parts.append(_table(("option", "default", "meaning"), [_option(p) for p in options]))
    return "\n\n".join(parts) + "\n"


def policy_keys() -> str:
    """Every key of a policy file, the kinds of rules, and the presets."""
    parts = [_page("Policy keys", f"What a verdict rests on is in {_link('../statistics.md#verdicts', 'Statistics')}.")]
    for title, model in (("[policy]", policy.Settings), ("[[rules]]", policy.Rule), ("slice", policy.Slice)):
        parts.append(f"## {title}\n\n" + _fields(model))
    rows = []
    for name, kind in kinds.kinds().items():
        said = _first(importlib.import_module(type(kind).__module__).__doc__)
        rows.append(
            (f"`{name}`", said, kind.needs or "nothing", ", ".join(kind.proves), "yes" if kind.sequential else "no")
        )
    parts.append(
        "## What `against` takes\n\n" + _table(("against", "the rule is", "needs", "proves", "sequential"), rows)
    )
    for name in policy.PRESETS:
        parts.append(f"## Preset {name}\n\n```toml\n{policy.policy_text(name).strip()}\n```")
    return "\n\n".join(parts) + "\n"


def metrics_page() -> str:
    """Every metric: what it is, which way is better, which runs report it, its statistics and columns."""
    told = _rows("Metrics")
    parts = [_page("Metrics", f"Definitions and words are in {_link('../semantics.md', 'What every number means')}.")]
    for name, metric in metrics.registry().items():
        definition, meaning = told[name]
        facts = [
            ("per position" if metric.per == "position" else "per window", definition),
            ("tells", meaning),
            ("unit", metric.unit),
            ("closer to the reference", metric.better),
            ("reported by", ", ".join(f"`evalgate {kind}`" for kind in metric.kinds)),
            ("statistics", ", ".join(f"`{s.name}`" for s in metric.statistics)),
            ("columns", ", ".join(f"`{c}`" for c in metric.columns)),
            ("of an endpoint", _LISTED[metric.listed]),
        ]
        parts.append(f"## {name}\n\n" + _table(("", ""), facts))
    return "\n\n".join(parts) + "\n"


_LISTED = {
    "value": "a value",
    "interval": "an interval",
    "lower": "a lower bound",
    "none": "nothing",
}


_NAMES = {
    "candidate": "the candidate's spec, or the name that the run gives it",
    "domain": "the document's domain",
    "document": "the document's name",
}


def columns() -> str:
    """Every column of the per-position table, with its type and range."""
    definitions = {name: cells[0] for name, cells in _rows("Metrics").items() if name in table.PAIR_COLUMNS}
    told = {name: cells[0] for name, cells in _rows("The token-score table").items()} | definitions | _NAMES
    ranges = {**{n: r for m in metrics.registry().values() for n, r in m.ranges.items()}, **table.RANGES}
    rows = []
    for name in (*table.KEY_COLUMNS, *table.score_columns(pair=True)):
        base = name.removeprefix("ref_").removeprefix("cand_")
        allowed = ranges.get(name, ranges.get(base))
        kind = re.sub(
            r"dictionary<.*", "string, dictionary-encoded", str(table.column_type(name)).replace("float", "float32")
        )
        rows.append((f"`{name}`", kind, str(allowed) if allowed else "any name", told[name]))
    about = (
        f"The rows of `tokens.parquet`; see {_link('../semantics.md#the-token-score-table', 'The token-score table')}."
    )
    more = (
        "A perplexity run has the key columns and those of `cand_`. An estimated column has `NAME_se` and `NAME_low` "
        "beside it. Where only an interval is known, `NAME_low` and `NAME_high` stand in for `NAME`; null is unbounded."
    )
    return (
        f"{_page('Columns of the table', about)}\n\n{_table(('column', 'type', 'range', 'meaning'), rows)}\n\n{more}\n"
    )


def files() -> str:
    """The folders that evalgate writes: their files, their manifests, their columns."""
    entry = ", ".join(f"`{key}`" for key in manifest.FileEntry(0, "", 0).body())
    listed = ", ".join(f"`{name}`" for name in alternatives.schema().names)
    parts = [
        _page("File formats", "Runs and traces are folders, written whole or not at all."),
        "## Run folder\n\n"
        + _table(
            ("file", "holds"),
            [
                (f"`{runs.MANIFEST}`", f"the request, the identity of models and text, and of each file {entry}"),
                (f"`{runs.TOKENS}`", f"the {_link('columns.md', 'per-position table')}, Parquet"),
                (
                    f"`{runs.TEXTS}`",
                    "the text of every token id in the tables (`token`, `text`), where it is known; Parquet",
                ),
                (
                    f"`{runs.ALTERNATIVES}`",
                    f"up to {alternatives.LISTED} {_link('../semantics.md#alternatives', 'likeliest ids')} of both "
                    f"sides at the worst positions ({listed}), where they are known; Parquet",
                ),
                (f"`{runs.SUMMARY}`", f"the {_link('documents.md#summary', 'summary')}, as `--json` prints it"),
            ],
        )
        + f"\n\nFormat `{runs.FORMAT.name}`, version {runs.FORMAT.version}.",
        "## Trace\n\n"
        + _table(
            ("file", "holds"),
            [
                (f"`{layout.MANIFEST}`", f"what was recorded and how (`meta`, below), and of each file {entry}"),
                (f"`{layout.PARTIAL}`", "the same while it is being recorded"),
                (f"`{layout.WINDOWS}`", "the windows: ids, score ranges, masks; Parquet"),
                ("`shard-00000.parquet` ...", "the positions, whole windows in the order they were recorded"),
            ],
        )
        + f"\n\nFormat `{layout.FORMAT.name}`, version {layout.FORMAT.version}. The columns of a shard are `document`, "
        + f"`domain`, {', '.join(f'`{name}`' for name in (*tables.FLAT, *tables.WIDE))}; with `--full` also `lse` and "
        + "`shifted`. The keys of `meta` are "
        + f"{', '.join(f'`{name}`' for name in layout.TraceMeta.__dataclass_fields__)}. "
        + f"What they hold is in {_link('../traces.md#what-is-kept', 'Traces')}.",
        "## The manifest\n\nA manifest has "
        + ", ".join(f"`{key}`" for key in manifest.RESERVED)
        + ". Its `sha256` is that of the rest of it, as JSON with sorted keys and without spaces. A file that does not "
        + "have the size and digest that the manifest names is refused.",
        "## Reports\n\n"
        + _table(
            ("name", "of", "written by"),
            [
                (f"`{name}`", kind, _written(kind, name, one))
                for kind in _KINDS
                for name, one in reports.of(kind).items()
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


_KINDS = ("summary", "run", "gate", "sweep", "slices", "plan", "compare", "diff")


def _written(kind: str, name: str, report: reports.Report) -> str:
    if report.file:
        return f"`evalgate gate --{name} FILE`"
    if kind in ("summary", "sweep"):
        return f"`evalgate show --format {name}`"
    return f"`evalgate {kind}`"


_SCHEMAS: dict[str, type[BaseModel]] = {"summary": Summary, "gate": GateReport, "sweep": Leaderboard}


def documents() -> str:
    """The JSON documents of a run, a gate and a sweep, model by model."""
    named = [
        f"`evalgate schema {name}` prints {_link(f'../{name}.schema.json', f'{name}.schema.json')}" for name in _SCHEMAS
    ]
    about = f"Their JSON schemas are published: {'; '.join(named)}."
    parts = [_page("JSON documents", about)]
    shown: set[type[BaseModel]] = set()
    for model in _SCHEMAS.values():
        for one in _nested(model):
            if one not in shown:
                shown.add(one)
                parts.append(f"## {_title(one)}\n\n{_prose(one.__doc__)}\n\n{_fields(one)}")
    return "\n\n".join(parts) + "\n"


def _title(model: type[BaseModel]) -> str:
    """A heading for a model: `Summary`, `Gate report`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", model.__name__).capitalize()


def _nested(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The model and every model in its fields, in the order of the fields."""
    yield model
    for field in model.model_fields.values():
        for one in _models(field.annotation):
            yield from _nested(one)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _fields(model: type[BaseModel]) -> str:
    """A table of a model's keys: type, default and meaning."""
    schema = model.model_json_schema(mode="serialization")
    needed = {name for name, field in model.model_fields.items() if field.is_required()}
    rows = []
    for name, spelled in schema["properties"].items():
        default = "required" if name in needed else _json(spelled.get("default", ""))
        rows.append((f"`{name}`", _type(spelled), default, _line(spelled.get("description", ""))))
    return _table(("key", "type", "default", "meaning"), rows)


def _type(spelled: Mapping[str, Any]) -> str:
    """A JSON schema's type in words."""
    if "anyOf" in spelled:
        return " or ".join(dict.fromkeys(_type(one) for one in spelled["anyOf"]))
    if "$ref" in spelled:
        name = spelled["$ref"].rpartition("/")[2]
        return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).capitalize()
    if "enum" in spelled or "const" in spelled:
        return ", ".join(
            f'`"{value}"`' if isinstance(value, str) else f"`{value}`"
            for value in spelled.get("enum", [spelled.get("const")])
        )
    if spelled.get("type") == "array":
        return f"list of {_type(spelled.get('items', {})) or 'values'}"
    if spelled.get("type") == "object" and isinstance(spelled.get("additionalProperties"), dict):
        return f"name to {_type(spelled['additionalProperties'])}"
    return str(spelled.get("type", "any"))


def _json(value: object) -> str:
    return (
        "`" + str(value).replace("None", "null").replace("True", "true").replace("False", "false") + "`"
        if value != ""
        else "empty"
    )


def _leaves(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    """Every command that is not hidden, by the words that call it."""
    for name, one in command.commands.items():
        if getattr(one, "hidden", False):
            continue
        if hasattr(one, "commands"):
            yield from _leaves(one, f"{words} {name}")
        else:
            yield f"{words} {name}", one


def _option(parameter: Any) -> tuple[str, str, str]:
    value = "" if parameter.is_flag else f" {_metavar(parameter)}"
    spelled = ", ".join(f"`{name}{value}`" for name in (*parameter.opts, *parameter.secondary_opts))
    repeat = " Repeatable." if parameter.multiple and "repeat" not in (parameter.help or "").lower() else ""
    return spelled, _needed(parameter), f"{_line(parameter.help)}{repeat}"


def _needed(parameter: Any) -> str:
    if parameter.required:
        return "required"
    default = parameter.default
    if (
        default is None
        or default is False
        or callable(default)
        or default in ((), "")
        or "UNSET" in repr(default).upper()
    ):
        return ""
    return f"`{'--' + parameter.name.replace('_', '-') if default is True else default}`"


def _metavar(parameter: Any) -> str:
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    choices = [str(value) for part in (annotation, *get_args(annotation)) for value in _literals(part)]
    return str(parameter.metavar or "|".join(choices) or parameter.name.upper())


def _literals(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _rows(heading: str) -> dict[str, tuple[str, ...]]:
    """The rows of the table below a heading of docs/semantics.md, by the name in their first cell."""
    found: dict[str, tuple[str, ...]] = {}
    for names, *cells in _cells(heading):
        for name in re.findall(r"`(\w+)`", names):
            found[name] = tuple(cells)
    return found


def _cells(heading: str) -> Iterator[list[str]]:
    text = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)])


def _page(title: str, about: str) -> str:
    return f"# {title}\n\n{about} {MADE}"


def _link(target: str, text: str) -> str:
    return f"[{text}]({target})"


def _anchor(words: str) -> str:
    return words.lower().replace(" ", "-")


def _line(text: str | None) -> str:
    """A help text or docstring on one line."""
    return " ".join((text or "").replace("\b", "").split())


def _first(text: str | None) -> str:
    """A docstring's first paragraph."""
    return _line((text or "").split("\n\n")[0])


def _prose(text: str | None) -> str:
    """A docstring as paragraphs."""
    return "\n\n".join(_line(part) for part in (text or "").replace("\b", "").split("\n\n"))
