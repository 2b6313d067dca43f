"""Which tests `make quick` takes for a change, and that the commit hooks are the checks of `make check`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.quick import ELSEWHERE, ROOT, covering


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("evalgate/gate/judge.py", "tests/evalgate/gate"),
        ("evalgate/gate/presets/8bit.toml", "tests/evalgate/gate"),
        ("evalgate/specs.py", "tests/evalgate/test_specs.py"),
        ("evalgate/core.py", "tests/evalgate"),
        ("serve/engine/loop.py", "tests/serve/engine"),
        ("serve/app.py", "tests/serve"),
        ("tests/serve/engine/test_loop.py", "tests/serve/engine/test_loop.py"),
        ("tests/serve/engine/test_gone.py", "tests/serve/engine"),
        ("tests/evalgate/fake_endpoint.py", "tests/evalgate"),
        ("tests/stuck.py", None),
        ("docs/cli.md", "tests/test_docs.py"),
        ("docs/ci/gate.yml", "tests/test_ci_docs.py"),
        ("pyproject.toml", None),
    ],
)
def test_tests_of_a_file(path: str, tests: str | None) -> None:
    assert covering(path) == tests


@pytest.mark.parametrize("package", ["evalgate", "serve"])
def test_every_module_has_a_room_of_tests(package: str) -> None:
    """A new room without tests would be given all tests of its package."""
    for path in (ROOT / package).rglob("*.py"):
        name = path.relative_to(ROOT)
        assert (ROOT / str(covering(str(name)))).exists(), name
        if len(name.parts) > 2 and "/".join(name.parts[:2]) not in ELSEWHERE:
            assert Path(str(covering(str(name)))).parts[:3] == ("tests", *name.parts[:2]), name


def test_commit_hooks_are_the_checks() -> None:
    """Each hook runs a tool of the project's own environment, as `make check` does, and downloads nothing."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (group,) = config["repos"]
    assert group["repo"] == "local"
    assert [hook["language"] for hook in group["hooks"]] == ["system"] * 4
    for hook in group["hooks"]:
        tool = hook["entry"].split(" --")[0].removeprefix(".venv/bin/")
        assert f"$(BIN)/{tool}" in makefile, hook
