"""Windows against slow, separate computations of what each preset promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalgate.core import Document, TokenizedDocument, Window, WindowPolicy
from evalgate.errors import InputError, UsageError
from evalgate.windows import PRESETS, cut, policy, sizes, tokenized

BOS = 1_000_000


def document(
    n: int, *, bos: bool, name: str = "d", first: int = 0, domain: str = "x", scored: tuple[bool, ...] = ()
) -> TokenizedDocument:
    """Token ids first, first+1, ...: an id says where it came from. Token i has i % 5 bytes."""
    ids = tuple(range(first, first + n))
    sizes = tuple(i % 5 for i in ids)
    return TokenizedDocument(name, domain, ids, sizes, (BOS,) if bos else (), scored)


@st.composite
def corpora(draw: st.DrawFn, *, masks: bool = False) -> list[TokenizedDocument]:
    bos = draw(st.booleans())
    documents = []
    for k, n in enumerate(draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))):
        scored = tuple(draw(st.lists(st.booleans(), min_size=n, max_size=n))) if masks and draw(st.booleans()) else ()
        documents.append(document(n, bos=bos, name=f"d{k}", first=1000 * k, scored=scored))
    return documents


@st.composite
def policies(draw: st.DrawFn, presets: tuple[str, ...] = ("disjoint", "sliding", "lm-eval")) -> WindowPolicy:
    preset = draw(st.sampled_from(presets))
    context = draw(st.integers(3 if preset == "llama.cpp" else 2, 20))
    stride = draw(st.none() | st.integers(1, context - 1)) if preset == "sliding" else None
    return policy(preset, context=context, stride=stride)


def windows_of(documents: list[TokenizedDocument], chosen: WindowPolicy, **options: int | None) -> tuple[Window, ...]:
    try:
        return cut(documents, chosen, **options).windows
    except InputError:
        return ()


def scorable(documents: list[TokenizedDocument], chosen: WindowPolicy) -> Counter[int]:
    """Every id that a preset promises to score, once each."""
    wanted: Counter[int] = Counter()
    for d in documents:
        for i, token in enumerate(d.ids):
            context_only = not d.prefix and (i % chosen.context == 0 if chosen.preset == "disjoint" else i == 0)
            if not context_only and (not d.scored or d.scored[i]):
                wanted[token] += 1
    return wanted


@settings(max_examples=300)
@given(corpora(masks=True), policies())
def test_every_scorable_token_is_scored_exactly_once(documents: list[TokenizedDocument], chosen: WindowPolicy) -> None:
    scored = Counter(w.ids[i] for w in windows_of(documents, chosen) for i in w.positions)
    assert scored == scorable(documents, chosen)


@settings(max_examples=300)
@given(corpora(masks=True), policies())
def test_window_invariants(documents: list[TokenizedDocument], chosen: WindowPolicy) -> None:
    by_name = {d.name: d for d in documents}
    windows = windows_of(documents, chosen)
    assert [w.index for w in windows] == list(range(len(windows)))
    for w in windows:
        d = by_name[w.document]
        assert 1 <= w.score_from < w.score_to == len(w.ids) == len(w.bytes_per_token)
        assert len(w.ids) <= chosen.context + (chosen.preset == "lm-eval")
        assert w.positions
        assert len(w.mask) in (0, w.score_to - w.score_from)
        assert not (w.mask and all(w.mask))
        has_bos = w.ids[0] == BOS
        body = w.ids[has_bos:]
        assert body == tuple(range(body[0], body[0] + len(body)))  # consecutive tokens of one document
        assert set(body) <= set(d.ids)
        assert w.bytes_per_token == (0,) * has_bos + tuple(i % 5 for i in body)
        scores_the_opening = w.ids[w.score_from] == d.ids[0]
        assert has_bos == (bool(d.prefix) and (scores_the_opening or chosen.preset != "lm-eval"))


@settings(max_examples=200)
@given(corpora(masks=True), policies())
def test_skipped_documents_are_those_without_a_scored_token(
    documents: list[TokenizedDocument], chosen: WindowPolicy
) -> None:
    wanted = scorable(documents, chosen)
    unscored = [d.name for d in documents if not any(i in wanted for i in d.ids)]
    if len(unscored) == len(documents):
        with pytest.raises(InputError, match=unscored[0]):
            cut(documents, chosen)
    else:
        assert [s.name for s in cut(documents, chosen).skipped] == unscored


@given(st.integers(1, 60), policies())
def test_scored_bytes_are_the_documents_bytes_where_bos_exists(n: int, chosen: WindowPolicy) -> None:
    d = document(n, bos=True)
    windows = cut([d], chosen).windows
    assert sum(w.bytes_per_token[i] for w in windows for i in w.positions) == sum(d.bytes_per_token)


@given(corpora(), policies(("sliding",)))
def test_sliding_gives_the_most_context(documents: list[TokenizedDocument], chosen: WindowPolicy) -> None:
    for w in windows_of(documents, chosen):
        first = next(d.ids[0] for d in documents if d.name == w.document)
        has_bos = w.ids[0] == BOS
        if w.ids[has_bos] != first:  # all that precedes does not fit: full, and never under context - stride
            assert len(w.ids) == chosen.context
            assert w.score_from >= chosen.context - chosen.stride


def test_sliding_worked_out_by_hand() -> None:
    got = cut([document(8, bos=True)], policy("sliding", context=5, stride=2)).windows
    assert [(w.ids, w.score_from) for w in got] == [
        ((BOS, 0, 1, 2, 3), 1),
        ((BOS, 2, 3, 4, 5), 3),
        ((BOS, 4, 5, 6, 7), 3),
    ]
    got = cut([document(8, bos=False)], policy("sliding", context=5, stride=2)).windows
    assert [(w.ids, w.score_from) for w in got] == [((0, 1, 2, 3, 4), 1), ((2, 3, 4, 5, 6), 3), ((3, 4, 5, 6, 7), 4)]


def test_disjoint_worked_out_by_hand() -> None:
    got = cut([document(7, bos=True)], policy("disjoint", context=4)).windows
    assert [w.ids for w in got] == [(BOS, 0, 1, 2), (BOS, 3, 4, 5), (BOS, 6)]
    got = cut([document(9, bos=False)], policy("disjoint", context=4)).windows
    assert [(w.ids, w.score_from) for w in got] == [((0, 1, 2, 3), 1), ((4, 5, 6, 7), 1)]  # a lone 8 scores nothing


# lm-evaluation-harness 0.4, lm_eval/utils.py, restated: (input, predicted) pairs, then the disjoint cut.
def rolling(
    tokens: list[int], prefix: int, max_length: int, context_len: int = 1
) -> Iterator[tuple[list[int], list[int]]]:
    if not tokens:
        return
    per_window = max_length - context_len + 1
    done = min(max_length, len(tokens))
    yield [prefix, *tokens[: done - 1]], tokens[:done]
    while done < len(tokens):
        count = min(len(tokens) - done, per_window)
        end = done + count
        yield tokens[end - max_length - 1 : end - 1], tokens[end - count : end]
        done = end


def disjoint_pair(pair: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
    given_tokens, predicted = pair
    return given_tokens[: len(given_tokens) - (len(predicted) - 1)], predicted


@settings(max_examples=300)
@given(st.integers(0, 70), st.integers(2, 20), st.sampled_from(["bos", "prefix", "own first token", "prefix present"]))
def test_lm_eval_is_the_published_algorithm(n: int, context: int, kind: str) -> None:
    d = document(n, bos=kind == "bos")
    tokens, prefix, prefix_id = list(d.ids), BOS, None
    if kind == "prefix":
        prefix = prefix_id = 77_777
    elif kind == "own first token" and n:
        prefix, *tokens = tokens
    elif kind == "prefix present" and n:
        prefix, *tokens = tokens
        prefix_id = prefix
    if not n or not tokens:
        tokens = []
    expected = [disjoint_pair(pair) for pair in rolling(tokens, prefix, context)]
    got = windows_of([d], policy("lm-eval", context=context), prefix_id=prefix_id)
    assert [(list(w.ids[: w.score_from]), list(w.ids[w.score_from : w.score_to])) for w in got] == expected


def test_lm_eval_published_example() -> None:
    """The worked example in that project's own tests: 34 tokens, max_seq_len 10, prefix -100."""
    d = TokenizedDocument("d", "x", tuple(range(34)), (1,) * 34, (-100,))
    pairs = list(rolling(list(d.ids), -100, 10))
    assert pairs[0] == ([-100, *range(9)], list(range(10)))
    assert pairs[3] == (list(range(23, 33)), [30, 31, 32, 33])
    windows = cut([d], policy("lm-eval", context=10)).windows
    assert [(w.ids[0], w.ids[-1], w.score_from) for w in windows] == [
        (-100, 9, 1),
        (9, 19, 1),
        (19, 29, 1),
        (23, 33, 7),
    ]


def test_several_tokens_before_every_text() -> None:
    """As GLM's tokenizers put them: all are shown, none is scored."""
    d = TokenizedDocument("d", "x", tuple(range(7)), (1,) * 7, prefix=(100, 101))
    got = cut([d], policy("disjoint", context=5)).windows
    assert [(w.ids, w.score_from) for w in got] == [
        ((100, 101, 0, 1, 2), 2),
        ((100, 101, 3, 4, 5), 2),
        ((100, 101, 6), 2),
    ]
    assert got[0].bytes_per_token == (0, 0, 1, 1, 1)
    got = cut([d], policy("sliding", context=5, stride=2)).windows
    assert [(w.ids, w.score_from) for w in got] == [
        ((100, 101, 0, 1, 2), 2),
        ((100, 101, 2, 3, 4), 3),
        ((100, 101, 4, 5, 6), 3),
    ]
    (window,) = cut([d], policy("lm-eval", context=8), prefix_id=9).windows
    assert window.ids == (9, *range(7))  # that tool knows one prefix token
    with pytest.raises(UsageError, match="puts one token over each chunk's first, and this tokenizer adds 2"):
        cut([d], policy("llama.cpp", context=4))
    with pytest.raises(UsageError, match="a context of 2 is filled by the 2 tokens"):
        cut([d], policy("disjoint", context=2))


def llama_cpp(stream: list[int], n_ctx: int, bos: int | None) -> list[tuple[list[int], list[int]]]:
    """tools/perplexity/perplexity.cpp, restated: (chunk as evaluated, scored tokens)."""
    out = []
    for i in range(len(stream) // n_ctx):
        chunk = stream[i * n_ctx : (i + 1) * n_ctx]
        if bos is not None:
            chunk[0] = bos
        first = n_ctx // 2
        scored = [chunk[j + 1] for j in range(first, n_ctx - 1)]  # logits j predict token j + 1
        assert len(scored) == n_ctx - first - 1  # what the tool adds to its count
        out.append((chunk, scored))
    return out


@settings(max_examples=300)
@given(corpora(), policies(("llama.cpp",)), st.none() | st.integers(1, 4))
def test_llama_cpp_is_the_tool(documents: list[TokenizedDocument], chosen: WindowPolicy, limit: int | None) -> None:
    bos = next(iter(documents[0].prefix), None)
    stream = [i for d in documents for i in d.ids]
    expected = llama_cpp([BOS, *stream] if bos is not None else stream, chosen.context, bos)
    if not expected:
        with pytest.raises(InputError, match="fewer than one context"):
            cut(documents, chosen, limit=limit)
        return
    got = cut(documents, chosen, limit=limit)
    assert [(list(w.ids), [w.ids[i] for i in w.positions]) for w in got.windows] == expected[:limit]
    owner = {i: d.name for d in documents for i in d.ids}
    assert [w.document for w in got.windows] == [owner[scored[0]] for _, scored in expected[:limit]]
    seen = {owner[i] for _, scored in expected for i in scored}
    assert [s.name for s in got.skipped] == [d.name for d in documents if d.name not in seen]
    for w in got.windows:
        assert w.bytes_per_token == tuple(0 if i == BOS else i % 5 for i in w.ids)


def test_llama_cpp_512() -> None:
    windows = cut([document(1200, bos=True)], policy("llama.cpp", context=512)).windows
    assert len(windows) == 2
    assert windows[0].ids[:2] == (BOS, 0)  # the BOS of the stream is part of the first chunk
    assert windows[1].ids[:2] == (BOS, 512)  # token 511 gave way to BOS
    assert (windows[0].score_from, windows[0].score_to, len(windows[0].positions)) == (257, 512, 255)


def test_a_limit_spreads_over_documents_and_keeps_corpus_order() -> None:
    documents = [document(n, bos=True, name=f"d{k}", first=1000 * k) for k, n in enumerate([30, 6, 30])]
    got = cut(documents, policy("disjoint", context=4), limit=5).windows
    assert [(w.index, w.document, w.ids[1]) for w in got] == [
        (0, "d0", 0),
        (1, "d0", 3),
        (2, "d1", 1000),
        (3, "d1", 1003),
        (4, "d2", 2000),
    ]
    in_order = cut(documents, policy("lm-eval", context=4), limit=5).windows
    assert [w.document for w in in_order] == ["d0"] * 5


@given(corpora(masks=True), policies(), st.integers(1, 12))
def test_a_limit_takes_windows_of_the_whole_cut(
    documents: list[TokenizedDocument], chosen: WindowPolicy, limit: int
) -> None:
    every = [(w.document, w.ids, w.score_from) for w in windows_of(documents, chosen)]
    some = [(w.document, w.ids, w.score_from) for w in windows_of(documents, chosen, limit=limit)]
    assert len(some) == min(limit, len(every))
    assert some == [w for w in every if w in some]


def test_masks() -> None:
    flags = (False, False, True, True, False, False, True, True)
    d = document(8, bos=True, scored=flags)
    windows = cut([d], policy("disjoint", context=3)).windows
    assert [(w.ids, w.mask, w.positions) for w in windows] == [
        ((BOS, 2, 3), (), (1, 2)),
        ((BOS, 6, 7), (), (1, 2)),
    ]
    (whole,) = cut([d], policy("disjoint", context=20)).windows
    assert whole.mask == flags
    assert [whole.ids[i] for i in whole.positions] == [2, 3, 6, 7]


def test_skipped_reasons() -> None:
    documents = [
        document(0, bos=False, name="none"),
        document(1, bos=False, name="one"),
        document(4, bos=False, name="masked", scored=(True, False, False, False)),
        document(4, bos=False, name="good"),
    ]
    got = cut(documents, policy("disjoint", context=4))
    assert {s.name: s.reason for s in got.skipped} == {
        "none": "no tokens",
        "one": "one token and no BOS before it",
        "masked": "no scored token",
    }
    with pytest.raises(InputError, match="there are no documents"):
        cut([], policy("disjoint", context=4))


def test_policy_defaults() -> None:
    assert policy("sliding", context=9) == WindowPolicy("sliding", 9, 4)
    assert policy("sliding", context=2) == WindowPolicy("sliding", 2, 1)
    assert [policy(p, context=8).stride for p in PRESETS] == [8, 4, 8, 8]


@pytest.mark.parametrize(
    ("preset", "context", "stride", "message"),
    [
        ("rolling", 8, None, "there is no window preset 'rolling': use one of disjoint, sliding, llama.cpp, lm-eval"),
        ("disjoint", 1, None, "context of 1"),
        ("llama.cpp", 2, None, "at least 3"),
        ("disjoint", 8, 4, "stride does not apply to the disjoint preset"),
        ("lm-eval", 8, 7, "stride does not apply to the lm-eval preset"),
        ("sliding", 8, 8, "outside 1..7"),
        ("sliding", 8, 0, "outside 1..7"),
    ],
)
def test_policy_refuses_by_name(preset: str, context: int, stride: int | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        policy(preset, context=context, stride=stride)


def test_cut_refuses() -> None:
    d = document(9, bos=True)
    disjoint = policy("disjoint", context=4)
    with pytest.raises(UsageError, match="limit of 0"):
        cut([d], disjoint, limit=0)
    with pytest.raises(UsageError, match="stride of 4, not 3"):
        cut([d], WindowPolicy("disjoint", 4, 3))
    with pytest.raises(UsageError, match="prefix token does not apply"):
        cut([d], disjoint, prefix_id=3)
    with pytest.raises(UsageError, match="'chat' is a chat"):
        cut([document(9, bos=True, name="chat", scored=(True,) * 9)], policy("llama.cpp", context=4))
    with pytest.raises(InputError, match="differ in their BOS"):
        cut([d, document(9, bos=False)], policy("llama.cpp", context=4))
    with pytest.raises(InputError, match="9 tokens but 8 byte counts"):
        cut([TokenizedDocument("d", "x", d.ids, d.bytes_per_token[1:], BOS)], disjoint)
    with pytest.raises(InputError, match="1 scored flags"):
        cut([TokenizedDocument("d", "x", d.ids, d.bytes_per_token, BOS, (True,))], disjoint)


def test_llama_cpp_keeps_the_tokens_of_a_text_that_was_cut() -> None:
    """Parts of one text give the windows of the whole text, with the part's name where it is scored."""
    texts = ["one two\n", "three", " four five six\n", "seven eight nine ten"]
    parts = [Document(f"t:{i}", "d", text=text, whole="t") for i, text in enumerate(texts, 1)]
    other = Document("u", "d", text="another text")

    def tokenize(documents: list[Document]) -> list[TokenizedDocument]:
        """Three bytes a token, so that some tokens lie across a cut."""
        raws = [d.text.encode() for d in documents]
        pieces = [[raw[i : i + 3] for i in range(0, len(raw), 3)] for raw in raws]
        return [
            TokenizedDocument(
                d.name, d.domain, tuple(int.from_bytes(p, "big") % 997 for p in row), tuple(map(len, row)), prefix=(1,)
            )
            for d, row in zip(documents, pieces, strict=True)
        ]

    chosen = policy("llama.cpp", context=4)
    found = tokenized([*parts, other], chosen, tokenize)
    assert [d.name for d in found] == ["t:1", "t:2", "t:3", "t:4", "u"]
    (whole, rest) = tokenize([Document("t", "d", text="".join(texts)), other])
    assert tuple(i for d in found[:4] for i in d.ids) == whole.ids
    assert found[4] == rest
    begins = 0
    for part, text in zip(found, texts, strict=False):
        assert begins <= sum(len(t.encode()) for t in texts[: texts.index(text) + 1])
        begins += sum(part.bytes_per_token)
    cut_windows, whole_windows = cut(found, chosen).windows, cut([whole, rest], chosen).windows
    assert [w.ids for w in cut_windows] == [w.ids for w in whole_windows]
    assert len({w.document for w in cut_windows}) > len({w.document for w in whole_windows})
    assert [len(d.ids) for d in tokenized(parts, policy("disjoint", context=4), tokenize)] == [3, 2, 5, 7]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    preset=st.sampled_from(PRESETS),
    context=st.integers(3, 12),
    stride=st.integers(1, 11),
    head=st.integers(0, 1),
    limit=st.none() | st.integers(1, 9),
)
def test_sizes_are_those_of_the_windows_that_are_cut(lengths, preset, context, stride, head, limit):
    chosen = policy(preset, context=context, stride=min(stride, context - 1) if preset == "sliding" else None)
    documents = [
        TokenizedDocument(f"d{i}", "prose", tuple(range(1, n + 1)), (1,) * n, prefix=(0,) * head)
        for i, n in enumerate(lengths)
    ]
    found = sizes(lengths, chosen, head=head, limit=limit)
    try:
        windows = cut(documents, chosen, limit=limit).windows
    except InputError:
        windows = ()
    positions = sum(len(window.positions) for window in windows)
    assert found == (len(windows), positions, sum(len(window.ids) for window in windows))
