"""What the routes answer, as types: they make the OpenAPI schema true. Replies may gain fields."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class PromptTokensDetails(BaseModel):
    """cached_tokens: prompt tokens that the prefix cache had."""

    cached_tokens: int


class UsageReply(BaseModel):
    """Tokens used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptEntry(BaseModel):
    """One token at one prompt position. bytes: its own, perhaps a piece of a character."""

    logprob: float
    rank: int
    decoded_token: str
    bytes: list[int]


PromptLogprobs = list[dict[str, PromptEntry] | None]


class LegacyLogprobs(BaseModel):
    """Lists of equal length; `ranks` and `token_logprobs` are null only for the first token of an echo."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    token_ids: list[int]
    bytes: list[list[int]]
    ranks: list[int | None]


class CompletionChoice(BaseModel):
    """One continuation. finish_reason: stop or length."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None
    logprobs: LegacyLogprobs | None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]


class CompletionReply(_Completion):
    """POST /v1/completions."""

    usage: UsageReply


class CompletionChunk(_Completion):
    """One event of a streamed completion: what is new. usage: with `stream_options`; alone in the last one."""

    usage: UsageReply | None = None


class TopEntry(BaseModel):
    """A token that was likely, or was asked for by id."""

    token: str
    logprob: float
    bytes: list[int]
    id: int
    rank: int


class ChatEntry(TopEntry):
    """A sampled token and its alternatives."""

    top_logprobs: list[TopEntry]


class ChatLogprobs(BaseModel):
    """Entries by what their tokens are part of."""

    content: list[ChatEntry]
    reasoning_content: list[ChatEntry] | None = None
    tool_calls: list[ChatEntry] | None = None


class ChatMessage(BaseModel):
    """The reply. content is null where there are only tool calls."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(BaseModel):
    """One reply. finish_reason: stop, length or tool_calls."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatReply(BaseModel):
    """POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class CallDelta(BaseModel):
    """A tool call, whole in one chunk. index: among the choice's calls."""

    index: int
    id: str
    type: Literal["function"]
    function: dict[str, Any]


class ChatDelta(BaseModel):
    """What is new of a message: the role first, then text or a call of one kind, and nothing in the last one."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """What is new of one choice. logprobs: of the tokens of this delta alone."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """One event of a streamed chat reply. usage: with `stream_options`; alone in the last one."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageReply | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
