"""One source that is asked through a dialect: its URLs, how it is asked, and what was certified."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from evalgate import dialects
from evalgate.core import SourceInfo, Window
from evalgate.dialects.base import Ask, Capabilities, Dialect, Vocabulary, WindowScores
from evalgate.endpoints.budget import Purse
from evalgate.endpoints.certify import ProbeText, alternatives, certify, choose_dialect
from evalgate.endpoints.channel import Channel, EndpointDown
from evalgate.endpoints.constancy import MOVED, Named, difference, few_positions
from evalgate.endpoints.settings import EndpointSettings
from evalgate.endpoints.texts import model_of
from evalgate.errors import EndpointError
from evalgate.probe.certificate import Certificate
from evalgate.probe.excess import in_nats
from evalgate.probe.ordering import MOST_AT_ONCE
from evalgate.probe.quantum import Quantum, coarsest, with_excess
from evalgate.specs import SourceSpec

_EMBEDDED_AT_ONCE = 2  # windows: one is computed while the next one waits


@dataclass(frozen=True)
class Sending:
    """How a window's prefixes are sent where each position is asked for: as the probe found it cheapest.

    batch: requests sent together. listed: prefixes of one request. descending: longest first.
    """

    batch: int = 32
    listed: int = 1
    descending: bool = False


@dataclass(frozen=True)
class EndpointSource:
    """A source behind one or more URLs that share its windows.

    k: alternatives per position. windows_at_once: per URL. sending: how one window's prefixes go out.
    certificates: by URL, empty for the embedded server, which is ours. notes: for the reader.
    """

    info: SourceInfo
    model: str
    dialect: str
    k: int
    capabilities: Capabilities
    channels: tuple[Channel, ...]
    windows_at_once: int = 1
    sending: Sending = Sending()
    vocab_size: int | None = None
    vocabulary: Vocabulary | None = None
    certificates: Mapping[str, Certificate] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def by_id(self) -> bool:
        """Whether equal logprobs come ordered by ascending id."""
        return self.capabilities.tie_order == "id"

    @property
    def quantum(self) -> Quantum | None:
        """How far its log-probabilities may be off, at the worst of its URLs; None = not known to be at all."""
        return with_excess(coarsest(c.quantum for c in self.certificates.values()), self.excess)

    @property
    def excess(self) -> float:
        """Nats by which its log-probabilities may be too high: none where it lists the whole vocabulary."""
        whole = self.vocab_size is not None and self.k >= self.vocab_size
        return 0.0 if whole else max((in_nats(c.excess) for c in self.certificates.values()), default=0.0)

    @property
    def follows(self) -> bool:
        """Whether it is asked last, for the ids that the others named too: our own server takes any."""
        return not self.certificates

    @property
    def takes_ids(self) -> bool:
        """Whether it can be asked for ids by name, as far as its dialect and its probe say."""
        return self.asked.names_ids(self.capabilities)

    @property
    def asked(self) -> Dialect:
        """The dialect that it is asked in."""
        return dialects.get(self.dialect)

    def most_requests(self, window: Window, wanted: Mapping[int, tuple[int, ...]] | None = None) -> int:
        """Requests that one window takes at most, what is asked a second time among them, repeats not."""
        return self.asked.most_requests(window, self._ask(wanted))

    def score(
        self,
        channel: Channel,
        window: Window,
        wanted: Mapping[int, tuple[int, ...]] | None = None,
        *,
        purse: Purse | None = None,
    ) -> WindowScores:
        """Ask one URL about a window; `purse` pays, None = it is free.

        Raises EndpointDown where it does not answer, Spent where the budget ends, ScoreError for nonsense.
        """
        return channel.drive(self.asked.score_window(window, self._ask(wanted)), purse)

    @property
    def named(self) -> frozenset[Named]:
        """What the replies of its URLs name as the model."""
        return frozenset().union(*(channel.served.named for channel in self.channels))

    def check_unchanged(self, window: Window, before: WindowScores) -> None:
        """Ask every URL about a window again. Raises EndpointError where one answers otherwise than `before`.

        Where each position is a request of its own, the first few are asked. A URL that does not answer is left out.
        """
        if not self.certificates:
            return  # our own server, whose weights do not change
        part = window if self.asked.prompt_scoring else few_positions(window)
        limit = max(MOVED, 2 * (self.info.noise_floor or 0.0))
        for channel in self.channels:
            try:
                moved = difference(before, self.score(channel, part))
            except EndpointDown:
                continue
            if moved > limit:
                raise EndpointError(
                    f"{channel.url} does not repeat what was answered about window {window.index}: its "
                    f"log-probabilities are {moved:.3g} nats off on average, where repeats change {limit:.3g} at most; "
                    "its model changed, so start the run anew with --no-resume",
                    window=window.index,
                    endpoint=channel.url,
                )

    def draw(self, channel: Channel, prompt: tuple[int, ...], count: int, *, seed: int) -> tuple[int, ...] | None:
        """Token ids drawn after the prompt at temperature 1 (see `Dialect.draw`); None where no ids come back."""
        return channel.drive(self.asked.draw(self.model, self.capabilities, prompt, count, seed=seed))

    def _ask(self, wanted: Mapping[int, tuple[int, ...]] | None) -> Ask:
        return Ask(
            model=self.model,
            k=self.k,
            capabilities=self.capabilities,
            wanted=wanted or {},
            vocabulary=self.vocabulary,
            vocab_size=self.vocab_size,
            batch=self.sending.batch,
            listed=self.sending.listed,
            descending=self.sending.descending,
        )

    def identity(self) -> dict[str, Any]:
        """What changes its numbers, without what a probe measures anew each time."""
        return {
            "spec": self.info.spec,
            "model": self.model,
            "dialect": self.dialect,
            "k": self.k,
            "capabilities": {k: v for k, v in asdict(self.capabilities).items() if k != "excess"},
            "weights_hash": self.info.weights_hash,
            "tokenizer_hash": self.info.tokenizer_hash,
            "compute_dtype": self.info.compute_dtype,
            "context": self.info.context_length,
        }

    def close(self) -> None:
        """End the connections."""
        for channel in self.channels:
            channel.close()


def open_endpoint(
    spec: SourceSpec,
    channels: Sequence[Channel],
    settings: EndpointSettings,
    text: ProbeText,
    *,
    model: str = "",
    vocabulary: Vocabulary | None = None,
) -> EndpointSource:
    """Probe every URL and settle how all of them are asked; one that does not answer is left out, and noted.

    Raises EndpointError where none answers, one cannot be scored, or two differ in what they honour.
    """
    model = model or _first_model(channels, spec)
    found: dict[str, Certificate] = {}
    notes: list[str] = []
    alive: list[Channel] = []
    for channel in channels:
        try:
            found[channel.url] = certify(channel, model, text, vocabulary=vocabulary, dialect=settings.dialect)
            alive.append(channel)
        except EndpointDown as error:
            if len(channels) == 1:
                raise
            notes.append(f"{channel.url} did not answer and was left out")
            last = error
    if not alive:
        raise last
    names = {url: choose_dialect(c, url, forced=settings.dialect) for url, c in found.items()}
    dialect = next(iter(names.values()))
    other = next((url for url, name in names.items() if name != dialect), None)
    if other is not None:
        raise EndpointError(
            f"{alive[0].url} speaks '{dialect}' and {other} '{names[other]}': they are not the same server, "
            "so name one dialect with --dialect or leave one URL out"
        )
    k = min(alternatives(c, dialect, wanted=settings.top_k, url=url) for url, c in found.items())
    lead = next(iter(found.values()))
    if lead.tokenizer == "unknown" and text.plain:  # without plain ids the text is its own, and there is nothing to say
        notes.append(f"whether {spec.spec} cuts text into the same tokens is not known: it has no /tokenize")
    notes += [
        f"{url} rounds its log-probabilities to {c.quantum}, which the intervals count at its worst: {c.rounding}"
        for url, c in found.items()
        if c.rounding is not None
    ]
    notes += [
        f"the probabilities of {url} add up to {1 + (c.excess or 0.0):.5f} over the vocabulary: its log-probabilities "
        f"may be {in_nats(c.excess):.2g} nats too high (twice what the probe saw), which nll and all bounds count"
        for url, c in found.items()
        if in_nats(c.excess)
    ]
    return EndpointSource(
        info=_info(spec, model, dialect, k, found),
        model=model,
        dialect=dialect,
        k=k,
        capabilities=_common(found.values()),
        channels=tuple(alive),
        windows_at_once=settings.concurrency if dialects.get(dialect).prompt_scoring else 1,
        sending=_sending(found.values(), settings.concurrency),
        vocabulary=vocabulary,
        certificates=found,
        notes=tuple(notes),
    )


def embedded_source(info: SourceInfo, channel: Channel, *, k: int) -> EndpointSource:
    """The embedded server's model, asked like an endpoint: what it does is known and needs no probe."""
    return EndpointSource(
        info=info,
        model=info.name,
        dialect="prompt_logprobs",
        k=min(k, info.vocab_size),
        capabilities=Capabilities(token_id_keys=True, return_token_ids=True, logprob_token_ids=True, tie_order="id"),
        channels=(channel,),
        windows_at_once=_EMBEDDED_AT_ONCE,
        vocab_size=info.vocab_size,
    )


def _first_model(channels: Sequence[Channel], spec: SourceSpec) -> str:
    for channel in channels[:-1]:
        try:
            return model_of(channel, spec.model)
        except EndpointDown:
            continue
    return model_of(channels[-1], spec.model)


def _sending(found: Collection[Certificate], concurrency: int) -> Sending:
    """The cheapest way that all URLs take; the most that was tried at once stands for as many as are allowed."""
    costs = [c.cheapest for c in found]
    known = [c for c in costs if c is not None]
    if not known or len(known) < len(costs):
        return Sending(batch=concurrency)
    if all(c.listed > 1 for c in known):
        return Sending(batch=concurrency, listed=min(c.prompt_list for c in found))
    at_once = min(MOST_AT_ONCE if c.listed > 1 else c.at_once for c in known)
    batch = concurrency if at_once == MOST_AT_ONCE else min(at_once, concurrency)
    return Sending(batch=batch, descending=all(c.order == "descending" for c in known))


def _common(found: Iterable[Certificate]) -> Capabilities:
    """What all URLs honour."""
    able = [c.capabilities() for c in found]
    first = able[0]
    for other in able[1:]:
        limits = [c.max_logprobs for c in (first, other) if c.max_logprobs is not None]
        first = replace(
            first,
            max_logprobs=min(limits) if limits else None,
            token_id_keys=first.token_id_keys and other.token_id_keys,
            return_token_ids=first.return_token_ids and other.return_token_ids,
            forced=first.forced if first.forced == other.forced else "",
            logprob_token_ids=first.logprob_token_ids and other.logprob_token_ids,
            max_tokens_zero=first.max_tokens_zero and other.max_tokens_zero,
            tie_order=first.tie_order if first.tie_order == other.tie_order else "unknown",
        )
    return first


def _info(spec: SourceSpec, model: str, dialect: str, k: int, found: Mapping[str, Certificate]) -> SourceInfo:
    lengths = [c.context_length for c in found.values() if c.context_length]
    moved = [d for c in found.values() for d in (c.cached_difference, c.batch_difference) if d is not None]
    lead = next(iter(found.values()))
    return SourceInfo(
        spec=spec.spec,
        name=f"{model} at {spec.urls[0]}" if spec.kind == "endpoint" else spec.spec,
        kind="endpoint",
        vocab_size=0,  # not told
        context_length=min(lengths, default=0),  # 0 = not told
        noise_floor=max(moved) if moved else None,
        extra={
            "dialect": dialect,
            "top_k": str(k),
            "urls": ", ".join(found),
            "tokenizer": lead.tokenizer,
            "tie_order": lead.tie_order,
            "certificate": json.dumps({url: c.to_dict() for url, c in found.items()}, allow_nan=False),
        },
    )
