"""`python -m serve.llamacpp GGUF`: a real llama.cpp server (from the `xllamacpp` wheel) as somebody's child.

Speaks the same announcements as `python -m serve` and ends when its standard input closes. One slot: a window's
growing prefixes then always meet their own cache. `demo` names the demo model's GGUF file.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from serve.errors import LoadFailed

BAD_START = 2


def main(argv: list[str] | None = None) -> int:
    """Run the server until standard input ends; returns 2 when it could not start."""
    options = _parser().parse_args(argv)
    with os.fdopen(options.announce_fd, "w", buffering=1) as announce:
        try:
            server = _start(options, announce)
            port = urlsplit(server.listening_address).port
        except LoadFailed as error:
            _tell(announce, {"error": error.message})
            return BAD_START
        _tell(announce, {"weights": _weights(options.model)})
        _tell(announce, {"port": port})
    while os.read(0, 4096):
        pass
    os._exit(0)  # llama.cpp's own threads do not end by themselves


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m serve.llamacpp", description="A llama.cpp server.")
    parser.add_argument("model", metavar="GGUF", help="a GGUF file, or demo")
    parser.add_argument("--port", type=int, default=0, help="0 = a free port")
    parser.add_argument("--context", type=int, default=0, help="tokens; 0 = what the model was trained with")
    parser.add_argument("--threads", type=int, default=None, help="default: one per core")
    parser.add_argument("--gpu-layers", type=int, default=-1, help="-1 = all that fit")
    parser.add_argument("--api-key-env", required=True, help="environment variable that holds the key")
    parser.add_argument("--announce-fd", type=int, required=True, help="descriptor for the announcements")
    return parser


def _start(options: argparse.Namespace, announce: IO[str]) -> Any:
    path = _path(options.model)
    if not os.path.isfile(path):  # noqa: PTH113
        raise LoadFailed(f"there is no file {path}: llama.cpp loads a GGUF file")
    try:
        import xllamacpp
    except ImportError as error:
        raise LoadFailed("llama.cpp is not installed: pip install 'evalgate-lm[gguf]'") from error
    _tell(announce, {"stage": f"loading {options.model} with llama.cpp ({xllamacpp.__name__})"})
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.model_alias = [options.model]
    params.hostnames = ["127.0.0.1"]
    params.port = options.port
    params.n_ctx = options.context
    params.n_parallel = 1
    params.swa_full = True  # a sliding-window cache forgets what a shorter prefix would need
    params.n_gpu_layers = options.gpu_layers
    params.warmup = False
    params.ui = False
    if options.threads is not None:
        params.cpuparams.n_threads = options.threads
        params.cpuparams_batch.n_threads = options.threads
    key = os.environ.pop(options.api_key_env, "")
    params.api_keys = [key] if key else []
    try:
        return xllamacpp.Server(params)
    except RuntimeError as error:
        raise LoadFailed(f"llama.cpp cannot load {options.model} ({error}): is it a GGUF file it knows?") from error


def _weights(model: str) -> dict[str, Any] | None:
    """How large the file's weights are; None where that is not known. Its tensors are its parameters."""
    from serve.models.weights import gguf_elements, of_files

    path = Path(_path(model))
    try:
        found = of_files([path], parameters=gguf_elements(path))
    except (OSError, ValueError):
        return None
    return None if found is None else found.document()


def _path(model: str) -> str:
    return _demo_path() if model == "demo" else model


def _demo_path() -> str:
    try:
        from serve.models.demo import demo_path
    except ModuleNotFoundError as error:  # what puts the demo together comes with the server
        raise LoadFailed(f"the demo model needs {error.name}: pip install 'evalgate-lm[demo]'") from error
    return str(demo_path())


def _tell(announce: IO[str], message: dict[str, object]) -> None:
    print(json.dumps(message), file=announce, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
