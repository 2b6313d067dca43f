"""Packages: what the distribution requires, what of it is installed, and the line that installs the rest."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel

DISTRIBUTION = "evalgate-lm"


class Package(BaseModel):
    """A required package. installed: its version, None = it is not. requirement: as `numpy>=1.26`."""

    name: str
    requirement: str
    installed: str | None
    satisfied: bool
    install: str  # the line that installs it


class Extra(BaseModel):
    """An extra. status: "whole", "partly" or "none" of its packages are installed. missing: their names."""

    name: str
    status: str
    packages: list[Package]
    missing: list[str]
    install: str


def known_extras() -> list[str]:
    """The names of the distribution's extras; none where it is a source tree that is not installed."""
    found = _distribution()
    return [] if found is None else list(found.metadata.get_all("Provides-Extra") or ())


def required() -> list[Package]:
    """What the base install needs."""
    return [_package(one, f"pip install '{one}'") for one in _requirements(None)]


def extras() -> list[Extra]:
    """Every extra, with the packages of those that it includes."""
    return [_extra(name) for name in known_extras()]


def _extra(name: str) -> Extra:
    line = f"pip install '{DISTRIBUTION}[{name}]'"
    packages = [_package(one, line) for one in _requirements(name)]
    missing = [package.name for package in packages if package.installed is None]
    status = "whole" if not missing else "none" if len(missing) == len(packages) else "partly"
    return Extra(name=name, status=status, packages=packages, missing=missing, install=line)


def _requirements(extra: str | None, seen: frozenset[str] = frozenset()) -> list[Requirement]:
    """What an extra needs here, None = the base install; this distribution's own extras are unfolded."""
    distribution = _distribution()
    found: dict[str, Requirement] = {}
    for text in (distribution.requires or ()) if distribution is not None else ():
        try:
            one = Requirement(text)
        except InvalidRequirement:  # of a tool that writes another version of the format
            continue
        marker = one.marker
        belongs = marker is None or marker.evaluate({"extra": ""})
        if belongs if extra is None else (marker is not None and not belongs and marker.evaluate({"extra": extra})):
            if canonicalize_name(one.name) != DISTRIBUTION:
                found.setdefault(canonicalize_name(one.name), one)
                continue
            for inner in sorted(one.extras - seen):
                for more in _requirements(inner, seen | {inner, extra or ""}):
                    found.setdefault(canonicalize_name(more.name), more)
    return list(found.values())


def _package(requirement: Requirement, line: str) -> Package:
    try:
        installed: str | None = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        installed = None
    wanted = f"{requirement.name}{requirement.specifier}"
    satisfied = installed is not None and requirement.specifier.contains(installed, prereleases=True)
    return Package(name=requirement.name, requirement=wanted, installed=installed, satisfied=satisfied, install=line)


def _distribution() -> metadata.Distribution | None:
    try:
        return metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None
