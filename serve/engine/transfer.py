"""Arrays on their way between the host and a model's device: no waiting to go there, one wait to come back.

A plain copy from a device waits until everything queued there has run, and so does a plain copy to it. A step that
copies values one by one keeps the device idle between them. So everything that a step needs on the device goes there
without waiting (`upload`), and everything that it gives comes back at its end in one copy (`Download`).

On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]
_ALIGN = 8  # bytes: arrays that travel together begin at multiples of it, so that each can be read in its own type


def upload(device: torch.device, *arrays: Array) -> tuple[torch.Tensor, ...]:
    """The arrays as tensors on the device, in one copy that nobody waits for. They are not to be changed afterwards."""
    given = [np.ascontiguousarray(array) for array in arrays]
    hosts = [torch.from_numpy(array) for array in given]
    if device.type == "cpu":
        return tuple(hosts)
    flat = [torch.from_numpy(array.reshape(-1).view(np.uint8)) for array in given]
    starts = [0]
    for part in flat:
        starts.append(starts[-1] + -(-part.shape[0] // _ALIGN) * _ALIGN)
    pinned = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda" and torch.cuda.is_available())
    for part, start in zip(flat, starts, strict=False):
        pinned[start : start + part.shape[0]] = part
    there = pinned.to(device, non_blocking=True)
    return tuple(
        there[low : low + part.shape[0]].view(host.dtype).view(host.shape)
        for host, part, (low, _) in zip(hosts, flat, pairwise(starts), strict=True)
    )


class Download:
    """Tensors of one device that come to the host together.

    >>> download = Download()
    >>> lse = download.add(torch.zeros(2, dtype=torch.float64))
    >>> download.fetch()[lse]
    array([0., 0.])
    """

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self.bytes = 0

    def add(self, tensor: torch.Tensor) -> int:
        """Take a tensor along; returns its place in what `fetch` gives. It is not to be changed until then."""
        self._parts.append(tensor)
        self.bytes += tensor.numel() * tensor.element_size()
        return len(self._parts) - 1

    def fetch(self) -> Sequence[Array]:
        """All tensors as arrays, in the order added: the one wait for the device. Starts anew."""
        parts, self._parts, self.bytes = self._parts, [], 0
        if not parts or parts[0].device.type == "cpu":
            return [part.numpy() for part in parts]
        flat = [part.contiguous().reshape(-1).view(torch.uint8) for part in parts]
        host = torch.cat(flat).cpu().numpy()
        found, at = [], 0
        for part, piece in zip(parts, flat, strict=True):
            dtype = torch.empty(0, dtype=part.dtype).numpy().dtype
            # a copy begins where its own type may begin, which a place among the others need not
            found.append(host[at : at + piece.shape[0]].copy().view(dtype).reshape(tuple(part.shape)))
            at += piece.shape[0]
        return found
