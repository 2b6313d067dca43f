"""What is installed here, what of it works, and what to install for the rest.

Nothing heavy is imported in this process: the server's libraries and models are tried in a child (serve.selftest).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from evalgate.core import VERSION
from evalgate.doctor.backends import Check, check_backends
from evalgate.doctor.machine import Machine, this_machine
from evalgate.doctor.packages import Extra, Package, extras, known_extras, required
from evalgate.doctor.places import Completion, Demo, Place, cache_place, completion, demo, on_path
from evalgate.errors import UsageError, choose

__all__ = ["Diagnosis", "examine"]


class Diagnosis(BaseModel):
    """Everything that was looked at. problems: sentences on what is broken; usable: there are none."""

    schema_version: Literal[1] = 1
    evalgate: str
    python: str
    executable: str
    command: str | None  # where the shell finds evalgate; None = nowhere
    machine: Machine
    packages: list[Package]  # of the base install
    extras: list[Extra]
    checks: list[Check]
    cache: Place
    demo: Demo
    completion: Completion
    problems: list[str]
    usable: bool


def examine(wanted: Sequence[str] = (), *, device: str = "auto") -> Diagnosis:
    """Look at this machine and installation. wanted: extras that must be whole and work.

    Extras that are not installed are no problem unless they are wanted; what is installed must work.
    Raises UsageError for an extra that there is not.
    """
    import platform
    import sys

    known = known_extras()
    unknown = next((name for name in wanted if name not in known), None)
    if unknown is not None:
        raise UsageError(f"there is no extra '{unknown}': {choose(unknown, known)}")
    packages, found = required(), extras()
    checks = check_backends(found, device=device)
    cache, model = cache_place(), demo()
    problems = [
        *(f"{p.name} {p.installed or 'is missing'}, and evalgate needs {p.requirement}: {p.install}" for p in packages
          if not p.satisfied),
        *(problem for extra in found for problem in _extra_problems(extra, wanted=extra.name in wanted)),
        *(f"{check.name} does not work: {check.says}" for check in checks if check.status == "broken"),
        *([] if cache.problem is None else [cache.problem]),
        *([model.problem] if model.problem is not None and (model.package or "demo" in wanted) else []),
    ]  # fmt: skip
    return Diagnosis(
        evalgate=VERSION,
        python=platform.python_version(),
        executable=sys.executable,
        command=on_path("evalgate"),
        machine=this_machine(),
        packages=packages,
        extras=found,
        checks=checks,
        cache=cache,
        demo=model,
        completion=completion(),
        problems=problems,
        usable=not problems,
    )


def _extra_problems(extra: Extra, *, wanted: bool) -> list[str]:
    """What is wrong with an extra: packages that are too old, and where it is wanted those that are missing."""
    old = [p for p in extra.packages if p.installed and not p.satisfied]
    found = [
        f"{p.name} {p.installed} is not {p.requirement}, which the extra '{extra.name}' needs: {p.install}" for p in old
    ]
    if wanted and extra.missing:
        found.append(f"the extra '{extra.name}' lacks {', '.join(extra.missing)}: {extra.install}")
    return found
