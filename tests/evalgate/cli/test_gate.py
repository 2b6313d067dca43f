"""`evalgate gate` and `evalgate policy` on a fake pipeline: exit codes, streams and files."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from jsonschema import validate
from junitparser import JUnitXml

from evalgate.cli.app import invoke
from evalgate.core import Figure, Interval, Limits
from evalgate.gate.judge import Decision, _reason
from evalgate.gate.policy import load_policy
from evalgate.metrics import mean
from evalgate.store.runs import read_run
from tests.evalgate import fake_pipeline
from tests.evalgate.cli.test_cli import MemoryOutput

SIDES = ["--ref", "demo", "--cand", "demo@int8", "-q"]


@pytest.fixture(autouse=True)
def pipeline(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT"):
        monkeypatch.delenv(name, raising=False)
    requests = []

    def recorded(request, *, observer=None, **more):
        requests.append(request)
        return fake_pipeline.measured(request, observer=observer, documents=24)

    monkeypatch.setitem(sys.modules, "evalgate.measure.run", fake_pipeline.module(recorded))
    return requests


def write_policy(path, limit=1.0, extra=""):
    path.write_text(f'[policy]\nnoise_floor = false\n{extra}\n[[rules]]\nmetric = "kl"\nmax = {limit}\n')
    return str(path)


@pytest.fixture
def stored(tmp_path):
    assert call("kl", *SIDES, "--out", "stored")[0] == 0
    return tmp_path / "stored"


def call(*args):
    output = MemoryOutput()
    return invoke(args, output), output.text


def kl(folder):
    return read_run(folder).summary.comparisons[0].overall.metrics["kl"].statistics["mean"]


def test_exit_codes(tmp_path, stored, capsys):
    figure = kl(stored)
    for limit, code in ((figure.high * 2, 0), (figure.low / 2, 1), (figure.value, 3)):
        found, text = call("gate", "--policy", write_policy(tmp_path / "p.toml", limit), "--run", "stored")
        assert found == code
        assert text.startswith(f"====== evalgate gate: {('PASS', 'FAIL', '', 'UNDECIDED')[code]} ======")
    assert call("gate", "--policy", write_policy(tmp_path / "p.toml", "nan"), "--run", "stored") == (2, "")
    policy = write_policy(tmp_path / "p.toml", figure.value, 'on_undecided = "fail"')
    assert call("gate", "--policy", policy, "--run", "stored")[0] == 1


def test_it_measures_with_the_policy_s_confidence_and_keeps_the_run(tmp_path, pipeline):
    policy = write_policy(tmp_path / "p.toml", extra="confidence = 0.9")
    code, text = call("gate", "--policy", policy, *SIDES, "--limit", "5", "--out", "r", "--json")
    assert code == 0
    assert (pipeline[0].kind, pipeline[0].confidence, pipeline[0].limit) == ("kl", 0.9, 5)
    body = json.loads(text)
    validate(body, json.loads(call("schema", "gate")[1]))
    assert (body["verdict"], body["exit_code"], body["run"]) == ("pass", 0, "r")
    again = json.loads(call("gate", "--policy", policy, "--run", "r", "--json")[1])
    assert {**again, "created": ""} == {**body, "created": ""}


@pytest.mark.parametrize(
    ("documents", "said"),
    [(4, "there are only 4 documents, too few to"), (5, "fewer than 5 of 5 documents differ, too few to")],
)
def test_too_few_documents_are_told_from_too_few_that_differ(documents, said):
    alike = Figure(0.0, Interval(0.0, 1.0), alike=True)
    figure = SimpleNamespace(documents=documents, exactness="exact", statistic=mean(), limits=Limits(None, 0.5))
    assert _reason(figure, Decision("undecided", alike)).startswith(said)


def test_the_published_schema_is_the_printed_one():
    from pathlib import Path

    published = Path(__file__).parents[3] / "docs" / "gate.schema.json"
    assert call("schema", "gate") == (0, published.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "--ref and --cand"),
        (["--ref", "demo"], "--ref and --cand"),
        (["--run", "nowhere"], "not a run folder"),
        (["--run", "r", "--ref", "demo"], "leave out --ref"),
        (["--run", "r", "--limit", "5", "--top-k", "3"], "leave out --limit, --top-k"),
        (["--run", "r", "--no-resume", "--seed", "0", "-q"], "leave out --seed, --no-resume"),
        (["--ref", "demo", "--cand", "http://a/v1#m", "--noise-floor"], "--noise-floor"),
        ([*SIDES, "--candidate", "demo"], "--candidate"),
        ([*SIDES, "--sequential", "--baseline", "nowhere"], "leave out --sequential or --baseline"),
        ([*SIDES, "--baseline", "nowhere"], "not a run folder"),
        ([*SIDES, "--junit", "no/such/file.xml"], "no folder for no/such/file.xml"),
    ],
)
def test_mistakes_cost_no_measurement(tmp_path, pipeline, capsys, args, part):
    if "r" in args:
        call("kl", *SIDES, "--out", "r")
        pipeline.clear()
    assert call("gate", "--policy", write_policy(tmp_path / "p.toml"), *args) == (2, "")
    assert part in capsys.readouterr().err
    assert pipeline == []


def test_a_baseline_is_asked_for_before_measuring(tmp_path, pipeline, capsys):
    path = tmp_path / "p.toml"
    path.write_text('[[rules]]\nmetric = "kl"\nagainst = "baseline"\nmax = 0.0\n')
    assert call("gate", "--policy", str(path), *SIDES) == (2, "")
    assert "--baseline RUN" in capsys.readouterr().err
    assert pipeline == []
    call("kl", *SIDES, "--out", "before")
    code, text = call("gate", "--policy", str(path), *SIDES, "--baseline", "before")
    assert code == 3 and "against the baseline" in text  # the same run: no change, which 4 documents cannot show


def test_the_noise_floor_is_measured_unless_the_policy_or_the_option_says_no(tmp_path, pipeline, capsys):
    plain = tmp_path / "plain.toml"
    plain.write_text('[[rules]]\nmetric = "kl"\nmax = 1\n')
    without = write_policy(tmp_path / "without.toml")
    for policy, options in (
        (str(plain), ()),
        (str(plain), ("--no-noise-floor",)),
        (without, ("--noise-floor",)),
        (without, ()),
    ):
        assert call("gate", "--policy", policy, *SIDES, *options)[0] == 0
    assert [request.noise_floor for request in pipeline] == [True, False, True, False]
    (tmp_path / "floor.toml").write_text('[[rules]]\nmetric = "kl"\nagainst = "floor"\nmax = 1\n')
    assert call("gate", "--policy", "floor.toml", *SIDES, "--no-noise-floor") == (2, "")
    assert "measure it, with --noise-floor" in capsys.readouterr().err


def test_a_sequential_gate_shuffles_and_hands_its_judge_to_the_pipeline(tmp_path, monkeypatch, stored):
    policy = write_policy(tmp_path / "p.toml", 0.0005)
    judges = []

    def recorded(request, *, observer=None, judge=None):
        from evalgate.gate.sequential import replay

        run = fake_pipeline.measured(request, observer=observer, documents=24)
        judges.append((request.shuffle, judge))
        replay(judge, run.table, seed=request.seed, noise_floor=1e-6)
        return run

    monkeypatch.setitem(sys.modules, "evalgate.measure.run", fake_pipeline.module(recorded))
    code, text = call("gate", "--policy", policy, *SIDES, "--sequential", "--json")
    assert judges[0][0] is True
    body = json.loads(text)
    assert body["sequential"]["of"] == 24 and code == {"pass": 0, "fail": 1, "undecided": 3}[body["verdict"]]
    again = json.loads(call("gate", "--policy", policy, "--run", "stored", "--sequential", "--json")[1])
    assert again["candidates"] == body["candidates"]


def test_files_for_ci(tmp_path, stored):
    files = ["--junit", "j.xml", "--comment", "c.md", "--badge", "b.json"]
    assert call("gate", "--policy", write_policy(tmp_path / "p.toml"), "--run", "stored", *files)[0] == 0
    assert JUnitXml.fromfile("j.xml").tests == 1
    assert (tmp_path / "c.md").read_text().startswith("<!-- evalgate: policy -->\n### ✅")
    assert json.loads((tmp_path / "b.json").read_text())["message"].startswith("pass")
    assert call("gate", "--policy", "p.toml", "--run", "stored", "--badge", ".")[0] == 2


def test_github_is_told_where_it_runs_us(tmp_path, stored, monkeypatch, capsys):
    policy = write_policy(tmp_path / "p.toml", 0.0001)
    assert call("gate", "--policy", policy, "--run", "stored")[0] == 1
    assert "::error" not in capsys.readouterr().err
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "out"))
    (tmp_path / "summary.md").write_text("before\n")
    code, text = call("gate", "--policy", policy, "--run", "stored", "--json")
    assert code == 1 and json.loads(text)["verdict"] == "fail"
    assert "::error title=evalgate fail%3A" in capsys.readouterr().err
    assert (tmp_path / "summary.md").read_text().startswith("before\n<!-- evalgate")
    assert "exit-code=1" in (tmp_path / "out").read_text()
    assert call("gate", "--policy", policy, "--run", "stored", "--no-github")[0] == 1
    assert "::error" not in capsys.readouterr().err


def test_policy_commands(tmp_path, stored, capsys):
    assert call("policy", "init", "--preset", "lossless", "--out", "evalgate.toml") == (0, "")
    assert load_policy("evalgate.toml") == load_policy("lossless")
    assert call("policy", "init", "--out", "evalgate.toml")[0] == 2
    assert "left alone" in capsys.readouterr().err
    code, text = call("policy", "init")
    assert code == 0 and 'name = "8bit"' in text
    assert call("policy", "init", "--preset", "2bit")[0] == 2
    assert call("policy", "check", "evalgate.toml")[0] == 0
    (tmp_path / "bad.toml").write_text('[[rules]]\nmetric = "kl"\nmaxx = 1\n')
    capsys.readouterr()
    assert call("policy", "check", "bad.toml") == (2, "")
    assert "bad.toml: there is no key rule 1 maxx: did you mean max?" in capsys.readouterr().err
    (tmp_path / "domain.toml").write_text(
        '[[rules]]\nmetric = "kl"\nmax = 1\nslice = {by = "domain", name = "poetry"}\n'
    )
    assert call("policy", "check", "domain.toml")[0] == 0
    assert call("policy", "check", "domain.toml", "--run", "stored") == (2, "")
    assert "prose, code" in capsys.readouterr().err


def test_explain_says_what_decides():
    code, text = call("policy", "explain", "8bit")
    assert code == 0
    for part in ("Policy '8bit'", "1. ", "exit code 3", "inside the limit"):
        assert part in " ".join(text.split())
    assert all(len(line) <= 80 for line in text.splitlines())
