"""What a benchmark was measured on, and which machines are alike enough for their ratios to be compared."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel

from evalgate.core import VERSION
from evalgate.doctor.machine import this_machine

PACKAGES = ("torch", "numpy", "numba", "transformers", "pyarrow", "scipy")
_ROOT = Path(__file__).parents[1]
# widest first: the kernels that matrix products take on processors that have them
_VECTORS = {
    "amx_bf16": "AMX",
    "amx_int8": "AMX",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "sve2": "SVE2",
    "sve": "SVE",
    "asimd": "NEON",
}


class Machine(BaseModel, extra="forbid", frozen=True):
    """features: what makes float kernels faster, as Linux calls it. vector: the widest class of them. cores: that the
    process may use. threads: of a matrix product. memory: GiB. torch_kernels: what this build of torch picked, where
    torch was imported. device: the accelerator that was measured, or null. commit: with `+` where files differ from it.
    """

    processor: str
    architecture: str
    vector: str
    features: list[str]
    cores: int
    threads: int
    memory: float | None
    system: str
    device: str | None
    torch_kernels: str | None
    versions: dict[str, str]
    commit: str

    @property
    def kind(self) -> str:
        """The class whose members are compared by ratio: architecture, vector instructions, cores and device."""
        parts = [self.architecture, self.vector, f"{self.cores} cores", *([self.device] if self.device else [])]
        return ", ".join(parts)

    def __str__(self) -> str:
        kernels = f", torch's {self.torch_kernels} kernels" if self.torch_kernels else ""
        device = f", {self.device}" if self.device else ""
        return (
            f"{self.processor} ({self.architecture}, {self.vector}), {self.cores} cores, {self.threads} threads"
            f"{kernels}{device}, torch {self.versions.get('torch', 'absent')}, Python {self.versions['python']}"
        )


def describe(*, device: str | None = None) -> Machine:
    """This machine, now. device: the name of the accelerator that is measured."""
    found = this_machine()
    features = set(found.features)
    return Machine(
        processor=found.processor,
        architecture=platform.machine(),
        vector=next((name for flag, name in _VECTORS.items() if flag in features), "no known vector unit"),
        features=found.features,
        cores=found.cores,
        threads=_threads(found.cores),
        memory=None if found.memory is None else round(found.memory / 2**30, 1),
        system=found.system,
        device=device,
        torch_kernels=_torch_kernels(),
        versions={"evalgate": VERSION, "python": platform.python_version(), **_versions()},
        commit=commit(),
    )


def commit() -> str:
    """The checkout's commit, with `+` where tracked files differ from it; "unknown" outside one."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    # what a benchmark writes does not change what it measures
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!reports/bench")
    return head + ("+" if changed else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _threads(cores: int) -> int:
    if (torch := sys.modules.get("torch")) is not None:
        return int(torch.get_num_threads())
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else cores


def _torch_kernels() -> str | None:
    torch = sys.modules.get("torch")  # not imported for its name alone: that takes seconds
    return None if torch is None else str(torch.backends.cpu.get_cpu_capability())
