"""From what the user wrote to files on disk: a checkpoint folder, a GGUF file, a hub id or the demo."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from serve.config import Reading
from serve.errors import LoadFailed
from serve.models import adapter, readers
from serve.models.demo import demo_path

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
HUB_TIMEOUT = 10.0  # seconds
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
SIDE_FILES = (".json", ".txt", ".model", ".jinja")


@dataclass(frozen=True)
class Source:
    """Where a model's files are: `path` is a checkpoint folder, or a GGUF file where `gguf`. adapter: a LoRA folder."""

    name: str
    path: Path
    gguf: bool
    adapter: Path | None = None

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The files that hold the weights and the configuration that shapes them."""
        beside = () if self.adapter is None else (self.adapter / adapter.CONFIG, *_adapter_weights(self.adapter))
        if self.gguf:
            return (self.path, *beside)
        return (self.path / "config.json", *_weights(self.path), *beside)

    @property
    def tensor_files(self) -> tuple[Path, ...]:
        """Those of them that hold tensors."""
        return tuple(path for path in self.weight_files if path.suffix != ".json")


def resolve(source: str, reading: Reading | None = None) -> Source:
    """Find the files of a source.

    Raises LoadFailed with one sentence that says what to give instead, also for pickled weights that are not allowed.
    """
    try:
        return _resolved(source, reading or Reading())
    except PermissionError as error:
        raise LoadFailed(f"'{source}' cannot be read ({error.strerror}): check its permissions") from error


def _resolved(source: str, reading: Reading) -> Source:
    local = source == "demo" or Path(source).expanduser().exists()
    if not local and "+" in source.strip("+"):
        return _with_adapter(source, *_split(source), reading)
    if local and reading.revision is not None:
        raise LoadFailed(f"--revision is for models of the hub, and '{source}' is here: leave it out")
    if source == "demo":
        return Source(source, demo_path(), gguf=True)
    path = Path(source).expanduser()
    if path.is_dir():
        _check_folder(source, path, reading)
        return Source(source, path, gguf=False)
    if path.is_file():
        _check_gguf(source, path)
        return Source(source, path, gguf=True)
    if source.startswith((".", "/", "~")) or source.endswith(".gguf") or not HUB_ID.fullmatch(source):
        raise LoadFailed(f"'{source}' does not exist: give a checkpoint folder, a .gguf file or a hub id (org/name)")
    folder = _cached(source, reading.revision) or _download(source, reading)
    _check_folder(source, folder, reading)
    return Source(source, folder, gguf=False)


def _split(source: str) -> tuple[str, str]:
    """Base and adapter of BASE+ADAPTER; where names have a + of their own, what is here decides, else the last +."""
    cuts = [i for i, letter in enumerate(source) if letter == "+" and 0 < i < len(source) - 1]
    splits = [(source[:i], source[i + 1 :]) for i in reversed(cuts)]
    here = (pair for pair in splits if all(name == "demo" or Path(name).expanduser().exists() for name in pair))
    return next(here, splits[0])


def _with_adapter(source: str, base: str, beside: str, reading: Reading) -> Source:
    """BASE+ADAPTER: the adapter is a folder here, or a hub id. A revision is the base's."""
    folder = Path(beside).expanduser()
    if not folder.is_dir():
        if beside.startswith((".", "/", "~")) or not HUB_ID.fullmatch(beside):
            raise LoadFailed(f"'{beside}' does not exist: after + stands the folder or hub id of a LoRA adapter")
        folder = _snapshot(beside, [adapter.CONFIG, "adapter_model.*"])
    adapter.check_folder(folder, allow_pickle=reading.allow_pickle)
    under = _resolved(base, reading)
    return Source(source, under.path, under.gguf, folder)


def _adapter_weights(folder: Path) -> tuple[Path, ...]:
    safe = folder / adapter.WEIGHTS
    return (safe,) if safe.exists() else (folder / "adapter_model.bin",)


def _check_folder(source: str, folder: Path, reading: Reading) -> None:
    if (folder / adapter.CONFIG).exists():
        raise LoadFailed(f"'{source}' is an adapter: write BASE+{source}, with the model that it was trained on")
    if not (folder / "config.json").exists():
        raise LoadFailed(f"'{source}' has no config.json: give a folder that save_pretrained wrote, or a .gguf file")
    files = _weights(folder)
    if not files:
        raise LoadFailed(f"'{source}' has a config.json but no weights (*.safetensors or *.bin): copy them there")
    absent = next((path for path in files if not path.exists()), None)
    if absent is not None:
        raise LoadFailed(f"'{source}' lacks the part {absent.name} that its index names: copy the checkpoint again")
    pickled = next((path for path in files if path.suffix not in (".safetensors", ".gguf")), None)
    if pickled is not None and not reading.allow_pickle:
        raise LoadFailed(
            f"'{source}' has pickled weights ({pickled.name}), and reading them can run code: convert them to "
            "safetensors, or pass --allow-pickle if you trust where they come from"
        )


def _check_gguf(source: str, path: Path) -> None:
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise LoadFailed(f"'{source}' is a file but not GGUF: give a checkpoint folder or a .gguf file")
    if SPLIT_GGUF.search(path.name):
        raise LoadFailed(f"'{source}' is one part of a split GGUF: join it with llama-gguf-split --merge first")


def _weights(folder: Path) -> tuple[Path, ...]:
    """The weight files that a load reads: safetensors where there are any, else PyTorch's own."""
    reader = readers.find(folder)
    if reader is not None:
        return (folder / reader.weights,)
    for index, single in (
        ("model.safetensors.index.json", "model.safetensors"),
        ("pytorch_model.bin.index.json", "pytorch_model.bin"),
    ):
        if (folder / single).exists():
            return (folder / single,)
        if (folder / index).exists():
            return tuple(folder / name for name in _shards(folder / index))
    return tuple(sorted(folder.glob("*.safetensors")))


def _shards(index: Path) -> list[str]:
    try:
        shards = sorted(set(map(str, json.loads(index.read_text())["weight_map"].values())))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadFailed(f"'{index}' is not a weight index: copy the checkpoint again") from error
    for shard in shards:
        if Path(shard).is_absolute() or ".." in Path(shard).parts:
            raise LoadFailed(f"'{index}' names a file outside its folder ({shard}): do not use this checkpoint")
    return shards


def _cached(repo: str, revision: str | None) -> Path | None:
    """The repository's snapshot in the Hugging Face cache, where it is complete; no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise LoadFailed(f"'{repo}' is neither a folder here nor a hub id (org/name): check the name") from error
    if not (folder / "config.json").exists():
        return None
    weights = _weights(folder)
    tokenizer = any((folder / name).exists() for name in TOKENIZER_FILES)
    return folder if weights and tokenizer and all(path.exists() for path in weights) else None


def _download(repo: str, reading: Reading) -> Path:
    """Fetch configuration, tokenizer and weights; one quick question first, so that no network fails fast."""
    return _snapshot(repo, None, reading)


def _snapshot(repo: str, patterns: list[str] | None, reading: Reading | None = None) -> Path:
    """Fetch the files of a repository that match, None = those that a load reads."""
    reading = reading or Reading()
    revision = reading.revision
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        listing = HfApi().model_info(repo, revision=revision, timeout=HUB_TIMEOUT).siblings or []
        listed = [str(sibling.rfilename) for sibling in listing]
        files = patterns if patterns is not None else _needed(listed)
        if reading.trust_remote_code:
            files = [*files, *(name for name in listed if "/" not in name and name.endswith(".py"))]
        return Path(snapshot_download(repo, revision=revision, allow_patterns=files))
    except GatedRepoError as error:
        raise LoadFailed(f"'{repo}' is gated: accept its terms on the hub and log in with `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise LoadFailed(
            f"'{repo}' has no revision '{revision}' on the hub: check the branch, tag or commit"
        ) from error
    except RepositoryNotFoundError as error:
        raise LoadFailed(
            f"'{repo}' is neither a folder here nor a model on the hub: check the name, or log in where it is private"
        ) from error
    except Exception as error:
        raise LoadFailed(
            f"'{repo}' is neither a folder here nor in the Hugging Face cache, and the hub cannot be reached "
            f"({type(error).__name__}): download it first or give a folder"
        ) from error


def _needed(files: list[str]) -> list[str]:
    """Top-level files of a repository that a load reads."""
    top = [name for name in files if "/" not in name]
    safetensors = [name for name in top if name.endswith(".safetensors") and not name.startswith("consolidated")]
    weights = safetensors or [name for name in top if name.endswith(".bin")]
    return [name for name in top if name.endswith(SIDE_FILES)] + weights
