"""`evalgate probe`: certificates of an endpoint's URLs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evalgate.endpoints.settings import EndpointSettings
from evalgate.errors import UsageError
from evalgate.measure.checks import check_applies
from evalgate.measure.sides import Stages, opened
from evalgate.probe.certificate import Certificate
from evalgate.specs import SourceSpec


def probe_source(
    model: SourceSpec, settings: EndpointSettings, *, device: str, watch: Stages
) -> tuple[str, int, Mapping[str, Certificate]]:
    """(dialect to use, alternatives per position, certificates by URL) of an endpoint or a llama.cpp server.

    Raises UsageError for a source that needs no probe, and the errors of `evalgate.measure.sides.opened`.
    """
    if not model.remote:
        raise UsageError(f"'{model}' is not an endpoint: probe http://HOST:PORT/v1#MODEL or llama.cpp:FILE.gguf")
    check_applies(settings, [model], local=["--device"] if device != "auto" else [])
    with opened([model], settings, device=device, logits="float32", watch=watch) as sides:
        source = sides.sources[model.spec]
        return source.dialect, source.k, source.certificates


def document(spec: str, dialect: str, k: int, certificates: Mapping[str, Certificate]) -> dict[str, Any]:
    """The probe's result as JSON values."""
    return {
        "source": spec,
        "dialect": dialect,
        "top_k": k,
        "certificates": {url: certificate.to_dict() for url, certificate in certificates.items()},
    }
