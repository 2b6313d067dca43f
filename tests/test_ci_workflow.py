"""The documented GitHub workflow, run step by step over a history: which steps run is what its `if:` lines say."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from evalgate.store.runs import write_run
from tests.evalgate.sample_run import source, summary, token_table
from tests.github_workflow import Expressions, run_steps
from tests.test_ci_docs import CI, FAKE_GH, shell

pytestmark = pytest.mark.slow

WORKFLOW = yaml.safe_load((CI / "github-workflow.yml").read_text())
ACTION = yaml.safe_load((CI / "action.yml").read_text())
(JOB,) = WORKFLOW["jobs"].values()
POLICY = """
[policy]
name = "release"
noise_floor = false
[[rules]]
metric = "kl"
against = "regression"
[[rules]]
metric = "kl"
max = {limit}
"""


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, True),
        ("always()", True),
        ("failure()", False),
        ("github.event_name == 'push'", True),
        ("github.event_name == 'PUSH' && inputs.x != ''", False),
        ("!(github.event_name == 'push') || inputs.y == 'it''s'", True),
        ("${{ hashFiles('a/*.txt') != '' }}", True),
        ("hashFiles('b') == ''", True),
    ],
)
def test_the_evaluator(tmp_path, text, wanted):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("x")
    values = {"github.event_name": "push", "inputs.y": "it's"}
    assert Expressions(values, tmp_path).condition(text) == wanted
    after = Expressions(values, tmp_path, failed=True).condition(text)
    assert after == (text in ("always()", "failure()"))


@dataclass
class Repository:
    """What outlives a workflow run: the cache. `push` and `pull_request` run the workflow in a fresh checkout."""

    place: Path
    cache: dict[str, Path] = field(default_factory=dict)
    number: int = 0
    gate: int = 0  # exit code of the last gate
    said: dict[str, object] = field(default_factory=dict)  # its verdict.json
    commented: bool = False

    def run(self, event, *, kl, limit=1.0, breaks=False):
        """One run of the workflow on a candidate of this mean KL; breaks: the model cannot be measured."""
        self.number += 1
        folder = self.place / f"checkout-{self.number}"
        (folder / "bin").mkdir(parents=True)
        (folder / "policy.toml").write_text(POLICY.format(limit=limit))
        table = token_table(("candidate",), documents=30, size=kl)
        write_run(folder / "measured", manifest={}, table=table, summary=summary(table, reference=source("demo")))
        (folder / "bin" / "gh").write_text(FAKE_GH)
        (folder / "bin" / "evalgate").write_text(BROKEN if breaks else MEASURED)
        for program in (folder / "bin").iterdir():
            program.chmod(0o755)
        values = {
            "github.event_name": event,
            "github.sha": f"sha{self.number}",
            "github.run_attempt": "1",
            "github.event.pull_request.number": "7",
        }
        outcomes = run_steps(JOB["steps"], lambda step, e: self._step(step, e, folder), values, folder)
        verdict = folder / "evalgate-out" / "verdict.json"
        self.said = json.loads(verdict.read_text()) if verdict.exists() and verdict.stat().st_size else {}
        return outcomes

    def _step(self, step, expressions, folder):
        if "run" in step:
            return shell(step["run"], folder).returncode == 0
        given = {name: expressions.filled(str(value)) for name, value in step.get("with", {}).items()}
        program = step["uses"].partition("@")[0]
        if program == "actions/cache/restore":
            found = [key for key in self.cache if key == given["key"] or key.startswith(given["restore-keys"])]
            if found:
                shutil.copytree(self.cache[found[-1]], folder / given["path"])
        elif program == "actions/cache/save":
            kept = self.place / f"cache-{self.number}"
            shutil.copytree(folder / given["path"], kept)
            self.cache[given["key"]] = kept
        elif program == "./.github/actions/evalgate":
            return self._action(given, expressions.values, folder)
        else:
            assert program in ("actions/checkout", "actions/setup-python", "actions/upload-artifact"), program
        return True

    def _action(self, given, values, folder):
        defaults = {name: one.get("default", "") for name, one in ACTION["inputs"].items()}
        inputs = {f"inputs.{name}": value for name, value in {**defaults, **given, "install": ""}.items()}

        def carry_out(step, expressions):
            env = {name: expressions.filled(str(value)) for name, value in step.get("env", {}).items()}
            done = shell(step["run"], folder, GITHUB_REPOSITORY="o/r", GH_LISTING="", **env)
            if step["name"] == "Gate":
                self.gate = done.returncode
            return done.returncode == 0

        outcomes = run_steps(ACTION["runs"]["steps"], carry_out, {**values, **inputs}, folder)
        self.commented = outcomes["Comment"] == "success"
        return "failure" not in outcomes.values()


# Stands for evalgate: "measures" by taking over the folder `measured`, then judges it as the real gate does.
MEASURED = """#!/bin/bash
set -e
kept=()
while [ $# -gt 0 ]; do
  case "$1" in
    --ref|--cand) shift;;
    --out) mkdir -p "$(dirname "$2")"; rm -rf "$2"; cp -r measured "$2"; run="$2"; shift;;
    --overwrite) ;;
    *) kept+=("$1");;
  esac
  shift
done
exec python -m evalgate "${kept[@]}" --run "$run"
"""
BROKEN = """#!/bin/bash
exec python -m evalgate "${@/.\\/candidate/http:\\/\\/127.0.0.1:9\\/v1#m}" --patience 0
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return Repository(tmp_path)


KEPT = ("Keep as the baseline", "Store the baseline")


def test_the_first_push_has_no_baseline_and_leaves_one(repository):
    outcomes = repository.run("push", kl=0.01)
    assert outcomes["Model gate"] == "success" and repository.gate == 0
    rules = repository.said["candidates"][0]["rules"]
    assert [rule["verdict"] for rule in rules] == ["not applicable", "pass"]
    assert [outcomes[name] for name in KEPT] == ["success"] * 2 and len(repository.cache) == 1
    outcomes = repository.run("pull_request", kl=0.03)
    assert outcomes["Model gate"] == "failure" and repository.gate == 1
    assert repository.said["candidates"][0]["rules"][0]["verdict"] == "fail"  # worse than what the push left
    assert [outcomes[name] for name in KEPT] == ["skipped"] * 2 and repository.commented
    assert repository.run("pull_request", kl=0.01)["Model gate"] == "success"


def test_a_first_push_that_fails_leaves_a_baseline_too(repository):
    outcomes = repository.run("push", kl=0.01, limit=0.0001)
    assert outcomes["Model gate"] == "failure" and repository.gate == 1
    assert [outcomes[name] for name in KEPT] == ["success"] * 2
    assert repository.run("pull_request", kl=0.01)["Model gate"] == "success"
    assert repository.said["candidates"][0]["rules"][0]["verdict"] == "pass"


def test_what_could_not_be_measured_is_said_and_not_kept(repository):
    repository.run("push", kl=0.01)
    outcomes = repository.run("push", kl=0.01, breaks=True)
    assert outcomes["Model gate"] == "failure" and repository.gate == 2
    assert repository.said["verdict"] == "cannot measure"
    assert [outcomes[name] for name in KEPT[:1]] == ["skipped"]
    assert outcomes["actions/upload-artifact@v4"] == "success"
    outcomes = repository.run("pull_request", kl=0.01, breaks=True)
    assert repository.gate == 2 and repository.commented
