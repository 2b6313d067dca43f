"""The probe: a fixed set of questions to an endpoint that ends in a certificate. A generator without I/O.

A refusal (400, 404, ...) is an answer and becomes a note; a missing key, an overloaded server or one that
is down raises EndpointError.
"""

from __future__ import annotations

from typing import Any

from evalgate import dialects
from evalgate.dialects import listings
from evalgate.dialects.base import Asking, Dialect
from evalgate.dialects.findings import Findings, Question, ask, complete
from evalgate.dialects.rows import is_sentinel
from evalgate.errors import UsageError
from evalgate.probe.behaviour import batches, forced, largest_k, temperature, tie_order
from evalgate.probe.caching import caching
from evalgate.probe.certificate import Certificate
from evalgate.probe.excess import excess
from evalgate.probe.ordering import ordering
from evalgate.probe.quantum import quantum_of, rounding_cost
from evalgate.probe.speculation import drafting


def probe(question: Question) -> Asking[Certificate]:
    """Ask everything and return the certificate.

    Raises UsageError for fewer than 4 ids, EndpointError where the endpoint cannot be asked at all.
    """
    if len(question.ids) < 4:
        raise UsageError("the probe needs a text of at least 4 tokens")
    found = Findings(question)
    yield from _identity(found)
    yield from _generated(found)
    yield from _dialects(found)
    yield from largest_k(found)
    yield from excess(found)
    yield from temperature(found)
    yield from forced(found)
    yield from caching(found)
    yield from batches(found)
    yield from drafting(found)
    yield from ordering(found)
    found.facts["tie_order"] = tie_order(found.listings)
    listed = [[v for _, v in listing if not is_sentinel(v)] for listing in found.listings]
    found.facts["quantum"] = quantum_of(v for values in listed for v in values)
    found.facts["rounding"] = rounding_cost(found.facts["quantum"], listed)
    sentinels = {v for listing in found.listings for _, v in listing if is_sentinel(v)}
    return Certificate(
        model=question.model, sentinels=tuple(sorted(sentinels)), notes=tuple(dict.fromkeys(found.notes)), **found.facts
    )


def _identity(found: Findings) -> Asking[None]:
    question = found.question
    models = yield from ask(found, "/v1/models", None)
    listed = [m for m in (models or {}).get("data") or () if isinstance(m, dict)]
    mine = next((m for m in listed if m.get("id") == question.model), None)
    if listed and mine is None:
        found.notes.append(f"/v1/models does not list '{question.model}'")
    cut = yield from _cut(found)
    tokens = (cut or {}).get("tokens")
    same = isinstance(tokens, list) and tuple(tokens) == question.local_ids
    known = isinstance(tokens, list) and bool(question.local_ids)
    found.facts["tokenizer"] = ("agrees" if same else "differs") if known else "unknown"
    found.facts["context_length"] = (mine or {}).get("max_model_len") or (cut or {}).get("max_model_len")


def _cut(found: Findings) -> Asking[dict[str, Any] | None]:
    """/tokenize in vLLM's shape, else in llama-server's; None where the endpoint has neither."""
    question, noted = found.question, len(found.notes)
    fields = {"model": question.model, "prompt": question.text, "add_special_tokens": False}
    cut = yield from ask(found, "/tokenize", fields)
    if not (cut or {}).get("tokens"):
        cut = yield from ask(found, "/tokenize", {"content": question.text, "add_special": False})
    if cut:
        del found.notes[noted:]
    return cut


def _generated(found: Findings) -> Asking[None]:
    """One generated token: whether it has logprobs, and whether ids can be had."""
    facts, sent = found.facts, len(found.question.ids)
    plain = yield from complete(found, logprobs=5)
    facts["ids_accepted"] = bool(plain)
    count = plain[0]["usage"] if plain else None
    facts["bos_added"] = None if count is None else count > sent
    if facts["bos_added"]:
        found.notes.append(f"{sent} prompt tokens were sent and {count} were read: the server adds a BOS to token ids")
    if count is not None and count < sent:
        found.notes.append(f"{sent} prompt tokens were sent and {count} were read: prompts are truncated")
    found.first = listings.of_choice(plain[0] if plain else None)
    facts["generated"] = bool(found.first)
    flags = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    flagged = (yield from complete(found, logprobs=5, **flags)) if plain else []
    keyed = listings.of_choice(flagged[0] if flagged else None)
    facts["return_token_ids"] = bool(flagged) and isinstance(flagged[0].get("token_ids"), list)
    facts["token_id_keys"] = bool(listings.ids(keyed)) and not listings.ids(found.first)
    facts["ids_on_wire"] = bool(listings.ids(keyed))
    found.plain = keyed if listings.ids(keyed) else found.first
    found.listings.append(found.plain)


def _dialects(found: Findings) -> Asking[None]:
    """Try every dialect, the preferred first, and settle which one will be used."""
    found.facts |= {"echo": False, "max_tokens_zero": False}
    honoured: list[Dialect] = []
    for dialect in dialects.in_order():
        if (yield from dialect.recognised(found)):
            honoured.append(dialect)
    best = next((dialect.name for dialect in honoured if dialect.preferable(found)), "")
    used = found.question.dialect or best
    found.facts |= {"prompt_logprobs": False, "off_by_one": False, "entries": "unknown"} | found.facts
    found.facts |= {"dialects": tuple(dialect.name for dialect in honoured), "best": best}
    found.dialect = dialects.get(used) if used else None
