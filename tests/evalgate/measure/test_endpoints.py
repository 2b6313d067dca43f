"""Whole runs against endpoints on loopback: resume, several URLs, budgets, and what the figures must be."""

import hashlib
import json
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from evalgate.endpoints.budget import Budget
from evalgate.endpoints.settings import EndpointSettings
from evalgate.errors import EndpointError, MismatchError, UsageError
from evalgate.measure.probe import probe_source
from evalgate.measure.run import RunRequest, run, silent
from evalgate.specs import parse
from tests.evalgate.fake_endpoint import MODEL, Fake, logprobs, serving
from tests.stuck import STUCK

CHECKS = 1  # windows asked again at the end of a run, and as many when one is resumed
QUICK = EndpointSettings(concurrency=4, patience=0.15)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EVALGATE_ENDPOINT_KEY", raising=False)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(5):
        (folder / f"{n}.txt").write_text(" ".join(f"{n}-{i} fox" for i in range(8)))
    return folder


@pytest.fixture
def sides():
    with serving(Fake()) as ref, serving(Fake(salt=1, noise=0.4)) as cand:
        yield ref, cand


def request(ref, *cands, corpus, out=None, **options):
    options.setdefault("endpoint", QUICK)
    return RunRequest.of(
        kind="kl",
        reference=ref if isinstance(ref, str) else f"{ref.url}/v1",
        candidates=tuple(c if isinstance(c, str) else f"{c.url}/v1#{MODEL}" for c in cands),
        data=str(corpus),
        context=24,
        out=out,
        overwrite=True,
        **options,
    )


def digest(folder):
    return hashlib.sha256((folder / "tokens.parquet").read_bytes()).hexdigest()


def figures(found):
    """The comparisons without the certificates, which say how long the probe's requests took."""
    return [c.model_dump(exclude={"candidate": {"extra"}}) for c in found.summary.comparisons]


def scored(fake):
    """Prompts of the requests that scored windows; the probe's own prompt is another text."""
    prompts = [p for b in fake.asked for p in (b["prompt"] if isinstance(b["prompt"][0], list) else [b["prompt"]])]
    return [tuple(prompt) for prompt in prompts if bytes(prompt[:1]) != b"T"]


def probe_cost(fake, corpus):
    """Requests of one probe. Leaves the fake as it was."""
    with serving(Fake(salt=1, noise=0.4, scoring=fake.scoring)) as other, serving(Fake()) as ref:
        run(request(ref, other, corpus=corpus, limit=1))
        return len(other.asked) - len(scored(other))


def test_figures_are_those_of_the_distributions(sides, corpus):
    table = run(request(*sides, corpus=corpus)).tokens
    text = {n: (corpus / f"{n}.txt").read_bytes() for n in range(5)}
    assert len(table) > 100
    for row in table.itertuples():
        data = text[int(str(row.document).split(".")[0])]
        assert row.token in data
    first = table[table.window == 0]
    ids = tuple(text[0][:24])
    for row in first.itertuples():
        p = logprobs(ids[: row.position])
        q = logprobs(ids[: row.position], salt=1, noise=0.4)
        kl, tv = (np.exp(p) * (p - q)).sum(), np.abs(np.exp(p) - np.exp(q)).sum() / 2
        assert row.ref_nll == pytest.approx(-p[row.token], abs=1e-5)
        assert row.cand_nll == pytest.approx(-q[row.token], abs=1e-5)
        assert 0 < row.kl_low <= kl + 1e-6
        assert row.tv_low - 1e-6 <= tv <= row.tv_high + 1e-6
        assert row.top1_agreement == float(p.argmax() == q.argmax())


def test_continuations_say_the_same_as_prompt_logprobs(sides, corpus):
    ref, cand = sides
    one = run(request(ref, cand, corpus=corpus)).tokens
    cand.scoring = False
    other = run(request(ref, cand, corpus=corpus))
    assert other.summary.comparisons[0].candidate.extra["dialect"] == "continuation"
    for name in ("cand_nll", "kl_low", "tv_low", "tv_high", "js_low", "js_high", "top1_agreement"):
        assert other.tokens[name].to_numpy() == pytest.approx(one[name].to_numpy(), abs=1e-6)


@pytest.mark.parametrize("scoring", [True, False])
def test_killed_at_30_60_and_90_percent_and_resumed(sides, corpus, tmp_path, scoring):
    ref, cand = sides
    cand.scoring = scoring
    undisturbed = run(request(ref, cand, corpus=corpus, out=tmp_path / "whole"))
    total = len(set(scored(cand)))
    probed = len(cand.asked) - len(scored(cand))
    cand.asked.clear()
    for share in (0.3, 0.6, 0.9):
        done = len(set(scored(cand)))
        again = (1 if scoring else 8) if done else 0  # of a kept window, to see that the model is the same
        cand.die_after = len(cand.asked) + probed + again + max(1, round(share * total) - done)
        with pytest.raises(EndpointError, match="is it running"):
            run(request(ref, cand, corpus=corpus, out=tmp_path / "again"))
        cand.die_after = None
    resumed = run(request(ref, cand, corpus=corpus, out=tmp_path / "again"))
    assert digest(tmp_path / "again") == digest(tmp_path / "whole")
    assert figures(resumed) == figures(undisturbed)
    if scoring:  # a window is one request: each was answered once
        assert len(set(scored(cand))) == total
        # More are asked: a kept one on resuming, the first one at the end, and those on their way when the run died.
        assert len(scored(cand)) <= total + 4 + 3 * QUICK.concurrency


class Changing(Fake):
    """An endpoint whose model is another one after `switch` answers about windows, by numbers or by name."""

    def __init__(self, *, switch: int, by: str) -> None:
        super().__init__(salt=1, noise=0.4)
        self.switch, self.by = switch, by

    def answer(self, path, body):
        changed = len(scored(self)) >= self.switch
        if changed and self.by == "numbers":
            self.noise = 0.8
        status, found = super().answer(path, body)
        if path == "/v1/completions" and self.by != "numbers":
            found["model"] = "b" if changed and self.by == "model" else MODEL
            found["system_fingerprint"] = "fp_2" if changed and self.by == "fingerprint" else "fp_1"
        return status, found


@pytest.mark.parametrize(
    ("by", "says"),
    [
        ("numbers", r"does not repeat what was answered about window \d+.*nats off on average"),
        ("model", r"answered as 'fake' \(system_fingerprint fp_1\) before and answers as 'b'"),
        ("fingerprint", r"fp_1\) before and answers as 'fake' \(system_fingerprint fp_2\) now: its model changed"),
    ],
)
@pytest.mark.parametrize("scoring", [True, False])
def test_a_model_that_changes_during_a_run_ends_it(corpus, by, says, scoring):
    with serving(Fake()) as ref, serving(Changing(switch=6, by=by)) as cand:
        cand.scoring = scoring
        with pytest.raises(EndpointError, match=says):
            run(request(ref, cand, corpus=corpus, limit=10))


@pytest.mark.parametrize(
    ("by", "says"),
    [
        ("numbers", "does not repeat what was answered"),
        ("model", r"when the run was interrupted and answers as 'b' .* now.*--no-resume"),
    ],
)
def test_a_model_that_changed_before_the_run_is_resumed_ends_it(corpus, by, says):
    with serving(Fake()) as ref, serving(Changing(switch=10**6, by=by)) as cand:
        cand.die_after = probe_cost(cand, corpus) + 6
        with pytest.raises(EndpointError, match="is it running"):
            run(request(ref, cand, corpus=corpus))
        cand.die_after, cand.switch = None, 0
        with pytest.raises(EndpointError, match=says):
            run(request(ref, cand, corpus=corpus))
        assert len(run(request(ref, cand, corpus=corpus, resume=False)).tokens) > 100


def test_another_k_starts_anew(sides, corpus):
    ref, cand = sides
    cand.die_after = probe_cost(cand, corpus) + 4
    with pytest.raises(EndpointError):
        run(request(ref, cand, corpus=corpus))
    cand.die_after = None
    cand.asked.clear()
    run(request(ref, cand, corpus=corpus, endpoint=EndpointSettings(concurrency=4, patience=0.15, top_k=7)))
    windows = set(scored(cand))
    assert {b["prompt_logprobs"] for b in cand.asked if repr(b["prompt"]) in {repr(list(w)) for w in windows}} == {7}


def test_four_urls_and_one_dies(sides, corpus, tmp_path):
    ref, cand = sides
    run(request(ref, cand, corpus=corpus, out=tmp_path / "one"))
    with ExitStack() as stack:
        fakes = [stack.enter_context(serving(Fake(salt=1, noise=0.4))) for _ in range(4)]
        spec = ",".join(f"{f.url}/v1" for f in fakes)
        # the first to have answered its probe and one window falls silent
        fakes[1].die_after = probe_cost(cand, corpus) + 1
        found = run(request(ref, spec, corpus=corpus, out=tmp_path / "four", endpoint=QUICK))
        shares = [len(scored(f)) - (CHECKS if f is not fakes[1] else 0) for f in fakes]
        asked = set().union(*(scored(f) for f in fakes))
    one, four = (json.loads((tmp_path / n / "summary.json").read_text()) for n in ("one", "four"))
    assert one["comparisons"][0]["overall"] == four["comparisons"][0]["overall"]
    assert len(asked) == len(set(found.tokens.window)) and shares[1] <= 1 and min(shares[0], *shares[2:]) >= 1
    checked = set.intersection(*(set(scored(f)) for f in fakes if f is not fakes[1]))  # asked of every URL at the end
    if set(fakes[1].unanswered) - checked:
        assert any("stopped answering" in note for note in found.summary.notes)


def test_a_url_that_is_down_at_the_start_is_left_out_and_said(sides, corpus):
    ref, cand = sides
    dead = "http://127.0.0.1:9"
    found = run(request(ref, f"{dead}/v1#{MODEL},{cand.url}/v1", corpus=corpus))
    assert any(dead in note for note in found.summary.notes)
    with pytest.raises(EndpointError, match="is it running"):
        run(request(ref, f"{dead}/v1#{MODEL}", corpus=corpus))


def test_a_budget_of_requests_stops_early_and_more_goes_on(sides, corpus):
    ref, cand = sides
    part = run(request(ref, cand, corpus=corpus, budget=Budget(requests=6)))
    assert len(set(part.tokens.window)) == 3
    assert len(set(scored(ref))) == len(set(scored(cand))) == 3
    assert any("budget ended after 3 of" in note for note in part.summary.notes)
    run(request(ref, cand, corpus=corpus, budget=Budget(requests=1000)))
    assert len(scored(cand)) == len(set(scored(cand))) + CHECKS + 2  # two runs end, and one is resumed
    with pytest.raises(UsageError, match="too small"):
        run(request(ref, cand, corpus=corpus, budget=Budget(requests=1), seed=3, limit=4))


def sent(fake):
    """Requests that scored windows."""
    first = [b["prompt"][0] if isinstance(b["prompt"][0], list) else b["prompt"] for b in fake.asked]
    return sum(bytes(prompt[:1]) != b"T" for prompt in first)


def test_what_is_asked_a_second_time_counts_to_the_budget(sides, corpus, tmp_path):
    ref, cand = sides
    cand.scoring = False
    run(request(ref, cand, corpus=corpus, out=tmp_path / "whole"))
    before = sent(ref) + sent(cand)
    part = run(request(ref, cand, corpus=corpus, budget=Budget(requests=60)))
    windows = len(set(part.tokens.window))
    spent = sent(ref) + sent(cand) - before
    checked = 1 + 8  # not counted: a whole window of one side, and 8 positions of the other
    assert 4 * windows < spent <= 60 + checked and windows > 1  # several requests a window: one of them is the first
    assert any(f"budget ended after {windows} of" in note for note in part.summary.notes)
    run(request(ref, cand, corpus=corpus, out=tmp_path / "again", budget=Budget(requests=1000)))
    assert digest(tmp_path / "again") == digest(tmp_path / "whole")


class Stumbling(Fake):
    """Refuses each window once. arrived: requests that scored windows, refused ones too."""

    def __init__(self, **options):
        super().__init__(**options)
        self.arrived, self.seen = 0, set()

    def answer(self, path, body):
        if path == "/v1/completions" and isinstance(body["prompt"][0], int) and bytes(body["prompt"][:1]) != b"T":
            self.arrived += 1
            if (prompt := tuple(body["prompt"])) not in self.seen:
                self.seen.add(prompt)
                return 503, {"error": {"message": "not now"}}
        return super().answer(path, body)


def test_repeats_count_to_the_budget_and_a_window_that_it_ends_is_left_for_later(corpus, tmp_path):
    patient = EndpointSettings(concurrency=4, patience=STUCK)
    with serving(Fake()) as ref, serving(Stumbling(salt=1, noise=0.4)) as cand:
        part = run(request(ref, cand, corpus=corpus, endpoint=patient, budget=Budget(requests=7)))
        assert len(scored(ref)) + cand.arrived == 7 + 2 * CHECKS  # each side's first window is asked again, uncounted
        assert 0 < len(set(part.tokens.window)) < len(set(scored(ref)))
        assert any("budget ended after" in note for note in part.summary.notes)
        options = {"endpoint": patient, "budget": Budget(requests=1000)}
        run(request(ref, cand, corpus=corpus, out=tmp_path / "again", **options))
        assert len(scored(ref)) == len(set(scored(ref))) + CHECKS + 2
        run(request(ref, cand, corpus=corpus, out=tmp_path / "whole", resume=False, endpoint=patient))
    assert digest(tmp_path / "again") == digest(tmp_path / "whole")


def test_sampled_positions_are_all_that_is_asked(sides, corpus):
    ref, cand = sides
    cand.scoring = False
    found = run(request(ref, cand, corpus=corpus, positions=17))
    assert len(found.tokens) == len(set(scored(cand))) == 17  # some twice: what is not listed is asked for again
    assert "greedy_match_length" not in found.summary.comparisons[0].overall.metrics
    assert any("sampled" in note for note in found.summary.notes)


def test_perplexity_of_an_endpoint(sides, corpus):
    _, cand = sides
    asked = RunRequest.of("ppl", None, (f"{cand.url}/v1",), data=str(corpus), context=24, endpoint=QUICK)
    found = run(asked)
    metric = found.summary.comparisons[0].overall.metrics["perplexity"]
    assert metric.statistics["candidate"].value == pytest.approx(np.exp(found.tokens.cand_nll.astype(float).mean()))


def test_a_forced_dialect_is_checked(sides, corpus):
    with pytest.raises(EndpointError, match=r"does not honour the dialect 'echo'.*--dialect prompt_logprobs"):
        run(request(*sides, corpus=corpus, endpoint=EndpointSettings(patience=0.2, dialect="echo")))


def test_another_tokenizer_is_refused(sides, corpus):
    ref, cand = sides
    plain = cand.answer

    def shifted(path, body):
        status, found = plain(path, body)
        if path == "/tokenize" and "tokens" in found:
            found["tokens"] = [t + 1 for t in found["tokens"]]
        return status, found

    cand.answer = shifted
    with pytest.raises(MismatchError, match="other tokens"):
        run(request(ref, cand, corpus=corpus))


def test_the_key_reaches_the_endpoint_and_nothing_else(sides, corpus, tmp_path, monkeypatch):
    ref, cand = sides
    monkeypatch.setenv("SOME_KEY", "s3cret-key")
    settings = EndpointSettings(
        patience=0.2, key_variable="SOME_KEY", headers=(("X-Team", "hidden-value"),), concurrency=2
    )
    found = run(request(ref, cand, corpus=corpus, out=tmp_path / "r", endpoint=settings))
    assert all(h["authorization"] == "Bearer s3cret-key" and h["x-team"] == "hidden-value" for h in cand.headers)
    for path in (tmp_path / "r").iterdir():
        assert b"s3cret-key" not in path.read_bytes()
        assert b"hidden-value" not in path.read_bytes()
    assert found.manifest["request"]["endpoint"]["headers"] == ["X-Team"]
    assert "s3cret" not in repr(settings) and "hidden" not in repr(settings)


def test_certificates_are_in_the_result(sides, corpus, tmp_path):
    run(request(*sides, corpus=corpus, out=tmp_path / "r"))
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    certificate = json.loads(summary["comparisons"][0]["candidate"]["extra"]["certificate"])
    (only,) = certificate.values()
    assert only["prompt_logprobs"] is True and only["largest_k"] == 256 and only["tokenizer"] == "agrees"


def test_an_endpoint_probed_alone_does_not_agree_with_itself(sides):
    _, _, found = probe_source(parse(f"{sides[0].url}/v1#{MODEL}"), QUICK, device="auto", watch=silent())
    assert [certificate.tokenizer for certificate in found.values()] == ["unknown"]


class Told:
    """An observer that keeps the running means."""

    def __init__(self):
        self.means = []

    def stage(self, text): ...

    def start(self, **counts): ...

    def finish(self): ...

    def advance(self, *, running, **counts):
        self.means.append(running)


@pytest.mark.parametrize(("kind", "column"), [("kl", "kl_low"), ("agree", "top1_agreement_low")])
def test_progress_shows_the_lower_end_of_what_is_measured(sides, corpus, kind, column):
    ref, cand = sides
    asked = RunRequest.of(kind, f"{ref.url}/v1", (f"{cand.url}/v1",), data=str(corpus), context=24, endpoint=QUICK)
    told = Told()
    found = run(replace(asked, limit=4), observer=told)
    (mean,) = told.means[-1].values()
    name = column if column in found.tokens else column.removesuffix("_low")  # a value where all are known
    assert mean == pytest.approx(found.tokens[name].astype(float).mean(), rel=1e-6)
