"""Tiny checkpoints on disk, for tests that start a real server."""

from __future__ import annotations

import copy
from pathlib import Path

from tests.serve.architectures import built, perturbed
from tests.serve.tiny_models import byte_level, save

TEXTS = {
    "prose/fox.txt": "The quick brown fox jumps over the lazy dog. " * 6,
    "prose/wörld.txt": "Hello wörld, 日本語 and 🙂 too. " * 5,
    "code/add.py.txt": "def add(a, b):\n    return a + b\n" * 6,
    "code/loop.txt": "for i in range(10):\n    print(i)\n" * 6,
}


def pair(folder: Path) -> tuple[str, str]:
    """A reference and a candidate that differs a little, saved with one tokenizer."""
    ref = save(copy.deepcopy(built("llama")), folder / "ref", byte_level(bos=True))
    cand = save(perturbed(built("llama")), folder / "cand", byte_level(bos=True))
    return str(ref), str(cand)


def texts(folder: Path) -> str:
    """A folder of short documents in two domains."""
    for name, text in TEXTS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return str(folder)
