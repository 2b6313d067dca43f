"""The leaderboard of a sweep in every form, on fabricated scores."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from huggingface_hub import eval_result_entries_to_yaml, parse_eval_result_entries

from evalgate import reports
from evalgate.errors import UsageError
from evalgate.leaderboard import Leaderboard, Quantity, Size
from evalgate.reports import leaderboard_hub
from evalgate.reports._leaderboard import data_text, sentence
from evalgate.reports._pareto import marks, plot
from evalgate.reports._pareto_png import png
from evalgate.sweeps import Sweep
from evalgate.sweeps.outputs import write_outputs
from tests.browser import Chromium
from tests.evalgate.sample_sweep import board as sample

HOSTILE = "</title><script>alert(1)</script>\"' | `x` \u202e\x1b[31m\n::error::$x$ =1+1"


@pytest.fixture(scope="module")
def board() -> Leaderboard:
    return sample()


@pytest.fixture(scope="module")
def hostile(board: Leaderboard) -> Leaderboard:
    """The same with names and reasons that try to be markup, commands and formulas."""
    entries = [
        entry.model_copy(update={"name": f"{HOSTILE}{n}", "spec": HOSTILE, "reason": entry.reason and HOSTILE})
        for n, entry in enumerate(board.entries)
    ]
    reference = board.reference.model_copy(update={"spec": HOSTILE})
    corpus = board.corpus.model_copy(update={"name": HOSTILE})
    return board.model_copy(update={"entries": entries, "reference": reference, "corpus": corpus, "notes": [HOSTILE]})


def bounded(board: Leaderboard, *, high: bool = True) -> Leaderboard:
    """The same with bounds alone in the place of the first candidate's KL, and no size of the second's."""
    first, second, *rest = board.entries
    assert first.kl is not None and first.kl.value is not None
    value = first.kl.value
    limits = Quantity(low=value, high=value.model_copy(update={"value": 0.9}) if high else None, exactness="bounded")
    entries = [
        first.model_copy(update={"kl": limits, "front": False}),
        second.model_copy(update={"size": None, "front": False}),
        *rest,
    ]
    return board.model_copy(update={"entries": entries})


def text(board: Leaderboard, name: str, **options: object) -> str:
    return reports.get("sweep", name).text(board, **options)  # type: ignore[arg-type]


def test_places_ties_sizes_and_front(board: Leaderboard) -> None:
    """Best first; a tie is a range of places; who is both larger and further away is not on the front."""
    assert [entry.name for entry in board.entries] == ["bf16", "Q8_0", "int8", "Q4_0", "Q2_K", "nf4"]
    assert [entry.place.text if entry.place else None for entry in board.entries] == ["1", "2-3", "2-3", "4", "5", None]
    assert [entry.front for entry in board.entries] == [True, True, False, True, True, False]
    size = board.entries[1].size
    assert size == Size(
        bytes=285_000_000,
        parameters=268_000_000,
        bits=8 * 285 / 268,
        counted="tensors of the GGUF file",
        types={"Q4_K": 284_999_990, "F32": 10},
    )
    assert board.positions == 360 and board.documents == 12 and len(board.pairs) == 10


def test_terminal_fits_eighty_columns(board: Leaderboard) -> None:
    shown = text(board, "leaderboard")
    assert max(map(len, shown.splitlines())) <= 80
    lines = shown.splitlines()
    assert lines[0] == "====== evalgate sweep against demo ======"
    assert lines[1].startswith("closest to demo is bf16 (mean KL 0.0011")
    rows = [line for line in lines if line.endswith((" 912", "1,234", " 850", " -", " 33"))]
    assert [row.split()[:2] for row in rows] == [
        ["1", "bf16"],
        ["2-3", "Q8_0"],
        ["2-3", "int8"],
        ["4", "Q4_0"],
        ["5", "Q2_K"],
    ]
    assert [row.split()[-3:] for row in rows[1:3]] == [["MB*", "8.51", "912"], ["MB", "13.13", "850"]]
    assert "A range of places means a tie" in shown and "(Holm)" in shown
    assert "nf4  'models/nf4' needs bitsandbytes" in shown
    assert "\x1b[1m" in text(board, "leaderboard", color=True)


def test_bounds_and_unknown_sizes_are_shown_as_such(board: Leaderboard) -> None:
    for high in (True, False):
        found = bounded(board, high=high)
        shown = text(found, "leaderboard")
        assert ">= 0.0011" in shown and "mean KL at least 0.0011" in shown and max(map(len, shown.splitlines())) <= 80
        assert ("open)" in shown) is not high
        row = next(csv.DictReader(io.StringIO(text(found, "leaderboard_csv"))))
        assert row["kl"] == "" and row["kl_exactness"] == "bounded" and float(row["kl_low"]) > 0
        assert ET.fromstring(text(found, "leaderboard_svg")) is not None
        assert "Q8_0" not in plot(found).partition("</desc>")[2]  # it has no size
        assert "kl_divergence" not in leaderboard_hub.entry_text(found.entries[0], found)  # a bound is not a value
        assert png(found) is not None


def test_json_is_the_document_and_fits_its_schema(board: Leaderboard) -> None:
    import jsonschema

    from evalgate.reports.leaderboard_json import schema

    document = json.loads(text(board, "leaderboard_json"))
    jsonschema.validate(document, json.loads(schema()))
    assert Leaderboard.model_validate(document) == board


def test_csv_has_every_figure_unrounded(board: Leaderboard) -> None:
    rows = list(csv.DictReader(io.StringIO(text(board, "leaderboard_csv"))))
    assert [row["candidate"] for row in rows] == [entry.name for entry in board.entries]
    kl = board.entries[0].kl
    assert kl is not None and kl.value is not None
    assert float(rows[0]["kl"]) == kl.value.value and float(rows[0]["kl_high"]) == kl.value.high
    assert rows[1]["tied_with"] == "int8" and rows[1]["pareto"] == "true" and rows[2]["pareto"] == "false"
    assert rows[3]["tokens_per_second"] == "" and rows[5]["reason"].startswith("'models/nf4' needs")


def test_markdown_is_a_table_of_all_with_its_plot(board: Leaderboard) -> None:
    shown = text(board, "leaderboard_markdown")
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    assert {line.count(" | ") for line in rows[2:]} == {7} and len(rows) == 2 + 5
    assert rows[2].startswith("| 1 | **`bf16`** | 0.00")
    assert "](sweep.svg)" in shown and "- `nf4`: &#39;models" not in shown and "`nf4`" in shown
    for words in (
        "How it was measured",
        "360 positions in 12 windows of 12 documents",
        "not of generation",
        "GGUF file",
    ):
        assert words in shown, words


def test_hub_results_are_what_the_hub_reads(board: Leaderboard) -> None:
    """Each file is a list that huggingface_hub's own parser takes, with values that are numbers."""
    for entry in board.measured:
        content = yaml.safe_load(leaderboard_hub.entry_text(entry, board))
        found = parse_eval_result_entries(content)
        assert [one.task_id for one in found] == ["kl_divergence", "same_top1", "perplexity_ratio"]
        assert all(isinstance(one.value, float) and one.dataset_id == leaderboard_hub.BENCHMARK for one in found)
        assert "against demo" in str(found[0].notes) and found[0].date == board.created
        assert eval_result_entries_to_yaml(found) == content
    assert len(list(yaml.safe_load_all(text(board, "leaderboard_hub")))) == 5


@pytest.mark.parametrize(("value", "written"), [(1e-7, "1.0e-7"), (1.5e-12, "1.5e-12"), (0.25, "0.25"), (3.0, "3.0")])
def test_numbers_in_yaml_are_numbers(value: float, written: str) -> None:
    assert leaderboard_hub._number(value) == written
    assert yaml.safe_load(written) == value


class _Text(HTMLParser):
    """Elements and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attributes if name in ("href", "src")]
        assert not any(name.startswith("on") for name, _ in attributes)


def test_hostile_names_are_inert_everywhere(board: Leaderboard, hostile: Leaderboard, tmp_path: Path) -> None:
    """What names hold is text: no element, no command, no formula, and the files are read as before."""
    plain, page = (_Text(text(one, "leaderboard_html")) for one in (board, hostile))
    assert page.tags.count("script") == plain.tags.count("script") == 1
    assert page.links == plain.links == ["data:,"]
    for name in reports.of("sweep"):
        shown = text(hostile, name)
        if name != "leaderboard_json":  # says what there is; the output escapes it
            assert "\x1b" not in shown and "\u202e" not in shown, name
        assert not any(line.lstrip().startswith("::") for line in shown.splitlines()), name
    assert ET.fromstring(text(hostile, "leaderboard_svg")).find("{*}script") is None
    assert len(list(csv.reader(io.StringIO(text(hostile, "leaderboard_csv"))))) == 7
    assert len(list(yaml.safe_load_all(text(hostile, "leaderboard_hub")))) == 5
    table = [line for line in text(hostile, "leaderboard_markdown").splitlines() if line.startswith("| ")]
    assert {line.replace(r"\|", "").count(" | ") for line in table} == {7}
    assert png(hostile) is not None
    assert max(map(len, text(hostile, "leaderboard").splitlines())) <= 80
    assert "<script>alert" not in Sweep(hostile, tmp_path)._repr_html_()


def test_formulas_are_text() -> None:
    from evalgate.reports.leaderboard_csv import _cell

    assert [_cell(value) for value in ("=1+1", "@x", "-3", "plain", None, True, 0.5)] == [
        *("'=1+1", "'@x", "'-3", "plain", "", "true", "0.5")
    ]


def test_plot_shows_every_candidate_once(board: Leaderboard) -> None:
    root = ET.fromstring(text(board, "leaderboard_svg"))
    named = root.findall(".//{*}text[@class='name']")
    assert sorted(str(one.text) for one in named) == sorted(entry.name for entry in board.measured)
    boxes = [(float(t.get("x", 0)), float(t.get("y", 0)), 7 * len(str(t.text))) for t in named]
    for i, (x, y, wide) in enumerate(boxes):
        assert 0 <= x <= 760 - wide + 10 and 0 < y < 430
        assert not any(abs(y - b) < 10 and x < a + w and a < x + wide for a, b, w in boxes[:i])


@pytest.mark.parametrize("kl", [0.0, 1e-15, 5.0])
def test_plot_of_one_candidate_whatever_its_kl(board: Leaderboard, kl: float) -> None:
    """A KL of zero has no logarithm: it lies on the lower edge; open and zero ends are drawn to the edge."""
    first = board.entries[0]
    assert first.kl is not None and first.kl.value is not None
    for low, high in ((0.0, kl * 2), (None, None), (0.0, 0.0)):
        value = first.kl.value.model_copy(update={"value": kl, "low": low, "high": high})
        entry = first.model_copy(update={"kl": Quantity(value=value, exactness="exact")})
        one = board.model_copy(update={"entries": [entry]})
        assert "nan" not in plot(one) and "inf" not in plot(one).replace("info", "")
        assert ET.fromstring(plot(one, alone=True)) is not None and png(one) is not None


def test_no_plot_without_sizes(board: Leaderboard, tmp_path: Path) -> None:
    bare = board.model_copy(update={"entries": [e.model_copy(update={"size": None}) for e in board.entries]})
    assert marks(bare) == [] and png(bare) is None
    with pytest.raises(UsageError, match="nothing to plot"):
        text(bare, "leaderboard_svg")
    notes = write_outputs(tmp_path, bare)
    assert ["known size" in note for note in notes] == [True]
    assert not (tmp_path / "sweep.svg").exists() and (tmp_path / "sweep.json").exists()
    assert (
        "](sweep.svg)" not in (tmp_path / "sweep.md").read_text()
        and "<svg" not in (tmp_path / "sweep.html").read_text()
    )


def test_picture_is_left_out_without_matplotlib(
    board: Leaderboard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    assert write_outputs(tmp_path, board) == [] and (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    (tmp_path / "sweep.png").unlink()
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (note,) = write_outputs(tmp_path, board)
    assert "evalgate-lm[plot]" in note and not (tmp_path / "sweep.png").exists() and (tmp_path / "sweep.svg").exists()


def test_sentence_names_ties_and_failures(board: Leaderboard) -> None:
    said = sentence(board)
    assert "nothing is both smaller and closer than Q8_0, Q4_0 and Q2_K" in said
    assert said.endswith("1 candidate could not be measured")
    alone = board.model_copy(update={"entries": board.entries[1:3]})
    assert "it cannot be told from int8" in sentence(alone)
    lone = board.model_copy(update={"documents": 1})
    assert ", no interval: 1 document)" in sentence(lone)
    unranked = board.model_copy(update={"entries": [e.model_copy(update={"place": None}) for e in board.entries]})
    assert sentence(unranked) == "no candidate could be ranked"


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9_994, "9.99 kB"), (99_960, "100 kB"), (246_587_904, "247 MB"),
     (999_960, "1.00 MB"), (5e12, "5.00 TB"), (5e15, "5000 TB")],
)  # fmt: skip
def test_bytes_in_decimal_units(count: float, shown: str) -> None:
    assert data_text(count) == shown


@pytest.mark.slow
def test_page_in_a_browser(board: Leaderboard, hostile: Leaderboard, tmp_path: Path, chromium: Chromium) -> None:
    """Both themes on a desktop and a phone: no violation, no request, nothing on the console; sorting is driven."""
    for name, one in (("sweep", board), ("hostile", hostile)):
        (tmp_path / f"{name}.html").write_text(text(one, "leaderboard_html"), encoding="utf-8")
    page_url = (tmp_path / "sweep.html").as_uri()
    for dark in (False, True):
        for phone in (False, True):
            with chromium.open(page_url, dark=dark, phone=phone) as page:
                assert page.violations() == []
                assert page.overflow() == 0
                page.shot(f"sweep-{'dark' if dark else 'light'}-{'phone' if phone else 'desktop'}")

    def column(page: object, number: int) -> list[str]:
        return list(page.locator(f"tbody tr > :nth-child({number})").all_inner_texts())  # type: ignore[attr-defined]

    with chromium.open(page_url) as page:
        names = [one.split()[0] for one in column(page, 2)]
        assert names == ["bf16", "Q8_0", "int8", "Q4_0", "Q2_K"]
        page.get_by_role("button", name="size").click()
        assert column(page, 6) == ["130 MB", "152 MB", "285 MB", "440 MB", "536 MB"]
        page.get_by_role("button", name="size").click()
        assert column(page, 6)[0] == "536 MB"
        page.get_by_role("button", name="tokens/s").click()
        assert column(page, 8) == ["33", "850", "912", "1,234", "-"]  # what is not known comes last
        page.get_by_role("button", name="tokens/s").click()
        assert column(page, 8) == ["1,234", "912", "850", "33", "-"]
        assert page.locator("th[aria-sort]").count() == 1
        page.get_by_role("button", name="candidate").focus()
        page.keyboard.press("Enter")
        assert [one.split()[0] for one in column(page, 2)] == ["bf16", "int8", "Q2_K", "Q4_0", "Q8_0"]
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.locator("#theme").click()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
        assert page.violations() == []
    with chromium.open((tmp_path / "hostile.html").as_uri()) as page:
        assert page.violations() == [] and page.overflow() == 0
