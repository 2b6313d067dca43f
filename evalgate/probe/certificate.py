"""What a probe found out about an endpoint, as a record and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from evalgate.dialects.base import Capabilities
from evalgate.probe.excess import in_nats
from evalgate.probe.quantum import Quantum, RoundingCost


@dataclass(frozen=True)
class Cost:
    """What nested prefixes cost when sent in one way.

    at_once: requests under way together. listed: prefixes of one request. seconds: of all, HTTP included.
    computed: prompt tokens that no cache answered, None = the endpoint does not tell.
    """

    order: Literal["ascending", "descending"]
    at_once: int
    listed: int
    seconds: float
    computed: int | None


@dataclass(frozen=True)
class Certificate:
    """An endpoint's scoring behaviour. None = the probe could not find out.

    ids_accepted: prompts may be token ids. prompt_logprobs, echo: honoured (not merely accepted).
    off_by_one: row i predicts token i+1. generated: completions return logprobs of a generated token.
    dialects: those that are honoured, the preferred one first. ids_on_wire: alternatives carry ids.
    entries: a row of prompt logprobs holds k entries or k+1 where the actual token is outside.
    largest_k: most alternatives served; k_is_limit False = no limit was met up to there.
    temperature_scaled: generated logprobs depend on the temperature asked for. temperature: the one to ask
    with. bos_added: the server adds tokens to ids. tie_order: ids ascending among equal logprobs, seen at
    least three times, else "other" or "unknown". cached_difference, batch_difference: largest change of a
    logprob (nats) when a request is sent again, or four times in one batch. tokenizer: the server's ids of
    the probe text against the local ones. best: the one of `dialects` that the probe chooses, "" = none works.
    notes: refusals. quantum: the grid that printed log-probabilities lie on, None = finer than float32 or not known.
    rounding: what that costs the bounds of a position, None = nothing known. excess: by how much the probabilities of
    a whole list added up to more than 1, at most; None = no whole list was given.
    speculative: whether generated logprobs look like those of speculative decoding (`drafting`), by
    speculative_difference nats. prompt_list: longest list of prompts that was answered prompt by prompt.
    continuation_costs, cheapest: ways to send a window's prefixes, where it is asked position by position.
    overloads: replies 429 and 503 while probing. retry_after: longest wait that one named, seconds.
    rate_limits: headers that tell a limit (name, value), as they last came.
    """

    model: str
    ids_accepted: bool
    prompt_logprobs: bool
    off_by_one: bool
    echo: bool
    max_tokens_zero: bool
    generated: bool
    dialects: tuple[str, ...]
    ids_on_wire: bool
    token_id_keys: bool
    return_token_ids: bool
    forced: Literal["", "allowed_token_ids", "logit_bias"]
    logprob_token_ids: bool
    entries: Literal["k", "k+1", "unknown"]
    largest_k: int
    k_is_limit: bool
    temperature_scaled: bool | None
    temperature: float
    bos_added: bool | None
    context_length: int | None
    tie_order: Literal["id", "other", "unknown"]
    cached_difference: float | None
    batch_difference: float | None
    sentinels: tuple[float, ...]
    tokenizer: Literal["agrees", "differs", "unknown"]
    best: str
    notes: tuple[str, ...]
    speculative: Literal["not seen", "suspected", "unknown"] = "unknown"
    speculative_difference: float | None = None
    prompt_list: int = 1
    continuation_costs: tuple[Cost, ...] = ()
    cheapest: Cost | None = None
    overloads: int = 0
    retry_after: float | None = None
    rate_limits: tuple[tuple[str, str], ...] = ()
    quantum: Quantum | None = None
    rounding: RoundingCost | None = None
    excess: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The certificate as JSON-ready values."""
        lists = {name: list(getattr(self, name)) for name in ("dialects", "sentinels", "notes")}
        costs = [asdict(cost) for cost in self.continuation_costs]
        grid = None if self.quantum is None else {"kind": self.quantum.kind, "decimals": self.quantum.decimals}
        more = {"continuation_costs": costs, "rate_limits": dict(self.rate_limits), "quantum": grid}
        return asdict(self) | lists | more

    def capabilities(self) -> Capabilities:
        """What a dialect needs to know."""
        return Capabilities(
            max_logprobs=self.largest_k if self.k_is_limit else None,
            token_id_keys=self.token_id_keys,
            return_token_ids=self.return_token_ids,
            forced=self.forced,
            logprob_token_ids=self.logprob_token_ids,
            max_tokens_zero=self.max_tokens_zero,
            temperature=self.temperature,
            tie_order="id" if self.tie_order == "id" else "unknown",
            excess=in_nats(self.excess),
        )
