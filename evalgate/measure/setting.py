"""What a run shows: the window policy, the windows in their order, and whether the sources may be shown them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from evalgate.core import Document, SourceInfo, Window, WindowPolicy
from evalgate.endpoints.budget import Budget, sample_positions
from evalgate.errors import MismatchError, UsageError
from evalgate.measure.recordings import Recorded
from evalgate.measure.request import BUILTIN_LIMIT, DEFAULT_CONTEXT, Observer, RunRequest
from evalgate.server.client import EmbeddedClient
from evalgate.windows import WindowSet, cut, policy, tokenized

if TYPE_CHECKING:
    import pyarrow as pa

    from evalgate.corpora.corpus import Corpus


def shown(
    request: RunRequest, client: EmbeddedClient, sources: Sequence[SourceInfo], corpus: Corpus, watch: Observer
) -> tuple[WindowPolicy, int | None, WindowSet]:
    """The window policy, the limit of windows, and the windows that embedded models are shown: the first one's tokens.

    Raises the errors of `evalgate.windows`.
    """
    chosen = window_policy(request, sources)
    watch.stage(f"tokenizing {len(corpus.documents)} documents")
    limit = BUILTIN_LIMIT if request.limit is None and request.data is None else request.limit
    prefix = sources[0].extra.get("eos_token_id") if chosen.preset == "lm-eval" else None
    documents = tokenized(corpus.documents, chosen, lambda texts: client.tokenize(sources[0].name, texts))
    cutting = cut(documents, chosen, limit=limit, prefix_id=int(prefix) if prefix else None)
    return chosen, limit, sampled(request, cutting)


def window_policy(request: RunRequest, sources: Sequence[SourceInfo]) -> WindowPolicy:
    """The policy asked for; its context is 512 or the shortest model context by default, and never longer than one."""
    shortest = min(sources, key=lambda s: s.context_length)
    context = request.context or min(DEFAULT_CONTEXT, shortest.context_length)
    if context > shortest.context_length:
        raise UsageError(
            f"--context {context} is longer than the context of {shortest.name} ({shortest.context_length} tokens)"
        )
    return policy(request.windows, context=context, stride=request.stride)


def remote_policy(request: RunRequest, longest: int | None) -> WindowPolicy:
    """As `window_policy`, where some contexts are not known and one token is generated besides."""
    context = request.context or min(DEFAULT_CONTEXT, longest or DEFAULT_CONTEXT)
    if longest is not None and context > longest:
        raise UsageError(f"--context {context} is too long: the sources take windows of {longest} tokens at most")
    return policy(request.windows, context=context, stride=request.stride)


def sampled(request: RunRequest, cutting: WindowSet) -> WindowSet:
    """The windows with a sample of their positions where the request wants one, else as they are."""
    if request.positions is None:
        return cutting
    return replace(cutting, windows=sample_positions(cutting.windows, request.positions, seed=request.seed))


def in_document_order(request: RunRequest, windows: Sequence[Window]) -> list[Window]:
    """As they stand, or with their documents in seeded random order, each document's windows together."""
    if not request.shuffle:
        return list(windows)
    from evalgate.gate.sequential import shuffled

    owned: dict[str, list[Window]] = {}
    for window in windows:
        owned.setdefault(window.document, []).append(window)
    return [window for name in shuffled(list(owned), seed=request.seed) for window in owned[name]]


def in_budget_order(request: RunRequest, windows: Sequence[Window]) -> list[Window]:
    """As they stand, or shuffled where a budget may end the run early: what was answered is then a random sample."""
    if request.budget == Budget():
        return list(windows)
    import numpy as np

    return [windows[i] for i in np.random.default_rng(request.seed).permutation(len(windows))]


def check_comparable(sources: Sequence[SourceInfo]) -> None:
    """Token-level figures need one vocabulary: same ids for same tokens, same number of rows."""
    for other in sources[1:]:
        lead = sources[0]
        if other.extra.get("vocabulary_hash") != lead.extra.get("vocabulary_hash"):
            raise MismatchError(
                f"{lead.name} and {other.name} have different vocabularies (by content), so that their tokens cannot "
                "be compared one by one: compare bits_per_byte of two `evalgate ppl` runs instead"
            )
        if other.vocab_size != lead.vocab_size:
            raise MismatchError(
                f"{lead.name} has {lead.vocab_size} output rows and {other.name} has {other.vocab_size}: cutting to "
                "the smaller one would renormalise silently, so pad or export both alike"
            )


def cut_notes(
    client: EmbeddedClient, sources: Sequence[SourceInfo], corpus: Sequence[Document], windows: Sequence[Window]
) -> list[str]:
    """Which models, all loaded here, would cut these texts into other tokens than the first one's, which all are shown.

    Those with another tokenizer hash are asked: a GGUF file's may differ from its checkpoint's for the same tokens.
    What lies after the last document that a window names is not shown, and not cut again.
    """
    lead, others = _other_tokenizers(sources)
    if not others:
        return []
    named = {window.document for window in windows}
    documents = corpus[: 1 + max(i for i, d in enumerate(corpus) if d.name in named)]
    texts = [Document(d.name, d.domain, d.text or "\n".join(m.content for m in d.messages)) for d in documents]
    shown = _ids(client, lead, texts)
    notes = []
    for other in others:
        changed = sum(a != b for a, b in zip(shown, _ids(client, other, texts), strict=True))
        if changed:
            notes.append(
                f"{other.name} would cut {changed} of {len(texts)} documents into other tokens: "
                f"both were shown {lead.name}'s"
            )
    return notes


def tokenizer_notes(sources: Sequence[SourceInfo]) -> list[str]:
    """The same where the tokens themselves cannot be compared: the hashes tell only that they may differ."""
    lead, others = _other_tokenizers(sources)
    return [f"{o.name} may cut text into other tokens: both were shown {lead.name}'s" for o in others]


def _other_tokenizers(sources: Sequence[SourceInfo]) -> tuple[SourceInfo, list[SourceInfo]]:
    """The first source with a known tokenizer, and those with another one."""
    hashed = [source for source in sources if source.tokenizer_hash] or list(sources[:1])
    return hashed[0], [other for other in hashed[1:] if other.tokenizer_hash != hashed[0].tokenizer_hash]


def _ids(client: EmbeddedClient, source: SourceInfo, documents: Sequence[Document]) -> list[tuple[int | None, ...]]:
    return [(cut.bos_id, *cut.ids) for cut in client.tokenize(source.name, documents)]


def check_contexts(windows: Sequence[Window], sources: Sequence[SourceInfo]) -> None:
    """Raise UsageError where a window is longer than a source takes."""
    longest = max(len(window.ids) for window in windows)
    for source in sources:
        if longest > source.context_length:
            raise MismatchError(
                f"the recording has windows of {longest} tokens, more than the context of {source.name} "
                f"({source.context_length}): record one with a shorter --context"
            )


def named_source(models: dict[str, SourceInfo], spec: str) -> SourceInfo:
    """The resident model of that spec; raises UsageError naming those there are."""
    found = next((info for info in models.values() if spec in (info.spec, info.name)), None)
    if found is None:
        raise UsageError(f"the embedded server did not load {spec}: it has {', '.join(models)}")
    return found


def comparable(recorded: SourceInfo, candidates: Sequence[SourceInfo]) -> list[SourceInfo]:
    """All sides; a recording that does not name its vocabulary passes with the first candidate's name for it."""
    known = {"vocabulary_hash": candidates[0].extra.get("vocabulary_hash", "")}
    return [replace(recorded, extra={**known, **recorded.extra}), *candidates]


def recorded_corpus(recorded: Recorded, windows: Sequence[Window]) -> Corpus:
    """The recorded text as far as it is known: names and domains of its documents, and its hash."""
    from evalgate.corpora.corpus import Corpus

    documents = {window.document: Document(window.document, window.domain) for window in windows}
    return Corpus(recorded.corpus, tuple(documents.values()), (), recorded.corpus_hash)


def known_notes(table: pa.Table, unknown: dict[str, int]) -> list[str]:
    """What is not known everywhere of a run against endpoints, in words."""
    return [
        f"{name} is not known at {count:,} of {table.num_rows:,} positions, which count as intervals: a larger "
        "--top-k knows more"
        for name, count in unknown.items()
    ]
