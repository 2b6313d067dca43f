"""Another interpreter for the scoring child: checked before it is started, and never given our packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from evalgate.errors import UsageError
from evalgate.server.interpreter import NEEDS, checked
from evalgate.server.process import EmbeddedServer, module_command


def script(path: Path, says: str) -> str:
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o755)
    return str(path)


def test_our_own_interpreter_has_what_the_server_needs() -> None:
    assert checked(sys.executable) == sys.executable


@pytest.mark.parametrize(
    ("says", "said"),
    [
        (
            'echo "[[3, 11], [\\"fastapi\\", \\"prometheus_client\\"]]"',
            r"lacks fastapi, prometheus_client: .* -m pip instal",
        ),
        ('echo "[[3, 9], []]"', "is Python 3.9: the scoring server needs 3.11 or newer"),
        ("echo hello", "does not answer as a Python interpreter"),
        ("exit 3", "does not answer as a Python interpreter"),
    ],
)
def test_an_interpreter_that_cannot_serve_is_refused(tmp_path: Path, says: str, said: str) -> None:
    python = script(tmp_path / "a python", says)
    with pytest.raises(UsageError, match=said) as caught:
        EmbeddedServer(["demo"], python=python).start()
    assert "\n" not in caught.value.message


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a program: give the path of an interpreter"):
        checked(str(tmp_path / "nowhere"))


def test_it_sees_our_server_and_nothing_else_of_ours(tmp_path: Path) -> None:
    """No package of this environment, none of this checkout, and no `serve.py` of the working directory."""
    (tmp_path / "serve.py").write_text("print('not this one')\n")
    code = (
        "import importlib.util as u, serve.wire; print(serve.__file__, u.find_spec('evalgate'), u.find_spec('tests'))"
    )
    (tmp_path / "probe.py").write_text(code)
    command = module_command("serve.selftest.names", sys.executable)
    start = command[-1].rpartition("; ")[0]
    shown = subprocess.run(
        [sys.executable, "-P", "-S", "-c", f"{start}; print(serve_of := sys.modules['serve'].__file__, sys.path)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    root = str(Path(__file__).parents[3])
    assert shown.startswith(f"{root}/serve/__init__.py") and f"'{root}'" not in shown
    assert set(NEEDS) >= {"torch", "transformers", "fastapi"}
