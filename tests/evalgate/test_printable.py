"""Hostile bytes in what others wrote: nothing of them steers a terminal, a report, a comment or a CI runner."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import unicodedata

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalgate import reports
from evalgate.cli import probe, verify
from evalgate.cli.progress import BarObserver, LineObserver
from evalgate.errors import EndpointError
from evalgate.gate.report import Change, GateReport, Unmeasured
from evalgate.gate.unmeasured import unmeasured
from evalgate.printable import printable, printable_styled
from evalgate.reports import github
from evalgate.store.runs import write_run
from tests.evalgate.reports.test_gate_reports import report, rule
from tests.evalgate.sample_run import source, summary, token_table

# Window title, cursor home, conceal, C1's CSI, right-to-left override, a forged line, a runner's commands, markup.
HOSTILE = (
    "x\x1b]0;owned\x07\x1b[H\x1b[8m\x9b31m\u202egnp.exe\x00\x08\r\n::error title=forged::y\n"
    "====== evalgate gate: PASS ======\n##[error]z <script>@all|`"
)
CONTROLS = "".join(chr(c) for c in [*range(0x20), *range(0x7F, 0xA0), 0xAD, 0x200E, 0x202E, 0x2028, 0x2066, 0xFEFF])


def unsafe(text: str, *, allowed: str = "\n") -> list[str]:
    """The characters of a text that could steer what shows it."""
    kinds = ("Cc", "Cs", "Zl", "Zp")
    return [
        c for c in text if c not in allowed and (unicodedata.category(c) in kinds or c in "\u202e\u200e\u2066\ufeff")
    ]


def check(text: str) -> None:
    """Nothing steers a terminal, no line is a command, and no line was forged."""
    assert unsafe(text, allowed="\n\u200b") == []
    lines = text.splitlines()
    assert not [line for line in lines if line.lstrip().startswith("::") or "##[" in line]
    assert not [line for line in lines if line.strip() == "====== evalgate gate: PASS ======"]


def test_what_is_escaped():
    assert unsafe(printable(CONTROLS), allowed="") == []
    assert printable("a\x1b[1mb\u202e\U000e0041") == "a\\u001b[1mb\\u202e\\udb40\\udc41"
    assert printable("a\nb\tc") == "a\\nb\\tc" and printable("a\nb\tc", lines=True) == "a\nb\tc"
    assert printable("  ::error::x\n::stop\na::b", lines=True) == "  \\u003a:error::x\n\\u003a:stop\na::b"
    assert printable("a ##[command]") == "a \\u0023#[command]"
    assert printable("日本 café 👩\u200d🔬 \u00a0") == "日本 café 👩\u200d🔬 \u00a0"  # joiners and wide spaces are text
    assert printable_styled("\x1b[31mred\x1b[0m\x1b[2J") == "\x1b[31mred\x1b[0m\\u001b[2J"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_json_says_the_same_afterwards(text):
    document = json.dumps({"a": text, "::b": [text]}, indent=2, ensure_ascii=False)
    shown = printable(document, lines=True)
    assert json.loads(shown) == json.loads(document)
    assert unsafe(shown) == []


def test_errors_are_made_fit_to_be_shown():
    error = EndpointError(f"the endpoint said {HOSTILE}", body=HOSTILE)
    assert unsafe(error.message) == unsafe(str(error)) == [] and error.context["body"] == HOSTILE


def hostile_gate() -> GateReport:
    change = Change(
        metric=HOSTILE, statistic="mean", unit="nats", better="lower", value=1, baseline=1, difference=0, low=0, high=0
    )
    given = report(
        rule(HOSTILE, "fail", reason=HOSTILE, figure=HOSTILE),
        policy=HOSTILE,
        reference=HOSTILE,
        corpus=HOSTILE,
        baseline=HOSTILE,
        notes=[HOSTILE],
    )
    candidate = given.candidates[0].model_copy(update={"candidate": HOSTILE, "changes": [change], "headline": HOSTILE})
    return given.model_copy(update={"candidates": [candidate]})


def hostile_error() -> GateReport:
    return unmeasured(Unmeasured(type="EndpointError", message=HOSTILE, exit_code=2), name=HOSTILE, reference=HOSTILE)


@pytest.mark.parametrize("make", [hostile_gate, hostile_error])
def test_every_report_of_a_gate(make):
    document = make()
    for name, one in reports.of("gate").items():
        check(one.text(document))
        if name == "comment":
            assert "<script>" not in one.text(document) and "@all" not in one.text(document)
        if one.terminal:
            check(printable_styled(one.text(document, color=True)).replace("\x1b", ""))
    commands = github.workflow_commands(document)
    assert unsafe(commands) == []
    assert all(line.startswith(("::error title=evalgate", "::notice")) for line in commands.splitlines())
    assert [line.partition("=")[0] for line in github.outputs(document).splitlines()] == [
        "verdict",
        "exit-code",
        "headline",
    ]
    assert unsafe(github.outputs(document)) == []


def hostile_run(folder):
    table = token_table(("candidate",), documents=24)
    for name in ("candidate", "domain", "document"):
        values = [HOSTILE + value for value in table.column(name).cast("string").to_pylist()]
        field = table.schema.field(name)
        table = table.set_column(table.column_names.index(name), field, pa.array(values).cast(field.type))
    document = summary(table, reference=source(HOSTILE), notes=[HOSTILE])
    return write_run(folder, manifest={}, table=table, summary=document)


# One process for all commands, as each import takes a second; each has files of its own for streams.
EACH = """
import contextlib, os, sys
from evalgate.cli import main
for number, args in enumerate(eval(sys.argv[1])):
    for descriptor, name in (1, "out"), (2, "err"):
        with open(f"{number}.{name}", "wb") as file:
            os.dup2(file.fileno(), descriptor)
    with contextlib.suppress(SystemExit):
        main(args)
    sys.stdout.flush()
    sys.stderr.flush()
"""


def test_every_command_on_a_hostile_run_folder(tmp_path):
    """The bytes that arrive on both streams of a process, as JSON and as text."""
    folder = str(hostile_run(tmp_path / "run").folder)
    commands = [
        ["show", folder],
        ["show", folder, "--full"],
        ["show", folder, "--json"],
        ["diff", folder],
        ["slices", folder, "--by", "document"],
        ["slices", folder, "--by", "domain", "--json"],
        ["compare", folder, folder],
        ["plan", folder, "--max", "kl=0.02"],
        ["gate", "--max", "kl=0.0001", "--run", folder, "--github", "--debug"],
        ["gate", "--max", "kl=1", "--run", folder, "--candidate", HOSTILE, "--debug"],
        ["show", f"{tmp_path}/{HOSTILE.replace(chr(0), '')}"],
    ]
    done = subprocess.run([sys.executable, "-c", EACH, repr(commands)], capture_output=True, cwd=tmp_path, check=False)
    assert done.stderr == b""
    for number, args in enumerate(commands):
        stdout, stderr = ((tmp_path / f"{number}.{name}").read_bytes() for name in ("out", "err"))
        assert stdout or stderr, args
        assert b"failed unexpectedly" not in stderr, stderr
        for stream in (stdout, stderr):
            text = stream.decode()
            assert unsafe(text) == [], args
            lines = text.splitlines()
            ours = "--github" in args and stream is stderr
            assert ours or not [line for line in lines if line.lstrip().startswith("::")], args
            assert not [line for line in lines if line.strip() == "====== evalgate gate: PASS ======"], args


def test_progress():
    for made in (LineObserver, BarObserver):
        stream = io.StringIO()
        watch = made(stream, noun="KL")
        watch.stage(HOSTILE)
        watch.start(windows=2, positions=2)
        watch.advance(windows=1, positions=1, running={HOSTILE: 1.0, "b": 2.0})
        watch.finish()
        assert "\x1b]0" not in stream.getvalue() and "\u202e" not in stream.getvalue()


class Anything:
    """Stands for any document: what is not given is a hostile text."""

    def __init__(self, **given):
        self.__dict__.update(given)

    def __getattr__(self, name):
        return HOSTILE


def test_what_probe_and_verify_print():
    """Certificates and verifications of an endpoint that lies about its names and its limits."""
    certificate = Anything(rate_limits=((HOSTILE, HOSTILE),), continuation_costs=(), notes=(HOSTILE,), k_is_limit=False)
    check(probe.table(HOSTILE, 5, {f"http://h/{HOSTILE}": certificate}, width=80))
    found = Anything(
        evidence=(),
        floor=None,
        agreement=None,
        differing=None,
        tolerance=0.02,
        alarm=0.01,
        requests=6,
        assumed=(),
        notes=(HOSTILE,),
    )
    check(verify.text(found))


def test_a_long_value_of_a_certificate_is_folded_and_not_cut():
    names = ("prompt_logprobs", "echo", "continuation", "openai", "chat")
    certificate = Anything(dialects=names, rate_limits=(), continuation_costs=(), notes=(), k_is_limit=False)
    lines = probe.table("echo", 5, {"http://h": certificate}, width=80).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  dialects honoured"))
    assert lines[at].endswith("openai,") and lines[at + 1] == " " * 36 + "chat"
    assert f"  {'prompts of one request':<34}not tried" in lines
