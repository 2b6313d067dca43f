"""What a measurement would do: the models it loads or asks, how much text they are shown, how long, what it writes.

Nothing is loaded, started or asked. Whatever refuses the measurement before that refuses its forecast too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalgate import dialects
from evalgate.core import WindowPolicy, counted, sized
from evalgate.corpora import is_on_hub
from evalgate.corpora.corpus import Corpus
from evalgate.measure.cutting import limit_of, read_text, sampled
from evalgate.measure.kinds import measurement_of
from evalgate.measure.kinds.recording import RecordRequest, recording_of
from evalgate.measure.lengths import Lengths, checkpoint_folder, config_of, lengths, scored_share
from evalgate.measure.models import Model, described
from evalgate.measure.pace import described as paced
from evalgate.measure.recordings import is_recorded, open_recorded
from evalgate.measure.recordings.hidden import RecordedHidden
from evalgate.measure.recordings.logits_file import RecordedLogits
from evalgate.measure.recordings.trace import RecordedTrace
from evalgate.measure.request import DEFAULT_CONTEXT, RunRequest, TextCheck, check_text, silent
from evalgate.specs import SourceSpec
from evalgate.store import partial, rates
from evalgate.store.remote import Url, is_there, staging
from evalgate.traces.layout import PARTIAL
from evalgate.windows import Sizes, policy, sizes

if TYPE_CHECKING:
    from evalgate.measure.sweep import SweepRequest
    from evalgate.summary import Summary

HIDDEN_BYTES = 64  # at most, of a position of a trace of hidden states, besides the row
KEPT_BYTES = 8  # of an id that a trace keeps, with its log-probability, before compression


@dataclass(frozen=True)
class Amount:
    """How many: the likely number, and the least and most it is taken to be."""

    likely: int
    least: int
    most: int

    @classmethod
    def exactly(cls, number: int) -> Amount:
        """A number that is known."""
        return cls(number, number, number)

    def text(self, noun: str) -> str:
        """`64 windows`, or `about 70 windows (52 to 96)`."""
        if self.least == self.most:
            return counted(self.likely, noun)
        return f"about {counted(self.likely, noun)} ({self.least:,} to {self.most:,})"


@dataclass(frozen=True)
class Text:
    """The text: None where it is not known before it is read from the hub."""

    name: str
    documents: int | None = None
    bytes: int | None = None
    skipped: int | None = None
    hash: str | None = None


@dataclass(frozen=True)
class Asked:
    """Requests that a source which is asked through a dialect would be sent; None = not known. how: in words."""

    spec: str
    requests: Amount | None
    how: str


@dataclass(frozen=True)
class Forecast:
    """What a measurement would do.

    kind: kl, agree, ppl or record. cut: how windows are cut. counted: where their number comes from. seconds: about how
    long it takes, None = not known; pace: why. writes: places. resumes: whether answers of an interrupted one are used.
    """

    kind: str
    models: tuple[Model, ...]
    text: Text
    cut: str
    windows: Amount | None
    positions: Amount | None
    tokens: Amount | None
    counted: str
    requests: tuple[Asked, ...]
    seconds: float | None
    pace: str
    notes: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    resumes: str = ""

    def document(self) -> dict[str, Any]:
        """The forecast as JSON values."""
        return {"dry_run": True, **asdict(self)}


def forecast(request: RunRequest, *, text_check: TextCheck | None = None) -> Forecast:
    """What a run would do. text_check: may refuse the text.

    Raises what the run would raise before it loads or asks anything.
    """
    measurement = measurement_of(request)
    measurement.check()
    found = _forecast(request, request.kind, measurement.described(), text_check)
    return replace(found, writes=(_run_folder(request),), resumes=_resumed(request, found.text))


def forecast_sweep(request: SweepRequest) -> Forecast:
    """The same of a sweep, with all its candidates at once."""
    from evalgate.measure.sweep import check_sweep, folder_of
    from evalgate.store import sweeps

    check_sweep(request)
    run = request.run
    found = _forecast(run, "sweep", paced(run), None)
    folder = folder_of(run)
    before = None if folder is None or not run.resume else sweeps.read_progress(folder)
    done = [] if before is None else [spec for spec in before.done if spec in run.candidate_specs]
    said = (
        f"{len(done)} of {counted(len(run.candidates), 'candidate')} were measured before: kept if nothing changed"
        if done
        else "no candidate of it was measured before"
    )
    return replace(found, writes=(f"the sweep folder {run.out}",), resumes=said)


def forecast_recording(request: RecordRequest) -> Forecast:
    """The same of a recording."""
    measurement = recording_of(request)
    measurement.check()
    found = _forecast(request.text, "record", measurement.described(), None)
    return replace(found, writes=(_recording_size(request, found),), resumes=_recording_resumed(request))


def forecast_stored(summary: Summary, where: str) -> Forecast:
    """What judging a stored run does: it is read as it is. where: its folder."""
    group = summary.comparisons[0].overall
    corpus = summary.corpus
    return Forecast(
        kind=summary.kind,
        models=(),
        text=Text(corpus.name, corpus.documents, skipped=len(corpus.skipped), hash=corpus.hash),
        cut=f"{corpus.window_preset} windows of {corpus.context} tokens",
        windows=Amount.exactly(group.windows),
        positions=Amount.exactly(group.positions),
        tokens=Amount.exactly(corpus.tokens),
        counted=f"as the run {where} has them: nothing is measured",
        requests=(),
        seconds=0.0,
        pace="a stored run is read and judged",
    )


def _forecast(request: RunRequest, kind: str, key: dict[str, Any], text_check: TextCheck | None) -> Forecast:
    """All but what is written and resumed."""
    rate = rates.recall(key)
    text, cut, amounts, how, notes = _shown(request, rate, text_check)
    models = _models(request, recorded_apart=kind == "record")
    windows, positions, tokens = amounts or (None, None, None)
    seconds, pace = _time(rate, positions)
    return Forecast(
        kind=kind,
        models=tuple(models),
        text=text,
        cut=cut,
        windows=windows,
        positions=positions,
        tokens=tokens,
        counted=how,
        requests=tuple(_asked(request, spec, windows, positions) for spec in request.models if spec.remote),
        seconds=seconds,
        pace=pace,
        notes=tuple(notes),
    )


def _models(request: RunRequest, *, recorded_apart: bool) -> list[Model]:
    role = "reference" if recorded_apart else "model" if request.reference is None else "candidate"
    found = []
    if request.reference is not None and is_recorded(request.reference):
        found.append(Model("reference", request.reference.spec, "recorded: read from its files, not run"))
    elif request.reference is not None:
        found.append(described(request.reference, "reference", request.endpoint))
    found += [described(spec, role, request.endpoint) for spec in request.candidates]
    if request.endpoint.tokenizer:
        found.append(described(SourceSpec(request.endpoint.tokenizer, "embedded"), "tokenizer", request.endpoint))
    return found


def _shown(
    request: RunRequest, rate: rates.Rate | None, text_check: TextCheck | None
) -> tuple[Text, str, tuple[Amount, Amount, Amount | None] | None, str, list[str]]:
    """The text, how it is cut, windows, positions and tokens of them, where these come from, and notes."""
    if is_recorded(request.reference):
        return _recorded(request, text_check)
    context, assumed = _context(request)
    chosen = policy(request.windows, context=context, stride=request.stride)
    cut = f"{chosen.preset} windows of {chosen.context} tokens{assumed}"
    if is_on_hub(request.data):
        return Text(str(request.data)), cut, None, "the data set is not read now: it may be downloaded first", []
    corpus = read_text(request, silent())
    check_text(text_check, [(document.name, document.domain) for document in corpus.documents])
    local = [spec for spec in request.models if spec.kind == "embedded"]
    named = SourceSpec(request.endpoint.tokenizer, "embedded") if request.endpoint.tokenizer else None
    found = lengths(corpus.documents, named or next(iter(local), None), rate)
    limit = limit_of(request)
    amounts = _amounts(found, chosen, limit, request.positions)
    share = scored_share(corpus.documents)
    if share < 1.0:  # of a window of a chat the assistant's tokens are scored, and which windows are shown is not known
        windows, scored, tokens = amounts
        amounts = windows, Amount(round(scored.likely * share), round(scored.least * share**2), scored.most), tokens
    by_default = limit is not None and request.limit is None
    notes = [f"a corpus that comes with evalgate stops at {limit} windows by default"] if by_default else []
    return _text_of(corpus), cut, amounts, found.how, notes


def _recorded(
    request: RunRequest, text_check: TextCheck | None
) -> tuple[Text, str, tuple[Amount, Amount, Amount | None], str, list[str]]:
    """A recording brings its windows."""
    recorded = open_recorded(request.reference)
    check_text(text_check, recorded.documents)
    assert isinstance(recorded, RecordedTrace | RecordedHidden | RecordedLogits)
    if not isinstance(recorded, RecordedLogits):
        windows = sampled(request, recorded.trace.windows)
        found = Sizes(len(windows), sum(len(w.positions) for w in windows), sum(len(w.ids) for w in windows))
        documents = len({window.document for window in windows})
    else:
        chunks, context = recorded.chunks, recorded.policy.context
        found = sizes([chunks * context], recorded.policy, head=0)
        if request.positions is not None:
            found = found._replace(positions=min(found.positions, request.positions))
        documents = 1
    cut = f"{recorded.policy.preset} windows of {recorded.policy.context} tokens, as they were recorded"
    amounts = tuple(map(Amount.exactly, found))
    text = Text(recorded.corpus, documents=documents, hash=recorded.corpus_hash)
    return text, cut, (amounts[0], amounts[1], amounts[2]), "as they were recorded", []


def _text_of(corpus: Corpus) -> Text:
    contents = [document.text or "".join(m.content for m in document.messages) for document in corpus.documents]
    return Text(
        corpus.name,
        documents=len(corpus.documents),
        bytes=sum(len(content.encode()) for content in contents),
        skipped=len(corpus.skipped),
        hash=corpus.hash,
    )


def _context(request: RunRequest) -> tuple[int, str]:
    """Tokens of a window, and what is assumed about it."""
    if request.context is not None:
        return request.context, ""
    folders = [folder for spec in request.models if (folder := checkpoint_folder(spec)) is not None]
    known = [config_of(folder).get("max_position_embeddings") for folder in folders]
    least = min([DEFAULT_CONTEXT, *(n for n in known if isinstance(n, int) and n > 1)])
    if len(folders) == len(request.models):
        return least, ""
    return least, ", fewer where a model takes fewer"


def _amounts(
    found: Lengths, chosen: WindowPolicy, limit: int | None, positions: int | None
) -> tuple[Amount, Amount, Amount | None]:
    head = 1 if chosen.preset == "lm-eval" else found.head
    likely, least, most = (
        sizes(each, chosen, head=head, limit=limit) for each in (found.likely, found.fewest, found.most)
    )
    scored = [size.positions if positions is None else min(size.positions, positions) for size in (likely, least, most)]
    if positions is not None:  # which windows a sample is of, drawing it shows
        fewer = [min(size.windows, number) for size, number in zip((likely, least, most), scored, strict=True)]
        return Amount(fewer[0], min(1, fewer[1]), fewer[2]), Amount(*scored), None
    return (
        Amount(likely.windows, least.windows, most.windows),
        Amount(*scored),
        Amount(likely.tokens, least.tokens, most.tokens),
    )


def _asked(request: RunRequest, spec: SourceSpec, windows: Amount | None, positions: Amount | None) -> Asked:
    """Requests to one source, those of its probe aside."""
    if windows is None or positions is None:
        return Asked(spec.spec, None, "not known before the text is read")
    dialect = request.endpoint.dialect
    if not dialect and spec.kind == "llama.cpp":
        found, how = positions, "one a position, as llama.cpp's own server is asked; and those of the probe"
    elif not dialect:
        found = Amount(windows.likely, windows.least, positions.most)
        how = "one a window or one a position, as the dialect that the probe finds; and those of the probe"
    elif dialects.get(dialect).prompt_scoring:
        found, how = windows, f"one a window in the dialect {dialect}; and those of the probe"
    else:
        found, how = positions, f"one a position in the dialect {dialect}, or fewer in lists; and those of the probe"
    most = request.budget.requests
    if most is not None and most < found.most:
        found = Amount(*(min(number, most) for number in (found.likely, found.least, found.most)))
        how += f"; the budget ends it at {most:,}"
    return Asked(spec.spec, found, how)


def _time(rate: rates.Rate | None, positions: Amount | None) -> tuple[float | None, str]:
    if rate is None:
        return None, "no measurement of these models with these windows has finished on this machine yet"
    speed = rate.positions / max(rate.scoring, 1e-9)
    pace = (
        f"{rate.before:.3g} s before scoring, then {speed:,.0f} positions/s, as the run of {rate.created[:10]} over "
        f"{counted(rate.positions, 'position')} took"
    )
    return (None if positions is None else rate.seconds(positions.likely)), pace


def _run_folder(request: RunRequest) -> str:
    if request.out is None:
        return "nothing: the run is kept in memory"
    replaced = " (replaces the run that it holds)" if is_there(request.out / "manifest.json") else ""
    return f"the run folder {request.out}{replaced}"


def _resumed(request: RunRequest, text: Text) -> str:
    if not request.resume:
        return "no: it starts anew"
    for identity, answers in partial.unfinished():
        same = (
            identity.get("reference") == request.reference_spec
            and identity.get("candidates") == request.candidate_specs
            and text.hash in (None, identity.get("corpus"))
        )
        if same:
            return (
                f"an interrupted run of these models and this text has kept answers ({counted(answers, 'file')}): they "
                "are used if models, windows and versions are the same"
            )
    return "no interrupted run of these models and this text is kept"


def _recorded_in(request: RecordRequest) -> Path:
    """The folder of this machine that a trace is recorded in; it is copied from there to a URL."""
    return staging(request.out) if isinstance(request.out, Url) else request.out


def _recording_resumed(request: RecordRequest) -> str:
    if request.format == "trace" and request.text.resume and (_recorded_in(request) / PARTIAL).is_file():
        return "the unfinished recording in that folder is resumed if it is of the same model, text and settings"
    return "no unfinished recording is there"


def _recording_size(request: RecordRequest, found: Forecast) -> str:
    """Where the recording goes, and about how large it is."""
    (model,) = request.text.candidates
    place = f"{'the logits file' if request.format == 'llama.cpp' else 'the trace folder'} {request.out}"
    folder = checkpoint_folder(model)
    config = config_of(folder) if folder is not None else {}
    vocabulary = config.get("vocab_size")
    if request.hidden:
        size = config.get("hidden_size")
        if found.positions is None or not isinstance(size, int) or not isinstance(vocabulary, int):
            return f"{place}, of a size that is not known before the model is loaded"
        head = sized(4 * size * vocabulary)
        rows = sized((4 * size + HIDDEN_BYTES) * found.positions.likely)
        return f"{place}, at most about {rows} and the output head of {head}"
    each = KEPT_BYTES * (request.top_k + request.tail_samples) if request.format == "trace" else 0
    whole = request.full or request.format == "llama.cpp"
    if found.positions is None or (whole and not isinstance(vocabulary, int)):
        return f"{place}, of a size that is not known before the model is loaded"
    each += 2 * vocabulary if whole and isinstance(vocabulary, int) else 0
    return f"{place}, at most about {sized(each * found.positions.likely)}"
