"""What a release is made of: the checklist, the container's recipe, the citation, and the files of the wheel."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import re
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from evalgate.core import VERSION

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)


@pytest.fixture
def release():
    spec = importlib.util.spec_from_file_location("release", ROOT / "tools/release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tracked(*folders):
    done = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("the files of a release are those that git knows, and this is no checkout")
    return done.stdout.splitlines()


class TestWheel:
    """What setuptools is told to put into it."""

    def test_every_data_file_of_the_packages_is_named(self):
        named = PYPROJECT["tool"]["setuptools"]["package-data"]
        for path in tracked("evalgate", "serve"):
            package, _, inside = path.partition("/")
            if not path.endswith(".py"):
                assert any(fnmatch.fnmatch(inside, pattern) for pattern in named[package]), f"{path} is left out"

    def test_every_folder_of_code_is_a_package(self):
        for path in tracked("evalgate", "serve"):
            assert not path.endswith(".py") or (ROOT / path).with_name("__init__.py").is_file(), path

    def write(self, folder, names, tag="py3-none-any"):
        path = folder / f"evalgate_lm-{VERSION}-{tag}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, "")
        return path

    def test_a_wheel_that_lacks_a_file_or_has_another_is_refused(self, release, tmp_path):
        files = ["evalgate/a.py", "evalgate/b.toml"]
        whole = self.write(tmp_path, [*files, "evalgate_lm-1.dist-info/METADATA"])
        release._check_wheel(whole, files)
        with pytest.raises(release.Failed, match=r"lacks evalgate/c\.toml .*package-data"):
            release._check_wheel(whole, [*files, "evalgate/c.toml"])
        with pytest.raises(release.Failed, match=r"holds evalgate/b\.toml .*not committed"):
            release._check_wheel(whole, files[:1])
        with pytest.raises(release.Failed, match="one platform only"):
            release._check_wheel(self.write(tmp_path, files, "cp311-cp311-linux_x86_64"), files)


class TestChecklist:
    """The steps on a checkout of their own."""

    @pytest.fixture
    def checkout(self, release, tmp_path, monkeypatch):
        for path in ("evalgate/core.py", "serve/__init__.py", "CITATION.cff", "Dockerfile", "docs/ci/action.yml",
                     "docs/ci/gitlab-ci.yml"):  # fmt: skip
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text((ROOT / path).read_text(encoding="utf-8"), encoding="utf-8")
        (tmp_path / "CHANGELOG.md").write_text(
            f"# Changelog\n\n## Unreleased\n\n## {VERSION} (2026-01-02)\n\n- News.\n"
        )
        monkeypatch.setattr(release, "ROOT", tmp_path)
        self.git(tmp_path, "init", "-q")
        self.commit(tmp_path)
        return tmp_path

    def git(self, place, *arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *arguments], cwd=place, check=True, capture_output=True)

    def commit(self, place):
        self.git(place, "add", "-A")
        self.git(place, "commit", "-qm", "x")

    def test_a_clean_checkout_passes_and_a_changed_one_does_not(self, release, checkout):
        assert re.fullmatch(r"[0-9a-f]{7,}", release.tree())
        (checkout / "new.txt").write_text("")
        with pytest.raises(release.Failed, match=r"new\.txt.*commit"):
            release.tree()

    def test_a_file_at_another_version_is_named(self, release, checkout):
        assert release.versions() == VERSION
        path = checkout / "CITATION.cff"
        path.write_text(path.read_text().replace(f"version: {VERSION}", "version: 9.9.9"))
        with pytest.raises(release.Failed, match=r"CITATION\.cff"):
            release.versions()

    def test_the_changelog_must_speak_of_this_version_alone(self, release, checkout):
        assert release.changelog()
        file, text = checkout / "CHANGELOG.md", (checkout / "CHANGELOG.md").read_text()
        file.write_text(text.replace("## Unreleased\n", "## Unreleased\n\n- More.\n"))
        with pytest.raises(release.Failed, match="still has entries under Unreleased"):
            release.changelog()
        file.write_text(text.replace("- News.\n", ""))
        with pytest.raises(release.Failed, match=f"says nothing about {VERSION}"):
            release.changelog()

    def test_a_version_is_released_once(self, release, checkout, tmp_path_factory):
        assert release.untagged() == f"v{VERSION}"
        remote = tmp_path_factory.mktemp("remote")
        self.git(remote, "init", "-q", "--bare")
        self.git(checkout, "remote", "add", "origin", str(remote))
        self.git(checkout, "tag", f"v{VERSION}")
        with pytest.raises(release.Failed, match="there is a tag"):
            release.untagged()
        self.git(checkout, "push", "-q", "origin", f"v{VERSION}")
        self.git(checkout, "tag", "-d", f"v{VERSION}")
        with pytest.raises(release.Failed, match="origin has a tag"):
            release.untagged()

    def test_a_step_that_fails_does_not_end_the_others(self, release, monkeypatch, capsys):
        def bad():
            raise release.Failed("do this")

        monkeypatch.setattr(release, "STEPS", {"first": bad, "second": lambda: "fine"})
        assert release.main([]) == 1
        said = capsys.readouterr().out
        assert "first: FAILED: do this" in said and "second: ok (fine)" in said and "git tag" not in said
        assert release.main(["--skip", "first"]) == 0
        said = capsys.readouterr().out
        assert "not run: first" in said and f"git tag -a v{VERSION}" in said
        with pytest.raises(SystemExit):
            release.main(["--only", "third"])

    def test_the_list_says_what_each_step_makes_sure_of(self, release, capsys):
        assert release.main(["--list"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == list(release.STEPS)
        assert all(len(line.split()) > 4 for line in lines)

    def test_a_command_that_fails_is_said_with_its_last_words(self, release):
        with pytest.raises(release.Failed, match=r"ended with 3: no luck"):
            release._out("sh", "-c", "echo no luck >&2; exit 3")


def test_versions_of_the_docs_are_listed_newest_first_and_the_start_page_leads_to_the_latest(release, tmp_path):
    for new in ("0.9.0", "0.10.0", "1.0.0rc1", "0.10.0"):
        names = release._write_versions(tmp_path, new)
    assert names == ["1.0.0rc1", "0.10.0", "0.9.0"]
    entries = json.loads((tmp_path / "versions.json").read_text())
    assert {e["version"]: e["aliases"] for e in entries} == {"1.0.0rc1": [], "0.10.0": ["latest"], "0.9.0": []}
    assert 'url=0.10.0/index.html"' in (tmp_path / "index.html").read_text()


def instructions():
    """(instruction, the rest) of the Dockerfile in order; comments left out, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name, rest.strip()


def stages():
    """The instructions of each stage by its name, with those of the stages that it is made from."""
    found, name = {}, ""
    for instruction, rest in instructions():
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = list(found.get(base, [("FROM", base)]))
        elif name:
            found[name].append((instruction, rest))
    return found


def in_context(path):
    """Whether the build is given a path: of the rules of .dockerignore the last that matches it holds."""
    given = True
    for rule in (ROOT / ".dockerignore").read_text().splitlines():
        if not rule or rule.startswith("#"):
            continue
        pattern = rule.removeprefix("!")
        if any(fnmatch.fnmatch(part, pattern) for part in (path, *map(str, Path(path).parents))):
            given = rule.startswith("!")
    return given


class TestDockerfile:
    """No image is built here; what can be wrong without building one is looked for."""

    def test_what_is_copied_is_there_and_given_to_the_build(self):
        copied = []
        for name, rest in instructions():
            if name == "COPY" and not rest.startswith("--from"):
                copied += rest.split()[:-1]
        assert {"evalgate", "serve", "pyproject.toml", "constraints.txt"} <= set(copied)
        for path in copied:
            assert (ROOT / path).exists(), path
            assert in_context(path), f"{path} is not in the build's context"
        assert not in_context("tests") and not in_context(".venv") and not in_context("docs/cli.md")
        needed = [PROJECT["readme"], *PROJECT["license-files"]]
        assert set(needed) <= set(copied)  # else the wheel cannot be built

    def test_stages_are_made_of_earlier_ones(self):
        seen = []
        for name, rest in instructions():
            if name == "FROM":
                base, _, stage = rest.partition(" AS ")
                assert base in seen or base.startswith("python:${PYTHON}-"), base
                seen.append(stage)
            for source in re.findall(r"--from=(\S+)", rest):
                assert source in seen, source
        assert {"cpu", "cuda"} <= set(seen) and seen[-1] == "cpu"

    def test_versions_are_those_of_this_project(self):
        given = re.findall(r"^(\w+)=(\S+)$", "\n".join(rest for name, rest in instructions() if name == "ARG"), re.M)
        arguments = {}
        for name, value in given:
            assert arguments.setdefault(name, value) == value, f"two values of {name}"
        assert arguments["VERSION"] == VERSION and arguments["TORCH"] == PINS["torch"]
        assert f"{arguments['PYTHON']}.0" in SpecifierSet(PROJECT["requires-python"])
        assert any(c.endswith(f":: {arguments['PYTHON']}") for c in PROJECT["classifiers"])
        inputs = yaml.safe_load((ROOT / "docs/ci/action.yml").read_text())["inputs"]
        assert arguments["TORCH_INDEX"] == inputs["torch-index"]["default"]

    @pytest.mark.parametrize("target", ["cpu", "cuda"])
    def test_an_image_runs_the_command_as_a_user_without_rights(self, target):
        found = stages()[target]
        last = dict(found)
        assert json.loads(last["ENTRYPOINT"]) == ["evalgate"] and json.loads(last["CMD"]) == ["--help"]
        assert last["USER"] == "evalgate" and any("useradd" in rest for name, rest in found if name == "RUN")
        assert "EVALGATE_CACHE=/cache" in last["ENV"] and last["VOLUME"] == "/cache"
        runs = [rest for name, rest in found if name == "RUN" and "pip install" in rest]
        assert "torch==${TORCH}" in runs[0]  # before anything that would bring another build of it
        assert ("--index-url" in runs[0]) == (target == "cpu")
        (extras,) = re.findall(r"\[([\w,]+)\]", runs[1])
        assert "-c /tmp/constraints.txt" in runs[1] and set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_citation_is_valid_and_of_this_version():
    """The keys that the format asks for, and no version of its own."""
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "version", "license", "type"} <= set(found)
    assert found["cff-version"] == "1.2.0" and found["type"] == "software"
    assert str(found["version"]) == VERSION and found["license"] == PROJECT["license"]
    assert found["url"] in PROJECT["urls"].values()
    assert [a["name"] for a in found["authors"]] == [a["name"] for a in PROJECT["authors"]]
    assert all(isinstance(word, str) and word for word in found["keywords"])
