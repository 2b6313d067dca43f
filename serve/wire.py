"""What goes over the wire: request and reply types of the scoring server. No torch here.

An unknown field is refused by name (400), so that nothing is silently ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

ARROW = "application/vnd.apache.arrow.stream"
TokenId = Annotated[int, Field(ge=0, strict=True)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class Wire(BaseModel):
    """Base of every request: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


class Window(Wire):
    """Token ids and the positions to score (the prediction of ids[i] from ids[0..i))."""

    ids: TokenIds
    score_from: int = Field(1, ge=1)
    score_to: int | None = Field(None, ge=2, description="half-open end; null = the window's length")
    mask: list[bool] | None = Field(None, description="one flag per position of [score_from, score_to)")

    def positions(self) -> tuple[int, ...]:
        """The positions to score, ascending. Raises ValueError where range and mask do not fit the ids."""
        to = len(self.ids) if self.score_to is None else self.score_to
        if not self.score_from < to <= len(self.ids):
            raise ValueError(
                f"score_from {self.score_from} and score_to {to} do not lie in a window of {len(self.ids)}"
            )
        if self.mask is not None and len(self.mask) != to - self.score_from:
            raise ValueError(f"the mask has {len(self.mask)} flags for {to - self.score_from} positions")
        span = range(self.score_from, to)
        return tuple(span if self.mask is None else (i for i, keep in zip(span, self.mask, strict=True) if keep))


class ScoreRequest(Wire):
    """POST /v1/score: exact per-position columns of candidates, against a reference where one is named."""

    candidates: Annotated[list[str], Field(min_length=1)]
    reference: str | None = None
    windows: Annotated[list[Window], Field(min_length=1)]
    overlap_k: int = Field(10, ge=1, le=1000, description="k of topk_overlap")


class TokenizeRequest(Wire):
    """POST /tokenize: one prompt or several, or one chat. Special tokens in text are plain text."""

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = Field(True, description="add BOS where the tokenizer's own configuration adds it")
    chat_template: str | None = None
    return_details: bool = Field(False, description="also bytes per token, BOS id and the assistant mask")


class TokenizeReply(BaseModel):
    """Ids (one list per prompt if a list was sent); `bytes` and `assistant` only with return_details."""

    count: int | list[int]
    tokens: list[int] | list[list[int]]
    max_model_len: int
    bytes: list[int] | list[list[int]] | None = None
    assistant: list[bool] | None = None
    bos_token_id: int | None = None


class StreamOptions(Wire):
    """OpenAI's stream options."""

    include_usage: bool = False


class CompletionRequest(Wire):
    """POST /v1/completions: prompt logprobs and continuations."""

    model: str | None = None
    prompt: str | list[str] | TokenIds | list[TokenIds]
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=-1)
    prompt_logprobs: int | None = Field(None, ge=-1)
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    seed: int | None = None
    n: Literal[1] = 1
    stream: Literal[False] = False
    add_special_tokens: bool = True
    allowed_token_ids: TokenIds | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    user: str | None = None


class ModelCard(BaseModel):
    """One model of /v1/models; `evalgate` holds what a result's manifest records."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "evalgate"
    max_model_len: int
    evalgate: dict[str, Any]


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorBody(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: int | None = None


class ErrorReply(BaseModel):
    """What every refusal looks like."""

    error: ErrorBody
