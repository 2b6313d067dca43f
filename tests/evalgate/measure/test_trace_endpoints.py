"""Endpoints against a trace: estimates where they give the kept ids, bounds that hold where they do not, refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from evalgate.core import SourceInfo, Window, WindowPolicy
from evalgate.dialects.base import Capabilities
from evalgate.endpoints.budget import Budget
from evalgate.endpoints.settings import EndpointSettings
from evalgate.endpoints.source import EndpointSource
from evalgate.errors import MismatchError, UsageError
from evalgate.measure.comparable import check_comparable
from evalgate.measure.kinds.trace_endpoints import held_to_one_vocabulary
from evalgate.measure.record import RecordRequest, record
from evalgate.measure.recordings.trace import RecordedTrace, settle
from evalgate.measure.recordings.trace_for_endpoints import TraceForEndpoints
from evalgate.measure.run import RunRequest, run, silent
from evalgate.measure.tokenizers import tokenizer_notes
from evalgate.server.process import EmbeddedServer
from evalgate.traces import TraceMeta, TraceWriter, condense, read_trace
from tests.evalgate.fake_endpoint import MODEL, VOCAB, Fake, logprobs, serving
from tests.serve.architectures import built, perturbed
from tests.serve.tiny_models import byte_level, llama, metaspace, save

pytestmark = pytest.mark.slow

TEXTS = ["hello world, hello there. the quick brown fox", "user says hello; assistant says hi", "the fox says hi"]
FAKE_TEXTS = [" ".join(f"{n}-{i} fox" for i in range(4)) for n in range(4)]
QUICK = EndpointSettings(concurrency=4, patience=0.15, top_k=12)
NOISE = 0.4


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EVALGATE_ENDPOINT_KEY", raising=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory, warm):
    """Two tiny checkpoints of one vocabulary, a third of another, and a recording of the first."""
    import torch

    folder = tmp_path_factory.mktemp("models")
    warm.folders.add(str(folder))
    model = llama()
    save(model, folder / "ref", byte_level(bos=True))
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(0.02 * torch.randn_like(weights))
    save(model, folder / "cand", byte_level(bos=True))
    save(perturbed(built("gpt2")), folder / "other", metaspace())
    (folder / "text").mkdir()
    for n, text in enumerate(TEXTS):
        (folder / "text" / f"{n}.txt").write_text(text)
    asked = RunRequest.of("ppl", None, (str(folder / "ref"),), data=str(folder / "text"), context=32)
    record(RecordRequest(asked, folder / "ref.trace", top_k=16, tail_samples=8), observer=silent())
    record(
        RecordRequest(replace(asked, windows="llama.cpp", context=16), folder / "ref.kld", format="llama.cpp"),
        observer=silent(),
    )
    return folder


@pytest.fixture(scope="module")
def endpoint(place):
    with EmbeddedServer([str(place / "cand")], device="cpu") as server:
        yield server


@pytest.mark.parametrize("dialect", ["prompt_logprobs", "continuation"])
def test_an_endpoint_that_gives_the_kept_ids_is_estimated_like_a_model_loaded_here(
    place, endpoint, dialect, monkeypatch
):
    monkeypatch.setenv("KEY", endpoint.key)
    settings = EndpointSettings(dialect=dialect, key_variable="KEY", concurrency=4)
    model, url = str(place / "cand"), f"{endpoint.url}/v1"
    here = run(RunRequest.of("kl", str(place / "ref.trace"), (model,))).tokens
    measured = run(RunRequest.of("kl", str(place / "ref.trace"), (model, url), endpoint=settings))
    names = [c.candidate.name for c in measured.summary.comparisons]
    assert len(names) == 2
    for name in names:
        found = measured.tokens[measured.tokens["candidate"] == name].reset_index(drop=True)
        assert found[["window", "position", "token"]].equals(here[["window", "position", "token"]])
        for column in ("kl", "kl_se", "kl_low", "tv_low", "tv_high", "js_low", "js_high", "ref_nll", "cand_nll"):
            assert np.abs(found[column] - here[column]).max() < 1e-5, column
        assert (found.cand_top1 == here.cand_top1).all() and (found.ref_rank == here.ref_rank).all()
        assert np.abs(found.topk_overlap - here.topk_overlap).max() < 1e-6
    for comparison in measured.summary.comparisons:
        assert comparison.overall.metrics["kl"].exactness == "estimated"
    assert not any("vocabulary of the trace is not known" in note for note in measured.summary.notes)
    assert (here.kl_se > 0).any() and sum("tail samples a position" in note for note in measured.summary.notes) == 2


def test_the_vocabulary_of_a_trace_is_checked_through_the_tokenizer(place, endpoint, monkeypatch):
    monkeypatch.setenv("KEY", endpoint.key)
    settings = EndpointSettings(key_variable="KEY", tokenizer=str(place / "other"))
    with pytest.raises(MismatchError):
        run(RunRequest.of("kl", str(place / "ref.trace"), (f"{endpoint.url}/v1",), endpoint=settings))


def test_a_model_loaded_here_of_another_vocabulary_is_refused(place):
    recorded = RecordedTrace(read_trace(place / "ref.trace"), str(place / "ref.trace"))
    other = replace(recorded.info, name="other", kind="embedded", extra={"vocabulary_hash": "0"})
    with pytest.raises(MismatchError, match="different vocabularies"):
        check_comparable(held_to_one_vocabulary(recorded, SimpleNamespace(infos={}, tokenizer=other)))
    with pytest.raises(MismatchError, match="different vocabularies"):
        check_comparable(held_to_one_vocabulary(recorded, SimpleNamespace(infos={"other": other}, tokenizer=None)))
    same = replace(other, extra=recorded.info.extra)
    check_comparable(held_to_one_vocabulary(recorded, SimpleNamespace(infos={}, tokenizer=same)))
    assert held_to_one_vocabulary(recorded, SimpleNamespace(infos={}, tokenizer=None)) == []


def test_another_tokenizer_than_the_trace_was_recorded_with_is_said(place):
    recorded = RecordedTrace(read_trace(place / "ref.trace"), str(place / "ref.trace")).info
    assert recorded.tokenizer_hash
    same, other = replace(recorded, name="same"), replace(recorded, name="other", tokenizer_hash="0")
    unknown = replace(recorded, name="endpoint", tokenizer_hash="")
    assert tokenizer_notes([recorded, same, other, unknown]) == [
        f"other may tokenize text differently: both were shown {recorded.name}'s tokens"
    ]


def test_sglang_is_asked_for_the_kept_ids_unless_its_reply_would_be_too_large(place, monkeypatch):
    recorded = RecordedTrace(read_trace(place / "ref.trace"), str(place / "ref.trace"))
    window = recorded.trace.windows[0]
    rows = recorded.rows(window)
    info = SourceInfo(spec="s", name="s", kind="endpoint", vocab_size=0, context_length=0)
    source = EndpointSource(info, "m", "sglang", 16, Capabilities(), ())
    found = TraceForEndpoints(recorded, ["s"]).wanted(window, source)
    for at, position in enumerate(window.positions):
        kept = {int(rows.token[at]), *rows.top_ids[at].tolist(), *rows.tail_ids[at].tolist()} - {-1}
        assert found[position] == tuple(sorted(kept))
    union = set().union(*found.values())
    monkeypatch.setattr("evalgate.measure.recordings.trace_for_endpoints.MOST_VALUES", len(found) * len(union) - 1)
    assert TraceForEndpoints(recorded, ["s"]).wanted(window, source) == {}
    assert TraceForEndpoints(recorded, []).wanted(window, source) == {}
    assert TraceForEndpoints(recorded, ["s"]).wanted(window, replace(source, dialect="prompt_logprobs")) == found


def test_a_logits_file_is_refused_for_endpoints(place):
    with pytest.raises(UsageError, match="logits file, which endpoints cannot be compared with"):
        run(RunRequest.of("kl", str(place / "ref.kld"), ("http://127.0.0.1:9/v1#m",)))


@pytest.fixture
def trace(tmp_path):
    """A recording of the fake's own distribution (salt 0), one window a document."""
    windows = []
    for n, text in enumerate(FAKE_TEXTS):
        ids = tuple(text.encode())
        windows.append(Window(n, f"{n}.txt", "", ids, 1, len(ids), (1,) * len(ids)))
    meta = TraceMeta(
        source=SourceInfo(spec="fake", name="fake", kind="embedded", vocab_size=VOCAB, context_length=4096),
        policy=WindowPolicy("disjoint", 64, 64),
        corpus="fake",
        corpus_hash="0" * 32,
        top_k=16,
        tail_samples=8,
        seed=1,
    )
    folder = tmp_path / "fake.trace"
    writer = TraceWriter(folder, meta, windows=windows)
    for window in windows:
        rows = np.stack([logprobs(window.ids[:p]) for p in window.positions]).astype(np.float32)
        writer.append(condense(rows, [(window, p) for p in window.positions], top_k=16, tail_samples=8, seed=1))
    writer.finish()
    return folder


class Naming(Fake):
    """Also takes a list of ids for each position, as evalgate's server does."""

    def answer(self, path, body):
        wanted = body.get("logprob_token_ids")
        status, found = super().answer(path, {k: v for k, v in body.items() if k != "logprob_token_ids"})
        if wanted and status == 200:
            prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
            for prompt, choice in zip(prompts, found["choices"], strict=True):
                self._add(prompt, wanted, choice)
        return status, found

    def _add(self, prompt, wanted, choice):
        if isinstance(wanted[0], list):
            for at in range(1, len(prompt)):
                values = logprobs(tuple(prompt[:at]), salt=self.salt, noise=self.noise)
                best = np.lexsort((np.arange(VOCAB), -values)).tolist()
                more = {str(i): {"logprob": float(values[i]), "rank": best.index(i) + 1} for i in wanted[at]}
                choice["prompt_logprobs"][at] = {**more, **choice["prompt_logprobs"][at]}
        elif choice["logprobs"]:
            values = logprobs(tuple(prompt), salt=self.salt, noise=self.noise)
            more = {f"token_id:{i}": float(values[i]) for i in wanted}
            choice["logprobs"]["top_logprobs"][0] |= more


class Pretending(Naming):
    """Takes ids for generated tokens alone, and refuses lists of them."""

    def _add(self, prompt, wanted, choice):
        if not isinstance(wanted[0], list):
            super()._add(prompt, wanted, choice)

    def answer(self, path, body):
        if isinstance((body.get("logprob_token_ids") or [0])[0], list):
            return 400, {"error": {"message": "logprob_token_ids takes integers"}}
        return super().answer(path, body)


def ask(trace, *fakes, **options):
    options = {"endpoint": QUICK, **options}
    return RunRequest.of("kl", str(trace), tuple(f"{fake.url}/v1#{MODEL}" for fake in fakes), **options)


def exact_values(table):
    """kl, tv, js, nll and regret of each row, from the fake's distributions in float64."""
    found = {name: [] for name in ("kl", "tv", "js", "nll", "regret")}
    for row in table.itertuples():
        ids = tuple(FAKE_TEXTS[row.window].encode())
        p, q = logprobs(ids[: row.position]), logprobs(ids[: row.position], salt=1, noise=NOISE)
        middle = np.log((np.exp(p) + np.exp(q)) / 2)
        found["kl"].append((np.exp(p) * (p - q)).sum())
        found["tv"].append(np.abs(np.exp(p) - np.exp(q)).sum() / 2)
        found["js"].append((np.exp(p) * (p - middle) + np.exp(q) * (q - middle)).sum() / 2)
        found["nll"].append(-q[ids[row.position]])
        found["regret"].append(p.max() - p[q.argmax()])
    return {name: np.array(values) for name, values in found.items()}


@pytest.mark.parametrize("kind", [Fake, Pretending])
def test_likeliest_ids_alone_give_bounds_that_hold_the_exact_values(trace, kind):
    with serving(kind(salt=1, noise=NOISE)) as fake:
        measured = run(ask(trace, fake, endpoint=replace(QUICK, dialect="prompt_logprobs")))
    table, exact = measured.tokens, exact_values(measured.tokens)
    assert len(table) == sum(len(text.encode()) - 1 for text in FAKE_TEXTS)
    np.testing.assert_allclose(table.cand_nll, exact["nll"], atol=1e-5)
    assert "kl" not in table and "kl_se" not in table and "kl_high" not in table
    assert (table.kl_low <= exact["kl"] + 1e-6).all() and (table.kl_low > 0).any()
    for name in ("tv", "js"):
        low, high = table[f"{name}_low"].astype(float), table[f"{name}_high"].astype(float)
        assert (low <= exact[name] + 1e-6).all() and (exact[name] <= high + 1e-6).all()
        assert (low < high).any()
    regret = table["regret_low"] if "regret_low" in table else table["regret"]
    assert (regret <= exact["regret"] + 1e-5).all()
    metrics = measured.summary.comparisons[0].overall.metrics
    assert metrics["kl"].exactness == "bounded" and "mean" not in metrics["kl"].statistics
    assert metrics["perplexity"].exactness == "exact" and metrics["top1_agreement"].exactness == "exact"
    assert any("is a lower bound and no estimate" in note for note in measured.summary.notes)
    assert any("vocabulary of the trace is not known" in note for note in measured.summary.notes)


def test_continuations_that_name_ids_are_chosen_where_the_budget_allows(trace):
    positions = sum(len(text.encode()) - 1 for text in FAKE_TEXTS)
    with serving(Pretending(salt=1, noise=NOISE)) as fake:
        measured = run(ask(trace, fake))
        tight = run(ask(trace, fake, budget=Budget(requests=positions)))
    table, exact = measured.tokens, exact_values(measured.tokens)
    assert measured.summary.comparisons[0].candidate.extra["dialect"] == "continuation"
    error = np.sqrt(np.square(table.kl_se).sum()) / len(table)
    assert abs(table.kl.mean() - exact["kl"].mean()) < 4 * error
    assert (table.kl_low <= exact["kl"] + 1e-6).all()
    np.testing.assert_allclose(table.cand_nll, exact["nll"], atol=1e-5)
    assert measured.summary.comparisons[0].overall.metrics["kl"].exactness == "estimated"
    (note,) = [note for note in measured.summary.notes if "is estimated through about" in note]
    assert note.endswith("in the dialect 'continuation'; --dialect prompt_logprobs takes fewer and bounds it")
    assert tight.summary.comparisons[0].candidate.extra["dialect"] == "prompt_logprobs"
    assert tight.summary.comparisons[0].overall.metrics["kl"].exactness == "bounded"
    (note,) = [note for note in tight.summary.notes if "would be estimated" in note]
    said = int(re.search(r"about ([\d,]+) requests in the dialect 'continuation': --dialect continuation$", note)[1])
    assert positions < said <= 2 * positions  # a request a position, and one more for the ids it did not list


def test_ids_by_position_give_estimates_beside_a_candidate_that_has_bounds_alone(trace):
    with serving(Naming(salt=1, noise=NOISE)) as able, serving(Fake(salt=1, noise=NOISE)) as plain:
        measured = run(ask(trace, able, plain))
    first, second = (
        measured.tokens[measured.tokens.candidate == c.candidate.name] for c in measured.summary.comparisons
    )
    exact = exact_values(first)
    error = np.sqrt((first.kl_se.astype(float) ** 2).sum()) / len(first)
    assert abs(first.kl.mean() - exact["kl"].mean()) < 4 * error
    assert (first.kl_low <= exact["kl"] + 1e-6).all()
    assert second.kl.isna().all() and second.kl_se.isna().all()
    assert (second.kl_low.to_numpy() <= first.kl_low.to_numpy() + 1e-6).all()
    forms = [c.overall.metrics["kl"].exactness for c in measured.summary.comparisons]
    assert forms == ["estimated", "bounded"]


def leaking(prefix, *, salt=0, noise=0.0, own=logprobs):
    """The fake's distribution; under salt 2 it gives 20 % to the id that it finds unlikeliest."""
    values = own(prefix, salt=salt % 2, noise=noise)
    if salt == 2:
        leak = values.argmin()
        values = values + np.log(0.8)
        values[leak] = np.logaddexp(values[leak], np.log(0.2))
    return values


def test_a_token_that_an_endpoint_leaks_is_seen_by_its_own_alternatives(trace, monkeypatch):
    """KL 0.223 where the draws alone say 0.023: none of them hits the leaked id."""
    monkeypatch.setattr("tests.evalgate.fake_endpoint.logprobs", leaking)
    monkeypatch.setattr("tests.evalgate.measure.test_trace_endpoints.logprobs", leaking)
    with serving(Naming(salt=2)) as fake:
        measured = run(ask(trace, fake))
    kl = measured.tokens.kl.astype(float)
    assert kl.mean() == pytest.approx(-np.log(0.8), rel=0.01)
    assert (kl > 0.2).all() and (measured.tokens.kl_low < 0.2).any()


def test_columns_settle_by_all_positions_of_a_candidate():
    """Of two candidates one has corrections that do not average out, and a third no estimate."""
    n = 50
    rng = np.random.default_rng(0)
    corrected, gap = rng.lognormal(-5, 1, n), rng.normal(0, 1e-3, n)
    wide = pa.table(
        {
            "candidate": ["even"] * n + ["missed"] * n + ["none"] * n,
            "kl": [*corrected, *corrected, *[None] * n],
            "kl_se": [*[1e-4] * 2 * n, *[None] * n],
            "kl_plain": [*(corrected + gap), *(corrected + gap + 0.2), *[None] * n],
            "kl_plain_se": [*[1e-3] * 2 * n, *[None] * n],
            "kl_rare": [*[0.0] * 2 * n, *[None] * n],
        }
    )
    table, notes = settle(wide)
    assert table.column_names == ["candidate", "kl", "kl_se"]
    kl, se = (table.column(name).to_pylist() for name in ("kl", "kl_se"))
    np.testing.assert_allclose(kl[:n], corrected, rtol=1e-6)
    np.testing.assert_allclose(kl[n : 2 * n], corrected + gap + 0.2, rtol=1e-6)
    assert se[0] == pytest.approx(1e-4) and se[n] == pytest.approx(1e-3) and kl[2 * n :] == se[2 * n :] == [None] * n
    assert len(notes) == 1 and notes[0].startswith("missed likes ids") and "50 of 50 positions" in notes[0]


def test_a_budget_and_a_sample_go_on_where_they_stopped(trace):
    def scored(fake):
        bodies = [b["prompt"] for b in fake.asked if not isinstance(b["prompt"][0], list)]
        return [text for prompt in bodies if (text := bytes(prompt).decode("latin-1")) in FAKE_TEXTS]

    with serving(Fake(salt=1, noise=NOISE)) as fake:
        part = run(ask(trace, fake, budget=Budget(requests=2)))
        assert set(part.tokens.window) < set(range(4)) and any("the budget ended" in n for n in part.summary.notes)
        whole = run(ask(trace, fake, budget=Budget(requests=9)))
        assert set(scored(fake)) == set(FAKE_TEXTS)  # kept windows are asked again, to see that the model is the same
        assert set(whole.tokens.window) == set(range(4))
        assert len(run(ask(trace, fake, positions=20)).tokens) == 20


def test_windows_longer_than_the_endpoint_takes_are_refused(trace):
    class Short(Fake):
        def answer(self, path, body):
            status, found = super().answer(path, body)
            return status, {"data": [{"id": MODEL, "max_model_len": 26}]} if path == "/v1/models" else found

    with serving(Short(salt=1)) as fake, pytest.raises(MismatchError, match="25 at most"):
        run(ask(trace, fake))
