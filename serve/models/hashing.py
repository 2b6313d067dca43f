"""Content hashes (xxh3-128, hex) of weights and tokenizers: two names with one content are one model."""

from __future__ import annotations

import json
import mmap
import os
import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from serve.models.checks import plain_tensors
from serve.models.notes import read_note, write_note

if TYPE_CHECKING:
    import torch

CHUNK = 16 << 20  # bytes
_FILLER = re.compile(r"\[PAD\d+\]")
SETTLED = 2.0  # seconds: a file younger than this may change again within one clock tick


def hash_file(path: Path) -> str:
    """Hash of a file's bytes, read at disk speed."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as stream:
        if not stream.seek(0, os.SEEK_END):
            return digest.hexdigest()
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view, memoryview(view) as content:
            for start in range(0, len(content), CHUNK):
                digest.update(content[start : start + CHUNK])
    return digest.hexdigest()


def cached_file_hash(path: Path, *, cache: Path) -> str:
    """`hash_file`, remembered under `cache`/hashes for as long as the file is the same.

    That is: path, device and inode, size, and both times. Size and mtime alone are not enough: image layers, Nix, Bazel
    and `rsync --times` give a replaced file its old time. The time of the last change to the inode cannot be set.
    """
    path = path.resolve()
    status = path.stat()
    facts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    key = "\0".join(map(str, (path, *facts)))
    note = cache / "hashes" / f"{combine([key])}.json"
    known = read_note(note, key)
    if isinstance(known, str):
        return known
    digest = hash_file(path)
    if time.time() - max(status.st_mtime, status.st_ctime) > SETTLED:
        write_note(note, key, digest)
    return digest


def hash_files(paths: Sequence[Path], *, cache: Path) -> str:
    """Hash over the names and contents of the given files, in the order of their names."""
    ordered = sorted(paths, key=lambda path: path.name)
    with ThreadPoolExecutor(max_workers=4) as pool:
        digests = list(pool.map(lambda path: cached_file_hash(path, cache=cache), ordered))
    return combine(f"{path.name}={digest}" for path, digest in zip(ordered, digests, strict=True))


def hash_state(model: torch.nn.Module) -> str:
    """Hash over a model's state dict: names, dtypes, shapes and bytes, sorted by name."""
    import torch

    digest = xxhash.xxh3_128()
    for name, tensor in (plain for entry in sorted(model.state_dict().items()) for plain in plain_tensors(*entry)):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def vocabulary_hash(tokenizer: Any, *, rows: int | None = None) -> str:
    """Hash of id -> token (added tokens included) for a model's `rows` ids, or all: equal where ids mean the same.

    Left out is what no model gives and a conversion adds: ids beyond the model's rows, and names like [PAD128], which
    llama.cpp's converter gives to ids that have no token. So a checkpoint and its GGUF file are one vocabulary.
    """
    named = ((index, token) for token, index in tokenizer.get_vocab().items() if rows is None or index < rows)
    entries = sorted(entry for entry in named if not _FILLER.fullmatch(entry[1]))
    return combine([json.dumps(entries)])


def tokenizer_hash(tokenizer: Any, *, vocabulary: str = "") -> str:
    """Hash of all that makes text into ids: the vocabulary, the model's merges or scores, the added tokens' flags, the
    normalizer, the pre-tokenizer and the post-processor.

    Names, paths and versions do not enter. Tokenizers of other hashes may still give the same ids, as a GGUF file's and
    its checkpoint's do. `vocabulary`: its `vocabulary_hash`, where already known.
    """
    added = sorted(tokenizer.added_tokens_decoder.items())
    flags = [
        f"{index}\0{token.content}\0{token.special}{token.lstrip}{token.rstrip}{token.single_word}{token.normalized}"
        for index, token in added
    ]
    if tokenizer.is_fast:
        backend = tokenizer.backend_tokenizer
        parts = (backend.normalizer, backend.pre_tokenizer, backend.model, backend.post_processor)
        rules = [_state(part) for part in parts]
    else:
        rules = [type(tokenizer).__name__]
    return combine([vocabulary or vocabulary_hash(tokenizer), *flags, *rules])


def combine(parts: Iterable[str]) -> str:
    """Hash of a sequence of texts; no two different sequences share their bytes."""
    digest = xxhash.xxh3_128()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def _state(part: Any) -> str:
    """The JSON that the tokenizers library pickles a part of a tokenizer to; "" for none."""
    return "" if part is None else bytes(part.__getstate__()).decode()
