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
from evalgate.gate.family import Decision
from evalgate.gate.kinds.limit import KIND as LIMIT
from evalgate.gate.policy import load_policy
from evalgate.gate.reasons import reason
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
    figure = SimpleNamespace(
        documents=documents, exactness="exact", statistic=mean(), limits=Limits(None, 0.5), kind=LIMIT
    )
    assert reason(figure, Decision("undecided", alike)).startswith(said)


def test_the_published_schema_is_the_printed_one():
    from pathlib import Path

    published = Path(__file__).parents[3] / "docs" / "gate.schema.json"
    assert call("schema", "gate") == (0, published.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "--ref and --cand"),
        (["--ref", "demo"], "--ref and --cand"),
        (["--run", "nowhere"], "there is no run folder"),
        (["--run", "r", "--ref", "demo"], "leave out --ref"),
        (["--run", "r", "--limit", "5", "--top-k", "3"], "leave out --limit, --top-k"),
        (["--run", "r", "--no-resume", "--seed", "0", "-q"], "leave out --seed, --no-resume"),
        (["--ref", "demo", "--cand", "http://a/v1#m", "--noise-floor"], "--noise-floor"),
        ([*SIDES, "--candidate", "demo"], "--candidate"),
        ([*SIDES, "--sequential", "--baseline", "nowhere"], "leave out --sequential or --baseline"),
        ([*SIDES, "--baseline", "nowhere"], "there is no run folder"),
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

    def recorded(request, *, observer=None, judge=None, **more):
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
    comment = (tmp_path / "c.md").read_text()
    assert comment.startswith("<!-- evalgate: policy -->\n### ✅") and "\nmean KL 0." in comment
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
    said = " ".join(text.split())
    assert "and so is a bound that holds for heavy tails too" in said
    assert "a document of average length counts as at most 4 distances from the ideal figure to its limit" in said
    assert code == 0
    for part in ("Policy '8bit'", "1. ", "exit code 3", "inside the limit"):
        assert part in " ".join(text.split())
    assert all(len(line) <= 80 for line in text.splitlines())


FILES = ["--junit", "j.xml", "--comment", "c.md", "--badge", "b.json"]


@pytest.mark.parametrize(
    ("policy", "args", "part"),
    [
        ('[policy]\nname = "release"\n[[rules]]\nmetric = "kl"\nmaxx = 1\n', ["--run", "stored"], "no key rule 1 maxx"),
        ('[policy]\nname = "release"\n[[rules]]\nmetric = \n', ["--run", "stored"], "is not TOML"),
        (
            '[policy]\nname = "release"\n[[rules]]\nmetric = "kl"\nmax = 1\n',
            ["--run", "nowhere"],
            "there is no run folder",
        ),
        ('[policy]\nname = "release"\n[[rules]]\nmetric = "kl"\nmax = 1\n', ["--ref", "demo"], "--ref and --cand"),
        (
            '[policy]\nname = "release"\n[[rules]]\nmetric = "kl"\nmax = 1\n',
            ["--ref", "http://a/v1#m", "--cand", "demo"],
            "a lower bound only",
        ),
    ],
)
def test_what_cannot_be_measured_replaces_yesterday_s_verdict(
    tmp_path, stored, monkeypatch, capsys, policy, args, part
):
    """Every file that a passing gate wrote says so, under the name by which a comment is found again."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "out"))
    (tmp_path / "ok.toml").write_text('[policy]\nname = "release"\n[[rules]]\nmetric = "kl"\nmax = 1\n')
    assert call("gate", "--policy", "ok.toml", "--run", "stored", *FILES)[0] == 0
    before = (tmp_path / "c.md").read_text()
    (tmp_path / "p.toml").write_text(policy)
    capsys.readouterr()
    code, text = call("gate", "--policy", "p.toml", *args, *FILES, "--json")
    assert code == 2
    body = json.loads(text)
    validate(body, json.loads(call("schema", "gate")[1]))
    assert (body["verdict"], body["exit_code"], body["candidates"]) == ("cannot measure", 2, [])
    assert part in body["error"]["message"] and body["error"]["type"] in ("UsageError", "InputError")
    after = (tmp_path / "c.md").read_text()
    assert after.splitlines()[0] == before.splitlines()[0] == "<!-- evalgate: release -->"
    assert "cannot measure" in after and "\u2705" not in after
    (suite,) = JUnitXml.fromfile("j.xml")
    (case,) = suite
    assert suite.errors == 1 and part in case.result[0].message
    badge = json.loads((tmp_path / "b.json").read_text())
    assert (badge["message"], badge["color"]) == ("cannot measure", "lightgrey")
    said = capsys.readouterr().err
    assert "::error title=evalgate cannot measure::" in said and said.splitlines()[-1].startswith("evalgate: ")
    assert "verdict=cannot measure\nexit-code=2\n" in (tmp_path / "out").read_text()
    assert "cannot measure" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize(("error", "code"), [(ZeroDivisionError("x"), 2), (KeyboardInterrupt(), 130)])
def test_a_bug_and_an_interrupt_leave_a_report_too(tmp_path, monkeypatch, error, code):
    def fails(request, **more):
        raise error

    monkeypatch.setitem(sys.modules, "evalgate.measure.run", fake_pipeline.module(fails))
    found, text = call("gate", "--policy", write_policy(tmp_path / "p.toml"), *SIDES, *FILES, "--json")
    assert found == code == json.loads(text)["exit_code"]
    assert "cannot measure" in (tmp_path / "c.md").read_text()


@pytest.mark.parametrize(
    "args",
    [["--max", "kl=1", "--cand", "http://", "--ref", "demo"], ["--nope"], ["--policy", "p.toml", "--limit", "x"]],
)
def test_a_command_line_that_cannot_be_read_leaves_a_report_too(tmp_path, args, capsys):
    (tmp_path / "p.toml").write_text('[policy]\nname = "release"\n')
    assert call("gate", *args, "--junit=j.xml", "--comment", "c.md", "--badge", "--json")[0] == 2
    assert "cannot measure" in (tmp_path / "c.md").read_text()
    assert (
        (tmp_path / "c.md").read_text().startswith("<!-- evalgate: release" if "p.toml" in args else "<!-- evalgate: ")
    )
    assert JUnitXml.fromfile("j.xml").errors == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.md", "j.xml", "p.toml"]


def test_one_file_that_cannot_be_written_leaves_the_others(tmp_path, stored, capsys):
    files = [*FILES[:-1], "no/such/b.json"]
    assert call("gate", "--policy", write_policy(tmp_path / "p.toml"), "--run", "stored", *files)[0] == 2
    assert "b.json" in (tmp_path / "c.md").read_text() and "cannot measure" in (tmp_path / "c.md").read_text()


def test_a_gate_on_one_line(tmp_path, stored, pipeline, capsys):
    pipeline.clear()
    code, text = call("gate", "--max", "kl=1", "--min", "topk=0.1", "--run", "stored", "--json")
    body = json.loads(text)
    assert code == 0 and body["policy"] == "command line"
    assert [r["rule"] for r in body["candidates"][0]["rules"]] == ["kl mean <= 1", "topk_overlap mean >= 0.1"]
    code, text = call("gate", "--policy", "8bit", "--max", "js=0.5", "--run", "stored", "--json")
    assert [r["rule"] for r in json.loads(text)["candidates"][0]["rules"]][-1] == "js mean <= 0.5"
    for args, part in (
        (["--max", "kl=x"], "has no number after ="),
        (["--max", "kl"], "is not a limit"),
        (["--min", "top1=97"], "for 97 % write 0.97"),
        (["--max", "t=1"], "there is no metric 't'"),
        (["--max", "kl=1", "--max", "kl=1"], "are both called"),
        (["--no-regression", "kl=-1"], "asks for an improvement"),
        ([], "there is nothing to judge by"),
    ):
        assert call("gate", *args, *SIDES) == (2, ""), args
        assert part in capsys.readouterr().err
    assert pipeline == []


def test_no_regression_against_a_baseline_that_may_not_be_there_yet(tmp_path, stored, capsys):
    line = ["gate", "--no-regression", "kl", "--no-regression", "top1", *SIDES, "--out", "new", "--overwrite"]
    assert call(*line) == (2, "")
    assert "--baseline-optional" in capsys.readouterr().err
    code, text = call(*line, "--baseline", "nowhere", "--baseline-optional")
    assert (
        code == 0 and "not applicable" in text and text.splitlines()[-1] == "pass: 0 of 2 rules pass, 2 not applicable"
    )
    code, text = call(*line, "--baseline", "stored", "--baseline-optional", "--junit", "j.xml")
    assert code == 0 and "pass: 2 of 2 rules pass" in text and "against the baseline" in text
    (tmp_path / "damaged").mkdir()
    assert call(*line, "--baseline", "damaged", "--baseline-optional")[0] == 2  # there, and unreadable


def test_a_domain_that_the_text_does_not_have_is_named_before_measuring(tmp_path, monkeypatch, capsys):
    asked = []

    def recorded(request, *, text_check=None, **more):
        text_check("domain", {"prose", "code"})
        asked.append(request)

    monkeypatch.setitem(sys.modules, "evalgate.measure.run", fake_pipeline.module(recorded))
    (tmp_path / "p.toml").write_text('[[rules]]\nmetric = "kl"\nmax = 1\nslice = {by = "domain", name = "poetry"}\n')
    assert call("gate", "--policy", "p.toml", *SIDES) == (2, "")
    assert "has no domain 'poetry': use one of code, prose" in capsys.readouterr().err and asked == []


def test_policy_check_says_what_is_hardly_meant(tmp_path):
    (tmp_path / "p.toml").write_text('[[rules]]\nmetric = "kl"\nagainst = "baseline"\nmax = 0\n')
    code, text = call("policy", "check", "p.toml")
    assert code == 0 and 'for "not worse" write against = "regression"' in text
    (tmp_path / "p.toml").write_text(
        '[policy]\nbaseline = "optional"\n[[rules]]\nmetric = "kl"\nagainst = "regression"\non_undecided = "fail"\n'
    )
    said = " ".join(call("policy", "explain", "p.toml")[1].split())
    for part in (
        "kl mean not worse than baseline",
        "a pass says that worse is not proven",
        "not applicable",
        "counts as fail",
    ):
        assert part in said
