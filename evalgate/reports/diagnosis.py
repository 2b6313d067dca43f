"""What `evalgate doctor` found, for a terminal: what is broken first, then everything by its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from evalgate.core import counted
from evalgate.reports import Report
from evalgate.reports._rich import fact_table, printed, safe, title

if TYPE_CHECKING:
    from evalgate.doctor import Diagnosis

_CHECKS = {"ok": "", "missing": "not installed: ", "broken": "BROKEN: ", "untried": "not tried: "}
_WORDS = {"whole": "installed", "partly": "installed in part", "none": "not installed"}


def render(diagnosis: Diagnosis, *, width: int = 80, color: bool = False) -> str:
    """The diagnosis as text."""
    from rich.text import Text

    verdict = "usable" if diagnosis.usable else counted(len(diagnosis.problems), "problem")
    parts = [Text(f"evalgate {diagnosis.evalgate}: {verdict}", style="bold", overflow="fold")]
    parts += [Text.assemble("- ", safe(problem), overflow="fold") for problem in diagnosis.problems]
    tables = [
        ("here", _here(diagnosis)),
        ("extras", [(e.name, _WORDS[e.status] + _line(e.status, e.missing, e.install)) for e in diagnosis.extras]),
        ("what works", [(c.name, _check(c.status, c.says)) for c in diagnosis.checks]),
    ]
    shown = [part for name, pairs in tables for part in (title(name), fact_table(pairs))]
    return printed([*parts, *shown], width=width, color=color)


def _line(status: str, missing: list[str], install: str) -> str:
    lacks = f", without {', '.join(missing)}" if status == "partly" else ""
    return lacks if status == "whole" else f"{lacks}: {install}"


def _check(status: str, says: str) -> str:
    return f"{_CHECKS[status]}{says}"


def _here(found: Diagnosis) -> list[tuple[str, str]]:
    return list(_facts(found))


def _facts(found: Diagnosis) -> Iterator[tuple[str, str]]:
    machine, cache = found.machine, found.cache
    yield "python", f"{found.python} ({found.executable})"
    yield "command", found.command or "not on the PATH: run `python -m evalgate`"
    yield "system", machine.system
    yield "processor", f"{machine.processor}, {counted(machine.cores, 'core')} for this process"
    yield "features", " ".join(machine.features) or "none that speed up kernels"
    yield "memory", _memory(machine.memory, machine.available, machine.limit)
    for gpu in machine.gpus:
        yield "gpu", f"{gpu.name}, {_gib(gpu.memory)}, driver {gpu.driver}"
    if not machine.gpus:
        yield "gpu", "none that nvidia-smi lists"
    yield (
        "cache",
        f"{cache.folder}, {_gib(cache.size)}" + (f", {_gib(cache.free)} free" if cache.free is not None else ""),
    )
    yield "demo model", _demo(found)
    yield "completion", _completion(found)
    yield from machine.variables.items()


def _memory(total: int | None, available: int | None, limit: int | None) -> str:
    said = [f"{_gib(total)}" if total is not None else "not known"]
    said += [f"{_gib(available)} available"] if available is not None else []
    return ", ".join(said + ([f"limited to {_gib(limit)} here"] if limit is not None else []))


def _demo(found: Diagnosis) -> str:
    if found.demo.package is None:
        return f"not installed: {found.demo.install}"
    return "ready" if found.demo.assembled else "installed; put together at its first use"


def _completion(found: Diagnosis) -> str:
    done, shell = found.completion.installed, found.completion.shell
    if done is None:
        return f"not known for {shell}" if shell else "not known: SHELL is not set"
    return f"installed for {shell}" if done else f"not installed for {shell}: {found.completion.install}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 29 else f"{size / 2**20:.0f} MiB"


REPORT = Report("diagnosis", render, terminal=True)
