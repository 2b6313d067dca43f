"""Chats as rows have them: OpenAI's messages and ShareGPT's conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from evalgate.core import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "function_response": "tool",
    "observation": "tool",
}
_TEXTS = ("name", "tool_call_id", "reasoning_content")  # further fields of a message, each a string
_IGNORED = ("weight", "index", "id")  # say nothing that a template could show


class Unreadable(Exception):
    """Why a row's chat cannot be used, in words that follow the row's name."""


def read_chat(value: object, field: str) -> tuple[Message, ...]:
    """The turns in `messages`, or in ShareGPT's `conversations`.

    Raises Unreadable for what is not a chat, for a turn that says something we cannot pass on, and for a chat in which
    the assistant says nothing, since only its tokens are scored.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise Unreadable(f"{field} is {_kind(value)}, not a list")
    if not value:
        raise Unreadable(f"{field} is empty")
    read = _sharegpt if field == "conversations" else _message
    turns = tuple(read(turn, f"message {number}") for number, turn in enumerate(value, 1))
    spoken = [turn for turn in turns if turn.role == "assistant"]
    if not spoken:
        raise Unreadable("no message is the assistant's, and only the assistant's are scored")
    if not any(turn.content or turn.fields for turn in spoken):
        raise Unreadable("empty: the assistant says nothing")
    return turns


def read_tools(value: object) -> str:
    """The tools that a row offers, as canonical JSON; "" where there are none.

    Raises Unreadable for what is not a list of objects, or JSON text of one.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            raise Unreadable("tools is text that is not JSON") from None
    if value is None or (isinstance(value, Sequence) and not value):
        return ""
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        raise Unreadable("tools is not a list of objects")
    return _canonical([_present(tool) for tool in value])


def _message(turn: object, place: str) -> Message:
    if not isinstance(turn, Mapping):
        raise Unreadable(f"{place}: {_kind(turn)}, not an object")
    given = {key: value for key, value in turn.items() if value is not None and key not in _IGNORED}
    role, content, calls = given.pop("role", None), given.pop("content", None), given.pop("tool_calls", None)
    if role not in ROLES:
        raise Unreadable(f"{place}: role {role!r} is not one of {', '.join(ROLES)}")
    fields: dict[str, Any] = {}
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        fields["content"] = [_part(part, f"{place}: part {number}") for number, part in enumerate(content, 1)]
        content = "".join(part["text"] for part in fields["content"])
    if calls:
        if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
            raise Unreadable(f"{place}: tool_calls is not a list of objects")
        fields["tool_calls"] = [_present(call) for call in calls]
        content = "" if content is None else content
    if not isinstance(content, str):
        raise Unreadable(f"{place}: content is {_kind(content)}, not a string")
    for name, value in given.items():
        if name not in _TEXTS and value:
            raise Unreadable(f"{place}: {name} is not supported")
        if value and not isinstance(value, str):
            raise Unreadable(f"{place}: {name} is {_kind(value)}, not a string")
    fields |= {name: given[name] for name in _TEXTS if given.get(name)}
    return Message(str(role), content, _canonical(fields) if fields else "")


def _part(part: object, place: str) -> dict[str, str]:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
        raise Unreadable(f"{place} is {kind!r}, and only text parts can be shown")
    return {"type": "text", "text": str(part["text"])}


def _sharegpt(turn: object, place: str) -> Message:
    if not isinstance(turn, Mapping):
        raise Unreadable(f"{place}: {_kind(turn)}, not an object")
    speaker, value = turn.get("from"), turn.get("value")
    role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise Unreadable(f"{place}: from {speaker!r} is not one of {', '.join(SHAREGPT_ROLES)}")
    if not isinstance(value, str):
        raise Unreadable(f"{place}: value is {_kind(value)}, not a string")
    return Message(role, value)


def _present(value: Any) -> Any:
    """The value without the nulls that a table's columns fill absent fields with."""
    if isinstance(value, Mapping):
        return {str(key): _present(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_present(inner) for inner in value]
    return value


def _canonical(value: object) -> str:
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise Unreadable(f"holds what JSON cannot ({error})") from error


def _kind(value: object) -> str:
    return type(value).__name__


def plain_text(messages: Sequence[Message], tools: str = "") -> str:
    """A chat as plain text, for models without a chat template: who speaks, a colon, and what is said.

    tools: those that the chat offers, as canonical JSON, "" = none; they come first. A call of a tool is a line of JSON
    with its name and arguments.
    """
    turns = [f"Tools: {tools}"] if tools else []
    for message in messages:
        calls = message.wire().get("tool_calls", [])
        said = [message.content] if message.content else []
        said += [_canonical(call.get("function", call)) for call in calls]
        turns.append(f"{message.role.capitalize()}: " + "\n".join(said))
    return "\n\n".join(turns) + "\n"
