"""The command as a process: what reaches which stream, signals, start-up cost, completion."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stuck import STUCK

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "transformers", "pyarrow", "pandas", "scipy", "pydantic", "datasets", "numpy", "click")

NOISY = """
import atexit, ctypes, os, subprocess, sys
from tests.evalgate import fake_pipeline
libc = ctypes.CDLL(None)
def noisy(request, *, observer=None, **more):
    print("python noise")
    os.write(1, b"descriptor noise\\n")
    libc.puts(b"buffered C noise")
    subprocess.run(["echo", "child noise"], check=True)
    atexit.register(print, "late noise")
    return fake_pipeline.measured(request, observer=observer)
"""
WAITING = """
import sys, time
from tests.evalgate import fake_pipeline
def noisy(request, *, observer=None, **more):
    print("waiting", file=sys.stderr, flush=True)
    time.sleep(3600)
"""
MAIN = """
sys.modules["evalgate.measure.run"] = fake_pipeline.module(noisy)
from evalgate.cli import main
sys.exit(main())
"""
PRINTING = """
import sys
from tests.evalgate import fake_pipeline
def noisy(request, *, observer=None, **more):
    print("python noise")
    return fake_pipeline.measured(request, observer=observer)
"""
ALONE = """
import sys
from evalgate.cli import main
sys.exit(main())
"""


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", **changes}


def start(program: str, *args: str, cwd: Path, **options: object) -> subprocess.Popen[str]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-c", program, *args], cwd=cwd, env=environment(), text=True, **streams)


KL = ("kl", "--ref", "demo", "--cand", "demo@int8", "--out", "r")


def test_stdout_holds_the_document_and_nothing_else(tmp_path):
    process = start(NOISY + MAIN, *KL, "--json", cwd=tmp_path)
    out, err = process.communicate(timeout=STUCK)
    assert process.returncode == 0, err
    assert json.loads(out)["kind"] == "kl"
    for noise in ("python noise", "descriptor noise", "buffered C noise", "child noise", "late noise"):
        assert noise in err and noise not in out
    assert "4/4 windows" in err and "mean KL 0.01" in err  # progress by plain lines


def test_quiet_leaves_standard_error_empty(tmp_path):
    program = "import sys\nfrom tests.evalgate import fake_pipeline\nnoisy = fake_pipeline.measured\n" + MAIN
    process = start(program, *KL, "--no-progress", cwd=tmp_path)
    out, err = process.communicate(timeout=STUCK)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("demo@int8 against demo: mean KL ")


def test_a_reader_that_went_away_is_no_failure(tmp_path):
    read, write = os.pipe()
    os.close(read)
    process = start(NOISY + MAIN, *KL, cwd=tmp_path, stdout=write)
    os.close(write)
    err = process.communicate(timeout=STUCK)[1]
    assert process.returncode == 0
    assert "Broken" not in err and "Traceback" not in err
    assert (tmp_path / "r" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("args", "wanted"),
    [(["--help"], 0), (["kl", "--help"], 0), (["--version"], 0), (["schema"], 0), (["policy", "init"], 0), ([], 2)],
)
def test_a_closed_pipe_is_quiet_and_changes_no_exit_code(tmp_path, args, wanted):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "evalgate", *args]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment(), cwd=tmp_path, timeout=STUCK)
    os.close(write)
    assert (done.returncode, done.stderr) == (wanted, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("flags", ((), ("--json",)))
def test_a_full_disk_is_a_sentence(tmp_path, flags):
    with Path("/dev/full").open("w") as full:
        process = start(NOISY + MAIN, "kl", "--ref", "a", "--cand", "b", "-q", *flags, cwd=tmp_path, stdout=full)
        _, stderr = process.communicate(timeout=STUCK)
    assert process.returncode == 2
    assert "evalgate: cannot write to standard output (No space left on device): make room" in stderr
    assert "Traceback" not in stderr and "unexpectedly" not in stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_on_a_full_disk_is_a_sentence(tmp_path, option):
    with Path("/dev/full").open("w") as full:
        process = start(ALONE, option, cwd=tmp_path, stdout=full)
        _, stderr = process.communicate(timeout=STUCK)
    assert (process.returncode, stderr) == (2, "evalgate: cannot write (No space left on device): make room\n")


@pytest.mark.parametrize("broken", ["closed", "full", "reader gone"])
@pytest.mark.parametrize(
    ("program", "args", "wanted"),
    [
        (PRINTING + MAIN, (*KL, "--json"), 0),
        (ALONE, ("gate", "--policy", "8bit", "--run", "nowhere", "--json"), 2),
        (ALONE, ("kl", "--nope", "--json"), 2),
    ],
)
def test_standard_error_that_cannot_be_written_changes_no_exit_code(tmp_path, broken, program, args, wanted):
    if broken == "full" and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    if broken == "full":
        write = os.open("/dev/full", os.O_WRONLY)
    else:
        read, write = os.pipe()
        os.close(read)
    closing = "2>&-" if broken == "closed" else ""
    command = ["sh", "-c", f'exec "$0" -c "$PROGRAM" "$@" {closing}', sys.executable, *args]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=write, env=environment(PROGRAM=program), cwd=tmp_path, timeout=STUCK
    )
    os.close(write)
    assert done.returncode == wanted
    assert ("error" in json.loads(done.stdout)) == (wanted != 0)


def test_closed_standard_output_is_a_sentence(tmp_path):
    command = f"exec {sys.executable} -m evalgate schema >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, env=environment(), cwd=tmp_path, timeout=STUCK)
    assert done.returncode == 2
    assert b"standard output is closed" in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_a_run_with_130(tmp_path, number):
    process = start(WAITING + MAIN, *KL, "--json", cwd=tmp_path)
    assert process.stderr is not None and process.stderr.readline() == "waiting\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=STUCK)
    assert process.returncode == 130
    assert json.loads(out)["error"]["type"] == "Interrupted"
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "program", ["import evalgate", "import sys, evalgate.cli as c; sys.argv[1:] = ['--help']; c.main()"]
)
def test_start_is_light(tmp_path, program):
    check = f"\nimport sys\nprint('HEAVY', sorted(set({HEAVY!r}) & set(sys.modules)))"
    command = [sys.executable, "-c", program + check]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=STUCK)
    assert done.stdout.splitlines()[-1] == "HEAVY []", done.stderr


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("evalgate kl --windows l", {"llama.cpp", "lm-eval"}),
        ("evalgate kl --cand demo@b", {"demo@bf16"}),
        ("evalgate sl", {"slices"}),
    ],
)
def test_bash_completion(tmp_path, words, wanted):
    variables = {
        "_EVALGATE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    command = [sys.executable, "-m", "evalgate"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(**variables), cwd=tmp_path, timeout=STUCK
    )
    assert set(done.stdout.split()) == wanted
    assert done.returncode == 0
