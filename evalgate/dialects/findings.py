"""The probe's notebook: what is asked with, what was found so far, and how one question is put."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from evalgate.core import Window
from evalgate.dialects.base import Ask, Asking, Capabilities, Dialect, Place, Reply, Request, Vocabulary, WindowScores
from evalgate.dialects.body import prompt_tokens, read_body
from evalgate.dialects.generation import COMPLETIONS as COMPLETIONS_ROUTE
from evalgate.dialects.generation import Generation
from evalgate.dialects.listings import Listing
from evalgate.dialects.texts import REPLACEMENT
from evalgate.errors import EndpointError, ScoreError

Body = dict[str, Any] | None

COMPLETIONS = "/v1/completions"
NO_ANSWER = (401, 403, 408, 429, 502, 503, 504, 520, 529)  # statuses that do not tell what is honoured
_OUTSIDE = -1  # index of the probe's windows, which belong to no run


@dataclass(frozen=True)
class Question:
    """What the probe asks with.

    ids: at least 4 tokens of plain text, as the local tokenizer cuts `text` (BOS included where it adds
    one). local_ids: ids of `text` without special tokens. vocabulary: reads alternatives that come as text.
    dialect: the one that will be used whatever is found, "" = the best.
    """

    model: str
    ids: tuple[int, ...]
    text: str
    local_ids: tuple[int, ...] = ()
    vocabulary: Vocabulary | None = None
    dialect: str = ""


@dataclass
class Findings:
    """The certificate while it is being filled.

    facts: fields of the certificate. notes: refusals, for people. listings: every list of alternatives that came.
    first: the very first one, cold and asked for without flags; plain: the same with ids where they can be had.
    dialect: the one that will be used, None = none works.
    """

    question: Question
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    listings: list[Listing] = field(default_factory=list)
    first: Listing = field(default_factory=list)
    plain: Listing = field(default_factory=list)
    dialect: Dialect | None = None

    @property
    def generation(self) -> Generation | None:
        """How the dialect's server generates tokens; None where that cannot be measured."""
        found = self.dialect.generation if self.dialect is not None else None
        return found if found is not COMPLETIONS_ROUTE or self.facts["generated"] else None

    @property
    def takes_ids(self) -> bool:
        """Whether /v1/completions takes token ids as they are."""
        return bool(self.facts["ids_accepted"]) and self.facts["bos_added"] is not True

    def scored(
        self, dialect: Dialect, *, k: int, ids: tuple[int, ...] = (), positions: tuple[int, ...] = ()
    ) -> Asking[WindowScores | None]:
        """Scores of `positions` of `ids` through a dialect, None where the endpoint refuses.

        By default the last position of the probe's prompt.
        """
        ids = ids or self.question.ids
        able = Capabilities(
            token_id_keys=bool(self.facts.get("token_id_keys")),
            return_token_ids=bool(self.facts.get("return_token_ids")),
            max_tokens_zero=bool(self.facts.get("max_tokens_zero")),
            temperature=float(self.facts.get("temperature", 0.0)),
        )
        window = Window(_OUTSIDE, "probe", "probe", ids, 1, len(ids), (1,) * len(ids))
        asked = Ask(
            self.question.model,
            k,
            capabilities=able,
            positions=positions or (len(ids) - 1,),
            vocabulary=self.question.vocabulary,
            batch=1,  # one after the other, so that each finds what the one before left in a cache
        )
        try:
            return (yield from dialect.score_window(window, asked))
        except (EndpointError, ScoreError) as error:
            if error.context.get("status") in NO_ANSWER:
                raise
            self.notes.append(error.message)
            return None


def ask(found: Findings, path: str, fields: dict[str, Any] | None, *, k: int = 0) -> Asking[Body]:
    """One question; None where the endpoint refuses it."""
    (reply,) = yield (Request("GET" if fields is None else "POST", path, fields),)
    return _read(found, path, reply, k)


def complete(found: Findings, **fields: Any) -> Asking[list[dict[str, Any]]]:
    """The choices of a completions request, by index; empty where it is refused."""
    base = {"model": found.question.model, "prompt": list(found.question.ids), "max_tokens": 1, "temperature": 0}
    body = yield from ask(
        found, COMPLETIONS, base | fields, k=int(fields.get("prompt_logprobs", fields.get("logprobs", 0)))
    )
    choices = [c for c in (body or {}).get("choices") or () if isinstance(c, dict)]
    if body is not None and choices:
        choices[0]["usage"] = prompt_tokens(body, Place(COMPLETIONS))
    return sorted(choices, key=lambda c: c.get("index", 0))


def key_ids(key: str, found: Findings) -> frozenset[int]:
    """The ids that a listing's key may be; empty where nothing tells."""
    if key.startswith("token_id:"):
        return frozenset({int(key.removeprefix("token_id:"))})
    vocabulary = found.question.vocabulary
    return vocabulary.ids_of(key.encode()) if vocabulary is not None and REPLACEMENT not in key else frozenset()


def _read(found: Findings, path: str, reply: Reply, k: int) -> Body:
    try:
        return read_body(reply, Place(path), k=k)
    except EndpointError as error:
        if error.context.get("status") in NO_ANSWER:
            raise
        found.notes.append(error.message)
        return None
