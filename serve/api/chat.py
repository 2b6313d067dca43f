"""Chats to prompts: what a message may hold, templates, and which parsers read the reply."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from serve.api.events import Chain, Parser, Plain
from serve.api.parsers import AUTO, OFF, parsers, pick
from serve.config import ServerConfig
from serve.engine.runtime import HeadRuntime
from serve.errors import BadRequest, LoadFailed
from serve.models.chat import EncodedChat
from serve.models.tokenizer import encode_chat

_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "refusal"}


class Prepared(NamedTuple):
    """A chat as tokens, and what its reply begins with: the text of a message to be continued, or None."""

    encoded: EncodedChat
    continued: str | None


def prepare(
    model: HeadRuntime,
    config: ServerConfig,
    messages: Sequence[dict[str, Any]],
    *,
    template: str | None = None,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
    tools: Sequence[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> Prepared:
    """Check the messages and render them. Raises BadRequest that names the field."""
    if template is not None and not config.trust_request_templates:
        raise BadRequest(
            "'chat_template' in requests is off: start the server with --trust-request-chat-template",
            param="chat_template",
        )
    if continue_final_message and add_generation_prompt:
        raise BadRequest("'continue_final_message' needs add_generation_prompt: false", param="continue_final_message")
    chat = [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
    final = chat[-1].get("content") if continue_final_message else None
    if continue_final_message and not final:
        raise BadRequest("there is no text in the final message to continue", param="continue_final_message")
    encoded = encode_chat(
        model.loaded.tokenizer,
        chat,
        template=template,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=tools,
        template_kwargs=template_kwargs,
    )
    return Prepared(encoded, final)


def reply_parser(model: HeadRuntime, config: ServerConfig, prepared: Prepared, *, tools: bool) -> Parser:
    """The parser of one reply; tool calls are looked for only where tools were given."""
    template = _template_text(model)
    reasoning = pick("reasoning", config.reasoning_parser, template)
    calls = pick("tools", config.tool_parser, template) if tools else None
    first: Parser = Plain() if reasoning is None else reasoning.PARSER(lead=_lead(reasoning.PARSER, prepared))
    second: Parser = Plain() if calls is None else calls.PARSER()
    return Chain(first, second)


def check_parsers(config: ServerConfig) -> None:
    """Raise LoadFailed for an unknown parser name."""
    for kind, name in (("reasoning", config.reasoning_parser), ("tools", config.tool_parser)):
        if name not in (OFF, AUTO, *parsers(kind)):
            raise LoadFailed(f"'{name}' is not a {kind} parser: use one of {', '.join((OFF, AUTO, *parsers(kind)))}")


def _lead(parser: Any, prepared: Prepared) -> str:
    """The end of the prompt that a parser may look at: no more than a mark, so that no message can reach in."""
    if prepared.continued is not None:
        return prepared.continued
    return prepared.encoded.text.rstrip()[-max(map(len, parser.marks)) :]


def _template_text(model: HeadRuntime) -> str:
    template = model.loaded.tokenizer.chat_template
    if isinstance(template, dict):
        return "\n".join(map(str, template.values()))
    return template or ""


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    unknown = sorted(set(message) - _FIELDS)
    if unknown:
        raise BadRequest(f"'{where}.{unknown[0]}' is not supported by this server", param=f"{where}.{unknown[0]}")
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise BadRequest(f"'{where}.role' must be a text", param=f"{where}.role")
    checked = {key: value for key, value in message.items() if value is not None}
    for name in ("name", "tool_call_id", "reasoning_content", "refusal"):
        if not isinstance(checked.get(name, ""), str):
            raise BadRequest(f"'{where}.{name}' must be a text", param=f"{where}.{name}")
    checked["content"] = _content(message.get("content"), f"{where}.content")
    if "tool_calls" in checked:
        checked["tool_calls"] = _calls(checked["tool_calls"], f"{where}.tool_calls")
    return checked


def _content(content: Any, where: str) -> str:
    """A message's text; text parts are joined with newlines, as vLLM does."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"'{where}' must be a text or a list of text parts", param=where)
    texts = []
    for at, part in enumerate(content):
        place = f"{where}[{at}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            raise BadRequest(f"'{place}': only text parts are supported", param=place)
        if not isinstance(part.get("text"), str):
            raise BadRequest(f"'{place}.text' must be a text", param=f"{place}.text")
        texts.append(part["text"])
    return "\n".join(texts)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Earlier tool calls, with their arguments as the objects that templates expect."""
    if not isinstance(calls, list):
        raise BadRequest(f"'{where}' must be a list", param=where)
    return [_call(call, f"{where}[{at}]") for at, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"'{where}.function' must have a name and arguments", param=where)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise BadRequest(f"'{where}.function.arguments' is not JSON", param=where) from None
    return {**call, "function": {**function, "arguments": arguments}}
