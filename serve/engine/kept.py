"""Hidden rows of models, kept on disk by content, so that the next run over the same text needs no body.

    hidden/KEY/about.json     what the model is, without loading it; KEY is a hash of all that its rows' bits depend on
    hidden/KEY/BATCH.rows     the rows of one batch of windows; BATCH is a hash of their ids and scored positions
    heads/SHA256.safetensors  output heads (serve.models.headfile)

A file of rows is a line of JSON (dtype, shape, digest) and their bytes, split by byte and compressed. Every file is
written beside and renamed; one that is cut, altered or not ours is removed and made again. Together they stay below a
limit: what was used longest ago goes first, and never what this process has used.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import xxhash

from serve.config import EngineConfig, ModelSpec
from serve.engine.head import Head
from serve.engine.pair import ScoreWindow
from serve.engine.remembered import circumstances
from serve.engine.runtime import HeadRuntime, ModelRuntime
from serve.engine.stored import DTYPES, head_written
from serve.errors import LoadFailed, ServeError
from serve.models import gguf, hashing
from serve.models.cache import cache_root
from serve.models.headfile import read_head
from serve.models.layers import LayerKind
from serve.models.load import LoadedModel, found_device, load_models
from serve.models.quiet import quiet
from serve.models.source import resolve
from serve.models.tokenizerfiles import load_tokenizer, template_hash, tokenizer_hashes
from serve.models.weights import Weights

FORMAT = 1
ABOUT, ROWS, HEADS = "about.json", ".rows", "heads"
SCRATCH = (".evalgate.", ".tmp")
ABANDONED = 3600.0  # seconds: scratch that is older was left by a process that was killed
_LEVEL = 1  # of zstd: more saves nothing
_FACTS = (
    *("context_length", "weights_hash", "tokenizer_hash", "vocabulary_hash", "dtype", "compute_dtype"),
    *("load_mode", "scheme", "vocab_size", "compute_reason", "template_hash"),
)


@dataclass
class Store:
    """The folder of all kept rows and heads. limit: bytes of them together."""

    root: Path
    limit: int
    began: float = field(default_factory=time.time)
    _total: int | None = None  # bytes, as far as this process knows

    @property
    def reached(self) -> str:
        """Why nothing more is kept."""
        return f"its limit of {self.limit:,} bytes is reached"

    def room(self, size: int) -> bool:
        """Take a place for a new file of that size; False where there is none.

        What was used longest ago is removed for it, but nothing that was used since this process began.
        """
        if size > self.limit:
            return False
        if self._total is None or self._total + size > self.limit:
            self._total = self._made_room(size)
        if self._total + size > self.limit:
            return False
        self._total += size
        return True

    def _made_room(self, size: int) -> int:
        """Bytes of all files that are left."""
        tidy(self.root)
        files = sorted(_files(self.root), key=lambda each: each[1])
        total = sum(own for _, _, own in files)
        for path, used, own in files:
            if total + size <= self.limit or used >= self.began:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                total -= own
        tidy(self.root)
        return total


class KeptRows:
    """The rows of one model: see `serve.engine.pair.KnownRows`.

    found, kept, rebuilt: batches that were read, written, and not believed. problem: why nothing more is kept.
    """

    def __init__(self, store: Store, key: str, spec: ModelSpec) -> None:
        self.store, self.key, self.spec = store, key, spec
        self.folder = store.root / "hidden" / key
        self.found = self.kept = self.rebuilt = 0
        self.problem = ""
        self.model: ModelRuntime | None = None  # with its body, where that is loaded
        self._introduced = False

    def find(self, windows: Sequence[ScoreWindow], first: int) -> torch.Tensor | None:
        """The rows of a batch, where they are kept and whole."""
        path = self._path(windows)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        rows = _rows(content, sum(len(window.positions) for window in windows))
        if rows is None:
            self.rebuilt += 1
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        self.found += 1
        with contextlib.suppress(OSError):
            os.utime(path)
        return rows

    def keep(self, windows: Sequence[ScoreWindow], rows: torch.Tensor) -> None:
        """Write the rows of a batch; a disk that refuses costs the next run time, and this one nothing."""
        if self.problem or self.model is None:
            return
        content = _content(rows)
        try:
            if not self._introduced:
                if not self._known():
                    self._introduce(self.model)
                self._introduced = True
            if not self.store.room(len(content)):
                self.problem = self.store.reached
                return
            _write(self._path(windows), content)
            self.kept += 1
        except (OSError, ServeError) as error:
            self.problem = error.message if isinstance(error, ServeError) else str(error.strerror or error)

    def facts(self) -> dict[str, Any]:
        """What happened, as /v1/models shows it."""
        return {"found": self.found, "kept": self.kept, "rebuilt": self.rebuilt, "problem": self.problem}

    def _path(self, windows: Sequence[ScoreWindow]) -> Path:
        return self.folder / f"{batch_key(windows)}{ROWS}"

    def _known(self) -> bool:
        """Whether the model and its head are there already, as another run left them."""
        try:
            about = json.loads((self.folder / ABOUT).read_bytes())
            return (self.store.root / HEADS / f"{about['head']}.safetensors").is_file()
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _introduce(self, model: ModelRuntime) -> None:
        """Write the head, and what a later process must know to do without the body."""
        weight = model.loaded.model.get_output_embeddings().weight
        if not self.store.room(weight.numel() * weight.element_size()):
            raise LoadFailed(self.store.reached)
        head, digest = head_written(model, self.store.root / HEADS)
        loaded = model.loaded
        about = {
            "format": FORMAT,
            "key": self.key,
            "spec": str(self.spec),
            "head": digest,
            "head_xxh3": hashing.cached_file_hash(head, cache=self.store.root),
            "facts": {name: getattr(loaded, name) for name in _FACTS},
            "weights": None if loaded.weights is None else loaded.weights.document(),
            "layers": [kind.document() for kind in loaded.layers],
            "backend": model.backend,
            "deviation": model.deviation,
            "kl_floor": model.kl_floor,
        }
        _write(self.folder / ABOUT, json.dumps(about, sort_keys=True).encode())


class StoredModel(HeadRuntime):
    """A model whose body is loaded only where rows are wanted that are not kept. Lives on the engine's thread."""

    def __init__(self, rows: KeptRows, loaded: LoadedModel, about: dict[str, Any], config: EngineConfig) -> None:
        super().__init__(loaded, Head(loaded.model), config)
        self.rows = rows
        self.backend = str(about["backend"])
        self.deviation, self.kl_floor = float(about["deviation"]), float(about["kl_floor"])
        self._runtime: ModelRuntime | None = None
        self._kv_memory = config.kv_memory

    def runs(self) -> ModelRuntime:
        """The model with its body, loaded now where it is not yet. Raises LoadFailed."""
        if self._runtime is None:
            device = str(self.device)
            (loaded,) = load_models([self.rows.spec], device=device, max_model_len=self.config.max_model_len)
            if loaded.weights_hash != self.loaded.weights_hash:
                raise LoadFailed(f"{self.name} has changed since this server was started: run the command again")
            self._runtime = ModelRuntime(loaded, self.config, kv_memory=self._kv_memory)
            self.rows.model = self._runtime
        return self._runtime


def rows_of(model: HeadRuntime, store: Store, spec: ModelSpec) -> KeptRows | None:
    """Where the rows of a resident model are kept; None where its head is its own code, or its files have changed."""
    if isinstance(model, StoredModel):
        return model.rows
    if not isinstance(model, ModelRuntime) or not isinstance(model.head, Head) or model.streamed is not None:
        return None
    key, digest = model_key(spec, model.config)
    if digest != model.loaded.weights_hash:
        return None
    rows = KeptRows(store, key, spec)
    rows.model = model
    return rows


def stored_model(spec: ModelSpec, config: EngineConfig, store: Store) -> StoredModel | None:
    """The model of a spec without its body, where rows of it are kept; None where it has to be loaded whole.

    Raises LoadFailed where there is no such model.
    """
    if config.logits == "model":
        return None
    key, digest = model_key(spec, config)
    rows = KeptRows(store, key, spec)
    try:
        about = json.loads((rows.folder / ABOUT).read_bytes())
        head = store.root / HEADS / f"{about['head']}.safetensors"
        facts = about["facts"]
        same = about["format"] == FORMAT and about["key"] == key and facts["weights_hash"] == digest
        if not same or not any(rows.folder.glob(f"*{ROWS}")):
            return None
        if hashing.cached_file_hash(head, cache=store.root) != about["head_xxh3"]:
            raise ValueError
        with quiet(), torch.no_grad():
            model = read_head(head, device=found_device(config.device))
            tokenizer = _tokenizer(spec)
        hashes = tokenizer_hashes(tokenizer, rows=facts["vocab_size"])
        tokens = (hashes.vocabulary, hashes.rules, template_hash(tokenizer))
        if tokens != (facts["vocabulary_hash"], facts["tokenizer_hash"], facts["template_hash"]):
            raise ValueError
        size = None if about["weights"] is None else Weights(**about["weights"])
        known = {name: facts[name] for name in _FACTS}
        kinds = tuple(LayerKind(**kind) for kind in about["layers"])
        loaded = LoadedModel(
            spec=spec, name=str(spec), model=model, tokenizer=tokenizer, weights=size, layers=kinds, **known
        )
        made = StoredModel(rows, loaded, about, config)
    except (OSError, ValueError, KeyError, TypeError, ServeError):  # none, or one that cannot be trusted
        shutil.rmtree(rows.folder, ignore_errors=True)
        return None
    for path in (rows.folder / ABOUT, head):
        with contextlib.suppress(OSError):
            os.utime(path)
    return made


def model_key(spec: ModelSpec, config: EngineConfig) -> tuple[str, str]:
    """A hash of all that the bits of a model's hidden rows depend on, but the text; and the hash of its weights.

    As `load_models` makes it of the files, without reading them again: they are hashed once (serve.models.hashing).
    """
    digest = hashing.hash_files(resolve(spec.source).weight_files, cache=cache_root())
    if spec.conversion:
        digest = hashing.combine([digest, str(spec.recipe())])
    device = torch.device(found_device(config.device))
    settings = [config.deterministic, config.max_batch_tokens, config.max_model_len]
    return hashing.combine([str(FORMAT), digest, json.dumps([*settings, circumstances(device)])]), digest


def batch_key(windows: Sequence[ScoreWindow]) -> str:
    """A hash of a batch: the ids and scored positions of its windows, in order."""
    digest = xxhash.xxh3_128()
    for window in windows:
        digest.update(np.array([len(window.ids), len(window.positions)], dtype=np.int64).tobytes())
        digest.update(np.array(window.ids, dtype=np.int32).tobytes())
        digest.update(np.array(window.positions, dtype=np.int32).tobytes())
    return digest.hexdigest()


def tidy(root: Path) -> None:
    """Remove the folders of models of which no rows are left, heads that none names, and abandoned scratch."""
    named = set()
    for folder in (root / "hidden").glob("*/"):
        fresh = time.time() - folder.stat().st_mtime < ABANDONED
        if not fresh and not any(folder.glob(f"*{ROWS}")):
            shutil.rmtree(folder, ignore_errors=True)
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            named.add(json.loads((folder / ABOUT).read_bytes())["head"])
        _sweep(folder)
    _sweep(root / HEADS)
    for head in (root / HEADS).glob("*.safetensors"):
        with contextlib.suppress(OSError):
            status = head.stat()
            # one with a second name belongs to a trace, and removing it here frees nothing
            if head.stem not in named and status.st_nlink == 1 and time.time() - status.st_mtime > ABANDONED:
                head.unlink()


def _tokenizer(spec: ModelSpec) -> Any:
    source = resolve(spec.source)
    return gguf.cached_tokenizer(source.path) if source.gguf else load_tokenizer(source.path)


def _files(root: Path) -> list[tuple[Path, float, int]]:
    """Every kept file, when it was last used, and its size. A head that a trace shares takes no room of its own."""
    found = []
    for path in [*(root / "hidden").glob(f"*/*{ROWS}"), *(root / HEADS).glob("*.safetensors")]:
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_nlink == 1:
                found.append((path, status.st_mtime, status.st_size))
    return found


def _sweep(folder: Path) -> None:
    for path in folder.glob(f"{SCRATCH[0]}*{SCRATCH[1]}"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - ABANDONED:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _write(path: Path, content: bytes) -> None:
    """A whole file or none. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=SCRATCH[0], suffix=SCRATCH[1], dir=path.parent)
    scratch = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _content(rows: torch.Tensor) -> bytes:
    """A file of rows [n, size]."""
    raw = rows.detach().cpu().contiguous()
    planes = raw.view(torch.uint8).numpy().reshape(-1, raw.element_size()).T
    packed = pa.Codec("zstd", compression_level=_LEVEL).compress(np.ascontiguousarray(planes).tobytes(), asbytes=True)
    head = {
        "dtype": str(rows.dtype).removeprefix("torch."),
        "shape": list(rows.shape),
        "xxh3": xxhash.xxh3_128_hexdigest(packed),
    }
    return json.dumps(head).encode() + b"\n" + bytes(packed)


def _rows(content: bytes, count: int) -> torch.Tensor | None:
    """The rows of a file; None where it was cut or altered, or holds another number of them."""
    try:
        line, packed = content.split(b"\n", 1)
        head = json.loads(line)
        dtype, (n, size) = DTYPES[head["dtype"]], head["shape"]
        if n != count or xxhash.xxh3_128_hexdigest(packed) != head["xxh3"]:
            return None
        each = torch.finfo(dtype).bits // 8
        planes = pa.Codec("zstd").decompress(packed, n * size * each, asbytes=True)
        raw = np.ascontiguousarray(np.frombuffer(planes, dtype=np.uint8).reshape(each, n * size).T)
        return torch.from_numpy(raw.reshape(n, size * each)).view(dtype)
    except (ValueError, KeyError, TypeError, RuntimeError, pa.ArrowException):
        return None
