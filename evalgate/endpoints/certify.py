"""Probes an endpoint and says which dialect it is asked in: a forced one is checked like a found one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from evalgate import dialects
from evalgate.dialects.base import Vocabulary
from evalgate.dialects.findings import Question
from evalgate.endpoints.channel import Channel
from evalgate.endpoints.texts import context_of, tokens_of
from evalgate.errors import EndpointError, MismatchError
from evalgate.probe.certificate import Certificate
from evalgate.probe.probe import probe

PROBE_TEXT = "The capital of France is Paris, and the quick brown fox jumps over the lazy dog near the river bank."
MOST_IDS = 24  # of the probe's prompt, so that it fits into a small context
DEFAULT_K = 20


@dataclass(frozen=True)
class ProbeText:
    """What the probe asks with. ids: BOS included where the tokenizer adds one; plain: without special tokens."""

    ids: tuple[int, ...]
    plain: tuple[int, ...]
    text: str = PROBE_TEXT


def own_probe_text(channel: Channel, model: str) -> ProbeText:
    """The probe text under the endpoint's own tokenizer. Raises EndpointError where it has no /tokenize."""
    whole = tokens_of(channel, model, PROBE_TEXT, special=True)
    if whole is None:
        raise EndpointError(
            f"{channel.url} has no /tokenize, and token ids are what it is asked with: give --tokenizer SPEC"
        )
    return ProbeText(whole, ())


def certify(
    channel: Channel, model: str, text: ProbeText, *, vocabulary: Vocabulary | None = None, dialect: str = ""
) -> Certificate:
    """The endpoint's certificate; the context length comes from /props where /v1/models has none.

    dialect: the one that was asked for, "" = the best. Limits of the endpoint are those seen by `channel` so far.
    """
    question = Question(model, text.ids[:MOST_IDS], text.text, text.plain, vocabulary, dialect)
    found = channel.drive(probe(question))
    return replace(
        found,
        context_length=found.context_length or context_of(channel),
        overloads=channel.overloads,
        retry_after=channel.longest_hold,
        rate_limits=tuple(sorted(channel.rate_limits.items())),
    )


def choose_dialect(certificate: Certificate, url: str, *, forced: str) -> str:
    """The dialect to use: `forced` where one was asked for and the endpoint honours it, else the best.

    Raises EndpointError where none works, MismatchError where the endpoint tokenizes otherwise, each saying
    what to change.
    """
    if certificate.tokenizer == "differs":
        raise MismatchError(
            f"{url} cuts text into other tokens than the reference does: it serves another model or tokenizer",
            endpoint=url,
        )
    if not forced:
        if certificate.best:
            return certificate.best
        why = _merged(certificate.notes) or "no request came back with log-probabilities"
        raise EndpointError(f"{url} cannot be scored: {why}", endpoint=url)
    if forced not in certificate.dialects:
        instead = f": use --dialect {certificate.best}" if certificate.best else ", nor any other dialect"
        raise EndpointError(f"{url} does not honour the dialect '{dialects.get(forced).name}'{instead}", endpoint=url)
    return forced


def _merged(notes: tuple[str, ...]) -> str:
    """Notes as one text; routes that were refused for the same reason share it."""
    routes: dict[str, list[str]] = {}
    for note in notes:
        route, colon, reason = note.partition(": ")
        if colon and route.startswith("/") and " " not in route:
            routes.setdefault(reason, []).append(route)
        else:
            routes[note] = []
    return "; ".join(f"{', '.join(named)}: {reason}" if named else reason for reason, named in routes.items())


def alternatives(certificate: Certificate, dialect: str, *, wanted: int | None, url: str) -> int:
    """Alternatives per position: `wanted`, or as many of DEFAULT_K as the endpoint serves.

    Raises EndpointError where more are wanted than it serves.
    """
    most = certificate.largest_k if certificate.k_is_limit else None
    allowed = dialects.get(dialect).most_alternatives
    if allowed is not None:
        most = min(allowed, allowed if most is None else most)
    if wanted is None:
        return DEFAULT_K if most is None else min(DEFAULT_K, most)
    if most is not None and wanted > most:
        raise EndpointError(
            f"{url} serves at most {most} alternatives per position in the dialect '{dialect}' and --top-k asks for "
            f"{wanted}: lower it, or start vLLM with --max-logprobs {wanted}",
            endpoint=url,
        )
    return wanted
