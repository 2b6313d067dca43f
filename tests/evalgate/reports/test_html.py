"""The HTML report without a browser: what is in it, what is inert in it, and that it is one file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pytest

from evalgate.errors import ScoreError
from evalgate.gate.judge import judge
from evalgate.gate.policy import parse_policy
from evalgate.measure.page import PAGE, leave_page
from evalgate.reports import _page, html
from evalgate.reports.html import explorer, plots, subjects
from evalgate.store.runs import Run, read_run, write_run
from evalgate.summary import Summary
from tests.evalgate.reports.worded_run import worded_run
from tests.evalgate.sample_run import source, summary, token_table
from tests.evalgate.score_tables import replaced

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\u202eevil",
    "\x1b[31mred",
    "\ud800",
    "<!--",
    "]]>",
    "&lt;b&gt;",
    "\u2028",
    "{{ 7 * 7 }}",
)
ATTRIBUTES = {"src", "srcset", "poster", "data", "action", "formaction", "background", "ping"}
VOID = {"meta", "link", "br", "wbr", "img", "input", "hr", "col"}


class Parsed(HTMLParser):
    """Elements, ids, what is loaded, and whether every element that opens closes in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.handlers: list[str] = []
        self.scripts: list[dict[str, str | None]] = []
        self.tags: dict[str, int] = {}
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.ids += [values["id"]] if "id" in values else []
        self.loads += [f"{tag} {name}" for name in values if name in ATTRIBUTES]
        self.loads += [tag for name in ("href",) if tag not in ("a",) and values.get(name, "data:,") != "data:,"]
        self.loads += [tag for name in ("href",) if tag == "a" and not str(values.get(name, "#")).startswith("#")]
        self.handlers += [name for name in values if name.startswith("on") or name == "style"]
        if tag == "script":
            self.scripts.append(values)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "script" not in self.open and "style" not in self.open:
            self.text += data


@pytest.fixture(scope="module")
def run() -> Run:
    return worded_run(1500, documents=15, extra=HOSTILE[:4])


def page_of(run: Run, **more) -> tuple[str, Parsed]:
    text = html.render(run, **more)
    return text, Parsed(text)


def explored(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="explorer-data">(.*?)</script>', page)[1])


def test_a_report_is_one_file_that_asks_for_nothing(run: Run) -> None:
    text, parsed = page_of(run)
    assert parsed.loads == [] and parsed.handlers == []
    assert len(parsed.ids) == len(set(parsed.ids))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
    assert "http:" not in re.sub(r"http://www\.w3\.org/2000/svg", "", text) and "https:" not in text
    assert "url(" not in text and "@import" not in text
    assert [s.get("type") for s in parsed.scripts] == ["application/json", None]


def test_the_same_run_gives_the_same_page(run: Run) -> None:
    assert html.render(run) == html.render(run)


def test_what_it_shows(run: Run) -> None:
    text, parsed = page_of(run)
    for said in ("demo@int8", "against", "mean KL", "99 % KL", "same top-1", "perplexity ratio", "exact"):
        assert said in parsed.text
    for title in (
        "How large KL is", "The estimate as documents arrive", "By domain", "By class of token", "Calibration",
        "By the reference's entropy", "By position in the window", "The worst documents", "Change of the token",
        "Candidate against reference", "Manifest", "What was measured", "All figures",
    ):  # fmt: skip
        assert title in parsed.text
    assert text.count("noise floor 2.4 × 10⁻⁵") == 7  # one in every plot of KL
    assert parsed.tags["svg"] >= 10 and parsed.tags["figure"] == 10
    assert "about" in parsed.text and "times the noise floor" in parsed.text  # the headline
    assert "a note that a reader must know" in parsed.text


def test_every_plot_has_a_name_a_description_and_its_data(run: Run) -> None:
    found = subjects.subjects(run)
    for plot in plots.plots(found, subjects.kl_floor(run), run.token_texts):
        svg = str(plot.svg)
        assert re.search(r'role="img" aria-labelledby="plot-[\w-]+t plot-[\w-]+d"><title id=', svg)
        assert len(re.search(r"<desc[^>]*>(.*?)</desc>", svg)[1]) > 40, plot.name
        assert "nan" not in svg.lower().replace("finance", "") and "inf" not in re.sub(r"[a-z]*inf[a-z]+", "", svg)
        assert plot.table.rows and {len(row) for row in plot.table.rows} == {len(plot.table.headings)}
        for x, y in re.findall(r"[ML](-?[\d.]+),(-?[\d.]+)", svg):
            assert -20 <= float(x) <= 480 and -20 <= float(y) <= 2000


def test_the_verdict_of_a_gate_opens_it(run: Run) -> None:
    policy = parse_policy('[policy]\nname = "tight"\n[[rules]]\nmetric = "kl"\nmax = 1e-6\n', name="tight")
    verdict = judge(policy, run)
    _, parsed = page_of(run, verdict=verdict)
    assert verdict.verdict == "fail"
    assert parsed.text.index("fail") < parsed.text.index("99 % KL")
    assert "tight" in parsed.text and "0 of 1 rules pass" in parsed.text and "≤ 1e-06" in parsed.text


def test_candidates_stand_side_by_side_best_first() -> None:
    several = worded_run(600, documents=6, candidates=("worst", "best", "middle"))
    table = several.table
    names = pa.array([{"worst": "c3", "best": "c1", "middle": "c2"}[n] for n in table.column("candidate").to_pylist()])
    table = table.set_column(0, "candidate", names.dictionary_encode())
    document = summary(table, reference=source("demo"))
    text, parsed = page_of(replace(several, table=table, summary=document))
    assert document.ranking is not None or "place" not in parsed.text
    rows = re.findall(r'<th scope="row"><svg.*?</svg> <bdi>(c\d)</bdi>', text)
    assert sorted(rows) == ["c1", "c2", "c3"]
    assert "Legend of all plots" in text
    assert len(explored(text)["candidates"]) == 3


def test_names_of_others_are_text(run: Run) -> None:
    evil = "<script>alert('x')</script>\x1b[2J\u202e"
    document = run.summary.model_copy(
        update={
            "notes": [evil],
            "reference": run.summary.reference.model_copy(update={"spec": evil}),
            "corpus": run.summary.corpus.model_copy(update={"name": evil}),
        }
    )
    table = run.table
    for place, name in ((1, "domain"), (2, "document")):
        values = pa.array([f"{value}{evil}" for value in table.column(name).to_pylist()]).dictionary_encode()
        table = table.set_column(table.column_names.index(name), name, values)
        assert place
    text, parsed = page_of(replace(run, summary=document, table=table, manifest={evil: evil}))
    assert len(parsed.scripts) == 2
    assert "\x1b" not in text and "\u202e" not in re.sub(r'<script type="application/json".*?</script>', "", text)
    assert "<script>alert('x')</script>\\u001b[2J\\u202e" in parsed.text


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_tokens_are_data(text: str) -> None:
    page, parsed = page_of(worded_run(300, documents=5, extra=(text,)))
    page.encode("utf-8")
    assert len(parsed.scripts) == 2
    data = explored(page)
    assert text in data["tokens"]


def test_json_ends_no_script() -> None:
    text = _page.json_text({"</script>": ["<!--", "&", "\ud800", "é日", "\u2028"]})
    assert not set("<>&\ud800\u2028") & set(text) and "é日" in text
    assert json.loads(text) == {"</script>": ["<!--", "&", "\ud800", "é日", "\u2028"]}
    with pytest.raises(ValueError, match="Out of range"):
        _page.json_text(float("nan"))


def test_the_explorer_keeps_the_worst_of_everything(run: Run) -> None:
    (subject,) = subjects.subjects(run)
    found = explorer.explorer([subject], run.token_texts, most=80)
    (candidate,) = found["candidates"]
    assert candidate["bad"] == sorted(candidate["bad"], reverse=True)
    assert candidate["bad"][0] == pytest.approx(subject.scores.floats("kl").max(), rel=1e-3)
    assert len(candidate["rows"]) <= 80 + 20 * explorer.OF_EACH
    domains = {found["names"][candidate["spans"][span]["m"]] for span, _ in candidate["rows"]}
    assert domains == set(subject.scores.domains)
    classes = {found["classes"][c] for c in candidate["class"]}
    assert classes >= {"word", "code", "punctuation", "whitespace", "other scripts"}


def test_the_explorer_shows_a_position_where_it_is(run: Run) -> None:
    (subject,) = subjects.subjects(run)
    found = explorer.explorer([subject], run.token_texts, most=60)
    (candidate,) = found["candidates"]
    scores = subject.scores
    token, kl = scores.integers("token"), scores.floats("kl")
    rows = {(int(w), int(p)): row for row, (w, p) in enumerate(zip(scores.window, scores.position, strict=True))}
    for (span_at, offset), bad in zip(candidate["rows"], candidate["bad"], strict=True):
        span = candidate["spans"][span_at]
        row = rows[span["w"], span["p"] + offset]
        assert kl[row] == pytest.approx(bad, rel=1e-3)
        ids = [found["ids"][t] for t in span["t"]]
        assert ids == token[row - offset : row - offset + len(ids)].tolist()
        assert set(scores.window[row - offset : row - offset + len(ids)]) == {span["w"]}
        assert offset == explorer.BEFORE or offset > explorer.BEFORE or span["p"] == 1
    kept = [(s["w"], s["p"] + i) for s in candidate["spans"] for i in range(len(s["t"]))]
    assert len(kept) == len(set(kept))  # no token is kept twice


def test_the_page_does_not_grow_with_the_run() -> None:
    """Of 100,000 positions the explorer keeps a bounded number, with what is around them."""
    run = worded_run(100_000, documents=40, lists=0)
    (candidate,) = explorer.explorer(subjects.subjects(run), run.token_texts)["candidates"]
    assert len(candidate["rows"]) <= explorer.LARGEST * 1.3
    around = explorer.BEFORE + explorer.AFTER + 1
    assert sum(len(span["t"]) for span in candidate["spans"]) <= len(candidate["rows"]) * around
    assert len(html.render(run).encode()) < 1_000_000


def test_a_gap_between_scored_positions_is_said(run: Run) -> None:
    position = run.table.column("position").to_pylist()
    chat = replace(run, table=run.table.filter(pa.array([p % 10 != 5 for p in position])))
    (candidate,) = explorer.explorer(subjects.subjects(chat), run.token_texts)["candidates"]
    for span in candidate["spans"]:
        at = span["p"]
        gaps = dict(map(tuple, span.get("g", [])))
        for i in range(len(span["t"])):
            at += gaps.get(i, 0) + (1 if i else 0)
            assert at % 10 != 5


def test_control_tokens_are_named(run: Run) -> None:
    found = explorer.explorer(subjects.subjects(run), run.token_texts)
    (candidate,) = found["candidates"]
    named = {found["tokens"][span["t"][i]] for span in candidate["spans"] for i in span.get("c", [])}
    assert named and named <= {"<|im_start|>", "<|im_end|>"}


def test_lists_of_both_sides_are_shown_where_they_are_known(run: Run) -> None:
    (subject,) = subjects.subjects(run)
    row = int(subject.scores.floats("kl").argmax())
    place = (int(subject.scores.window[row]), int(subject.scores.position[row]))
    lists = pa.Table.from_pylist(
        [
            {
                "candidate": subject.scores.candidate, "window": place[0], "position": place[1],
                "ref_top_ids": [3, 1], "ref_top_logprobs": [-0.1, -2.5],
                "cand_top_ids": [1], "cand_top_logprobs": [-0.5],
            }
        ]
    )  # fmt: skip
    found = explorer.explorer([subject], run.token_texts, lists)
    (candidate,) = found["candidates"]
    ref_ids, ref, cand_ids, cand = candidate["lists"][0]
    assert [found["ids"][t] for t in ref_ids] == [3, 1] and ref == [-0.1, -2.5]
    assert [found["ids"][t] for t in cand_ids] == [1] and cand == [-0.5]
    assert candidate["lists"][1:] == [None] * (len(candidate["rows"]) - 1)


def without(run: Run, *names: str, **more) -> Run:
    return replace(run, table=run.table.drop_columns([*names]), **more)


def test_runs_of_every_kind_and_exactness_have_a_report(run: Run) -> None:
    kl = run.table.column("kl").to_numpy()
    estimated = run.table.append_column("kl_se", pa.array(kl / 10, pa.float32()))
    estimated = estimated.append_column("kl_low", pa.array(kl / 2, pa.float32()))
    lower = replaced(run.table, "kl", kl_low=kl / 2).drop_columns(["reverse_kl", "js", "tv"])
    both = replaced(run.table, "kl", kl_low=kl / 2, kl_high=kl * 2)
    for table, word in ((estimated, "estimated"), (lower, "bounded"), (both, "bounded")):
        given = replace(run, table=table, summary=summary(table, reference=source("demo", kl_floor=1e-6)))
        text, parsed = page_of(given)
        assert f">{word}</span>" in text
        assert ("KL (lower bound)" in parsed.text) == (word == "bounded")
    text, parsed = page_of(replace(run, table=lower, summary=summary(lower, reference=source("demo"))))
    assert "KL, at least" in json.dumps(explored(text))
    assert "The noise floor was not measured" in parsed.text


def test_perplexity_and_agreement_have_a_report() -> None:
    text, parsed = page_of(worded_run(400, documents=5, kind="ppl", candidates=("a", "b")))
    assert "bits per byte" in parsed.text and "against" not in parsed.text and "Calibration" in parsed.text
    assert explored(text)["bad"]["key"] == "nll"
    whole = worded_run(400, documents=5)
    bare = whole.table.drop_columns(["kl", "reverse_kl", "js", "tv"])
    text, parsed = page_of(replace(whole, table=bare, summary=summary(bare, kind="agree", reference=source("demo"))))
    assert "flips above noise" in parsed.text and "How large" not in parsed.text
    assert explored(text)["bad"]["key"] == "regret"


def test_little_is_enough() -> None:
    """One document, one position, no texts, no columns but the least: there is a page."""
    table = token_table(("c",), documents=1)
    _, parsed = page_of(Run(summary(table, reference=source("r")), table, {}))
    assert "unknown (1 document)" in parsed.text and "ids stand for them" in parsed.text
    one = table.slice(0, 1)
    page_of(Run(summary(one, reference=source("r")), one, {}))
    equal = table
    for name in ("kl", "reverse_kl", "js", "tv"):
        equal = equal.set_column(equal.column_names.index(name), name, pa.array([0.0] * equal.num_rows, pa.float32()))
    _, parsed = page_of(Run(summary(equal, reference=source("r", kl_floor=0.0)), equal, {}))
    assert "mean KL" in parsed.text
    least = table.select([n for n in table.column_names if n not in ("ref_entropy", "cand_entropy", "regret", "tv")])
    page_of(Run(summary(least, reference=source("r")), least, {}))


def test_many_domains_and_candidates_stay_readable() -> None:
    table = token_table(tuple(f"c{i}" for i in range(7)), documents=16)
    names = [f"domain number {d} with a long name" for d in table.column("document").to_pylist()]
    table = table.set_column(1, "domain", pa.array(names).dictionary_encode())
    text, _ = page_of(Run(summary(table, reference=source("r")), table, {}))
    assert "more are in the table" in text and len(text) < 3_000_000


def test_a_table_without_its_candidates_is_refused(run: Run) -> None:
    with pytest.raises(ScoreError, match="no rows"):
        html.render(replace(run, table=run.table.slice(0, 0)))


def stored(folder: Path) -> Run:
    table = token_table(("c",))
    return write_run(folder, manifest={}, table=table, summary=summary(table, reference=source("r")))


def test_the_page_is_left_beside_the_run_and_is_no_part_of_it(tmp_path: Path) -> None:
    run = stored(tmp_path / "run")
    assert leave_page(run) == ""
    page = (tmp_path / "run" / PAGE).read_text(encoding="utf-8")
    assert page == html.render(run)
    assert PAGE not in read_run(tmp_path / "run").manifest["files"]
    (tmp_path / "run" / PAGE).unlink()
    assert read_run(tmp_path / "run").summary == run.summary
    assert leave_page(replace(run, folder=None)) == ""


def test_what_goes_wrong_with_a_page_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stored(tmp_path / "run")
    errors: dict[str, BaseException] = {
        "MemoryError": MemoryError("too much"),
        "a bad value": ScoreError("a bad value"),
        "makes one": ValueError(),
        "was interrupted": KeyboardInterrupt(),
    }
    for said, error in errors.items():

        def fail(*_: object, error: BaseException = error) -> str:
            raise error

        monkeypatch.setattr(html, "render", fail)
        assert said in leave_page(run)
    monkeypatch.undo()
    monkeypatch.setattr("evalgate.measure.page.MOST_ROWS", 10)
    assert "has 120 rows" in leave_page(run)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["manifest.json", "summary.json", "tokens.parquet"]
    monkeypatch.undo()
    (tmp_path / "run" / PAGE).mkdir()
    assert "cannot write" in leave_page(run)


def test_summaries_of_earlier_versions_have_a_report(run: Run) -> None:
    document = run.summary.model_dump()
    for comparison in document["comparisons"]:
        comparison["noise"] = None
    document["ranking"] = None
    page_of(replace(run, summary=Summary.model_validate(document)))
