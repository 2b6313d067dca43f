"""The probe: a fixed set of questions to an endpoint that ends in a certificate. A generator without I/O.

A refusal (400, 404, ...) is an answer and becomes a note; a missing key, an overloaded server or one that
is down raises EndpointError.
"""

from __future__ import annotations

from typing import Any

from evalgate.dialects.rows import is_sentinel
from evalgate.errors import UsageError
from evalgate.probe import listings
from evalgate.probe.behaviour import forced, largest_k, stability, temperature, tie_order
from evalgate.probe.certificate import Certificate
from evalgate.probe.findings import Asking, Findings, Question, ask, complete
from evalgate.probe.ordering import ordering
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
    yield from _prompt_logprobs(found)
    yield from _echo(found)
    yield from _native(found)
    yield from _chat(found)
    found.facts["best"] = _best(found.facts)
    yield from largest_k(found)
    yield from temperature(found)
    yield from forced(found)
    yield from stability(found)
    yield from drafting(found)
    yield from ordering(found)
    found.facts["tie_order"] = tie_order(found.listings)
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
    found.k_from = "generated" if found.plain else ""


def _prompt_logprobs(found: Findings) -> Asking[None]:
    facts, ids = found.facts, found.question.ids
    facts |= {"prompt_logprobs": False, "off_by_one": False, "entries": "unknown"}
    choices = yield from complete(found, prompt_logprobs=2)
    maps = choices[0].get("prompt_logprobs") if choices else None
    if not isinstance(maps, list) or len(maps) not in (len(ids), len(ids) - 1):
        return
    rows = [row if isinstance(row, dict) else {} for row in maps]
    straight = sum(str(t) in row for row, t in zip(rows[1:], ids[1:], strict=False))
    shifted = sum(str(t) in row for row, t in zip(rows, ids[1:], strict=False))
    facts["prompt_logprobs"] = True
    facts["off_by_one"] = bool(rows[0]) and shifted >= straight
    widths = {len(row) for row in rows if row}
    facts["entries"] = "k+1" if 3 in widths else "k" if widths == {2} else "unknown"
    found.listings += [listings.of_id_map(row)[1:] for row in rows]  # the first is the actual token
    facts["ids_on_wire"] = True
    found.k_from = "prompt_logprobs"


def _echo(found: Findings) -> Asking[None]:
    facts, count = found.facts, len(found.question.ids)
    facts |= {"echo": False, "max_tokens_zero": False}
    if not facts["ids_accepted"]:
        return
    choices = yield from complete(found, echo=True, logprobs=1)
    facts["echo"] = _echoed(choices) in (count, count + 1)
    if choices and not facts["echo"]:
        found.notes.append("echo is accepted and ignored: a scorer that trusts it gets chance-level results")
    if facts["echo"]:
        none = yield from complete(found, echo=True, logprobs=1, max_tokens=0)
        facts["max_tokens_zero"] = _echoed(none) == count
        found.k_from = found.k_from if found.k_from == "prompt_logprobs" else "echo"


def _echoed(choices: list[dict[str, Any]]) -> int:
    """Scored tokens of an echo reply; 0 where it has another shape."""
    logprobs = choices[0].get("logprobs") if choices else None
    tokens = logprobs.get("tokens") if isinstance(logprobs, dict) else None
    return len(tokens) if isinstance(tokens, list) else 0


def _native(found: Findings) -> Asking[None]:
    """SGLang's /generate and llama-server's /completion."""
    ids = list(found.question.ids)
    sampling = {"max_new_tokens": 1, "temperature": 1.0}
    fields = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    body = yield from ask(found, "/generate", fields | {"top_logprobs_num": 2})
    meta = (body or {}).get("meta_info")
    rows = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    found.facts["sglang"] = isinstance(rows, list) and len(rows) == len(ids)
    if found.facts["sglang"] and isinstance(meta, dict):
        found.listings += [listings.of_triples(row) for row in meta.get("input_top_logprobs") or ()]
    body = yield from ask(found, "/completion", {"prompt": ids, "n_predict": 1, "n_probs": 5, "temperature": 0})
    found.facts["llamacpp"] = isinstance((body or {}).get("completion_probabilities"), list)
    found.facts["ids_on_wire"] |= found.facts["sglang"] or found.facts["llamacpp"]


def _chat(found: Findings) -> Asking[None]:
    turns = [{"role": "user", "content": found.question.text}]
    fields = {"model": found.question.model, "messages": turns, "max_tokens": 1, "temperature": 0}
    body = yield from ask(found, "/v1/chat/completions", fields | {"logprobs": True, "top_logprobs": 2})
    choices = (body or {}).get("choices") or [None]
    listing = listings.of_choice(choices[0])
    found.facts["chat"] = bool(listing)
    found.listings.append(listing)


def _best(facts: dict[str, Any]) -> str:
    order = (
        ("tensorrt_llm", facts["prompt_logprobs"] and facts["off_by_one"]),
        ("prompt_logprobs", facts["prompt_logprobs"]),
        ("sglang", facts["sglang"]),
        ("echo", facts["echo"]),
        ("llamacpp", facts["llamacpp"]),
        ("continuation", facts["generated"] and facts["ids_on_wire"]),
        ("openai", facts["generated"]),
        ("chat", facts["chat"]),
    )
    usable = (name for name, works in order if works and (facts["bos_added"] is not True or name == "chat"))
    return next(usable, "")
