"""The sides of a measurement where at least one is an endpoint, opened: all are asked through a dialect.

Models loaded here run in one server of ours and are asked for prompt logprobs at the same k; llama.cpp servers are
started as children; endpoints are probed. `evalgate verify` and `evalgate probe` open their sources here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from evalgate.core import Document, SourceInfo, TokenizedDocument
from evalgate.endpoints.certify import DEFAULT_K, PROBE_TEXT, ProbeText, own_probe_text
from evalgate.endpoints.channel import Channel, EndpointDown
from evalgate.endpoints.llamacpp_server import LlamaCppServer
from evalgate.endpoints.settings import EndpointSettings
from evalgate.endpoints.source import EndpointSource, embedded_source, open_endpoint
from evalgate.endpoints.texts import model_of, tokenize, tokens_of
from evalgate.endpoints.vocabulary import ByteVocabulary
from evalgate.errors import UsageError
from evalgate.measure.tokenizers import token_texts
from evalgate.server.client import EmbeddedClient, weights_facts
from evalgate.server.process import EmbeddedServer
from evalgate.specs import SourceSpec

if TYPE_CHECKING:
    import pyarrow as pa

_DAY = 86400.0  # seconds: our own server on a slow machine takes what it takes


class Stages(Protocol):
    """Receives a phrase for each stage before scoring."""

    def stage(self, text: str) -> None:
        """A stage begins."""


class Sides:
    """The opened sources by spec, in the order given; made by `opened`."""

    def __init__(
        self,
        sources: dict[str, EndpointSource],
        server: EmbeddedServer | None,
        lead: _Tokenizer,
        certified: Callable[[str, str], EndpointSource],
    ) -> None:
        self.sources = sources
        self._certified = certified
        self._server = server
        self._lead = lead

    @property
    def infos(self) -> dict[str, SourceInfo]:
        """What is known about each source."""
        return {spec: source.info for spec, source in self.sources.items()}

    @property
    def context(self) -> int | None:
        """Most tokens of a window that every side takes: one token is generated besides. None = not known."""
        known = [s.info.context_length - 1 for s in self.sources.values() if s.info.context_length]
        return min(known, default=None)

    @property
    def notes(self) -> list[str]:
        """What a reader must know about how the sources were asked."""
        return [note for source in self.sources.values() for note in source.notes]

    @property
    def end_id(self) -> int | None:
        """The embedded tokenizer's end-of-text id, None where it is not known."""
        return self._lead.end_id

    @property
    def tokenizer(self) -> SourceInfo | None:
        """The model loaded here whose tokenizer the endpoints are held to; None where there is none."""
        return self._lead.info

    def through(self, spec: str, dialect: str) -> EndpointSource:
        """An endpoint of these sides, probed again for another dialect. Raises EndpointError where it cannot be."""
        return self._certified(spec, dialect)

    @property
    def client(self) -> EmbeddedClient | None:
        """The client of the server that holds the models loaded here; None where none is."""
        return self._lead.client

    def versions(self) -> dict[str, str]:
        """Package versions of the embedded server; empty where there is none."""
        return self._lead.client.versions() if self._lead.client is not None else {}

    def tokenize(self, documents: Sequence[Document]) -> list[TokenizedDocument]:
        """The documents tokenized by the model loaded here, or by the first endpoint where none is."""
        return self._lead.tokenize(documents)

    def token_texts(self, table: pa.Table, alternatives: pa.Table | None) -> dict[int, str] | None:
        """The texts of a run's ids, of the model loaded here; None where none is."""
        lead = self._lead
        if lead.client is None or lead.info is None:
            return None
        return token_texts(lead.client, lead.info.name, table, alternatives)

    def identity(self) -> dict[str, Any]:
        """By spec, what changes the numbers of a source."""
        return {spec: source.identity() for spec, source in self.sources.items()}

    def failure(self, spec: str, error: BaseException) -> BaseException:
        """The error to show for a side's failure; where our own server died, it says how."""
        if isinstance(error, EndpointDown) and self.sources[spec].info.kind == "embedded" and self._server is not None:
            return self._server.failure(error.message)
        return error


@dataclass
class _Tokenizer:
    """What tokenizes the text: the model `info`, which is loaded here, or an endpoint."""

    client: EmbeddedClient | None = None
    info: SourceInfo | None = None
    end_id: int | None = None
    channel: Channel | None = None
    model: str = ""

    @property
    def name(self) -> str:
        return self.info.name if self.info is not None else ""

    def tokenize(self, documents: Sequence[Document]) -> list[TokenizedDocument]:
        if self.client is not None:
            return self.client.tokenize(self.name, documents)
        if self.channel is None:
            raise UsageError("there is no tokenizer for the text: name one with --tokenizer SPEC")
        return tokenize(self.channel, self.model, documents)

    def probe_text(self) -> ProbeText:
        if self.client is not None:
            (cut,) = self.client.tokenize(self.name, [Document("probe", "probe", PROBE_TEXT)])
            return ProbeText((*cut.prefix, *cut.ids), cut.ids)
        if self.channel is None:
            raise UsageError("there is no tokenizer for the text: name one with --tokenizer SPEC")
        whole = own_probe_text(self.channel, self.model)
        return replace(whole, plain=tokens_of(self.channel, self.model, PROBE_TEXT, special=False) or ())

    def vocabulary(self) -> ByteVocabulary | None:
        return None if self.client is None else ByteVocabulary(self.client.vocabulary(self.name))


@contextmanager
def opened(
    models: Sequence[SourceSpec],
    settings: EndpointSettings,
    *,
    device: str,
    logits: str,
    watch: Stages,
    check: bool = False,
    server_options: Sequence[str] = (),
    python: str | None = None,
) -> Iterator[Sides]:
    """The sources, opened: servers of ours started, endpoints probed. All are closed after the block.

    server_options, python: of the server that holds the models loaded here.
    Raises UsageError for a trace, ServerError where a child cannot start, EndpointError and MismatchError for
    an endpoint that cannot be trusted.
    """
    parsed = {model.spec: model for model in models}
    traces = [spec for spec, found in parsed.items() if found.kind == "trace"]
    if traces:
        raise UsageError(f"{traces[0]} is a trace: compare a model with it that is loaded here, not an endpoint")
    local = [spec for spec, found in parsed.items() if found.kind == "embedded"]
    lead_specs = list(dict.fromkeys([*local, *([settings.tokenizer] if settings.tokenizer else [])]))
    k = settings.top_k or DEFAULT_K
    with ExitStack() as stack:
        server, lead = None, _Tokenizer()
        loaded: dict[str, SourceInfo] = {}
        if lead_specs:
            options = ["--logits", logits, "--max-logprobs", str(k), *(["--check"] if check else []), *server_options]
            server = stack.enter_context(
                EmbeddedServer(lead_specs, device=device, options=options, on_stage=watch.stage, python=python)
            )
            client = EmbeddedClient(server)
            stack.callback(client.close)
            loaded = client.sources(lead_specs)
            info = loaded[settings.tokenizer or local[0]]
            end = info.extra.get("eos_token_id")
            lead = _Tokenizer(client, info, int(end) if end else None)
        sizes: dict[str, dict[str, str]] = {}
        channels = {
            spec: _channels(parsed[spec], settings, stack, watch, sizes) for spec in parsed if parsed[spec].remote
        }
        if lead.client is None:
            first = next(iter(channels))
            lead.channel, lead.model = channels[first][0], model_of(channels[first][0], parsed[first].model)
        text = lead.probe_text()
        sources: dict[str, EndpointSource] = {}

        def certified(spec: str, dialect: str) -> EndpointSource:
            watch.stage(f"probing {spec}")
            own_cut = lead.channel is not None and lead.channel in channels[spec]
            # an endpoint that agrees with itself says nothing about its tokenizer
            asked = replace(text, plain=()) if own_cut else text
            source = _certified(parsed[spec], channels[spec], replace(settings, dialect=dialect), asked, lead)
            return replace(source, info=replace(source.info, extra={**source.info.extra, **sizes.get(spec, {})}))

        for spec in parsed:
            if parsed[spec].remote:
                sources[spec] = certified(spec, settings.dialect)
            elif server is not None:
                own = EndpointSettings(concurrency=4, timeout=_DAY, patience=1.0)
                channel = Channel(server.url, own, key=server.key, trust_env=False)
                stack.callback(channel.close)
                sources[spec] = embedded_source(loaded[spec], channel, k=k)
        yield Sides(sources, server, lead, certified)


def _channels(
    spec: SourceSpec, settings: EndpointSettings, stack: ExitStack, watch: Stages, sizes: dict[str, dict[str, str]]
) -> list[Channel]:
    """Channels to the URLs of a source; for a llama.cpp spec, to a server started here. sizes: gets its weights'."""
    if spec.kind == "llama.cpp":
        server = stack.enter_context(LlamaCppServer(spec.path, settings.llama, on_stage=watch.stage))
        sizes[spec.spec] = weights_facts(server.weights)
        own = replace(settings, concurrency=1, headers=(), proxy="", ca_file="")
        made = [Channel(server.url, own, key=server.key, trust_env=False)]
    else:
        key = settings.key()
        made = [Channel(url, settings, key=key) for url in spec.urls]
    for channel in made:
        stack.callback(channel.close)
    return made


def _certified(
    spec: SourceSpec, channels: list[Channel], settings: EndpointSettings, text: ProbeText, lead: _Tokenizer
) -> EndpointSource:
    source = open_endpoint(spec, channels, settings, text)
    if all(c.ids_on_wire for c in source.certificates.values()) and not source.asked.text_keyed:
        return source
    vocabulary = lead.vocabulary()
    if vocabulary is None:
        raise UsageError(f"{spec.spec} answers with texts instead of token ids: give --tokenizer SPEC")
    return open_endpoint(spec, source.channels, settings, text, model=source.model, vocabulary=vocabulary)
