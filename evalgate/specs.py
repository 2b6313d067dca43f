"""What a source spec names: a model for the embedded server, an endpoint, a llama.cpp server, or a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from evalgate.errors import UsageError

LLAMA_CPP = "llama.cpp:"
Kind = Literal["embedded", "endpoint", "llama.cpp", "trace"]


@dataclass(frozen=True)
class SourceSpec:
    """A parsed spec.

    spec: as the user wrote it. urls and model: of an endpoint ("" = the one model it serves); urls are roots without
    the trailing `/v1`, since dialects add their own paths. path: of a GGUF file or trace.
    """

    spec: str
    kind: Kind
    urls: tuple[str, ...] = ()
    model: str = ""
    path: str = ""

    def __str__(self) -> str:
        return self.spec

    @property
    def remote(self) -> bool:
        """Whether it is asked through a dialect."""
        return self.kind in ("endpoint", "llama.cpp")


def parse(spec: str) -> SourceSpec:
    """Read a spec as it stands on the command line.

    `http(s)://HOST/v1[#MODEL]`, several of them separated by commas share the work (one model name for all);
    `llama.cpp:FILE.gguf` or `llama.cpp:demo`; `FILE.trace`; everything else is loaded by the embedded server.
    Raises UsageError for a URL without a host or with a password, and for URLs that name different models.
    """
    if spec.startswith(("http://", "https://")):
        return _endpoint(spec)
    if spec.startswith(LLAMA_CPP):
        path = spec.removeprefix(LLAMA_CPP)
        if not path:
            raise UsageError(f"'{spec}' names no model: write {LLAMA_CPP}FILE.gguf or {LLAMA_CPP}demo")
        return SourceSpec(spec, "llama.cpp", path=path)
    if spec.endswith(".trace"):
        return SourceSpec(spec, "trace", path=spec)
    return SourceSpec(spec, "embedded")


def _endpoint(spec: str) -> SourceSpec:
    urls: list[str] = []
    models: set[str] = set()
    for part in spec.split(","):
        url, _, model = part.strip().partition("#")
        if model:
            models.add(model)
        urls.append(_root(url))
    if len(models) > 1:
        raise UsageError(f"'{spec}' names the models {', '.join(sorted(models))}: URLs of one source serve one model")
    if len(set(urls)) < len(urls):
        raise UsageError(f"'{spec}' names one URL twice: give each once")
    return SourceSpec(spec, "endpoint", urls=tuple(urls), model=next(iter(models), ""))


def _root(url: str) -> str:
    """The server's root of a base URL: without a final slash and without `/v1`."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(f"'{url}' is not a URL: write http://HOST:PORT/v1#MODEL")
    if parts.username or parts.password:
        raise UsageError("a key does not belong in a URL, which results show: use --api-key-env or --api-key-file")
    if parts.query:
        raise UsageError(f"'{url}' has a query: give the base URL alone, and headers with --header")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def conversions() -> tuple[str, ...]:
    """Names that may follow `@` in a spec that is loaded here; the server has one file for each."""
    from serve.wire import conversions as served

    return served()


def split_conversion(spec: str) -> tuple[str, str]:
    """Source and conversion of a spec that is loaded here; "" = none. A path that has an @ in its name is a source."""
    from serve.wire import known_conversion, split_spec

    source, conversion = split_spec(spec)
    known = conversion.endswith(".toml") or known_conversion(conversion.partition("{")[0])
    return (source, conversion) if known and not Path(spec).expanduser().exists() else (spec, "")


def unknown_conversion(spec: str) -> str | None:
    """The first name in what follows `@` that no conversion has, where the spec is not a path either."""
    from serve.wire import known_conversion, split_spec

    source, conversion = split_spec(spec)
    if not (source and conversion) or conversion.endswith(".toml") or Path(spec).expanduser().exists():
        return None
    base, _, inside = conversion.removesuffix("}").partition("{")
    named = [base, *(part.rpartition("=")[2].strip() for part in inside.split(",") if inside)]
    return next((name for name in named if not known_conversion(name)), None)
