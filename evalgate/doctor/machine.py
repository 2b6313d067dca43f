"""The machine: processor, threads, memory, and graphics cards as their driver lists them."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

from pydantic import BaseModel

# What makes float kernels faster, as Linux calls it on x86 and on ARM.
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16",
            "asimd", "asimddp", "sve", "sve2", "i8mm", "bf16")  # fmt: skip
VARIABLES = (
    "EVALGATE_CACHE",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_OFFLINE",
)
_SECONDS = 10.0  # for the driver's own tool


class Gpu(BaseModel):
    """A graphics card as its driver lists it; memory: bytes."""

    name: str
    memory: int
    driver: str


class Machine(BaseModel):
    """cores: that this process may use. memory, available: bytes, None = not known. limit: of a container, bytes."""

    system: str
    processor: str
    features: list[str]
    cores: int
    memory: int | None
    available: int | None
    limit: int | None
    gpus: list[Gpu]
    variables: dict[str, str]


def this_machine() -> Machine:
    """What this machine is."""
    memory = _meminfo()
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=_cpuinfo("model name") or platform.processor() or platform.machine(),
        features=[name for name in FEATURES if name in _flags()],
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=memory.get("MemTotal") or _physical(),
        available=memory.get("MemAvailable"),
        limit=_container_limit(),
        gpus=_gpus(),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def _cpuinfo(key: str) -> str:
    """The first value of a key of /proc/cpuinfo; "" where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")


def _flags() -> set[str]:
    return set((_cpuinfo("flags") or _cpuinfo("Features")).split())


def _meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes; empty elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _container_limit() -> int | None:
    """What a control group allows, of either version; None where it sets no limit."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < 1 << 60:  # version 1 writes a huge number for none
            return int(text)
    return None


def _gpus() -> list[Gpu]:
    """NVIDIA's cards, as nvidia-smi lists them; empty where it is not there or does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    asked = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run([tool, *asked], capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in done.stdout.splitlines():
        name, memory, driver = (part.strip() for part in [*line.rsplit(",", 2), "", ""][:3])
        if memory.isdecimal():
            found.append(Gpu(name=name, memory=int(memory) << 20, driver=driver))
    return found
