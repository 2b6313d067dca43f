"""What goes over the wire: request and reply types of the scoring server. No torch here.

An unknown field is refused by name (400), so that nothing is silently ignored.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, StrictBool, model_validator
from pydantic.fields import FieldInfo

_CONVERSIONS = Path(__file__).parent / "models" / "conversions"
ARROW = "application/vnd.apache.arrow.stream"
LEAST_LOGPROB = -1000.0
"""Nats. A lower number is no log-probability but a mask, and is never scored; `evalgate.core` has the same limit."""
TokenId = Annotated[int, Field(ge=0, strict=True)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$", description="a token id")]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Messages = Annotated[list[dict[str, Any]], Field(min_length=1)]


def conversions() -> tuple[str, ...]:
    """The names of the conversions on load: the files of serve/models/conversions, none of which is imported here."""
    return tuple(sorted(file.stem for file in _CONVERSIONS.glob("[!_]*.py")))


TRIED_CONVERSIONS = {
    "bf16": None,
    "f16": None,
    "f32": None,
    "int8": None,
    "int4": "compressed-tensors",
    "nf4": "bitsandbytes",
    "q4_0": "gguf",
}
"""Conversions that the self-test tries, one for each library that some are made by, and the package that it needs."""
_SPEC = re.compile(r"(?P<source>.*)@(?P<conversion>[A-Za-z0-9_-]+(\{[^{}]*\})?|[^@]*\.toml)", re.DOTALL)


def split_spec(spec: str) -> tuple[str, str]:
    """Source and conversion of a spec: `demo@int4-g128{mlp=int8}` is "demo" and "int4-g128{mlp=int8}"; "" = none.

    A conversion is a name, a name with layers of other conversions in braces, or a recipe file (.toml). Whether there
    is one of that name is not looked at.
    """
    match = _SPEC.fullmatch(spec)
    return (match["source"], match["conversion"]) if match else (spec, "")


def known_conversion(name: str) -> bool:
    """Whether there is a conversion of that name, which may end in a group size (`-g128`)."""
    return re.sub(r"-g[1-9][0-9]{0,5}$", "", name) in conversions()


class Wire(BaseModel):
    """Base of every request: unknown fields are errors; null means the default, as OpenAI's clients expect."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {k: v for k, v in given.items() if v is not None or not _defaulted(cls.model_fields.get(k))}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        for name, field in handler.resolve_ref_schema(schema).get("properties", {}).items():
            if _defaulted(cls.model_fields.get(name)):
                known = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
                branches = field.pop("anyOf", None) or [dict(field)]
                field.clear()
                field.update(known, anyOf=[*branches, {"type": "null"}])
        return schema


def _defaulted(field: FieldInfo | None) -> bool:
    """Whether a field has a default other than null."""
    return field is not None and not field.is_required() and field.get_default(call_default_factory=True) is not None


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


class RecordRequest(Wire):
    """POST /v1/record: per position what a trace keeps of a reference. Arrow columns as serve.engine.record says."""

    model: str | None = None
    windows: Annotated[list[Window], Field(min_length=1)]
    indices: list[Annotated[int, Field(ge=0, strict=True)]] | None = Field(
        None, description="number of each window in the seeding of its draws; null = its place in the list"
    )
    top_k: int = Field(64, ge=2)
    tail_samples: int = Field(16, ge=0, le=4096, description="ids drawn i.i.d. from the tail of each position")
    seed: int = Field(0, ge=0)
    full: bool = Field(False, description="whole rows besides: shifted float16, lse float64")


class GatherWindow(Window):
    """A window and, for each scored position, the ids to score: lists of one length, padded with -1."""

    wanted: list[list[Annotated[int, Field(ge=-1, lt=1 << 31, strict=True)]]]


class GatherRequest(Wire):
    """POST /v1/gather: logprobs of exactly the wanted ids, and the model's own nll, entropy, top1, margin, rank, and
    top_ids with top_logprobs."""

    model: str | None = None
    windows: Annotated[list[GatherWindow], Field(min_length=1)]
    top_k: int = Field(10, ge=1, description="most likely ids of the model to name")


class RowsRequest(Wire):
    """POST /v1/rows: whole rows of float32 logits."""

    model: str | None = None
    windows: Annotated[list[Window], Field(min_length=1)]


class ScoreRequest(Wire):
    """POST /v1/score: exact per-position columns of candidates, against a reference where one is named."""

    candidates: Annotated[list[str], Field(min_length=1)]
    reference: str | None = None
    windows: Annotated[list[Window], Field(min_length=1)]
    overlap_k: int = Field(10, ge=1, le=1000, description="k of topk_overlap")
    top_k: int = Field(0, ge=0, le=1000, description="most likely ids of each side to name; 0 = none")
    apart: bool = Field(False, description="run candidates one window at a time, even where one is the reference")
    hidden: bool = Field(
        False, description="also send the hidden rows of the reference, or of the only candidate, as a second stream"
    )
    keep: bool = Field(
        False, description="use the reference's hidden rows that are kept on disk, and keep those that are computed"
    )
    bits: bool = Field(False, description="also count the logits of each row that differ in any bit, `unequal`")


class TokenizeRequest(Wire):
    """POST /tokenize: one prompt or several, or one chat. Special tokens in text are plain text.

    One exception: a prompt that is nothing but the text of one control token is that token (unless
    return_details), which is how clients learn its id.
    """

    model: str | None = None
    prompt: str | list[str] | None = None
    content: str | list[str] | None = Field(None, description="the prompt, as llama.cpp calls it")
    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = Field(True, description="add BOS where the tokenizer's own configuration adds it")
    add_generation_prompt: bool = Field(False, description="end a chat with the template's opening of a reply")
    continue_final_message: bool = Field(False, description="leave the last message of a chat open")
    chat_template: str | None = None
    return_details: bool = Field(
        False, description="also bytes per token, the ids put before a text and the assistant mask"
    )
    return_token_strs: bool = Field(False, description="also each token's text")


class TokenizeReply(BaseModel):
    """Ids (one list per prompt if a list was sent); `bytes` and `assistant` only with return_details."""

    count: int | list[int]
    tokens: list[int] | list[list[int]]
    max_model_len: int
    bytes: list[int] | list[list[int]] | None = None
    assistant: list[bool] | None = None
    bos_token_id: int | None = None
    prefix_token_ids: list[int] | None = None
    token_strs: list[str] | list[list[str]] | None = None


class DetokenizeRequest(Wire):
    """POST /detokenize: ids to text; control tokens are written out unless skipped."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False


class DetokenizeReply(BaseModel):
    """The text."""

    prompt: str


class StreamOptions(Wire):
    """OpenAI's stream options, and vLLM's usage in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Generation(Wire):
    """What completions and chats share. Sampling fields choose tokens; they never change a reported logprob."""

    model: str | None = None
    prompt_logprobs: int | None = Field(
        None, ge=-1, strict=True, description="score the prompt: 0 = its tokens, k = and the top k"
    )
    n: int = Field(1, ge=1, le=128)
    stop: Stop | Annotated[list[Stop], Field(max_length=64)] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False, description="0 = greedy")
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(0, ge=-1, description="0 and -1 = no cut")
    min_p: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100, allow_inf_nan=False)
    logit_bias: dict[TokenKey, Bias] | None = None
    allowed_token_ids: TokenIds | None = None
    logprob_token_ids: list[TokenId] | list[list[TokenId]] | None = Field(
        None,
        description="ids to score exactly: one list for all positions, or one a position: first of the prompt's "
        "tokens where it is scored (its first list is not used), then of max_tokens new ones",
    )
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    # What OpenAI's clients send without changing an answer; anything but these values is refused by name.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class CompletionRequest(Generation):
    """POST /v1/completions: prompt logprobs and continuations."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    max_tokens: int = Field(16, ge=0, description="0 = score only")
    logprobs: int | None = Field(None, ge=-1, strict=True, description="0 = the chosen token, k = and the top k")
    echo: bool = False
    add_special_tokens: bool = Field(True, description="add BOS where the tokenizer's own configuration adds it")
    best_of: Literal[1] | None = None
    suffix: None = None


class TextFormat(Wire):
    """The only response format served."""

    type: Literal["text"] = "text"


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: int | None = Field(None, ge=0)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: StrictBool = False
    top_logprobs: int | None = Field(None, ge=-1, strict=True, description="needs logprobs: true")
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: TextFormat | None = None


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
