"""From a request's text to windows: the policy, the cut, a sample of positions, and the order they are asked in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from evalgate.core import SourceInfo, Window, WindowPolicy, counted
from evalgate.corpora import is_named, load_corpus
from evalgate.endpoints.budget import Budget
from evalgate.errors import UsageError
from evalgate.measure.request import DEFAULT_CONTEXT, NAMED_LIMIT, Observer, RunRequest
from evalgate.measure.sampling import sample_positions
from evalgate.server.client import EmbeddedClient
from evalgate.windows import WindowSet, cut, policy, tokenized

if TYPE_CHECKING:
    from evalgate.corpora.corpus import Corpus
    from evalgate.measure.sides import Sides


def read_text(request: RunRequest, watch: Observer) -> Corpus:
    """The documents that a request names. Raises the errors of evalgate.corpora."""
    watch.stage("reading the corpus")
    return load_corpus(request.data, split=request.split, text_column=request.text_column, split_on=request.split_on)


def cut_for_models(
    request: RunRequest, client: EmbeddedClient, sources: Sequence[SourceInfo], corpus: Corpus, watch: Observer
) -> tuple[WindowPolicy, int | None, WindowSet]:
    """The policy, the limit of windows, and the windows for models loaded here: tokens are the first model's.

    Raises UsageError for a context that is too long, and the errors of evalgate.windows.
    """
    chosen = policy_for_models(request, sources)
    watch.stage(f"tokenizing {counted(len(corpus.documents), 'document')}")
    prefix = sources[0].extra.get("eos_token_id") if chosen.preset == "lm-eval" else None
    documents = tokenized(corpus.documents, chosen, lambda texts: client.tokenize(sources[0].name, texts))
    limit = limit_of(request)
    found = cut(documents, chosen, limit=limit, prefix_id=int(prefix) if prefix else None)
    return chosen, limit, replace(found, windows=sampled(request, found.windows))


def cut_for_sides(
    request: RunRequest, sides: Sides, corpus: Corpus, watch: Observer
) -> tuple[WindowPolicy, int | None, WindowSet]:
    """As `cut_for_models`, where some side is an endpoint: tokens are those of the sides' one tokenizer."""
    chosen = policy_for_sides(request, sides.context)
    watch.stage(f"tokenizing {counted(len(corpus.documents), 'document')}")
    prefix = sides.end_id if chosen.preset == "lm-eval" else None
    limit = limit_of(request)
    found = cut(tokenized(corpus.documents, chosen, sides.tokenize), chosen, limit=limit, prefix_id=prefix)
    return chosen, limit, replace(found, windows=sampled(request, found.windows))


def policy_for_models(request: RunRequest, sources: Sequence[SourceInfo]) -> WindowPolicy:
    """The policy asked for. Its context is 512 tokens by default, or the shortest model context where that is less.

    Raises UsageError for a context longer than a model's.
    """
    shortest = min(sources, key=lambda s: s.context_length)
    context = request.context or min(DEFAULT_CONTEXT, shortest.context_length)
    if context > shortest.context_length:
        raise UsageError(
            f"--context {context} is longer than the context of {shortest.name} "
            f"({counted(shortest.context_length, 'token')}): give a smaller --context"
        )
    return policy(request.windows, context=context, stride=request.stride)


def policy_for_sides(request: RunRequest, longest: int | None) -> WindowPolicy:
    """As `policy_for_models`, where some contexts are not known. longest: most tokens of a window, None = not known."""
    if longest is not None and request.windows == "lm-eval":
        longest -= 1  # its windows have one token more than its context, which is only predicted
    context = request.context or min(DEFAULT_CONTEXT, longest or DEFAULT_CONTEXT)
    if longest is not None and context > longest:
        raise UsageError(f"--context {context} is too long: the sources take {counted(longest, 'token')} at most")
    return policy(request.windows, context=context, stride=request.stride)


def limit_of(request: RunRequest) -> int | None:
    """Most windows; a corpus that comes with evalgate has a limit by default."""
    return NAMED_LIMIT if request.limit is None and is_named(request.data) else request.limit


def sampled(request: RunRequest, windows: Sequence[Window]) -> tuple[Window, ...]:
    """The windows, reduced to a sample of their positions where the request asks for one."""
    if request.positions is None:
        return tuple(windows)
    return sample_positions(windows, request.positions, seed=request.seed)


def in_document_order(request: RunRequest, windows: Sequence[Window]) -> list[Window]:
    """The windows as they are, or with the documents shuffled by the seed; each document's windows stay together."""
    if not request.shuffle:
        return list(windows)
    from evalgate.gate.sequential import shuffled

    by_document: dict[str, list[Window]] = {}
    for window in windows:
        by_document.setdefault(window.document, []).append(window)
    return [window for name in shuffled(list(by_document), seed=request.seed) for window in by_document[name]]


def in_budget_order(request: RunRequest, windows: Sequence[Window]) -> list[Window]:
    """The windows as they are, or shuffled where a budget may end early: those answered are then a random sample."""
    if request.budget == Budget():
        return list(windows)
    import numpy as np

    return [windows[i] for i in np.random.default_rng(request.seed).permutation(len(windows))]
