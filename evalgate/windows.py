"""Documents to windows: which tokens are shown together, and which of them are scored.

Intervals are half-open. The head of a window is what is put before its first document token: BOS, where the tokenizer
adds one, or the several ids that a few tokenizers add (GLM). It has 0 bytes and is never scored.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Literal, NamedTuple

from evalgate.core import Document, Skipped, TokenizedDocument, Window, WindowPolicy, counted
from evalgate.errors import InputError, UsageError, choose

Preset = Literal["disjoint", "sliding", "llama.cpp", "lm-eval"]
PRESETS: tuple[Preset, ...] = ("disjoint", "sliding", "llama.cpp", "lm-eval")
NAMED_REASONS = 5  # how many skipped documents an error spells out


@dataclass(frozen=True)
class WindowSet:
    """Windows with index 0..N-1 in corpus order, and the documents none of whose tokens the policy can score.

    notes: what a reader of the figures must know, such as how many chats are shown as plain text.
    """

    windows: tuple[Window, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...] = ()


class _Span(NamedTuple):
    """A window in its document's own indices: shows [start, stop) after `head` ids, scores [scored, stop).

    start - head < scored < stop, so that every scored token has a token before it.
    """

    start: int
    scored: int
    stop: int
    head: int


def policy(preset: str, *, context: int, stride: int | None = None) -> WindowPolicy:
    """A checked window policy.

    context: tokens in a full window, head included (at least 2; 3 for llama.cpp, which scores nothing with 2). For
    `lm-eval` that tool's max_length: tokens that the model is shown, one less than the window has, whose last token is
    only predicted. stride: only for `sliding`, 1 <= stride < context, by default context // 2; elsewhere the context.

    Raises UsageError naming the argument.
    """
    known = next((p for p in PRESETS if p == preset), None)
    if known is None:
        raise UsageError(f"there is no window preset {preset!r}: {choose(preset, PRESETS)}")
    least = 3 if known == "llama.cpp" else 2
    if context < least:
        raise UsageError(
            f"a context of {context} scores nothing with the {known} preset; give at least {least} tokens."
        )
    if known != "sliding":
        if stride is not None:
            raise UsageError(f"a stride does not apply to the {known} preset; leave it out or use sliding.")
        return WindowPolicy(known, context, context)
    chosen = context // 2 if stride is None else stride
    if not 1 <= chosen < context:
        raise UsageError(f"a stride of {chosen} is outside 1..{context - 1}; it must be shorter than the context.")
    return WindowPolicy(known, context, chosen)


def tokenized(
    documents: Sequence[Document], policy: WindowPolicy, tokenize: Callable[[list[Document]], list[TokenizedDocument]]
) -> list[TokenizedDocument]:
    """The documents through `tokenize`; the parts of one text go through it together where the preset joins them again.

    Cut before it is tokenized, a text can have other tokens at the cuts, and the figures of the tool that `llama.cpp`
    repeats are those of the whole text. A token belongs to the part in which its first byte lies. That preset joins
    plain texts, so it takes a chat's plain text where there is one.
    """
    if policy.preset != "llama.cpp":
        return tokenize(list(documents))
    chats = {document.name for document in documents if document.messages and document.text}
    texts = [replace(d, messages=(), tools="") if d.name in chats else d for d in documents]
    reason = "the llama.cpp preset joins plain texts"
    return [replace(d, plain=reason) if d.name in chats else d for d in _tokenized_whole(texts, tokenize)]


def _tokenized_whole(
    documents: Sequence[Document], tokenize: Callable[[list[Document]], list[TokenizedDocument]]
) -> list[TokenizedDocument]:
    groups = [list(group) for _, group in groupby(documents, key=lambda d: d.whole or d)]
    wholes = tokenize([replace(group[0], text="".join(d.text for d in group)) for group in groups])
    return [part for group, whole in zip(groups, wholes, strict=True) for part in _parted(whole, group)]


def _parted(whole: TokenizedDocument, parts: Sequence[Document]) -> list[TokenizedDocument]:
    """A text's tokens by the part that they begin in. A text that is one document is given back as it is."""
    if len(parts) == 1:
        return [whole]
    begins = list(accumulate(whole.bytes_per_token, initial=0))[:-1]  # of each token, in bytes of the text
    ends = accumulate(len(part.text.encode()) for part in parts)
    cuts = [0, *(bisect_left(begins, end) for end in ends)]
    return [
        TokenizedDocument(
            part.name,
            part.domain,
            whole.ids[start:stop],
            whole.bytes_per_token[start:stop],
            prefix=whole.prefix,
        )
        for part, (start, stop) in zip(parts, pairwise(cuts), strict=True)
    ]


def cut(
    documents: Sequence[TokenizedDocument],
    policy: WindowPolicy,
    *,
    limit: int | None = None,
    prefix_id: int | None = None,
) -> WindowSet:
    """Cuts documents into windows of at most `policy.context` tokens.

    disjoint: BOS, where the tokenizer adds one, and the next tokens of the document, in each window; all but the first
    token of the window are scored, so without BOS each window's first token is context only. The short last window is
    kept.

    sliding: the first window as in disjoint; each later one ends `stride` tokens further on (or at the document's
    end), is full, starts with BOS where the tokenizer adds one, and scores what no window before it has scored.

    llama.cpp (tools/perplexity): the documents are joined to one stream, BOS at its start where the tokenizer adds one;
    the stream is cut into chunks of exactly n_ctx = `context` tokens, that first BOS included, and the incomplete tail
    is dropped; the first token of each chunk is replaced by BOS; predictions made at n_ctx/2 .. n_ctx-2, that is
    positions n_ctx/2 + 1 .. n_ctx - 1, are scored. A window belongs to the document of its first scored token, so
    that errors can still be clustered by document.

    lm-eval (lm-evaluation-harness: get_rolling_token_windows with context_len=1, then make_disjoint_window): a run with
    max_length = `context`. That tool does not count the last predicted token, so that windows have context + 1 tokens.
    The first window has the prefix token and `context` tokens; each later one has one token of context, the last one as
    many more as make it full. The prefix is BOS; for documents whose tokenizer adds none, or several ids, `prefix_id`
    where given (the tool takes EOS) and they do not start with it already, else what the tokenizer adds, else the
    document's first token, which is then not scored.

    limit: at most this many windows. disjoint and sliding take every document's first window, then every document's
    second, ..., so that a limit spreads over documents; the windows then stay in corpus order. llama.cpp and lm-eval
    take the first windows in corpus order, as those tools do.

    Only tokens whose `scored` flag is set are scored; windows without any are dropped.

    Raises UsageError for a policy that `policy()` would not make, a limit below 1, a prefix_id with another preset, a
    chat with llama.cpp, or a context that the head fills; InputError for documents whose fields disagree, or when there
    is no window at all.
    """
    _check(documents, policy, limit, prefix_id)
    if policy.preset == "llama.cpp":
        return _noted(_joined(documents, policy.context, limit), documents)
    heads = [_head(document, policy, prefix_id) for document in documents]
    skipped: list[Skipped] = []
    places: list[tuple[int, int, _Span]] = []  # (ordinal within the document, document, span)
    for number, (document, head) in enumerate(zip(documents, heads, strict=True)):
        spans = [s for s in _spans(len(document.ids), len(head), policy) if _scores(document, s)]
        places += [(ordinal, number, span) for ordinal, span in enumerate(spans)]
        if not spans:
            skipped.append(Skipped(document.name, _why_unscored(document)))
    if not places:
        raise _nothing(skipped)
    if limit is not None and policy.preset != "lm-eval":
        places = sorted(sorted(places)[:limit], key=lambda place: (place[1], place[0]))
    windows = [_window(i, documents[n], span, heads[n]) for i, (_, n, span) in enumerate(places[:limit])]
    return _noted(WindowSet(tuple(windows), tuple(skipped)), documents)


def _noted(found: WindowSet, documents: Sequence[TokenizedDocument]) -> WindowSet:
    """The windows, with what a reader must know of the chats among them."""
    shown = {window.document for window in found.windows}
    here = [document for document in documents if document.name in shown]
    reasons = Counter(document.plain for document in here if document.plain)
    notes = [
        f"{counted(count, 'chat')} {'is' if count == 1 else 'are'} shown as plain text and scored whole: {reason}"
        for reason, count in reasons.items()
    ]
    if any(document.scored for document in here):
        notes.insert(0, "chats: control tokens have 0 bytes; the nll of those that end an assistant's turn counts")
    return replace(found, notes=tuple(notes))


class Sizes(NamedTuple):
    """How much a policy makes of documents: windows, scored positions, and tokens shown."""

    windows: int
    positions: int
    tokens: int


def sizes(lengths: Sequence[int], policy: WindowPolicy, *, head: int, limit: int | None = None) -> Sizes:
    """What `cut` would make of documents of these lengths (tokens, all of them scored), without their tokens.

    head: ids before each document's first token.
    """
    if policy.preset == "llama.cpp":
        chunks = (head + sum(lengths)) // policy.context
        count = chunks if limit is None else min(limit, chunks)
        return Sizes(count, count * (policy.context - policy.context // 2 - 1), count * policy.context)
    places: list[tuple[int, int, _Span]] = []  # as in `cut`
    for number, n in enumerate(lengths):
        spans = (span for span in _spans(n, head, policy) if span.scored < span.stop)
        places += [(ordinal, number, span) for ordinal, span in enumerate(spans)]
    if limit is not None:
        places = (places if policy.preset == "lm-eval" else sorted(places))[:limit]
    spans_kept = [span for _, _, span in places]
    return Sizes(
        len(spans_kept),
        sum(span.stop - span.scored for span in spans_kept),
        sum(span.stop - span.start + span.head for span in spans_kept),
    )


def _check(
    documents: Sequence[TokenizedDocument], given: WindowPolicy, limit: int | None, prefix_id: int | None
) -> None:
    stride = given.stride if given.preset == "sliding" else None
    checked = policy(given.preset, context=given.context, stride=stride)
    if checked != given:
        raise UsageError(f"the {given.preset} preset has a stride of {checked.stride}, not {given.stride}.")
    if limit is not None and limit < 1:
        raise UsageError(f"a limit of {limit} windows leaves nothing to score; give at least 1.")
    if prefix_id is not None and given.preset != "lm-eval":
        raise UsageError(f"a prefix token does not apply to the {given.preset} preset; leave it out or use lm-eval.")
    for document in documents:
        n = len(document.ids)
        if len(document.bytes_per_token) != n or len(document.scored) not in (0, n):
            raise InputError(
                f"document {document.name!r} has {counted(n, 'token')} but {len(document.bytes_per_token)} byte counts "
                f"and {len(document.scored)} scored flags; tokenize it again.",
                document=document.name,
            )


def _head(document: TokenizedDocument, policy: WindowPolicy, prefix_id: int | None) -> tuple[int, ...]:
    """The ids shown before the document's first token. Raises UsageError where they leave no room for it."""
    head = document.prefix
    if policy.preset == "lm-eval" and len(head) != 1 and prefix_id is not None:
        head = () if document.ids[:1] == (prefix_id,) else (prefix_id,)
    if len(head) >= policy.context:
        raise UsageError(f"a context of {policy.context} is filled by the {len(head)} tokens before every text.")
    return head


def _spans(n: int, head: int, policy: WindowPolicy) -> Iterator[_Span]:
    """The spans of a document of n tokens, some of which may score nothing. head: ids before it."""
    if policy.preset == "disjoint":
        return _disjoint(n, head, policy.context)
    if policy.preset == "sliding":
        return _rolling(n, head, policy.context, policy.stride, later_head=head)
    return _rolling(n, head, policy.context + 1, policy.stride, later_head=0)


def _disjoint(n: int, head: int, context: int) -> Iterator[_Span]:
    room = context - head
    for start in range(0, n, room):
        yield _Span(start, start + (not head), min(start + room, n), head)


def _rolling(n: int, head: int, size: int, stride: int, *, later_head: int) -> Iterator[_Span]:
    """Windows of `size` whose ends advance by the stride; each later one is full and scores [end before, its own)."""
    stop = min(size - head, n)
    yield _Span(0, int(not head), stop, head)
    while stop < n:
        scored, stop = stop, min(stop + stride, n)
        yield _Span(max(stop - size + later_head, 0), scored, stop, later_head)


def _scores(document: TokenizedDocument, span: _Span) -> bool:
    if not document.scored:
        return span.scored < span.stop
    return any(document.scored[span.scored : span.stop])


def _why_unscored(document: TokenizedDocument) -> str:
    if document.refusal:
        return document.refusal
    if not document.ids:
        return "no tokens"
    if len(document.ids) == 1 and not document.prefix:
        return "one token and no BOS before it"
    return "no scored token"


def _window(index: int, document: TokenizedDocument, span: _Span, head: tuple[int, ...]) -> Window:
    front = head[: span.head]
    shown = slice(span.start, span.stop)
    mask = document.scored[span.scored : span.stop]
    return Window(
        index=index,
        document=document.name,
        domain=document.domain,
        ids=front + document.ids[shown],
        score_from=span.scored - span.start + len(front),
        score_to=span.stop - span.start + len(front),
        bytes_per_token=(0,) * len(front) + document.bytes_per_token[shown],
        mask=() if all(mask) else mask,
    )


def _joined(documents: Sequence[TokenizedDocument], context: int, limit: int | None) -> WindowSet:
    """The llama.cpp preset: chunk c is stream[c * context, (c + 1) * context), its first token replaced by BOS."""
    front = _common_bos(documents)
    no_bytes = (0,) * len(front)
    ids = [*front, *(i for d in documents for i in d.ids)]
    sizes = [*no_bytes, *(b for d in documents for b in d.bytes_per_token)]
    starts = list(accumulate((len(d.ids) for d in documents), initial=len(front)))  # of each document, and the end
    chunks, score_from = len(ids) // context, context // 2 + 1
    if chunks == 0:
        raise InputError(
            f"the documents have {counted(len(ids), 'token')} together, fewer than one context of {context}; "
            "use a smaller context or more text.",
            tokens=len(ids),
            context=context,
        )

    def chunk(index: int) -> Window:
        owner = documents[bisect_right(starts, index * context + score_from) - 1]
        kept = slice(index * context + len(front), (index + 1) * context)
        return Window(
            index=index,
            document=owner.name,
            domain=owner.domain,
            ids=(*front, *ids[kept]),
            score_from=score_from,
            score_to=context,
            bytes_per_token=(*no_bytes, *sizes[kept]),
        )

    def is_scored(number: int) -> bool:
        begin, end = starts[number], min(starts[number + 1], chunks * context)
        into_chunk = begin % context
        return begin - into_chunk + max(into_chunk, score_from) < end

    skipped = [
        Skipped(d.name, "no token in a chunk's scored half") for n, d in enumerate(documents) if not is_scored(n)
    ]
    count = chunks if limit is None else min(limit, chunks)
    return WindowSet(tuple(chunk(index) for index in range(count)), tuple(skipped))


def _common_bos(documents: Sequence[TokenizedDocument]) -> tuple[int, ...]:
    """BOS, or nothing."""
    chat = next((d.name for d in documents if d.scored), None)
    if chat is not None:
        raise UsageError(f"the llama.cpp preset joins plain texts, and {chat!r} is a chat; use another preset.")
    found = {d.prefix for d in documents}
    if len(found) > 1:
        raise InputError("the documents differ in their BOS token and cannot be joined; use another preset.")
    (bos,) = found or {()}
    if len(bos) > 1:
        raise UsageError(
            f"the llama.cpp preset puts one token over each chunk's first, and this tokenizer adds {len(bos)}; "
            "use another preset."
        )
    return bos


def _nothing(skipped: Sequence[Skipped]) -> InputError:
    named = ", ".join(f"{s.name}: {s.reason}" for s in skipped[:NAMED_REASONS]) or "there are no documents"
    more = f", and {len(skipped) - NAMED_REASONS} more" if len(skipped) > NAMED_REASONS else ""
    return InputError(f"no document has a token that can be scored ({named}{more}).")
