"""Shell completion of what options take: models, texts, metrics, limits, policies, dialects, runs, traces, commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from evalgate.specs import LLAMA_CPP, conversions

_SPECS = (("demo", "Gemma 3 270M from PyPI"), (LLAMA_CPP, "a GGUF file on llama.cpp's own kernels"))


def complete_source(incomplete: str) -> list[tuple[str, str]]:
    """Specs: known names, files and folders below the typed path, conversions after `@`."""
    source, at, conversion = incomplete.rpartition("@")
    if at:
        return [(f"{source}@{c}", f"converted to {c} on load") for c in conversions() if c.startswith(conversion)]
    prefix = LLAMA_CPP if incomplete.startswith(LLAMA_CPP) else ""
    names = [(name, text) for name, text in _SPECS if name.startswith(incomplete)]
    return names + [(prefix + path, "") for path in _source_paths(incomplete.removeprefix(prefix))]


def _source_paths(typed: str) -> list[str]:
    """Folders and model files (.gguf, .trace) whose path starts with what was typed, as it was typed."""
    return _paths(typed, lambda path: path.suffix in (".gguf", ".trace"))


def _paths(typed: str, wanted: Callable[[Path], bool]) -> list[str]:
    """Folders, and files that are wanted, whose path starts with what was typed; hidden ones where a dot was typed.

    A folder that is wanted is shown as one that is named whole, any other with a slash: there is more below it.
    """
    folder, slash, start = typed.rpartition("/")
    try:
        beside = sorted((Path(folder + slash) if slash else Path()).expanduser().iterdir())
    except OSError:
        return []
    shown = [path for path in beside if path.name.startswith(start) and (path.name[0] != "." or start[:1] == ".")]
    found = [(path, wanted(path)) for path in shown]
    return [
        f"{folder}{slash}{path.name}{'/' if path.is_dir() and not whole else ''}"
        for path, whole in found
        if whole or path.is_dir()
    ]


def complete_data(incomplete: str) -> list[tuple[str, str]]:
    """Corpora by name, files of text and folders."""
    from evalgate.corpora import names
    from evalgate.corpora.files import TABLE_SUFFIXES, TEXT_SUFFIXES

    known = [(name, said) for name, said in names().items() if name.startswith(incomplete)]
    readable = (*TEXT_SUFFIXES, *TABLE_SUFFIXES, ".gz", ".zst", ".bz2", ".xz")
    return known + [(path, "") for path in _paths(incomplete, lambda p: p.is_file() and p.suffix.lower() in readable)]


def complete_limit(incomplete: str) -> list[str]:
    """Metrics with the sign that a limit's value follows."""
    return [f"{name}=" for name in complete_metric(incomplete)]


def complete_trace(incomplete: str) -> list[str]:
    """Trace folders and the folders on the way to one."""
    return _paths(incomplete, lambda path: path.suffix == ".trace")


def complete_device(incomplete: str) -> list[str]:
    """Devices as they are usually called."""
    return [name for name in ("auto", "cpu", "cuda", "cuda:0", "cuda:1") if name.startswith(incomplete)]


def complete_metric(incomplete: str) -> list[str]:
    """Names of metrics."""
    from evalgate.metrics import registry

    return [name for name in sorted(registry()) if name.startswith(incomplete)]


def complete_policy(incomplete: str) -> list[str]:
    """Policies: presets, and TOML files and folders below the typed path."""
    found = _paths(incomplete, lambda path: path.is_file() and path.suffix == ".toml")
    return complete_preset(incomplete) + found


def complete_preset(incomplete: str) -> list[str]:
    """Presets of policies."""
    from evalgate.gate.policy import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


def complete_dialect(incomplete: str) -> list[str]:
    """Names of dialects."""
    from evalgate.dialects import names

    return [name for name in names() if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Run folders, and the folders on the way to one; where nothing is typed, those of `runs` first."""
    usual = [path for path in _paths("runs/", _is_run) if not path.endswith("/")] if not incomplete else []
    return usual + _paths(incomplete, _is_run)


def complete_shown(incomplete: str) -> list[str]:
    """Folders of runs and of sweeps, and the folders on the way to one."""
    return _paths(incomplete, lambda folder: _is_run(folder) or (folder / "sweep.json").is_file())


def _is_run(folder: Path) -> bool:
    return (folder / "manifest.json").is_file() and (folder / "tokens.parquet").is_file()


def complete_command(ctx: typer.Context, incomplete: str) -> list[str]:
    """The next word of a command: `policy`, then `init`."""
    group: Any = ctx.find_root().command
    for word in ctx.params.get("command") or ():
        group = getattr(group, "commands", {}).get(word)
    return [name for name in getattr(group, "commands", {}) if name.startswith(incomplete)]
