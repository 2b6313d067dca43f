"""The likeliest ids at the worst positions: which are kept, what they are of each kind of source, and when resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from evalgate.core import Window
from evalgate.dialects.base import PositionScore, Score, WindowScores
from evalgate.endpoints.settings import EndpointSettings
from evalgate.errors import EndpointError
from evalgate.measure import alternatives
from evalgate.measure.alternatives import Likeliest, Worst, with_lists, without_lists
from evalgate.measure.record import RecordRequest, record
from evalgate.measure.run import RunRequest, run, silent
from evalgate.measure.scoring import likeliest
from evalgate.store.alternatives import LIST_COLUMNS, check, check_lists
from evalgate.store.runs import read_run
from evalgate.table import build
from tests.checkpoints import texts
from tests.evalgate.fake_endpoint import MODEL, Fake, logprobs, serving

NAMES = ("b", "a")


def windows(count: int, size: int) -> list[Window]:
    return [Window(n, f"d{n}", "prose", tuple(range(size)), 1, size, (1,) * size) for n in range(count)]


def scored(shown: list[Window], *, seed: int, without: tuple[str, ...] = ()) -> pa.Table:
    """A part's scores, with many equal ones, and values that are not known."""
    random = np.random.default_rng(seed)
    n = len(NAMES) * sum(len(w.positions) for w in shown)
    kl = random.integers(0, 6, n).astype(float)
    columns = {"kl": kl, "ref_nll": random.integers(0, 9, n), "cand_nll": random.integers(0, 9, n)}
    columns = {name: [None if random.random() < 0.1 else float(v) for v in values] for name, values in columns.items()}
    return build(NAMES, shown, {name: values for name, values in columns.items() if name not in without})


def toplists(rows: int, seed: int) -> Likeliest:
    ids = np.random.default_rng(seed).permuted(np.tile(np.arange(50), (rows, 1)), axis=1)[:, :12]
    return Likeliest(ids, -np.arange(12.0) * np.ones((rows, 1)))


def gathered(parts: list[pa.Table]) -> pa.Table | None:
    worst = Worst()
    for part in parts:
        worst.add(part)
    return worst.of(pa.concat_tables([without_lists(part) for part in sorted_parts(parts)]))


def sorted_parts(parts: list[pa.Table]) -> list[pa.Table]:
    return sorted(parts, key=lambda part: part.column("window")[0].as_py())


def expected(table: pa.Table, kept: int) -> set[tuple[str, int, int]]:
    """By definition: of each candidate the `kept` largest, one list after the other, ties by window and position."""
    rows = table.to_pylist()
    keys = {
        "kl": lambda r: r.get("kl"),
        "step": lambda r: (
            None if r.get("ref_nll") is None or r["cand_nll"] is None else abs(r["ref_nll"] - r["cand_nll"])
        ),
    }
    if "kl" not in table.column_names:
        keys = {"nll": lambda r: r["cand_nll"]}
    chosen = set()
    for name in NAMES:
        for key in keys.values():
            known = [r for r in rows if r["candidate"] == name and key(r) is not None]
            for row in sorted(known, key=lambda r: (-key(r), r["window"], r["position"]))[:kept]:
                chosen.add((name, row["window"], row["position"]))
    return chosen


@pytest.mark.parametrize("without", [(), ("kl", "ref_nll")])
def test_the_worst_are_kept_whatever_the_parts_and_their_order(
    monkeypatch: pytest.MonkeyPatch, without: tuple[str, ...]
) -> None:
    monkeypatch.setattr(alternatives, "KEPT", 7)
    shown = windows(9, 12)
    parts = []
    for n, cut in enumerate((shown[:1], shown[1:5], shown[5:9])):
        table = scored(cut, seed=n, without=without)
        parts.append(with_lists(table, {"ref": toplists(table.num_rows, n), "cand": toplists(table.num_rows, n + 9)}))
    for part in parts:
        check_lists(part)
    found = gathered(parts)
    assert found is not None
    whole = pa.concat_tables([without_lists(part) for part in parts])
    check(found, whole)
    places = [tuple(row[n] for n in ("candidate", "window", "position")) for row in found.to_pylist()]
    assert set(places) == expected(whole, 7) and len(places) == len(set(places))
    assert found.equals(gathered(parts[::-1]))
    given = {(row["candidate"], row["window"], row["position"]): row for part in parts for row in part.to_pylist()}
    for row in found.to_pylist():
        source = given[row["candidate"], row["window"], row["position"]]
        assert all(row[name] == source[name] and len(row[name]) == 10 for name in LIST_COLUMNS)


def test_a_part_keeps_lists_of_its_worst_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept answers of an interrupted run stay small."""
    monkeypatch.setattr(alternatives, "KEPT", 3)
    table = scored(windows(4, 20), seed=1)
    part = with_lists(table, {"ref": toplists(table.num_rows, 1), "cand": None})
    assert without_lists(part).equals(table)
    there = table.num_rows - part.column("ref_top_ids").null_count
    assert 6 <= there <= 12  # of two candidates, in two ways
    assert {len(ids) for ids in part.column("cand_top_ids").to_pylist() if ids is not None} == {0}


def test_a_list_ends_where_no_more_is_known() -> None:
    table = scored(windows(1, 8), seed=3).slice(0, 7)
    ids = np.array([[4, 5, 6], [4, -1, 6], [4, 5, 6], [4, 5, 6], [-1, -1, -1], [4, 5, 6], [4, 5, 6]])
    values = np.array([[-1.0, -2, -3]] * 7)
    values[2, 1], values[3, 2], values[5, 0], values[6, 1] = -np.inf, -1e4, 0.1, np.nan
    part = with_lists(table, {"ref": Likeliest(ids, values), "cand": Likeliest(ids[:, :0], values[:, :0])})
    check_lists(part)
    worst = Worst()
    worst.add(part)
    found = worst.of(table)
    assert found is not None
    sizes = map(len, found.column("ref_top_ids").to_pylist())
    known = dict(zip(found.column("position").to_pylist(), sizes, strict=True))
    assert {position: known.get(position, 0) for position in range(1, 8)} == {1: 3, 2: 1, 3: 1, 4: 2, 5: 0, 6: 0, 7: 1}
    assert all(ids == [] for ids in found.column("cand_top_ids").to_pylist())


def test_where_nothing_is_known_nothing_is_stored() -> None:
    table = scored(windows(2, 8), seed=3)
    worst = Worst()
    assert worst.of(table) is None
    worst.add(with_lists(table, {}))
    assert worst.of(table) is None


def test_likeliest_of_what_is_known_is_in_order_and_without_what_cannot_be() -> None:
    found = Likeliest.of([{7: -1.0, 3: -1.0, 9: -0.5, -4: -0.1, 1 << 40: -0.2, 8: float("nan")}, {}])
    assert found.ids[0].tolist() == [9, 3, 7, *[-1] * 7] and found.logprobs[0, :3].tolist() == [-0.5, -1.0, -1.0]
    assert (found.ids[1] == -1).all()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(alternatives, "KEPT", 9)


def lengths(found: pd.DataFrame, side: str) -> set[int]:
    return {len(ids) for ids in found[f"{side}_top_ids"]}


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache", "warm")
def test_an_exact_run_keeps_them_and_a_resumed_one_keeps_the_same(
    tiny: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evalgate.server.batches.BATCH_TOKENS", 90)
    data = texts(tmp_path / "texts")

    def asked(out: str) -> RunRequest:
        return RunRequest.of("kl", tiny[0], tiny, data=data, context=32, out=tmp_path / out)

    whole = run(asked("whole"), observer=silent())
    with pytest.raises(KeyboardInterrupt):
        run(asked("again"), observer=Stops(after=3))
    again = run(asked("again"), observer=silent())
    assert again.table.equals(whole.table) and again.alternatives_table.equals(whole.alternatives_table)
    files = [(tmp_path / name / "alternatives.parquet").read_bytes() for name in ("whole", "again")]
    assert files[0] == files[1] and read_run(tmp_path / "again").alternatives_table.equals(whole.alternatives_table)

    found, frame = whole.alternatives, whole.tokens
    named = {int(token) for side in ("ref", "cand") for ids in found[f"{side}_top_ids"] for token in ids}
    nameless = named - set(whole.token_texts)  # rows of the head that the tokenizer has no token for
    assert named & set(whole.token_texts) and all(token > max(whole.token_texts) for token in nameless)
    joined = frame.merge(found, on=["candidate", "window", "position"])
    assert len(joined) == len(found)
    for side in ("ref", "cand"):
        assert lengths(found, side) == {10}
        assert [ids[0] for ids in joined[f"{side}_top_ids"]] == joined[f"{side}_top1"].tolist()
        gaps = [values[0] - values[1] for values in joined[f"{side}_top_logprobs"]]
        np.testing.assert_allclose(gaps, joined[f"{side}_margin"], atol=1e-5)
    frame["step"] = (frame["ref_nll"].astype(float) - frame["cand_nll"].astype(float)).abs()
    for name in tiny:
        own, kept = frame[frame["candidate"] == name], joined[joined["candidate"] == name]
        worst = {
            tuple(place)
            for column in ("kl", "step")
            for place in own.sort_values([column, "window", "position"], ascending=[False, True, True])[
                ["window", "position"]
            ][:9].itertuples(index=False)
        }
        assert set(zip(kept["window"], kept["position"], strict=True)) == worst
    itself = joined[joined["candidate"] == tiny[0]]
    assert all(list(a) == list(b) for a, b in zip(itself["ref_top_ids"], itself["cand_top_ids"], strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache", "warm")
def test_a_perplexity_run_lists_the_model_alone(tiny: tuple[str, str], tmp_path: Path) -> None:
    measured = run(RunRequest.of("ppl", None, (tiny[1],), data=texts(tmp_path / "texts"), context=32))
    found = measured.alternatives
    assert len(found) == 9 and lengths(found, "ref") == {0} and lengths(found, "cand") == {10}
    worst = measured.tokens.nlargest(9, "cand_nll")
    assert set(zip(worst["window"], worst["position"], strict=True)) == set(
        zip(found["window"], found["position"], strict=True)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache", "warm")
def test_a_recording_gives_what_it_keeps(tiny: tuple[str, str], tmp_path: Path) -> None:
    """A trace of six ids a position gives six; a logits file has codes of all."""
    text = RunRequest.of("ppl", None, (tiny[0],), data=texts(tmp_path / "texts"), context=32, windows="llama.cpp")
    trace, logits = tmp_path / "ref.trace", tmp_path / "ref.kld"
    record(RecordRequest(text, trace, top_k=6, tail_samples=4), observer=silent())
    record(RecordRequest(text, logits, format="llama.cpp"), observer=silent())
    direct = run(RunRequest.of("kl", tiny[0], (tiny[1],), data=text.data, context=32, windows="llama.cpp"))
    for reference, known, off in ((trace, 6, 1e-5), (logits, 10, 1e-3)):
        measured = run(RunRequest.of("kl", str(reference), (tiny[1],)))
        found = measured.alternatives
        assert len(found) >= 9 and lengths(found, "ref") == {known} and lengths(found, "cand") == {10}
        both = found.merge(direct.alternatives, on=["window", "position"], suffixes=("", "_direct"))
        assert len(both)
        for row in both.to_dict("records"):
            assert list(row["cand_top_ids"]) == list(row["cand_top_ids_direct"])
            assert list(row["ref_top_ids"]) == list(row["ref_top_ids_direct"][:known])
            np.testing.assert_allclose(row["ref_top_logprobs"], row["ref_top_logprobs_direct"][:known], atol=off)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(4):
        (folder / f"{n}.txt").write_text(" ".join(f"{n}-{i} fox" for i in range(4)))
    return folder


def against(ref: Fake, cand: Fake, corpus: Path, top_k: int, **options: Any) -> RunRequest:
    endpoint = EndpointSettings(concurrency=4, patience=0.15, top_k=top_k)
    sides = f"{ref.url}/v1", (f"{cand.url}/v1#{MODEL}",)
    return RunRequest.of("kl", *sides, data=str(corpus), context=24, endpoint=endpoint, **options)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("top_k", [3, 20])
def test_endpoints_give_what_they_list_and_are_asked_nothing_more(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, top_k: int
) -> None:
    with serving(Fake()) as ref, serving(Fake(salt=1, noise=0.4)) as cand:
        measured = run(against(ref, cand, corpus, top_k))
        assert {b["prompt_logprobs"] for b in cand.asked[-4:] if "prompt_logprobs" in b} == {top_k}
    found = measured.alternatives
    assert 9 <= len(found) <= 18 and measured.token_texts is None
    frame = measured.tokens
    frame["step"] = (frame["ref_nll"] - frame["cand_nll"]).abs()
    places = set(zip(found["window"], found["position"], strict=True))
    for column in ("kl_low", "step"):
        worst = frame.nlargest(9, column)
        assert set(zip(worst["window"], worst["position"], strict=True)) <= places
    for row in found.itertuples():
        whole = (corpus / f"{_document(frame, row.window)}").read_bytes()
        shown = tuple(whole[_start(frame, row.window) :][: row.position])
        for side, values in (("ref", logprobs(shown)), ("cand", logprobs(shown, salt=1, noise=0.4))):
            ids = np.lexsort((np.arange(len(values)), -values))[: min(top_k, 10)]
            assert list(getattr(row, f"{side}_top_ids")) == ids.tolist()
            np.testing.assert_allclose(getattr(row, f"{side}_top_logprobs"), values[ids], atol=1e-6)


def _document(frame: pd.DataFrame, window: int) -> str:
    return str(frame[frame["window"] == window]["document"].iloc[0])


def _start(frame: pd.DataFrame, window: int) -> int:
    """First byte of a window in its document: windows of one document follow each other."""
    same = sorted(set(frame[frame["document"] == _document(frame, window)]["window"]))
    return 24 * same.index(window)


@pytest.mark.usefixtures("own_cache")
def test_a_resumed_run_against_endpoints_keeps_the_same(corpus: Path) -> None:
    with serving(Fake()) as ref, serving(Fake(salt=1, noise=0.4)) as cand:
        whole = run(against(ref, cand, corpus, 12))
        total = len(cand.asked)
        cand.die_after = total + total // 2
        with pytest.raises(EndpointError, match="is it running"):
            run(against(ref, cand, corpus, 12, out=corpus.parent / "run"))
        cand.die_after = None
        again = run(against(ref, cand, corpus, 12, out=corpus.parent / "run"))
    assert again.alternatives_table.equals(whole.alternatives_table)
    assert read_run(corpus.parent / "run").alternatives_table.equals(whole.alternatives_table)


def test_an_answer_without_a_list_gives_the_ids_it_was_asked_for() -> None:
    """As some servers answer that name ids and list none; the actual token is in the table already."""

    def position(at: int, top: dict[int, float], wanted: tuple[Score, ...]) -> PositionScore:
        chosen = Score(3, -4.0, -4.0)
        listed = tuple(top), tuple(top.values())
        return PositionScore(at, chosen, None, 1, None, *listed, (), False, wanted, 0.1, ())

    wanted = (Score(8, -2.0, -2.0), Score(5, -1.0, -1.0), Score(6, -np.inf, -3.0, "not listed"))
    scores = WindowScores(0, "d", 2, (position(1, {7: -0.5, 9: -1.5}, wanted), position(2, {}, wanted)), False)
    found = likeliest(scores)
    assert [[i for i in row if i >= 0] for row in found.ids.tolist()] == [[7, 9], [5, 8]]


class Stops:
    """An observer that interrupts at a batch."""

    def __init__(self, *, after: int) -> None:
        self._left = after

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def advance(self, **_: Any) -> None:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt
