"""Measurements in which at least one side is asked through a dialect: all sides answer window by window.

The embedded sides run in one server of ours and are asked for prompt logprobs at the same k; llama.cpp servers
are started as children; endpoints are probed. Answers are kept on disk as they come and become rows of the
token-score table once all sides of a window are there.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from evalgate.bounds import known_ids, pair_columns, side_columns, tokens_table
from evalgate.client import EmbeddedClient
from evalgate.core import Document, SourceInfo, TokenizedDocument, Window
from evalgate.dialects.base import WindowScores
from evalgate.embedded import EmbeddedServer
from evalgate.endpoints.answers import Answers
from evalgate.endpoints.certify import DEFAULT_K, PROBE_TEXT, ProbeText, own_probe_text
from evalgate.endpoints.channel import Channel, EndpointDown
from evalgate.endpoints.llamacpp_server import LlamaCppServer
from evalgate.endpoints.settings import EndpointSettings
from evalgate.endpoints.source import EndpointSource, embedded_source, open_endpoint
from evalgate.endpoints.texts import model_of, tokenize, tokens_of
from evalgate.endpoints.vocabulary import ByteVocabulary
from evalgate.endpoints.work import Answered, Work
from evalgate.errors import ServerError, UsageError
from evalgate.sampling import Spending
from evalgate.sources import SourceSpec, parse

if TYPE_CHECKING:
    import pyarrow as pa

_DAY = 86400.0  # seconds: our own server on a slow machine takes what it takes
_POLL = 0.5  # seconds between two looks at whether the user wants to stop
Advance = Callable[[Window, dict[str, float]], None]


class Stages(Protocol):
    """Who is told what happens before scoring."""

    def stage(self, text: str) -> None:
        """One phrase."""


@dataclass(frozen=True)
class Measured:
    """A wide token-score table (evalgate.bounds) of the windows that were answered, in window order.

    whole: no window was left to the budget. requests: sent to endpoints in this process.
    """

    table: pa.Table
    windows: int
    whole: bool
    requests: int
    notes: tuple[str, ...]


class Sides:
    """The opened sources by spec, in the order given; made by `opened`."""

    def __init__(self, sources: dict[str, EndpointSource], server: EmbeddedServer | None, lead: _Tokenizer) -> None:
        self.sources = sources
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

    def versions(self) -> dict[str, str]:
        """Package versions of the embedded server; empty where there is none."""
        return self._lead.client.versions() if self._lead.client is not None else {}

    def tokenize(self, documents: Sequence[Document]) -> list[TokenizedDocument]:
        """Documents as the embedded tokenizer cuts them, or the first endpoint's own where none is embedded."""
        return self._lead.tokenize(documents)

    def identity(self) -> dict[str, Any]:
        """What changes the sources' numbers."""
        return {spec: source.identity() for spec, source in self.sources.items()}

    def score(
        self,
        reference: str | None,
        candidates: Sequence[str],
        windows: Sequence[Window],
        *,
        folder: Path,
        spending: Spending,
        advance: Advance,
    ) -> Measured:
        """Ask every side about every window, as far as the budget goes; answers in `folder` are taken over.

        Raises the errors of the dialects and of the endpoints; what was answered stays in `folder`.
        """
        return _Scoring(self, reference, candidates, folder, spending, advance).run(windows)

    def failure(self, spec: str, error: BaseException) -> BaseException:
        """An error of a side as the user should see it: a dead child says how it ended."""
        if isinstance(error, EndpointDown) and parse(spec).kind == "embedded" and self._server is not None:
            return self._server.failure(error.message)
        return error


@dataclass
class _Tokenizer:
    """Who cuts the text: the embedded model `name`, or an endpoint."""

    client: EmbeddedClient | None = None
    name: str = ""
    end_id: int | None = None
    channel: Channel | None = None
    model: str = ""

    def tokenize(self, documents: Sequence[Document]) -> list[TokenizedDocument]:
        if self.client is not None:
            return self.client.tokenize(self.name, documents)
        if self.channel is None:
            raise UsageError("nothing cuts the text: give --tokenizer SPEC")
        return tokenize(self.channel, self.model, documents)

    def probe_text(self) -> ProbeText:
        if self.client is not None:
            (cut,) = self.client.tokenize(self.name, [Document("probe", "probe", PROBE_TEXT)])
            return ProbeText(cut.ids if cut.bos_id is None else (cut.bos_id, *cut.ids), cut.ids)
        if self.channel is None:
            raise UsageError("nothing cuts the text: give --tokenizer SPEC")
        whole = own_probe_text(self.channel, self.model)
        return replace(whole, plain=tokens_of(self.channel, self.model, PROBE_TEXT, special=False) or ())

    def vocabulary(self) -> ByteVocabulary | None:
        return None if self.client is None else ByteVocabulary(self.client.vocabulary(self.name))


@contextmanager
def opened(
    specs: Sequence[str], settings: EndpointSettings, *, device: str, logits: str, watch: Stages
) -> Iterator[Sides]:
    """Start what we start, probe what we do not, and end all of it afterwards.

    Raises UsageError for a trace, ServerError where a child cannot start, EndpointError and MismatchError for
    an endpoint that cannot be trusted.
    """
    parsed = {spec: parse(spec) for spec in specs}
    traces = [spec for spec, found in parsed.items() if found.kind == "trace"]
    if traces:
        raise UsageError(f"{traces[0]} is a trace: compare a model with it that is loaded here, not an endpoint")
    local = [spec for spec, found in parsed.items() if found.kind == "embedded"]
    lead_specs = list(dict.fromkeys([*local, *([settings.tokenizer] if settings.tokenizer else [])]))
    k = settings.top_k or DEFAULT_K
    with ExitStack() as stack:
        server, lead = None, _Tokenizer()
        models: dict[str, SourceInfo] = {}
        if lead_specs:
            options = ["--logits", logits, "--max-logprobs", str(k)]
            server = stack.enter_context(
                EmbeddedServer(lead_specs, device=device, options=options, on_stage=watch.stage)
            )
            client = EmbeddedClient(server)
            stack.callback(client.close)
            models = client.models()
            info = _named(models, settings.tokenizer or local[0])
            end = info.extra.get("eos_token_id")
            lead = _Tokenizer(client, info.name, int(end) if end else None)
        channels = {spec: _channels(parsed[spec], settings, stack, watch) for spec in specs if parsed[spec].remote}
        if lead.client is None:
            first = next(iter(channels))
            lead.channel, lead.model = channels[first][0], model_of(channels[first][0], parsed[first].model)
        text = lead.probe_text()
        sources: dict[str, EndpointSource] = {}
        for spec in specs:
            if parsed[spec].remote:
                watch.stage(f"probing {spec}")
                sources[spec] = _certified(parsed[spec], channels[spec], settings, text, lead)
            elif server is not None:
                own = EndpointSettings(concurrency=4, timeout=_DAY, patience=1.0)
                channel = Channel(server.url, own, key=server.key, trust_env=False)
                stack.callback(channel.close)
                sources[spec] = embedded_source(_named(models, spec), channel, k=k)
        yield Sides(sources, server, lead)


def _named(models: Mapping[str, SourceInfo], spec: str) -> SourceInfo:
    found = next((info for info in models.values() if spec in (info.spec, info.name)), None)
    if found is None:
        raise ServerError(f"the embedded server did not load {spec}: it has {', '.join(models)}")
    return found


def _channels(spec: SourceSpec, settings: EndpointSettings, stack: ExitStack, watch: Stages) -> list[Channel]:
    """Channels to the URLs of a source; a llama.cpp server is started for its own."""
    if spec.kind == "llama.cpp":
        server = stack.enter_context(LlamaCppServer(spec.path, settings.llama, on_stage=watch.stage))
        made = [Channel(server.url, replace(settings, concurrency=1), key=server.key, trust_env=False)]
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
    if all(c.ids_on_wire for c in source.certificates.values()) and source.dialect not in ("openai", "chat"):
        return source
    vocabulary = lead.vocabulary()
    if vocabulary is None:
        raise UsageError(f"{spec.spec} answers with texts instead of token ids: give --tokenizer SPEC")
    return open_endpoint(spec, source.channels, settings, text, model=source.model, vocabulary=vocabulary)


class _Scoring:
    """One run's bookkeeping: which sides each open window still waits for."""

    def __init__(
        self,
        sides: Sides,
        reference: str | None,
        candidates: Sequence[str],
        folder: Path,
        spending: Spending,
        advance: Advance,
    ) -> None:
        self._sides = sides
        self._reference = reference
        self._candidates = list(candidates)
        self._specs = list(dict.fromkeys([*([reference] if reference else []), *candidates]))
        self._sources = [sides.sources[spec] for spec in self._specs]
        self._stores = [Answers(folder / f"answers-{n}") for n in range(len(self._specs))]
        self._spending = spending
        self._advance = advance
        self._done: queue.SimpleQueue[Answered] = queue.SimpleQueue()
        self._open: dict[int, dict[int, WindowScores]] = {}
        self._tables: dict[int, pa.Table] = {}
        self._mean = _RunningMean("kl_low" if reference else "cand_nll")

    def run(self, windows: Sequence[Window]) -> Measured:
        import pyarrow as pa

        by_index = {window.index: window for window in windows}
        todo = deque(windows)
        works = [Work(n, source, self._done) for n, source in enumerate(self._sources)]
        ahead = max(work.capacity for work in works) + 1
        try:
            while True:
                while todo and len(self._open) < ahead and self._release(todo[0], works):
                    window = todo.popleft()
                    self._close_if_complete(window)
                if not self._open:
                    break
                answered = self._next()
                if answered.error is not None or answered.scores is None:
                    raise self._sides.failure(self._specs[answered.source], answered.error or ServerError("no answer"))
                scores = answered.scores
                self._stores[answered.source].keep(scores)
                self._open[scores.window][answered.source] = scores
                if not self._sources[answered.source].follows:
                    self._follow(by_index[scores.window], works)
                self._close_if_complete(by_index[scores.window])
        finally:
            for work in works:
                work.stop()
        if not self._tables:
            raise UsageError("--budget is too small for a single window: raise it, or sample with --positions")
        tables = [self._tables[index] for index in sorted(self._tables)]
        table = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
        lost = tuple(f"{url} died during the run; the others took over its share" for w in works for url in w.lost)
        return Measured(table, len(tables), not todo, self._spending.requests, lost)

    def _next(self) -> Answered:
        while True:
            try:
                return self._done.get(timeout=_POLL)
            except queue.Empty:
                continue

    def _release(self, window: Window, works: Sequence[Work]) -> bool:
        """Hand a window to every side that has not answered it yet; False where the budget does not allow it."""
        known = {n: scores for n, store in enumerate(self._stores) if (scores := store.get(window.index)) is not None}
        missing = [n for n in range(len(works)) if n not in known]
        cost = sum(self._sources[n].cost(window) for n in missing if not self._sources[n].follows)
        if missing and not self._spending.take(cost):
            return False
        self._open[window.index] = known
        for n in missing:
            if not self._sources[n].follows:
                works[n].put(window)
        self._follow(window, works)
        return True

    def _follow(self, window: Window, works: Sequence[Work]) -> None:
        """Once the others have answered, ask the followers, for the ids that those named too."""
        answers = self._open[window.index]
        leaders = [n for n, source in enumerate(self._sources) if not source.follows]
        if any(n not in answers for n in leaders):
            return
        wanted: dict[int, set[int]] = {}
        for n in leaders:
            for row in answers[n].rows:
                wanted.setdefault(row.position, set()).update(known_ids(row))
        ids = {position: tuple(sorted(found)) for position, found in wanted.items()}
        for n, source in enumerate(self._sources):
            if source.follows and n not in answers:
                works[n].put(window, ids)

    def _close_if_complete(self, window: Window) -> None:
        answers = self._open[window.index]
        if len(answers) < len(self._specs):
            return
        del self._open[window.index]
        table = self._paired(window, answers)
        self._tables[window.index] = table
        self._advance(window, self._mean.add(table))

    def _paired(self, window: Window, answers: Mapping[int, WindowScores]) -> pa.Table:
        at = {spec: n for n, spec in enumerate(self._specs)}
        columns = {}
        for spec in self._candidates:
            source = self._sides.sources[spec]
            if self._reference is None:
                found = side_columns(answers[at[spec]], "cand", by_id=source.by_id)
            else:
                ref = self._sides.sources[self._reference]
                by_id = (ref.by_id, source.by_id)
                found = pair_columns(window, answers[at[self._reference]], answers[at[spec]], by_id=by_id)
            columns[source.info.name] = found
        return tokens_table(window, window.positions, columns)


class _RunningMean:
    """Mean of one column so far, by candidate; positions where it is not known count for nothing."""

    def __init__(self, column: str) -> None:
        self._column = column
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, table: pa.Table) -> dict[str, float]:
        names, values = table.column("candidate").to_pylist(), table.column(self._column).to_pylist()
        for name, value in zip(names, values, strict=True):
            if value is not None:
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + value, count + 1)
        return {name: total / count for name, (total, count) in self._sums.items()}
