"""The release checklist, run: `make release`, or `python tools/release.py --only build --only install`.

Each step is a function of this file; its first line says what it makes sure of. A step that fails says why and what to
do; the others still run, so that one pass shows everything. Nothing is published and no tag is made: at the end stands
what is left to a person.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
DEMO_WINDOWS = 2


class Failed(Exception):
    """A step found something that must not be released; the message says what to do."""


def version() -> str:
    """The version that the code says."""
    found = re.search(r'^VERSION = "([^"]+)"$', (ROOT / "evalgate/core.py").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise Failed("evalgate/core.py has no VERSION: put it back")
    return found[1]


def tag() -> str:
    """The tag of this version."""
    return f"v{version()}"


def tree() -> str:
    """The checkout is clean: what is released is what is committed."""
    changed = _out("git", "status", "--porcelain").splitlines()
    if changed:
        raise Failed(f"{len(changed)} files are changed or not committed ({changed[0].strip()} ...): commit them")
    return _out("git", "rev-parse", "--short", "HEAD").strip()


def versions() -> str:
    """Every file that names the version names this one."""
    places = {
        "serve/__init__.py": rf'^VERSION = "{re.escape(version())}"',
        "CITATION.cff": rf"^version: {re.escape(version())}$",
        "Dockerfile": rf"^ARG VERSION={re.escape(version())}$",
        "docs/ci/action.yml": rf"==\s*{re.escape(version())}\s*$",
        "docs/ci/gitlab-ci.yml": rf"=={re.escape(version())}",
    }
    wrong = [p for p, line in places.items() if not re.search(line, (ROOT / p).read_text("utf-8"), re.MULTILINE)]
    if wrong:
        raise Failed(f"not at version {version()}: {', '.join(wrong)}; change what they say")
    return version()


def changelog() -> str:
    """The changelog has a section for this version, with entries, and nothing is left under Unreleased."""
    sections = _sections((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    if sections.get("Unreleased", "").strip():
        raise Failed(f"CHANGELOG.md still has entries under Unreleased: call that section {version()}")
    if not sections.get(version(), "").strip():
        raise Failed(f"CHANGELOG.md says nothing about {version()}: write what a user must know")
    return f"{len(sections[version()].splitlines())} lines"


def _sections(text: str) -> dict[str, str]:
    """Heading -> what stands below it, of the second level; a date after a version is not part of its heading."""
    parts = re.split(r"^## +(\S+).*$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def untagged() -> str:
    """Nobody has released this version yet: its tag is neither here nor at the remote."""
    if _out("git", "tag", "--list", tag()).strip():
        raise Failed(f"there is a tag {tag()} already: raise VERSION, or remove the tag if nothing was published")
    for remote in _out("git", "remote").split():
        if _out("git", "ls-remote", "--tags", remote, f"refs/tags/{tag()}").strip():
            raise Failed(f"{remote} has a tag {tag()} already: raise VERSION")
    return tag()


def checks() -> str:
    """`make check` passes: format, lint, types, layers, documentation."""
    _run("make", "check")
    return ""


def tests() -> str:
    """`make suite` passes: every test."""
    _run("make", "suite")
    return ""


def build() -> str:
    """A wheel and a source archive are built, for any platform, and hold every file of the packages."""
    for old in DIST.glob("evalgate_lm-*"):
        old.unlink()
    _out(sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT))
    made = wheel()
    _check_wheel(made, _out("git", "ls-files", "evalgate", "serve").splitlines())
    return f"{made.name}, {made.stat().st_size >> 10} KiB"


def wheel() -> Path:
    """The wheel of this version in dist/."""
    found = list(DIST.glob(f"evalgate_lm-{version()}-*.whl"))
    if len(found) != 1:
        raise Failed(f"dist/ holds {len(found)} wheels of {version()}: run the step build")
    return found[0]


def _check_wheel(path: Path, tracked: Sequence[str]) -> None:
    """Raise Failed where a wheel is for one platform, or holds other files than the tracked ones of the packages."""
    if not path.name.endswith("-py3-none-any.whl"):
        raise Failed(f"{path.name} is for one platform only: nothing in the packages may be compiled")
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    missing, foreign = sorted(set(tracked) - names), sorted(names - set(tracked))
    if missing:
        raise Failed(f"the wheel lacks {missing[0]} ({len(missing)} files): add it to package-data in pyproject.toml")
    if foreign:
        raise Failed(f"the wheel holds {foreign[0]} ({len(foreign)} files), which is not committed: remove it")


def install() -> str:
    """The wheel installs alone in a fresh environment, and the commands run from an empty folder without torch."""
    with _fresh() as (python, place, run):
        run(python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), str(wheel()))
        said = run("evalgate", "--version").strip()
        if said != f"evalgate {version()}":
            raise Failed(f"the installed command says '{said}' and not {version()}: build the wheel again")
        run("evalgate", "--help")
        run("evalgate", "policy", "explain", "8bit")  # package data
        found = json.loads(run("evalgate", "doctor", "--json"))
        home = run(python, "-c", "import evalgate; print(evalgate.__file__)").strip()
        if not found["usable"] or not home.startswith(str(place)):
            raise Failed(f"the installed wheel is not usable ({found['problems'] or home}): see evalgate doctor")
        return f"{len(found['packages'])} packages, serving is {found['checks'][0]['status']}"


def demo() -> str:
    """The demo runs from the wheel: the README's first command, in a fresh environment."""
    with _fresh() as (python, _, run):
        constraints = ("-c", str(ROOT / "constraints.txt"))
        run(python, "-m", "pip", "install", "-q", *constraints, "torch")  # first, so that it is the pinned one
        run(python, "-m", "pip", "install", "-q", *constraints, f"{wheel()}[demo]")
        found = json.loads(run("evalgate", "doctor", "demo", "--json"))
        if not found["usable"]:
            raise Failed(f"the demo's environment is not usable: {found['problems']}")
        shown = run("evalgate", "kl", "--ref", "demo", "--cand", "demo@int8", "--limit", str(DEMO_WINDOWS), "--json")
        mean = json.loads(shown)["comparisons"][0]["overall"]["metrics"]["kl"]["statistics"]["mean"]["value"]
        if not 1e-5 < mean < 0.1:
            raise Failed(f"mean KL of the demo is {mean}, and it was about 0.003 before: find out what changed")
        return f"mean KL {mean:.4f}"


def docs() -> str:
    """The documentation of this version is built into dist/docs/VERSION, beside those of other versions."""
    place = Path(os.environ.get("EVALGATE_DOCS", DIST / "docs"))
    config = ROOT / f".mkdocs-release-{os.getpid()}.yml"  # beside the real one, whose paths are relative to it
    config.write_text("INHERIT: mkdocs.yml\nextra:\n  version:\n    provider: mike\n", encoding="utf-8")
    try:
        env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
        _run(sys.executable, "-m", "mkdocs", "build", "-q", "-f", str(config), "-d", str(place / version()), env=env)
    finally:
        config.unlink(missing_ok=True)
    known = _write_versions(place, version())
    return f"{place / version()}, of {len(known)} versions"


def _write_versions(place: Path, new: str) -> list[str]:
    """Write versions.json for the theme's version menu, and the page that leads to the newest; returns newest first."""
    from packaging.version import Version

    file = place / "versions.json"
    before = [entry["version"] for entry in json.loads(file.read_text("utf-8"))] if file.exists() else []
    names = sorted({*before, new}, key=Version, reverse=True)
    latest = next((name for name in names if not Version(name).is_prerelease), names[0])
    entries = [{"version": n, "title": n, "aliases": ["latest"] if n == latest else []} for n in names]
    file.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    target = f"{latest}/index.html"
    (place / "index.html").write_text(
        f'<!doctype html><meta charset="utf-8"><title>evalgate</title>\n'
        f'<meta http-equiv="refresh" content="0; url={target}"><a href="{target}">evalgate {latest}</a>\n',
        encoding="utf-8",
    )
    return names


STEPS: dict[str, Callable[[], str]] = {
    step.__name__: step for step in (tree, versions, changelog, untagged, checks, tests, build, install, demo, docs)
}
BY_HAND = """\
What is left to a person:
  git tag -a {tag} -m "evalgate {version}" && git push origin {tag}
  upload dist/evalgate_lm-{version}* to the package index
  docker build --target cpu -t evalgate:{version} . ; docker build --target cuda -t evalgate:{version}-cuda .
  put dist/docs where the documentation is served from; keep the folders of other versions beside it
  open a new section Unreleased in CHANGELOG.md, and raise VERSION"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps; 0 where all passed, 1 where one failed."""
    parser = argparse.ArgumentParser(description="The release checklist. Publishes nothing.")
    parser.add_argument("--only", action="append", choices=STEPS, metavar="STEP", help="run this step; repeatable")
    parser.add_argument("--skip", action="append", choices=STEPS, metavar="STEP", default=[], help="leave a step out")
    parser.add_argument("--list", action="store_true", help="show the steps and exit")
    options = parser.parse_args(argv)
    if options.list:
        for name, step in STEPS.items():
            print(f"{name:10} {(step.__doc__ or '').splitlines()[0]}")
        return 0
    failed = []
    for name in [name for name in STEPS if name in (options.only or STEPS) and name not in options.skip]:
        print(f"{name} ...", flush=True)
        try:
            said = STEPS[name]()
        except Failed as error:
            failed.append(name)
            print(f"{name}: FAILED: {error}", flush=True)
        else:
            print(f"{name}: ok{f' ({said})' if said else ''}", flush=True)
    left = [name for name in STEPS if name in options.skip or (options.only and name not in options.only)]
    print(f"not run: {', '.join(left)}" if left else "every step was run")
    print(f"failed: {', '.join(failed)}" if failed else BY_HAND.format(tag=tag(), version=version()))
    return 1 if failed else 0


class _fresh:  # noqa: N801 (used as a function)
    """A new virtual environment in a temporary folder, an empty folder beside it, and a way to run commands in that.

    Nothing of the checkout can be found from there: no PYTHONPATH, and the environment's commands come first.
    """

    def __enter__(self) -> tuple[str, Path, Callable[..., str]]:
        """The environment's python, the folder of both, and `run`."""
        self._folder = tempfile.TemporaryDirectory(prefix="evalgate-release-")
        place = Path(self._folder.name).resolve()
        _run(sys.executable, "-m", "venv", str(place / "venv"))
        (place / "empty").mkdir()
        bin_folder = place / "venv" / "bin"
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
        env = {**kept, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "EVALGATE_CACHE": str(place / "cache")}

        def run(*command: str) -> str:
            found = shutil.which(command[0], path=env["PATH"]) or command[0]
            return _out(found, *command[1:], cwd=place / "empty", env=env)

        return str(bin_folder / "python"), place, run

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


def _run(*command: str, env: dict[str, str] | None = None) -> None:
    """Run a command whose output is for the reader. Raises Failed where it fails."""
    if subprocess.run(command, cwd=ROOT, env=env, check=False).returncode:
        raise Failed(f"`{' '.join(command)}` failed: see above")


def _out(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """What a command prints, in the checkout by default. Raises Failed with its last words where it fails."""
    done = subprocess.run(command, cwd=cwd or ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise Failed(f"`{' '.join(command)}` ended with {done.returncode}: {said}")
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
