"""The shell steps of docs/ci and docs/ci.md, run as they stand with a run that is already there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from junitparser import JUnitXml

from evalgate.store.runs import write_run
from tests.evalgate.sample_run import source, summary, token_table
from tests.stuck import STUCK

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
TABLE = token_table(("demo@int8",), documents=12)
SUMMARY = summary(TABLE, reference=source("demo"))
CI = ROOT / "docs" / "ci"

# Stands for gh: keeps its arguments, and answers the listing with what $GH_LISTING holds.
FAKE_GH = (
    '#!/bin/bash\nprintf "%s\\n" "$*" >> "$GH_LOG"\nif [ "$2" = "--paginate" ]; then printf "%s" "$GH_LISTING"; fi\n'
)

FAKE_PIPELINE = """
import sys
from tests.evalgate import fake_pipeline
sys.modules["evalgate.measure.run"] = fake_pipeline.module()
from evalgate.cli import main
sys.exit(main())
"""


@pytest.fixture
def workspace(tmp_path):
    for name in ("stored", "runs/first", "runs/old"):
        write_run(tmp_path / name, manifest={}, table=TABLE, summary=SUMMARY)
    (tmp_path / "policy.toml").write_text('[policy]\nname = "release"\n[[rules]]\nmetric = "kl"\nmax = 1.0\n')
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "gh").write_text(FAKE_GH)
    (programs / "evalgate").write_text(f'#!/bin/bash\nexec "{sys.executable}" -m evalgate "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    return tmp_path


def shell(script, workspace, **variables):
    environment = {
        "PATH": f"{workspace / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": os.environ.get("HOME", "/"),
        "GH_LOG": str(workspace / "gh.log"),
        **variables,
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=workspace, env=environment, capture_output=True, text=True, timeout=STUCK)


def action_step(name):
    action = yaml.safe_load((CI / "action.yml").read_text())
    return next(step for step in action["runs"]["steps"] if step["name"] == name)["run"]


GATE = {
    "EVALGATE_POLICY": "policy.toml",
    "EVALGATE_REF": "",
    "EVALGATE_CAND": "",
    "EVALGATE_BASELINE": "nowhere",
    "EVALGATE_ARGS": "--run\nstored",
    "EVALGATE_OUT": "out",
}


def test_the_gate_step_judges_and_leaves_its_files(workspace):
    github = {name: str(workspace / name) for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    done = shell(action_step("Gate"), workspace, **GATE, **github)
    assert done.returncode == 0, done.stderr
    assert json.loads((workspace / "out" / "verdict.json").read_text())["verdict"] == "pass"
    assert JUnitXml.fromfile(str(workspace / "out" / "junit.xml")).tests == 1
    assert "::notice" in done.stderr and "verdict=pass" in (workspace / "GITHUB_OUTPUT").read_text()
    assert (workspace / "GITHUB_STEP_SUMMARY").read_text() == (workspace / "out" / "comment.md").read_text()


def test_the_gate_step_ends_with_the_gate_s_code(workspace):
    (workspace / "strict.toml").write_text('[[rules]]\nmetric = "kl"\nmax = 0.0001\n')
    done = shell(action_step("Gate"), workspace, **{**GATE, "EVALGATE_POLICY": "strict.toml"})
    assert done.returncode == 1 and "::error" in done.stderr
    assert (workspace / "out" / "comment.md").read_text().startswith("<!-- evalgate: policy -->")
    assert shell(action_step("Gate"), workspace, **{**GATE, "EVALGATE_ARGS": "--run\nnone"}).returncode == 2


def test_the_gate_step_passes_models_and_an_existing_baseline_on(workspace):
    (workspace / "bin" / "evalgate").write_text('#!/bin/bash\nprintf "[%s]" "$@"\n')
    variables = {**GATE, "EVALGATE_REF": "a b", "EVALGATE_CAND": "x\ny z\n", "EVALGATE_BASELINE": "stored"}
    assert shell(action_step("Gate"), workspace, **{**variables, "EVALGATE_ARGS": ""}).returncode == 0
    said = (workspace / "out" / "verdict.json").read_text()
    assert "[--ref][a b][--out][out/run][--overwrite][--baseline][stored][--baseline-optional]" in said
    assert "[--cand][x][--cand][y z][--junit]" in said


@pytest.mark.parametrize(
    ("listing", "wanted"), [("", "--method POST repos/o/r/issues/7/comments"), ("42\n43", "issues/comments/42")]
)
def test_the_comment_step_replaces_its_own_comment(workspace, listing, wanted):
    (workspace / "out").mkdir()
    (workspace / "out" / "comment.md").write_text("<!-- evalgate: release -->\nhello\n")
    variables = {"EVALGATE_OUT": "out", "EVALGATE_PULL": "7", "GITHUB_REPOSITORY": "o/r", "GH_LISTING": listing}
    done = shell(action_step("Comment"), workspace, **variables)
    assert done.returncode == 0, done.stderr
    log = (workspace / "gh.log").read_text().splitlines()
    assert 'startswith("<!-- evalgate: release -->")' in log[0]
    assert wanted in log[1] and "-F body=@out/comment.md" in log[1]


def test_the_comment_step_is_quiet_where_nothing_was_measured(workspace):
    variables = {"EVALGATE_OUT": "out", "EVALGATE_PULL": "7", "GITHUB_REPOSITORY": "o/r", "GH_LISTING": ""}
    assert shell(action_step("Comment"), workspace, **variables).returncode == 0
    assert not (workspace / "gh.log").exists()


def test_the_workflow_keeps_a_baseline_for_the_next(workspace):
    workflow = yaml.safe_load((CI / "github-workflow.yml").read_text())
    (job,) = workflow["jobs"].values()
    (workspace / "evalgate-out").mkdir()
    (workspace / "stored").rename(workspace / "evalgate-out" / "run")
    scripts = [step["run"] for step in job["steps"] if "run" in step]
    for script in scripts * 2:  # a second time over the first
        assert shell(script, workspace).returncode == 0
    inputs = next(step["with"] for step in job["steps"] if step.get("name") == "Model gate")
    assert (workspace / inputs["baseline"] / "manifest.json").exists()
    assert set(inputs) <= set(yaml.safe_load((CI / "action.yml").read_text())["inputs"])


def test_gitlab_s_script(workspace):
    job = yaml.safe_load((CI / "gitlab-ci.yml").read_text())["model gate"]
    script = "\n".join(job["script"])
    assert '--ref "$EVALGATE_REF" --cand "$EVALGATE_CAND" --out evalgate-out/run --overwrite' in script
    script = script.replace(
        '--ref "$EVALGATE_REF" --cand "$EVALGATE_CAND" --out evalgate-out/run --overwrite', "--run stored"
    )
    assert shell(script, workspace).returncode == 0
    assert (workspace / job["artifacts"]["reports"]["junit"]).exists()
    assert job["allow_failure"]["exit_codes"] == 3


def test_the_shell_blocks_of_ci_md(workspace):
    """Every block runs as it stands, on a pipeline that measures nothing where it names models."""
    (workspace / "policy.toml").unlink()
    (workspace / "bin" / "evalgate").write_text(f"#!{sys.executable}\n{FAKE_PIPELINE}")
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "ci.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        done = shell(block.replace("runs/old", "runs/before"), workspace)
        assert done.returncode in (0, 1, 3) and "Traceback" not in done.stderr, done.stderr
    assert (workspace / "junit.xml").exists() and (workspace / "runs" / "before" / "manifest.json").exists()
