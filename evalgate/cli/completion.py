"""Shell completion of what options take: specs, metrics, policies, dialects."""

from __future__ import annotations

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
    """Names of metrics."""
    from evalgate.metrics import registry

    return [name for name in sorted(registry()) if name.startswith(incomplete)]


def complete_policy(incomplete: str) -> list[str]:
    """Policies: presets, and TOML files and folders below the typed path."""
    folder, slash, _ = incomplete.rpartition("/")
    base = Path(folder + slash) if slash else Path()
    paths = sorted(base.iterdir()) if base.is_dir() else []
    found = [f"{folder}{slash}{p.name}{'/' if p.is_dir() else ''}" for p in paths if p.is_dir() or p.suffix == ".toml"]
    return [name for name in ("lossless", "8bit", "4bit", *found) if name.startswith(incomplete)]


def complete_dialect(incomplete: str) -> list[str]:
    """Names of dialects."""
    from evalgate.dialects import names

    return [name for name in names() if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Run folders below the typed path, and the folders on the way to one; where nothing is typed, those of `runs`."""
    folder, slash, start = incomplete.rpartition("/")
    found = [f"{folder}{slash}{path.name}{'' if _is_run(path) else '/'}" for path in _folders(folder + slash, start)]
    return found if incomplete else [*(f"runs/{path.name}" for path in _folders("runs", "") if _is_run(path)), *found]


def _folders(below: str, start: str) -> list[Path]:
    """Folders in `below` whose names begin with `start`; hidden ones only where a dot was typed."""
    try:
        found = [path for path in Path(below).iterdir() if path.name.startswith(start) and path.is_dir()]
    except OSError:
        return []
    return sorted(path for path in found if start.startswith(".") or not path.name.startswith("."))


def _is_run(folder: Path) -> bool:
    return (folder / "manifest.json").is_file() and (folder / "tokens.parquet").is_file()


def complete_command(ctx: typer.Context, incomplete: str) -> list[str]:
    """The next word of a command: `policy`, then `init`."""
    group: Any = ctx.find_root().command
    for word in ctx.params.get("command") or ():
        group = getattr(group, "commands", {}).get(word)
    return [name for name in getattr(group, "commands", {}) if name.startswith(incomplete)]
