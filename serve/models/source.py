"""From what the user wrote to files on disk: a checkpoint folder, a GGUF file, a hub id or the demo."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from serve.errors import LoadFailed
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
    """Where a model's files are: `path` is a checkpoint folder, or a GGUF file where `gguf`."""

    name: str
    path: Path
    gguf: bool

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The files that hold the weights and the configuration that shapes them."""
        if self.gguf:
            return (self.path,)
        return (self.path / "config.json", *_weights(self.path))


def resolve(source: str, revision: str | None = None) -> Source:
    """Find the files of a source. revision: branch, tag or commit of a hub id.

    Raises LoadFailed with one sentence that says what to give instead.
    """
    try:
        return _resolved(source, revision)
    except PermissionError as error:
        raise LoadFailed(f"'{source}' cannot be read ({error.strerror}): check its permissions") from error


def _resolved(source: str, revision: str | None) -> Source:
    local = source == "demo" or Path(source).expanduser().exists()
    if local and revision is not None:
        raise LoadFailed(f"--revision is for models of the hub, and '{source}' is here: leave it out")
    if source == "demo":
        return Source(source, demo_path(), gguf=True)
    path = Path(source).expanduser()
    if path.is_dir():
        _check_folder(source, path)
        return Source(source, path, gguf=False)
    if path.is_file():
        _check_gguf(source, path)
        return Source(source, path, gguf=True)
    if source.startswith((".", "/", "~")) or source.endswith(".gguf") or not HUB_ID.fullmatch(source):
        raise LoadFailed(f"'{source}' does not exist: give a checkpoint folder, a .gguf file or a hub id (org/name)")
    folder = _cached(source, revision) or _download(source, revision)
    _check_folder(source, folder)
    return Source(source, folder, gguf=False)


def _check_folder(source: str, folder: Path) -> None:
    if (folder / "adapter_config.json").exists():
        raise LoadFailed(f"'{source}' is an adapter: merge it into its base model first and give the merged folder")
    if not (folder / "config.json").exists():
        raise LoadFailed(f"'{source}' has no config.json: give a folder that save_pretrained wrote, or a .gguf file")
    if not _weights(folder):
        raise LoadFailed(f"'{source}' has a config.json but no weights (*.safetensors or *.bin): copy them there")


def _check_gguf(source: str, path: Path) -> None:
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise LoadFailed(f"'{source}' is a file but not GGUF: give a checkpoint folder or a .gguf file")
    if SPLIT_GGUF.search(path.name):
        raise LoadFailed(f"'{source}' is one part of a split GGUF: join it with llama-gguf-split --merge first")


def _weights(folder: Path) -> tuple[Path, ...]:
    """The weight files that a load reads: safetensors where there are any, else PyTorch's own."""
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


def _download(repo: str, revision: str | None) -> Path:
    """Fetch configuration, tokenizer and weights; one quick question first, so that no network fails fast."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        listing = HfApi().model_info(repo, revision=revision, timeout=HUB_TIMEOUT).siblings or []
        files = _needed([str(sibling.rfilename) for sibling in listing])
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
