"""Detokenizing, stop strings and parsers: the same answer however the text is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.api.detokenize import Cutter, Detokenizer
from serve.api.events import Chain, Delta, Kind, Parser, Plain, Sampled, Span, apart
from serve.api.parsers import parsers, pick
from serve.api.prompt import Prompt
from tests.serve.tiny_models import byte_level, metaspace

TOKENIZER = byte_level()
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "日本"}}\n</tool_call>'

REASONING = parsers("reasoning")
TOOLS = parsers("tools")
ALL: dict[str, Callable[[], Parser]] = {
    **{name: module.PARSER for name, module in {**REASONING, **TOOLS}.items()},
    "plain": Plain,
    "opened": lambda: REASONING["think"].PARSER(lead="<think>"),
    **{
        f"think+{name}": lambda m=module: Chain(REASONING["think"].PARSER(), m.PARSER())
        for name, module in TOOLS.items()
    },
}
PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "\n", " ", "a", "<", "<t", "{", "}", ";",
    "日", "é", CALL, '{"name": "g", "parameters": {"y": 1}}', '{"name": "h", "arguments": {}}', "plain words ",
    '{"name": 3}', "[1]",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


def spans_of(cuts: Sequence[str]) -> list[Span]:
    """One token per piece (empty pieces too)."""
    return [Span(piece, (Sampled(i, None, 0),)) for i, piece in enumerate(cuts)]


def run(parser: Parser, spans: Iterable[Span]) -> list[Delta]:
    deltas = [delta for span in spans for delta in parser.feed(span)]
    return [*deltas, *parser.end()]


def regrouped(spans: list[Span], chooser: random.Random) -> list[Span]:
    """The same text and tokens, delivered in other groups."""
    out: list[Span] = []
    for span in spans:
        if out and chooser.random() < 0.4:
            last = out[-1]
            moved = tuple(t._replace(at=t.at + len(last.text)) for t in span.tokens)
            out[-1] = Span(last.text + span.text, last.tokens + moved)
            continue
        if len(span.text) > 1 and chooser.random() < 0.5:
            at = chooser.randrange(1, len(span.text))
            out += [Span(span.text[:at], span.tokens), Span(span.text[at:])]
        else:
            out.append(span)
    return out


def reduced(spans: list[Span]) -> list[Span]:
    """Everything as one span."""
    at, tokens = 0, []
    for span in spans:
        tokens += [t._replace(at=t.at + at) for t in span.tokens]
        at += len(span.text)
    return [Span("".join(s.text for s in spans), tuple(tokens))]


def merged(deltas: list[Delta]) -> dict[str, Any]:
    """Everything a reply would show, per kind."""
    return {
        kind.value: (
            "".join(d.text for d in deltas if d.kind is kind),
            [t.token for d in deltas if d.kind is kind for t in d.tokens],
            [d.call for d in deltas if d.kind is kind and d.call],
        )
        for kind in Kind
    }


def cuts(text: str, chooser: random.Random) -> list[str]:
    out, at = [], 0
    while at < len(text):
        size = chooser.choice((0, 1, 1, 2, 3, 9))
        out.append(text[at : at + size])
        at += size
    return out


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=150, deadline=None)
@given(text=texts, seed=st.integers(0, 1000))
def test_chunking_changes_nothing(name: str, text: str, seed: int) -> None:
    chooser = random.Random(seed)
    spans = spans_of(cuts(text, chooser))
    whole = run(ALL[name](), spans)
    other = run(ALL[name](), regrouped(spans, chooser))
    assert merged(whole) == merged(other)
    assert merged(run(ALL[name](), reduced(spans))) == merged(whole)
    by_character = run(ALL[name](), [Span(c) for c in text])
    at_once = run(ALL[name](), [Span(text)])
    assert merged(by_character) == merged(at_once)
    for deltas in (whole, other):
        assert [t.token for d in deltas for t in d.tokens] == list(range(len(spans)))  # every token once, in order


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=150, deadline=None)
@given(text=texts, seed=st.integers(0, 1000))
def test_a_token_lands_where_its_first_character_is(name: str, text: str, seed: int) -> None:
    """Tokens of one character each: visible text of a kind is made by that kind's tokens alone."""
    del seed
    for delta in run(ALL[name](), spans_of(list(text))):
        made = "".join(text[t.token] for t in delta.tokens)
        assert delta.text in ("", made)


def test_reasoning() -> None:
    spans = spans_of(["<th", "ink>", "\nhm", "</thi", "nk>a", "b"])
    got = merged(run(REASONING["think"].PARSER(), spans))
    assert got["reasoning_content"] == ("\nhm", [0, 1, 2, 3, 4], [])
    assert got["content"] == ("ab", [5], [])  # token 4 begins in the mark
    assert merged(run(ALL["opened"](), spans_of(["x", "</think>", "y"])))["reasoning_content"][:2] == ("x", [0, 1])
    assert merged(run(REASONING["think"].PARSER(), spans_of(["a <think>b"])))["content"][0] == "a <think>b"
    assert merged(run(REASONING["think"].PARSER(), spans_of(["<think>never closed"])))["content"][0] == ""


def test_hermes() -> None:
    parser = TOOLS["hermes"].PARSER
    got = merged(run(parser(), spans_of(["Let me", " see.", "\n", CALL, "\n", CALL, "\n"])))
    assert got["content"] == ("Let me see.", [0, 1], [])
    assert got["tool_calls"][1] == [2, 3, 4, 5, 6]
    assert [(c.name, json.loads(c.arguments)) for c in got["tool_calls"][2]] == [("f", {"x": "日本"})] * 2
    unclosed = merged(run(parser(), spans_of([CALL.removesuffix("</tool_call>")])))
    assert [c.name for c in unclosed["tool_calls"][2]] == ["f"]
    for body in (
        "nonsense",
        '{"name": 1}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": {"x": NaN}}',
    ):
        broken = f"<tool_call>{body}</tool_call>"
        assert merged(run(parser(), spans_of([broken])))["content"][0] == broken
    half = '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>'
    assert merged(run(parser(), spans_of([half])))["content"][0] == half


def test_llama3() -> None:
    parser = TOOLS["llama3"].PARSER
    text = '{"name": "a", "parameters": {"x": 1}}; {"name": "b", "parameters": {}}'
    for lead in ("", "<|python_tag|>", "\n"):
        got = merged(run(parser(), spans_of(list(lead + text))))
        assert [c.name for c in got["tool_calls"][2]] == ["a", "b"] and got["content"][0] == ""
        assert got["tool_calls"][1] == list(range(len(lead + text)))
    for other in ("hello {", '{"name": "a"}', text + " and more", "{}", "[]"):
        assert merged(run(parser(), spans_of([other])))["content"][0] == other


def test_plain_text_is_not_held_back() -> None:
    for name in ALL:
        if name == "opened":
            continue
        deltas = list(ALL[name]().feed(Span("hello", (Sampled(0, None, 0),))))
        assert "".join(d.text for d in deltas if d.kind is Kind.CONTENT) == "hello", name


def test_picking() -> None:
    assert pick("reasoning", "auto", "no marks") is None
    assert pick("reasoning", "auto", "{{ '<think>' }}") is REASONING["think"]
    assert pick("tools", "auto", "<tool_call>") is TOOLS["hermes"]
    assert pick("tools", "auto", 'role ipython "parameters"') is TOOLS["llama3"]
    assert pick("tools", "none", "<tool_call>") is None
    assert pick("tools", "llama3", "") is TOOLS["llama3"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 303), max_size=30), st.booleans())
def test_text_is_the_utf8_of_the_bytes(ids: list[int], sentencepiece: bool) -> None:
    tokenizer = SENTENCEPIECE if sentencepiece else TOKENIZER
    from serve.models.tokenizer import token_bytes

    detokenizer = Detokenizer(tokenizer, hide_special=False)
    text = "".join(map(detokenizer.text, ids)) + detokenizer.rest()
    assert text == b"".join(token_bytes(tokenizer, i) for i in ids).decode("utf-8", "replace")


SENTENCEPIECE = metaspace()


def expected_cut(text: str, stops: tuple[str, ...], exempt: int) -> str | None:
    """Where the text ends: before the stop string that is complete first."""
    for end in range(exempt + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return None


@settings(max_examples=300, deadline=None)
@given(st.text("ab<", max_size=20), st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3))
def test_stop_strings(text: str, stops: list[str]) -> None:
    """One token a character: the text ends before the first complete stop string; every token is told once."""
    cutter = Cutter(Detokenizer(TOKENIZER), stop=tuple(stops))
    spans, sent = [], 0
    for character in text:
        sent += 1
        spans.append(cutter.feed(TOKENIZER.convert_tokens_to_ids(character), None))
        if cutter.found is not None:
            break
    spans.append(cutter.end())
    shown = "".join(span.text for span in spans)
    want = expected_cut(text, tuple(stops), 0)
    assert shown == (text if want is None else want)
    assert (cutter.found is None) == (want is None)
    assert [t.offset for span in spans for t in span.tokens] == list(range(sent))


def test_stop_string_in_the_exempt_tokens_and_included() -> None:
    a, b = (TOKENIZER.convert_tokens_to_ids(c) for c in "ab")
    cutter = Cutter(Detokenizer(TOKENIZER), stop=("a",), min_tokens=2)
    shown = "".join(cutter.feed(t, None).text for t in (a, b)) + cutter.feed(a, None).text
    assert shown == "ab" and cutter.found == "a"
    kept = Cutter(Detokenizer(TOKENIZER), stop=("ba",), include=True)
    assert "".join(kept.feed(t, None).text for t in (a, b, a)) == "aba"


def test_split_characters_hold_their_tokens() -> None:
    ids = TOKENIZER.encode("é🙂", add_special_tokens=False)
    cutter = Cutter(Detokenizer(TOKENIZER))
    spans = [cutter.feed(i, None) for i in ids] + [cutter.end()]
    assert "".join(s.text for s in spans) == "é🙂"
    assert all(span.text or not span.tokens for span in spans)
    half = Cutter(Detokenizer(TOKENIZER))
    spans = [half.feed(i, None) for i in ids[:-1]] + [half.end()]
    assert "".join(s.text for s in spans) == "é\ufffd"
    assert sum(len(s.tokens) for s in spans) == len(ids) - 1


def test_control_tokens_are_hidden_unless_kept() -> None:
    ids = TOKENIZER.encode("<|im_start|>a", add_special_tokens=False)

    def shown(**options: Any) -> str:
        detokenizer = Detokenizer(TOKENIZER, **options)
        return "".join(map(detokenizer.text, ids))

    assert shown() == "a"
    assert shown(hide_special=False) == shown(keep=("<|im_start|>",)) == "<|im_start|>a"
    assert shown(hide=ids[1:]) == ""


PIECE, Z, A, B, START = (TOKENIZER.convert_tokens_to_ids(c) for c in ("æ", "Z", "a", "b", "<s>"))  # æ stands for E6


def streamed(ids: Sequence[int], **options: Any) -> list[Span]:
    cutter = Cutter(Detokenizer(TOKENIZER, **options))
    return [*(cutter.feed(i, None) for i in ids), cutter.end()]


def test_an_abandoned_lead_byte_does_not_shift_what_follows() -> None:
    """Bytes a E6 E6 Z b read as five characters, one a token; each token lands on its own."""
    spans = streamed([A, PIECE, PIECE, Z, B])
    assert "".join(s.text for s in spans) == "a\ufffd\ufffdZb"
    assert [t.offset for s in spans for t in s.tokens] == [0, 1, 2, 3, 4]
    shown = [(s.text[t.at : t.at + 1], t.token) for s in spans for t in s.tokens]
    assert shown == [("a", A), ("\ufffd", PIECE), ("\ufffd", PIECE), ("Z", Z), ("b", B)]
    assert Prompt.of_ids(TOKENIZER, [A, PIECE, PIECE, Z, B]).offsets == (0, 1, 2, 3, 4)
    split = TOKENIZER.encode("a日b", add_special_tokens=False)  # three bytes of one character
    assert Prompt.of_ids(TOKENIZER, split).offsets == (0, *[1] * (len(split) - 2), 2)


@pytest.mark.parametrize("name", TOOLS)
def test_markup_after_an_abandoned_byte_is_markup(name: str) -> None:
    mark = TOOLS[name].PARSER.marks[0]
    span = Span(f"\ufffd{mark}", (Sampled(0, None, 0, 0), Sampled(1, None, 1, 1)))
    rest = Span('{"name": "f", "arguments": {}}</tool_call>', (Sampled(2, None, 2, 0),))
    if name == "hermes":
        got = merged(run(TOOLS[name].PARSER(), [span, rest]))
        assert got["content"][:2] == ("\ufffd", [0]) and got["tool_calls"][1] == [1, 2]


def test_a_hidden_token_has_a_place_of_its_own() -> None:
    spans = streamed([START, A, START, START, B])
    assert [(s.text, [t.token for t in s.tokens]) for s in spans[:5]] == [
        ("", [START]),
        ("a", [A]),
        ("", [START]),
        ("", [START]),
        ("b", [B]),
    ]
    together = Span("ab", tuple(Sampled(i, None, 0, at, silent=i in (1, 2)) for i, at in enumerate((0, 1, 1, 1))))
    assert [(s.text, [t.token for t in s.tokens]) for s in apart(together)] == [
        ("a", [0]),
        ("", [1]),
        ("", [2]),
        ("b", [3]),
    ]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=100, deadline=None)
@given(text=texts, seed=st.integers(0, 1000))
def test_hidden_tokens_are_sent_at_once_and_wherever_the_text_is_cut(name: str, text: str, seed: int) -> None:
    chooser = random.Random(seed)
    spans = []
    for i, piece in enumerate(cuts(text, chooser)):
        silent = not piece or chooser.random() < 0.2
        spans.append(Span("" if silent else piece, (Sampled(i, None, 0, silent=silent),)))
    whole = run(ALL[name](), spans)
    assert merged(run(ALL[name](), regrouped(spans, chooser))) == merged(whole)
    assert merged(run(ALL[name](), reduced(spans))) == merged(whole)
    assert [t.token for d in whole for t in d.tokens] == list(range(len(spans)))
    fed = [[t.token for d in ALL[name]().feed(span) for t in d.tokens] for span in spans[:1] if not span.text]
    assert fed in ([], [[0]])  # with nothing before it, a hidden token does not wait for text


@pytest.mark.parametrize("text", ["plain words", "a日本b", "naïve ☃ 👩‍🔬", ""])
def test_the_length_of_a_text_is_known_without_the_text(text: str) -> None:
    """Cut anywhere, inside of a character too, where the pieces read as U+FFFD."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    for end in range(len(ids) + 1):
        counted, read = Prompt.of_ids(TOKENIZER, ids[:end]), Prompt.of_ids(TOKENIZER, ids[:end])
        assert counted.characters == len(read.text) == read.characters
    assert Prompt.of_text(TOKENIZER, "abc", add_bos=True).characters == 3
