"""Scripted endpoints over a random float64 model: what each server of the wire notes would answer."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from evalgate.dialects.base import Reply, Request
from tests.evalgate.dialects.drive import Words, reply_of

VOCAB = 40
# Ids 30, 31 and 34 to 36 share texts, 32 and 33 are not UTF-8.
WORDS = Words(
    {i: f" w{i}" for i in range(VOCAB)}
    | {30: " same", 31: " same", 32: b"\xe2\x80", 33: b"\xe2\x81", 34: " two", 35: " two", 36: " two"}
)
BOS = 1

Vector = npt.NDArray[np.float64]


def truth(prefix: tuple[int, ...], *, step: float = 0.0, temperature: float = 1.0) -> Vector:
    """Log-probabilities of the next token. step > 0 rounds the logits, which makes ties."""
    rng = np.random.default_rng(zlib.crc32(np.array(prefix, dtype=np.int64).tobytes()))
    logits = rng.normal(size=VOCAB) * 2.0
    if step:
        logits = np.round(logits / step) * step
    logits = logits / temperature
    top = logits.max()
    return logits - top - np.log(np.exp(logits - top).sum())  # type: ignore[no-any-return]


def best(lp: Vector, k: int, *, ascending: bool = True) -> list[int]:
    """The k best ids, ties by ascending (or descending) id."""
    ids = sorted(range(VOCAB), key=lambda i: (-lp[i], i if ascending else -i))
    return ids[:k]


def text_of(token: int) -> str:
    return WORDS.bytes_of(token).decode("utf-8", "replace")


@dataclass
class Fake:
    """One server. Every field is a trait of its wire."""

    prompt_logprobs: str = "refused"  # honoured, ignored, refused, shifted
    echo: str = "refused"  # honoured, ignored, refused
    shape: str = "completions"  # completions, content, none
    limit: int | None = None
    id_flags: bool = False
    unknown_fields: str = "ignored"  # ignored, refused
    forced: tuple[str, ...] = ()
    logprob_token_ids: bool = False
    scaled: bool = False
    adds_bos: bool = False
    cuts: int = 0
    sglang: bool = False
    llamacpp: bool = False
    chat: bool = True
    max_model_len: int | None = None
    tokenizer: bool = True
    step: float = 0.0
    ties_ascend: bool = True
    cache_noise: float = 0.0  # of a prompt that was asked before
    growth_noise: float = 0.0  # of a native prompt that continues the one before it, as on a cache that grows
    excess: float = 0.0  # by which the native path's probabilities exceed 1 in sum
    slot: tuple[int, ...] = ()
    draft_noise: float = 0.0  # of generated tokens after the first
    tells_drafts: bool = False
    longest_list: int = 4096
    extends_only: bool = False  # tells cached tokens; only a cached prompt that is a whole prefix counts
    cached: set[tuple[int, ...]] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)

    def answer(self, request: Request) -> Reply:
        fields = request.json or {}
        if request.path == "/v1/models":
            return reply_of({"data": [{"id": "m", "max_model_len": self.max_model_len}]})
        if request.path == "/tokenize" and self.tokenizer:
            return reply_of({"tokens": [int(w[1:]) for w in fields["prompt"].split()]})
        if request.path == "/v1/completions" and self.shape != "none":
            return self._completions(fields)
        if request.path == "/v1/chat/completions" and self.chat:
            return self._chat(fields)
        if request.path == "/generate" and self.sglang:
            return self._generate(fields)
        if request.path == "/completion" and self.llamacpp:
            return self._completion(fields)
        return reply_of({"error": {"message": "Not Found"}}, 404)

    def _lp(self, prefix: tuple[int, ...], temperature: float = 1.0, *, cold: bool = True) -> Vector:
        scale = temperature if self.scaled and temperature else 1.0
        lp = truth(prefix, step=self.step, temperature=scale)
        return lp if cold else lp - self.cache_noise

    def _top(self, lp: Vector, k: int) -> list[int]:
        return best(lp, k, ascending=self.ties_ascend)

    def _refuses(self, fields: dict[str, Any]) -> str:
        own = {"model", "prompt", "max_tokens", "temperature", "logprobs", "echo", "seed", "logit_bias"}
        if self.unknown_fields == "refused" and (extra := set(fields) - own):
            return f"Unrecognized request argument supplied: {min(extra)}"
        k = max(int(fields.get("logprobs") or 0), int(fields.get("prompt_logprobs") or 0))
        if self.limit is not None and k > self.limit:
            return f"Requested sample logprobs of {k}, which is greater than max allowed: {self.limit}"
        if "prompt_logprobs" in fields and self.prompt_logprobs == "refused":
            return "prompt_logprobs is not supported"
        if fields.get("echo") and self.echo == "refused":
            return "echo with logprobs is not supported"
        return ""

    def _completions(self, fields: dict[str, Any]) -> Reply:
        if message := self._refuses(fields):
            return reply_of({"error": {"message": message, "code": 400}}, 400)
        prompts = fields["prompt"] if isinstance(fields["prompt"][0], list) else [fields["prompt"]]
        if len(prompts) > self.longest_list:
            return reply_of({"error": {"message": "too many prompts"}}, 400)
        choices = [self._choice(i, tuple(p), fields) for i, p in enumerate(prompts)]
        read = sum(len(p) + self.adds_bos - self.cuts for p in prompts)
        usage: dict[str, Any] = {"prompt_tokens": read, "completion_tokens": len(prompts)}
        if self.extends_only:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(self._cached(tuple(p)) for p in prompts)}
        if self.tells_drafts:
            usage["completion_tokens_details"] = {"accepted_prediction_tokens": 3}
        return reply_of({"choices": choices, "usage": usage})

    def _cached(self, prompt: tuple[int, ...]) -> int:
        found = max((len(c) for c in self.cached if c == prompt[: len(c)]), default=0)
        self.cached.add(prompt)
        return min(found, len(prompt) - 1)

    def _continued(self, ids: tuple[int, ...], count: int, fields: dict[str, Any]) -> list[tuple[Vector, int]]:
        """(log-probabilities, token) of the generated tokens after the first, greedy."""
        done, found = (*ids, self._generated(ids, fields)), []
        for _ in range(count - 1):
            lp = self._lp(done) - self.draft_noise
            found.append((lp, self._top(lp, 1)[0]))
            done = (*done, found[-1][1])
        return found

    def _choice(self, index: int, ids: tuple[int, ...], fields: dict[str, Any]) -> dict[str, Any]:
        ids = ((BOS,) if self.adds_bos else ()) + ids[self.cuts :]
        choice: dict[str, Any] = {"index": index, "text": "", "finish_reason": "length"}
        k = fields.get("prompt_logprobs")
        if k is not None and self.prompt_logprobs in ("honoured", "shifted"):
            rows = [self._id_map(ids[:i], ids[i], k) for i in range(1, len(ids))]
            following = self._id_map(ids, self._top(self._lp(ids), 1)[0], k)
            choice["prompt_logprobs"] = [None, *rows] if self.prompt_logprobs == "honoured" else [*rows, following]
        k = fields.get("logprobs")
        if k is not None:
            echoed = bool(fields.get("echo")) and self.echo == "honoured"
            choice["logprobs"] = self._logprobs(ids, k, fields, echoed=echoed)
        if fields.get("return_token_ids") and self.id_flags:
            choice |= {"prompt_token_ids": list(ids), "token_ids": [self._generated(ids, fields)]}
        return choice

    def _id_map(self, prefix: tuple[int, ...], token: int, k: int) -> dict[str, Any]:
        lp = self._lp(prefix)
        worst = int((lp >= lp[token]).sum())
        row = {str(token): {"logprob": float(lp[token]), "rank": worst}}
        for rank, t in enumerate(self._top(lp, k)):
            row.setdefault(str(t), {"logprob": float(lp[t]), "rank": rank + 1})
        return row

    def _generated(self, ids: tuple[int, ...], fields: dict[str, Any]) -> int:
        if "allowed_token_ids" in self.forced and "allowed_token_ids" in fields:
            return int(fields["allowed_token_ids"][0])
        if "logit_bias" in self.forced and fields.get("logit_bias"):
            bias = fields["logit_bias"]
            return int(next(iter(bias)) if isinstance(bias, dict) else bias[0][0])
        return self._top(self._lp(ids), 1)[0]

    def _logprobs(self, ids: tuple[int, ...], k: int, fields: dict[str, Any], *, echoed: bool) -> dict[str, Any] | None:
        temperature = float(fields.get("temperature") or 0.0)
        cold = str(ids) not in self.seen
        self.seen.add(str(ids))
        lp, token = self._lp(ids, temperature, cold=cold), self._generated(ids, fields)
        rest = self._continued(ids, int(fields.get("max_tokens", 1)), fields)
        if self.shape == "content":
            return {"content": [self._item(v, t, k) for v, t in [(lp, token), *rest]]} if k > 0 else None
        keyed = self.id_flags and bool(fields.get("return_tokens_as_token_ids"))
        extra = fields.get("logprob_token_ids", []) if self.logprob_token_ids else []
        steps = [(self._lp(ids[:i]), ids[i]) for i in range(1, len(ids))] if echoed else []
        if not (echoed and fields["max_tokens"] == 0):
            steps += [(lp, token), *rest]

        def key(t: int) -> str:
            return f"token_id:{t}" if keyed else text_of(t)

        first = [key(ids[0])] if echoed else []
        return {
            "tokens": first + [key(t) for _, t in steps],
            "token_logprobs": [None for _ in first] + [float(v[t]) for v, t in steps],
            "top_logprobs": [None for _ in first]
            + [{key(i): float(v[i]) for i in [t, *(extra or self._top(v, k))]} for v, t in steps],
        }

    def _item(self, lp: Vector, token: int, k: int, *, with_id: bool = True) -> dict[str, Any]:
        def one(t: int) -> dict[str, Any]:
            named = {"id": t} if with_id else {}
            return named | {"token": text_of(t), "bytes": list(WORDS.bytes_of(t)), "logprob": float(lp[t])}

        return one(token) | {"top_logprobs": [one(t) for t in self._top(lp, k)]}

    def _chat(self, fields: dict[str, Any]) -> Reply:
        """The template: BOS, the user's words, and nothing else before the answer."""
        words = " ".join(m["content"] for m in fields["messages"]).split()
        ids = (BOS, *(int(w[1:]) for w in words))
        lp = self._lp(ids, float(fields["temperature"]))
        item = self._item(lp, self._top(lp, 1)[0], fields["top_logprobs"], with_id=False)
        choice = {"index": 0, "message": {}, "logprobs": {"content": [item]}}
        return reply_of({"choices": [choice], "usage": {"prompt_tokens": len(ids)}})

    def _generate(self, fields: dict[str, Any]) -> Reply:
        ids, start, k = tuple(fields["input_ids"])[self.cuts :], fields["logprob_start_len"], fields["top_logprobs_num"]
        own, top, extra = [[None, ids[start], None]], [None], [None]
        for i in range(start + 1, len(ids)):
            lp = self._lp(ids[:i])
            own.append([float(lp[ids[i]]), ids[i], None])
            top.append([[float(lp[t]), t, None] for t in self._top(lp, k)])
            extra.append([[float(lp[t]), t, None] for t in fields.get("token_ids_logprob", ())])
        meta = {"prompt_tokens": len(ids), "input_token_logprobs": own, "input_top_logprobs": top}
        return reply_of({"text": "", "meta_info": meta | {"input_token_ids_logprobs": extra}})

    def _completion(self, fields: dict[str, Any]) -> Reply:
        ids = tuple(fields["prompt"])[self.cuts :]
        token, lp = self._generated(ids, fields), self._lp(ids, cold=str(ids) not in self.seen)
        self.seen.add(str(ids))
        if 1 < len(self.slot) < len(ids) and ids[: len(self.slot)] == self.slot:
            lp = lp + self.growth_noise * np.where(np.arange(VOCAB) % 2, -1, 1)
        self.slot = ids
        steps = [(lp, token), *self._continued(ids, fields["n_predict"], fields)]
        items = [self._item(lp + np.log1p(self.excess), t, fields["n_probs"]) for lp, t in steps]
        return reply_of({"truncated": False, "tokens_evaluated": len(ids), "completion_probabilities": items})


def vllm(**more: Any) -> Fake:
    settings: dict[str, Any] = {
        "prompt_logprobs": "honoured",
        "echo": "honoured",
        "limit": 20,
        "id_flags": True,
        "forced": ("allowed_token_ids", "logit_bias"),
        "logprob_token_ids": True,
        "max_model_len": 2048,
        "step": 0.5,
        "ties_ascend": False,
    }
    return Fake(**(settings | more))


def sglang(**more: Any) -> Fake:
    return Fake(**({"sglang": True, "echo": "honoured", "scaled": True, "prompt_logprobs": "ignored"} | more))


def llamacpp(**more: Any) -> Fake:
    settings: dict[str, Any] = {
        "llamacpp": True,
        "shape": "content",
        "echo": "ignored",
        "prompt_logprobs": "ignored",
        "forced": ("logit_bias",),
        "cache_noise": 0.01,
    }
    return Fake(**(settings | more))


def openai(**more: Any) -> Fake:
    return Fake(**({"limit": 5, "unknown_fields": "refused", "tokenizer": False} | more))


def mini_sglang(**more: Any) -> Fake:
    return Fake(**({"limit": 5, "tokenizer": False} | more))


def pegainfer(**more: Any) -> Fake:
    return vllm(**({"ties_ascend": True, "forced": (), "logprob_token_ids": False} | more))


def tensorrt_llm(**more: Any) -> Fake:
    return Fake(**({"prompt_logprobs": "shifted"} | more))


# Dialect -> the server it is for. A dialect without one fails the contract tests.
SERVERS = {
    "chat": mini_sglang,
    "continuation": vllm,
    "echo": vllm,
    "llamacpp": llamacpp,
    "openai": openai,
    "prompt_logprobs": vllm,
    "sglang": sglang,
    "tensorrt_llm": tensorrt_llm,
}
