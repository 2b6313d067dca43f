"""What a reply's body is: JSON that is an answer, or an error that says what to change on the server."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from evalgate.core import counted
from evalgate.dialects.base import Place, Reply
from evalgate.errors import EndpointError, EvalgateError, ScoreError

# First match wins: (statuses, pattern in the message, what to do). The pattern picks the advice alone; what kind of
# error it is, and whether the request is tried again, depends on the status.
_ADVICE: tuple[tuple[tuple[int, ...], str, str], ...] = (
    ((401, 403), "", "check the API key"),
    ((408, 502, 503, 504, 520, 529), "", "the server or what stands before it did not answer in time: try again later"),
    (
        (400, 422),
        r"log.?probs.*(greater than|max allowed|at most|maximum|less than or equal|exceed|between"
        r"|must be (in|-1 or) \d|--max-logprobs)",
        "ask for a smaller k or start the server with a larger limit (vLLM: --max-logprobs {k})",
    ),
    ((400, 422), r"\bstream(ing)?\b", "prompt logprobs need a request that does not stream"),
    (
        (400, 413, 422),
        r"context (length|size|window)|max_model_len|too long|exceed\w* .*(context|length)|longer than",
        "use a shorter --context or start the server with a longer one (vLLM: --max-model-len, llama-server: -c)",
    ),
    (
        (400, 422),
        r"echo|prompt_logprobs",
        "this server does not score prompts: use the dialect 'continuation' or 'openai'",
    ),
    (
        (400, 422),
        r"chat template",
        "use the server's own template, or start vLLM with --trust-request-chat-template",
    ),
    ((404, 405), "", "check the URL, the model's name after '#' and the dialect"),
    ((413,), "", "raise the server's limit for request bodies or use a shorter --context"),
    ((429,), "", "the endpoint is overloaded: lower the concurrency"),
    (
        (500,),
        r"not JSON compliant|out of range float",
        "a logprob of -inf broke the server's JSON: ask for a smaller k",
    ),
)


def read_body(reply: Reply, place: Place, *, k: int = 0) -> dict[str, Any]:
    """The JSON object of a good reply.

    Raises EndpointError for an error status, a redirection, an error inside a 200, HTML, cut or invalid JSON, NaN or
    Infinity, and anything that is not an object. `k` is what the advice about limits names. A refusal's error has its
    status in its context, for an error inside a 200 the one that the error itself names.
    """
    if 300 <= reply.status < 400:
        target = reply.headers.get("location", "another address")
        raise place.error(
            EndpointError,
            f"redirects to {target} ({reply.status}): name the address that answers itself",
            status=reply.status,
        )
    if reply.status != 200:
        raise _refused(reply.status, _message(reply.body), place, k)
    body = _parse(reply.body, place)
    if not isinstance(body, dict):
        raise place.error(EndpointError, f"answered with a JSON {type(body).__name__} instead of an object")
    if (status := inner_status(body)) is not None:
        raise _refused(status, _error_text(body), place, k)
    return body


def inner_status(body: dict[str, Any]) -> int | None:
    """The status that an error inside a reply names, 400 where it names none; None where the reply is no error.

    Gateways answer 200 and put the upstream's error into the body: `{"error": {"code": 429, ...}}`.
    """
    inner = body.get("error")
    if not inner and body.get("object") != "error":
        return None
    named = [inner.get("status"), inner.get("code")] if isinstance(inner, dict) else []
    for code in map(str, (*named, body.get("status"), body.get("code"))):  # "429" is as good as 429
        if len(code) == 3 and code.isascii() and code.isdigit() and 400 <= int(code) < 600:
            return int(code)
    return 400


def _parse(body: bytes, place: Place) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise place.error(EndpointError, _why_not_json(body, str(error))) from error


def _why_not_json(body: bytes, parser: str) -> str:
    start = body.lstrip()[:1]
    if not start:
        return "answered with an empty body: is a proxy in between?"
    if start == b"<":
        return "answered with HTML instead of JSON: the URL points at a web page or a proxy"
    constants: list[str] = []
    try:
        json.loads(body, parse_constant=constants.append)
    except ValueError:
        return f"answered with broken JSON ({parser}): the reply was cut or is not JSON"
    named = constants[0] if constants else "a number out of range"
    return f"the reply holds {named}, which JSON does not have: a logprob on the server is not finite"


def _message(body: bytes) -> str:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        text = body.decode("utf-8", "replace").strip()
        return "an HTML page" if text.startswith("<") else text
    return _error_text(parsed) if isinstance(parsed, dict) else str(parsed)


def _error_text(body: dict[str, Any]) -> str:
    inner = body.get("error")
    if isinstance(inner, dict):
        inner = inner.get("message") or inner
    return str(inner or body.get("message") or body.get("detail") or body)


def _refused(status: int, message: str, place: Place, k: int) -> EvalgateError:
    said = " ".join(message.split())[:300]
    for statuses, pattern, advice in _ADVICE:
        if status in statuses and re.search(pattern, message, re.IGNORECASE):
            return place.error(EndpointError, f"refused ({status}: {said}): {advice.format(k=k)}", status=status)
    return place.error(EndpointError, f"failed ({status}: {said}): look at the server's log", status=status)


def only_choice(body: dict[str, Any], place: Place) -> dict[str, Any]:
    """The one choice of a completions or chat reply; EndpointError where it is not exactly choice 0."""
    choices = body.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise place.error(EndpointError, "the reply does not hold exactly one choice: is this an OpenAI-style server?")
    choice: dict[str, Any] = choices[0]
    if choice.get("index", 0) != 0:
        raise place.error(EndpointError, f"the only choice has index {choice.get('index')!r} instead of 0")
    return choice


def all_choices(body: dict[str, Any], count: int, place: Place) -> list[dict[str, Any]]:
    """The choices of a reply to a list of `count` prompts, in the prompts' order.

    Raises EndpointError unless there is exactly one for each.
    """
    choices = body.get("choices")
    found = [c for c in choices if isinstance(c, dict)] if isinstance(choices, list) else []
    by_index = {c.get("index"): c for c in found}
    if len(found) != count or set(by_index) != set(range(count)):
        raise place.error(
            EndpointError, f"{counted(count, 'prompt')} were sent and the reply does not hold one choice for each"
        )
    return [by_index[i] for i in range(count)]


def prompt_tokens(body: dict[str, Any], place: Place) -> int | None:
    """`usage.prompt_tokens`, None where the reply has none; ScoreError where it is not a count."""
    usage = body.get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if count is None:
        return None
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise place.error(ScoreError, f"usage.prompt_tokens is {count!r} instead of a count")
    return count


def check_prompt(
    body: dict[str, Any], choice: dict[str, Any], ids: tuple[int, ...], place: Place, *, count: int | None = None
) -> None:
    """Compare what the server says it read with `ids`: their number, and the ids where they come back.

    `count` replaces `usage.prompt_tokens` for servers that name it otherwise. Raises ScoreError for a
    truncated prompt, an added BOS or other ids.
    """
    seen = prompt_tokens(body, place) if count is None else count
    if seen is not None and seen != len(ids):
        why = (
            "the server adds a token of its own (BOS?): turn that off, token ids are sent as they are"
            if seen > len(ids)
            else "the prompt was truncated: use a shorter --context"
        )
        raise place.error(ScoreError, f"{len(ids)} prompt tokens were sent and {seen} were read: {why}")
    echoed = choice.get("prompt_token_ids", body.get("prompt_token_ids"))
    if echoed is not None and list(echoed) != list(ids):
        at = next((i for i, (a, b) in enumerate(zip(echoed, ids, strict=False)) if a != b), min(len(echoed), len(ids)))
        raise place.error(ScoreError, f"the server read other token ids than were sent, first at index {at}")
