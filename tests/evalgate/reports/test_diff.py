"""The worst tokens as text: fits its columns, shows what cannot be seen, and hostile text is inert."""

import json
import re

import numpy as np
import pytest
from rich.cells import cell_len

from evalgate.cli.app import invoke
from evalgate.gate.compare import sides
from evalgate.reports.diff import render
from evalgate.stats.worst import worst_tokens
from evalgate.store.runs import Run, write_run
from tests.evalgate.cli.test_cli import MemoryOutput
from tests.evalgate.reports.test_screen import put
from tests.evalgate.sample_run import listed, source, summary, token_table
from tests.evalgate.test_printable import HOSTILE, check

WORDS = (" the", "\n", "    ", " 日本語", " return", "<end_of_turn>", "\t", "def", " " * 90, "漢" * 90, "\u00a0", "")


def table_of(worst=(15, 40)):
    """One candidate whose rows `worst` have the largest KL, in that order."""
    table = token_table(("demo@int8",), documents=4)
    kl = table.column("kl").to_numpy().copy()
    for place, row in enumerate(worst):
        kl[row] = 90.0 - place
    return put(table, "kl", kl)


def shown(texts, *, table=None, lists=None, **options):
    table = table_of() if table is None else table
    found = Run(
        summary=summary(table, reference=source("demo")),
        table=table,
        manifest={},
        token_texts=texts,
        alternatives_table=lists,
    )
    return worst_tokens(found, sides(found, None)[0], **{"limit": 2, **options})


def with_tokens(words):
    """A table and texts in which the tokens before row 15 are these words, the last of them the token itself."""
    table = table_of()
    ids = table.column("token").to_numpy().copy()
    ids[16 - len(words) : 16] = 2000 + np.arange(len(words))
    return put(table, "token", ids), {2000 + i: word for i, word in enumerate(words)}


def test_a_token_in_its_text():
    table, texts = with_tokens(["def", " f", "(x", "):", "\n", "    ", "return", " x"])
    texts |= {5: " y", 6: " None"}
    lists = listed(table, (15,), [([5, 6], [np.log(0.75), np.log(0.125)])])
    text = render(shown(texts, table=table, lists=lists, limit=1, context=7))
    lines = text.splitlines()
    assert lines[0] == "demo@int8 against demo: the worst of 120 positions by KLD (nats)"
    assert lines[2] == "1. KLD 90.0  window 0, position 16, prose: doc0"
    assert lines[3] == "    ...def f(x):↵····return»·x«"
    assert re.fullmatch(r"    this token: reference [\d.]+%, candidate [\d.]+%", lines[4])
    assert lines[5:] == ["    reference picks  ·y 75.0%   ·None 12.5%", "    candidate picks  ·y 75.0%   ·None 12.5%"]


def test_what_cannot_be_seen_is_a_sign():
    table, texts = with_tokens(["a", "\t", "\r", "\u00a0", "", "<end_of_turn>", " "])
    text = render(shown(texts, table=table, limit=1, context=6))
    assert "a→␍⍽<empty 2004><end_of_turn>»·«" in text
    assert "<id " in render(shown(texts, limit=1))  # ids without a text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(width):
    texts = {i: WORDS[i % len(WORDS)] for i in range(1000)}
    lists = listed(table_of(), (15, 40), [([3, 8, 9, 15, 20], [-0.1, -2.0, -3.0, -4.0, -5.0])] * 2)
    text = render(shown(texts, lists=lists, limit=20, context=200), width=width)
    assert max(map(cell_len, text.splitlines())) <= width


def test_scripts_from_right_to_left_stand_last_in_their_lines():
    table, texts = with_tokens([" ok", " fine"])
    texts |= {5: " שלום", 6: " عالم", 7: "x"}
    lists = listed(table, (15,), [([5, 6, 7], [-0.2, -2.0, -4.0])])
    lines = render(shown(texts, table=table, lists=lists, limit=1)).splitlines()
    lines = lines[next(i for i, line in enumerate(lines) if "reference picks" in line) :]
    assert len(lines) == 6
    assert [line.split()[-1] for line in lines] == ["·שלום", "·عالم", "x"] * 2
    assert lines[0].startswith("    reference picks  81.9%  ")


def test_hostile_text_is_inert():
    table, texts = with_tokens(["\x1b[2J", HOSTILE, "::error::x", "\u202egnp", "\x00", HOSTILE])
    texts |= dict.fromkeys(range(1000), HOSTILE)
    document = shown(texts, table=table, lists=listed(table, (15,), [([1, 2], [-0.1, -3.0])]), limit=5)
    check(render(document))
    colored = render(document, color=True)
    assert set(re.findall(r"\x1b[^m]*m", colored)) <= {"\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[1;7m"}
    check(re.sub(r"\x1b\[[0-9;]*m", "", colored))


def test_a_side_is_named_wherever_there_are_two():
    table = table_of()
    hidden = table.drop_columns(["ref_nll"])
    found = Run(summary=summary(table, reference=source("demo")), table=hidden, manifest={})
    text = render(worst_tokens(found, sides(found, None)[0], limit=1))
    assert re.search(r"this token: candidate [\d.]+%\n", text)
    alone = token_table(("demo",), pair=False)
    found = Run(summary=summary(alone, kind="ppl"), table=alone, manifest={})
    text = render(worst_tokens(found, sides(found, None)[0], limit=1))
    assert text.startswith("demo: the worst of 120 positions by NLL (nats)\n")
    assert re.search(r"this token: [\d.]+%\n    picks +<id \d+>", text) and "reference" not in text


@pytest.mark.parametrize("length", [30, 34, 35, 36, 37, 40])
def test_the_token_is_not_broken_over_lines(length):
    table, texts = with_tokens(["漢" * length, "漢字", " "])
    text = render(shown(texts | {2001: "漢字", 2002: "漢字"}, table=table, limit=1, context=2))
    assert "»漢字«" in text and max(map(cell_len, text.splitlines())) <= 80
    spaced, texts = with_tokens(["a ", "b"])
    assert "...a·»b«" in render(shown(texts, table=spaced, limit=1, context=1))


def test_two_colons_inside_a_line_are_text():
    table, texts = with_tokens(["a", "::", "b", "::="])
    assert "...a::b»::=«" in render(shown(texts, table=table, limit=1, context=3))


def test_texts_that_are_not_known_are_said_to_be():
    text = render(shown(None, limit=1))
    assert "does not know the texts of its tokens" in text and "»<id " in text


def test_a_share_is_in_percent_and_kl_stands_beside_other_metrics():
    text = render(shown({}, metric="tv", domain="code", limit=1))
    assert "of 60 positions of domain code by TV\n" in text
    assert re.search(r"1\. TV [\d.]+%, KLD [\d.]+", text)


def call(*args):
    output = MemoryOutput()
    return invoke(args, output), output.text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    table = token_table(("a", "b"))
    path = tmp_path_factory.mktemp("diff") / "run"
    write_run(
        path,
        manifest={},
        table=table,
        summary=summary(table, reference=source("demo")),
        token_texts={i: f" w{i}" for i in range(1000)},
        alternatives_table=listed(table),
    )
    return str(path)


def test_the_command_shows_every_candidate(folder):
    code, text = call("diff", folder, "--limit", "3")
    assert code == 0 and text.count("the 3 worst of 120 positions") == 2
    code, text = call("diff", folder, "--candidate", "b", "--domain", "prose", "--by", "tv", "--context", "0")
    assert code == 0 and text.count("worst of 60 positions of domain prose by TV") == 1
    assert "\n    ...»·w" in text


def test_json(folder):
    code, text = call("diff", folder, "--candidate", "a", "--limit", "2", "--context", "1", "--json")
    found = json.loads(text)
    assert code == 0 and len(found["tokens"]) == 2
    first = found["tokens"][0]
    assert first["kl"] == first["value"] >= found["tokens"][1]["value"]
    assert first["token"]["text"] == f" w{first['token']['id']}" and len(first["before"]) == 1
    assert len(json.loads(call("diff", folder, "--json")[1])["candidates"]) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--domain", "poetry"), "there is no position in domain 'poetry': use one of prose, code"),
        (("--candidate", "c"), "has no candidate 'c'"),
        (("--by", "kll"), "there is no metric 'kll'"),
        (("--by", "greedy_match_length"), "has no value at a single token"),
        (("--limit", "0"), "--limit should be 1 or more"),
    ],
)
def test_mistakes_end_in_a_sentence(folder, options, said, capfd):
    assert call("diff", folder, *options)[0] == 2
    assert said in " ".join(capfd.readouterr().err.split())
