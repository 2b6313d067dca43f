"""What is installed and how: every install line of the repository names this distribution, and an index can show it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from evalgate.core import VERSION

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOLDERS = ("evalgate", "serve", "tests", "docs", "notebooks", "benchmarks", "reports", ".ci")
SUFFIXES = {".py", ".md", ".yml", ".yaml", ".toml", ".ipynb", ".txt", ".cfg", ""}
# A requirement as it stands in a pip command or an extra: a name, its extras, a pin.
_REQUIREMENT = r"(?P<name>[A-Za-z][\w.-]*)(?:\\?\[(?P<extras>[\w,\s-]+)\\?\])?(?:==(?P<pin>[\w.]+))?"
_OURS = re.compile(r"(?<![\w/.@:$-])" + _REQUIREMENT)


def pages():
    """Every text of the repository, by its path."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in files:
        if path.suffix in SUFFIXES and path != Path(__file__):
            yield path.relative_to(ROOT), path.read_text(encoding="utf-8", errors="replace")


def requirements(text):
    """What of this project's a text tells to install: after `pip install` in any form, or with extras anywhere."""
    for match in _OURS.finditer(text):
        named = match["name"].lower()
        installed = re.search(r"pip3? install\b[^\n`]*$", text[: match.start()].rpartition("\n")[2])
        if named.startswith("evalgate") and (installed or match["extras"]):
            yield match


def complaint(match):
    """What is wrong with a requirement, None where nothing is."""
    if match["name"] != PROJECT["name"]:
        return f"{match[0]} is another project: this one is {PROJECT['name']}"
    extras = {extra.strip() for extra in (match["extras"] or "").split(",")} - {""}
    if not extras <= set(PROJECT["optional-dependencies"]):
        return f"{match[0]} names an extra that there is not"
    return f"{match[0]} is not version {VERSION}" if match["pin"] not in (None, VERSION) else None


def test_every_install_line_names_this_distribution():
    found = [(path, match) for path, text in pages() for match in requirements(text)]
    assert [f"{path}: {said}" for path, match in found if (said := complaint(match))] == []
    places = {str(path) for path, _ in found}
    assert {"README.md", "docs/pypi.md", "docs/ci/action.yml", "docs/ci/gitlab-ci.yml", "serve/__main__.py"} <= places


@pytest.mark.parametrize(
    "line",
    [
        "pip install " + "evalgate",
        "python -m pip install -q '" + "evalgate[serve]'",
        "default: " + "evalgate[serve]",
        "pip install evalgate-lm[" + "server]",
        "pip install evalgate-lm" + "==0.0.1",
        "match=r\"pip install '" + "evalgate\\[demo\\]'\"",
    ],
)
def test_a_wrong_install_line_is_noticed(line):
    assert [complaint(match) for match in requirements(line)] != [None]


def test_a_checkout_is_installed_by_its_own_extras():
    for path, text in pages():
        for extras in re.findall(r"pip install[^\n`]*'\.\[([\w,]+)\]'", text):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]), path


def test_the_index_page_has_no_link_that_an_index_cannot_follow():
    text = (ROOT / PROJECT["readme"]).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)|<a href=\"([^\"]+)\"|^\[[^\]]+\]:\s*(\S+)", text, re.MULTILINE)
    assert [t for found in targets for t in found if t and not t.startswith("https://")] == []
    assert all(url.startswith("https://") for url in PROJECT["urls"].values())


def test_the_metadata_is_whole():
    assert {"name", "description", "readme", "license", "authors", "keywords", "classifiers", "urls"} <= set(PROJECT)
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    versions = [c for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert versions[0].endswith(PROJECT["requires-python"].removeprefix(">="))


def test_ci_takes_a_pinned_version_and_the_cpu_build_of_torch():
    inputs = yaml.safe_load((ROOT / "docs/ci/action.yml").read_text())["inputs"]
    assert inputs["install"]["default"] == f"{PROJECT['name']}[serve]=={VERSION}"
    assert inputs["torch-index"]["default"].endswith("/whl/cpu")
    before = yaml.safe_load((ROOT / "docs/ci/gitlab-ci.yml").read_text())["model gate"]["before_script"]
    assert "/whl/cpu" in before[0] and f"{PROJECT['name']}[serve]=={VERSION}" in before[1]


def test_the_version_is_read_from_the_code():
    """Not from what is installed under this name, which may be another project's."""
    from serve.api.routes.version import versions

    assert versions()["evalgate"] == VERSION  # of server and client
    text = "".join(text for path, text in pages() if path.parts[0] in ("evalgate", "serve"))
    assert not re.search(r"metadata\W+(import )?version\(?\W*evalgate", text)


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "fastapi", "uvicorn", "xllamacpp", "starlette"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


@pytest.mark.parametrize(
    ("call", "extra"),
    [
        ("from serve.__main__ import main; sys.exit(main(['demo', '--port', '0']))", "serve"),
        ("from serve.errors import LoadFailed\nfrom serve.llamacpp.__main__ import _demo_path\n"
         "try:\n    _demo_path()\nexcept LoadFailed as error:\n    sys.exit(error.message)", "demo"),
    ],
)  # fmt: skip
def test_the_base_install_says_what_to_install(call, extra):
    """Children of a base install name the install line, and not the module that was missing first."""
    done = subprocess.run([sys.executable, "-c", WITHOUT + call], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert f"pip install '{PROJECT['name']}[{extra}]'" in done.stderr
