"""The first screen fits 80 columns by 24 lines, and says what the summary does.

The snapshots are in tests/data/screens; EVALGATE_SNAPSHOTS=write writes them anew.
"""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from rich.cells import cell_len

from evalgate.reports import get
from evalgate.reports._headline import headline
from evalgate.reports.screen import render
from evalgate.stats.ranking import ranking
from evalgate.stats.summarize import HEADLINE
from tests.evalgate.sample_run import source, summary, token_table
from tests.evalgate.test_printable import HOSTILE, unsafe

SCREENS = Path(__file__).parents[2] / "data" / "screens"
ONE = ("demo@int8",)
SIX = ("demo@int8", "demo@bf16", "demo-q8_0.gguf", "Qwen/Qwen2.5-0.5B-Instruct@nf4", "demo-q4_0.gguf", "demo-q2_k.gguf")
SIZES = (1.0, 0.3, 0.33, 2.5, 9.0, 40.0)  # how far each of the six is from the reference, as a multiple
COLUMNS = ("kl", "reverse_kl", "js", "tv", "regret")
NOTES = [
    "24 documents say little about rare, bad ones: intervals are wide and may still be too narrow",
    "the server gave no token ids at 12 positions, which are left out",
    "chats: control tokens have 0 bytes; the nll of those that end an assistant's turn counts",
    "evalgate corpus v1 is cut to 24 windows by default: --limit N measures more",
]


def scored(names, form="exact", *, pair=True, documents=24):
    """A table of these candidates; agreement is that of models, not of dice."""
    parts = []
    for name, size in zip(names, SIZES, strict=False):
        table = token_table((name,), documents=documents, pair=pair)
        random = np.random.default_rng(11)
        n = table.num_rows
        if pair:
            top = random.integers(0, 1000, n)
            table = put(table, "ref_top1", top)
            table = put(table, "cand_top1", np.where(random.random(n) < 0.03 * size**0.5, 1001, top))
            shift = random.normal(0, 0.03 * size, n)
            table = put(table, "cand_nll", np.abs(table.column("ref_nll").to_numpy() + shift))
            worse = np.where(table.column("domain").to_numpy(zero_copy_only=False) == "code", 2.0, 1.0)
            for column in COLUMNS:
                table = formed(table, column, table.column(column).to_numpy() * size * worse, form)
        parts.append(table)
    return pa.concat_tables(parts)


def put(table, name, values):
    at = table.schema.get_field_index(name)
    return table.set_column(at, table.schema.field(at), pa.array(values).cast(table.schema.field(at).type))


def formed(table, name, values, form):
    """A column as a value, an estimate with its error, or a lower bound that has an upper one but for KL."""
    values = np.minimum(values, 0.69) if name == "js" else np.minimum(values, 1.0) if name == "tv" else values
    table = put(table, name, values)
    if form == "estimated":
        return table.append_column(f"{name}_se", pa.array(values * 0.1, pa.float32()))
    if form == "bounded":
        table = table.drop_columns([name]).append_column(f"{name}_low", pa.array(values * 0.8, pa.float32()))
        return table if name == "kl" else table.append_column(f"{name}_high", pa.array(values, pa.float32()))
    return table


def measured(names, form="exact", *, kind="kl", notes=NOTES[:1], floor=1e-4, **changes):
    table = scored(names, form, pair=kind != "ppl", **changes)
    reference = None if kind == "ppl" else source("demo", kl_floor=floor)
    found = summary(table, kind=kind, reference=reference, notes=notes)
    sides = [
        one.model_copy(update={"candidate": one.candidate.model_copy(update={"kl_floor": floor})})
        for one in found.comparisons
    ]
    ranked = ranking(table, HEADLINE[kind]) if len(names) > 1 else None
    return found.model_copy(update={"comparisons": sides, "ranking": ranked})


def fits(text, *, width=80, height=24):
    lines = text.splitlines()
    assert len(lines) < height, text  # the next command needs a line
    assert max(map(cell_len, lines)) <= width, text


@pytest.mark.parametrize("names", [ONE, SIX], ids=["one", "six"])
@pytest.mark.parametrize("form", ["exact", "estimated", "bounded"])
def test_snapshots(names, form):
    text = render(measured(names, form), folder=Path("runs/kl-20260102-030405"))
    path = SCREENS / f"{'one' if len(names) == 1 else 'six'}-{form}.txt"
    if os.environ.get("EVALGATE_SNAPSHOTS") == "write":
        path.write_text(text, encoding="utf-8")
    fits(text)
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["agree", "ppl"])
@pytest.mark.parametrize("names", [ONE, SIX[:2], SIX], ids=["one", "two", "six"])
def test_other_kinds_fit_too(kind, names):
    document = measured(names, kind=kind, notes=NOTES)
    text = render(document, folder=Path("runs/x"))
    fits(text)
    first = document.comparisons[0]
    if len(names) < 3:
        assert headline(document, first).replace(" ", "") in text.replace("\n", "").replace(" ", "")
    assert ("against demo" in text) is (kind == "agree")


def test_notes_are_cut_to_what_fits():
    long = [f"note {i}: " + "a reader must know this, and it goes on for a while " * 6 for i in range(9)]
    text = render(measured(ONE, notes=long))
    fits(text)
    assert "note 0: a reader must know" in text and "..." in text and "more notes: --full" in text
    assert "more note" not in render(measured(ONE, notes=NOTES[:2]))
    fits(render(measured(SIX, notes=long)))


def test_the_figures_are_those_of_the_block():
    document = measured(ONE)
    block, text = get("summary", "terminal").text(document), render(document)
    for name in ("Mean KLD", "99.0% KLD", "Same top-1", "RMS delta-p", "Perplexity ratio"):
        row = next(line.split() for line in block.splitlines() if line.startswith(name))
        assert any(line.split() == row for line in text.splitlines()), row


def test_the_best_comes_first_with_shared_places():
    text = render(measured(SIX))
    order = [next(i for i, line in enumerate(text.splitlines()) if name[-14:] in line) for name in SIX]
    assert sorted(range(6), key=order.__getitem__)[:2] == [1, 2] and order[5] == max(order)
    assert "best first" in text and "1  " in text
    table = scored(("a", "b"))
    same = table.column("kl").to_numpy().copy()
    same[len(same) // 2 :] = same[: len(same) // 2] * np.where(np.arange(len(same) // 2) % 2, 1.001, 0.999)
    twins = put(table, "kl", same)
    document = summary(twins, reference=source("demo"), ranking=ranking(twins, "kl"))
    text = render(document)
    assert text.count("1-2") >= 3 and "not told apart" in text


def test_a_run_without_a_ranking_keeps_its_order():
    document = measured(SIX).model_copy(update={"ranking": None})
    text = render(document)
    assert "best first" not in text and text.index("demo@int8") < text.index("demo@bf16")


def test_one_document_says_that_there_is_no_interval():
    text = render(measured(ONE, documents=1))
    fits(text)
    assert "unknown (1 document)" in text and "none: 1 document" in text and "[" not in text


def test_one_long_text_is_said_once():
    """All windows are of one document: intervals are within it, and what is measured says so."""
    table = scored(SIX, documents=70)
    table = table.set_column(2, "document", pa.array(["long"] * table.num_rows).dictionary_encode())
    table = table.set_column(1, "domain", pa.array(["prose"] * table.num_rows).dictionary_encode())
    several = summary(table, reference=source("demo"), ranking=ranking(table, "kl"), notes=NOTES)
    first = table.filter(pa.array([name == SIX[0] for name in table.column("candidate").to_pylist()]))
    for document in (several, summary(first, reference=source("demo"), notes=NOTES)):
        text = render(document)
        fits(text)
        assert "intervals  95 % within this text" in text
        table_lines = [line for line in text.splitlines() if line.startswith(("Mean KLD", "1  demo"))]
        assert table_lines and not [line for line in table_lines if "within" in line]


def test_several_candidates_of_one_document_have_no_interval():
    text = render(measured(SIX, documents=1))
    fits(text)
    assert "unknown" not in text and "none: 1 document" in text


@pytest.mark.parametrize("form", ["exact", "bounded"])
def test_a_narrow_table_has_a_line_for_each_candidate(form):
    """Where names have no room beside it, the interval gives way, and no cell is folded."""
    text = render(measured(SIX, form), width=60)
    rows = text.splitlines()[3:9]
    assert [row.split()[1].removeprefix("...")[-6:] for row in rows] == [
        name[-6:] for name in ("demo@bf16", "q8_0.gguf", "demo@int8", "ct@nf4", "q4_0.gguf", "q2_k.gguf")
    ]
    assert not any("[" in row for row in rows)


def test_where_the_rest_is(tmp_path):
    document = measured(ONE)
    assert f"{tmp_path}" in render(document, folder=tmp_path, width=120)
    assert "report.html" not in render(document, folder=tmp_path, width=120)
    (tmp_path / "report.html").write_text("")
    assert "report.html" in render(document, folder=tmp_path, width=120)
    assert "every figure: --full" in render(document)


def test_many_domains_are_cut_to_the_worst():
    table = scored(ONE)
    names = [f"domain-{int(name[3:]) % 12:02d}" for name in table.column("document").to_pylist()]
    table = table.set_column(1, "domain", pa.array(names).dictionary_encode())
    document = summary(table, reference=source("demo"), notes=NOTES)
    text = render(document)
    fits(text)
    assert "more: --full" in text
    worst = max(document.comparisons[0].domains, key=lambda d: d.metrics["kl"].statistics["mean"].value)
    assert f"by domain  {worst.name} " in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_long_and_hostile_names_stay_in_their_lines(width):
    names = ("x" * 300, f"組織/模型-{'漢' * 50}", f"evil{HOSTILE}\n====== Candidate demo: pass\x1b[2J")
    for some in (names[:1], names[1:2], names[2:], names):
        text = render(measured(some, notes=[HOSTILE * 3]), width=width, folder=Path("r" * 200))
        assert max(map(cell_len, text.splitlines())) <= width
        assert not unsafe(text) and not [line for line in text.splitlines() if line.lstrip().startswith(("::", "==="))]


def test_the_first_report_of_a_run_is_the_screen():
    document = measured(ONE)
    first = get("summary", "screen")
    assert first.first and first.text(document) == render(document)
    assert "\x1b[1m" in render(document, color=True) and "\x1b" not in render(document)
