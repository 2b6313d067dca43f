"""Whether one more model fits into memory beside those that are loaded: what a system that kills does not say."""

from __future__ import annotations

from pathlib import Path

from serve.models.source import Source
from serve.models.weights import float_elements, gguf_elements, other_bytes

_MARGIN = 1.25  # of a load: reading holds some tensors twice
_CGROUP = Path("/sys/fs/cgroup")


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


def available(device: str) -> int | None:
    """Bytes that are free on the device, None where that is not known."""
    if device != "cpu":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    found = [free for free in (_machine(), _container()) if free is not None]
    return min(found, default=None)


def _machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _container(folder: Path = _CGROUP) -> int | None:
    """What the control group leaves (version 2); its cache of files can be given up."""
    try:
        limit = int((folder / "memory.max").read_text())  # "max" = no limit
        used = int((folder / "memory.current").read_text())
        facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit - used + int(facts.get("inactive_file", 0))
    except (OSError, ValueError):
        return None
