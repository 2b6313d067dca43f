"""What memory there is: what is free here, a size that a user writes, and whether one more model fits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from serve.errors import LoadFailed
from serve.models.source import Source
from serve.models.weights import float_elements, gguf_elements, other_bytes

_MARGIN = 1.25  # of a load: reading holds some tensors twice
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60  # version 1 writes "no limit" as the largest number of pages
SEVERAL = "several"  # the name, here, of all CUDA devices as one
_FOR_WEIGHTS = 0.8  # of a device's free memory
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?B)?|(B)|(%))?", re.IGNORECASE)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


def size_of(text: str, *, free: int | None) -> int:
    """Bytes that a user means by `8GiB` or `8G` (2**30 each), `8GB` (10**9), `500M`, plain bytes, or `80%` of `free`.

    Raises LoadFailed for anything else, and for a share of what is not known.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise LoadFailed(f"'{text}' is not a size: write 8GiB, 500MiB, 8GB or 80%")
    number, unit, suffix, _, share = found.groups()
    if share:
        if free is None:
            raise LoadFailed(f"how much memory is free is not known here, so '{text}' is no size: write 8GiB")
        if not 0 < float(number) <= 100:
            raise LoadFailed(f"'{text}' is not a share of what is free: write 1% to 100%")
        return int(float(number) / 100 * free)
    base = 1000 if (suffix or "").upper() == "B" else 1024
    size = int(float(number) * base ** _POWERS.get((unit or "").upper(), 0))
    if size < 1:
        raise LoadFailed(f"'{text}' leaves no memory: write 8GiB, 500MiB, 8GB or 80%")
    return size


def shown(size: int) -> str:
    """A number of bytes as people read it: `1.5 GiB`, `350 MiB`."""
    if size >= 1 << 30:
        return f"{size / (1 << 30):.1f} GiB"
    return f"{-(-size // (1 << 20))} MiB" if size >= 10 << 20 else f"{-(-size // (1 << 10))} KiB"


def needed(source: Source, conversions: list[str | None], *, device: str) -> int:
    """Bytes that reading a source and its conversions will take, estimated from the headers of its files.

    0 where they cannot be read: the load then finds out.
    """
    cpu = device == "cpu"
    try:
        if source.gguf:
            elements = gguf_elements(source.path)
            read = 4 * elements  # dequantized to float32 on every device
        else:
            files = source.weight_files[1:]
            elements = float_elements(files)
            read = (4 if cpu else 2) * elements + other_bytes(files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0
    made = sum((2 if name in ("bf16", "f16") else 4) * elements for name in conversions if name is not None)
    return int(_MARGIN * (read + made))


def each_device() -> dict[int, int]:
    """Bytes that are free on each CUDA device, by its number."""
    import torch

    return {number: int(torch.cuda.mem_get_info(number)[0]) for number in range(torch.cuda.device_count())}


def device_map(free: dict[int, int]) -> dict[str, Any]:
    """How transformers is to place one model on several devices: its settings, with what each device may hold.

    A share of each stays free for keys and values, activations and logits. Layers are never split.
    """
    return {"device_map": "auto", "max_memory": {number: int(_FOR_WEIGHTS * size) for number, size in free.items()}}


def check_placed(places: Mapping[str, Any], *, name: str) -> None:
    """Raise LoadFailed where a part of a model was left on the disk or in the memory of the processor."""
    left = sorted({str(place) for place in places.values()} & {"disk", "cpu"})
    if left:
        raise LoadFailed(
            f"'{name}' does not fit on the CUDA devices together (a part would be on {' and '.join(left)}): give "
            f"--memory "
            "to stream its weights"
        )


def available(device: str) -> int | None:
    """Bytes that are free on the device, or on all CUDA devices (SEVERAL); None where that is not known."""
    if device == SEVERAL:
        return sum(each_device().values())
    if device != "cpu":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return min([free for free in (_machine(), *_containers()) if free is not None], default=None)


def _machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _containers(root: Path = _CGROUP, own: Path = _OWN_CGROUPS) -> list[int]:
    """What each control group around this process leaves, of both versions: the strictest of them holds."""
    return [
        free
        for folder in _groups(root, own)
        for free in (_container(folder), _container_v1(folder))
        if free is not None
    ]


def _groups(root: Path, own: Path) -> Iterator[Path]:
    """The folders of this process's control groups and of all above them. Inside a container the last is all there
    is."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    tops = [(root, "")]
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            tops.append((root, path))
        elif "memory" in controllers.split(","):
            tops.append((root / "memory", path))
    seen: set[Path] = set()
    for top, path in tops:
        folder = top / path.strip("/")
        for each in (folder, *folder.parents):
            if each not in seen and (each == top or top in each.parents):
                seen.add(each)
                yield each


def _container(folder: Path = _CGROUP) -> int | None:
    """What the control group leaves (version 2); its cache of files can be given up."""
    try:
        limit = int((folder / "memory.max").read_text())  # "max" = no limit
        used = int((folder / "memory.current").read_text())
        facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit - used + int(facts.get("inactive_file", 0))
    except (OSError, ValueError):
        return None


def _container_v1(folder: Path) -> int | None:
    """The same for version 1."""
    try:
        limit = int((folder / "memory.limit_in_bytes").read_text())
        used = int((folder / "memory.usage_in_bytes").read_text())
        facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return None if limit >= _NO_LIMIT else limit - used + int(facts.get("total_inactive_file", 0))
    except (OSError, ValueError):
        return None
