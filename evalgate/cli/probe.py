"""`evalgate probe`: what an endpoint really does with requests for log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer

from evalgate.cli import options
from evalgate.cli.command import Invocation
from evalgate.cli.completion import complete_source
from evalgate.cli.endpoint_options import EndpointOptions
from evalgate.cli.streams import say
from evalgate.core import counted
from evalgate.printable import printable
from evalgate.specs import SourceSpec, parse

if TYPE_CHECKING:
    from evalgate.probe.certificate import Certificate, Cost

_ROWS = (  # field of the certificate, what it says
    ("ids_accepted", "token ids accepted as prompt"),
    ("tokenizer", "tokenizer against the local one"),
    ("bos_added", "adds tokens to ids"),
    ("context_length", "context, tokens"),
    ("prompt_logprobs", "prompt_logprobs honoured"),
    ("off_by_one", "rows are off by one"),
    ("entries", "entries per row"),
    ("echo", "echo honoured"),
    ("generated", "logprobs of a generated token"),
    ("dialects", "dialects honoured"),
    ("ids_on_wire", "alternatives carry ids"),
    ("forced", "forces a token, logprob raw"),
    ("logprob_token_ids", "scores given ids"),
    ("temperature_scaled", "logprobs move with temperature"),
    ("tie_order", "order of ties"),
    ("cached_difference", "cached against cold, nats"),
    ("batch_difference", "in a batch against alone, nats"),
    ("sentinels", "sentinels seen"),
    ("quantum", "log-probabilities are rounded to"),
    ("rounding", "what the rounding costs"),
    ("excess", "probabilities exceed 1 in sum by"),
    ("speculative", "speculative decoding"),
    ("prompt_list", "prompts of one request"),
    ("overloads", "refused for load while probing"),
    ("retry_after", "longest Retry-After, seconds"),
)


class Lines:
    """Stages as lines on standard error; none where quiet."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def stage(self, text: str) -> None:
        """Say what happens now."""
        if not self._quiet:
            say(text)


def probe(
    call: Invocation,
    source: Annotated[
        SourceSpec,
        typer.Argument(
            metavar="URL#MODEL",
            parser=parse,
            autocompletion=complete_source,
            help="An endpoint, or llama.cpp:FILE.gguf.",
        ),
    ],
    endpoint: EndpointOptions,
    device: options.Device = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Find out how an endpoint can be scored: its dialect, its limits, and what it only pretends to honour."""
    from evalgate.measure.probe import document, probe_source
    from evalgate.store.documents import dump

    dialect, k, certificates = probe_source(source, endpoint.settings(), device=device, watch=Lines(quiet=quiet))
    if json:
        call.output.write(dump(document(source.spec, dialect, k, certificates), name="certificate"))
    else:
        call.output.write(table(dialect, k, certificates, width=call.output.width))


def table(dialect: str, k: int, certificates: Mapping[str, Certificate], *, width: int) -> str:
    """Certificates in words, one block per URL."""
    lines = [f"dialect: {dialect}, {k} alternatives per position"]
    for url, found in certificates.items():
        limit = "" if found.k_is_limit else " or more"
        rows = [("largest k", f"{found.largest_k}{limit}")]
        rows += [(words, _shown(found, name)) for name, words in _ROWS]
        lines += ["", f"{found.model} at {url}"]
        rows += [(name, value) for name, value in found.rate_limits]
        rows += [("continuations, " + _way(cost), _price(cost, found.cheapest)) for cost in found.continuation_costs]
        lines += [f"  {words:<34}{value}" for words, value in rows]
        lines += [f"  note: {note}" for note in found.notes]
    shown = [line for whole in map(printable, lines) for line in _folded(whole, max(width, 60))]
    return "".join(f"{line}\n" for line in shown)


def _shown(found: Certificate, name: str) -> str:
    """A field in words; lists of prompts are tried only where one request does not score a window."""
    if name == "prompt_list" and not found.continuation_costs:
        return "not tried"
    return _value(getattr(found, name))


def _folded(line: str, width: int) -> list[str]:
    """A row as lines of at most `width` characters, further ones under its value; others stay whole."""
    if not line.startswith("  ") or line.startswith("  note"):
        return [line]
    return wrap(line, width, subsequent_indent=" " * 36, break_on_hyphens=False)


def _way(cost: Cost) -> str:
    return f"{cost.listed} listed" if cost.listed > 1 else f"{cost.order}, {cost.at_once} at once"


def _price(cost: Cost, cheapest: Cost | None) -> str:
    computed = "" if cost.computed is None else f", {counted(cost.computed, 'token')} computed"
    return f"{cost.seconds:.3g} s{computed}{' (used)' if cost == cheapest else ''}"


def _value(value: object) -> str:
    """A field in words. None is "unknown"."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value) or "no"
