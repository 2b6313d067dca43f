"""Every `evalgate` command that the documentation shows runs, in the order of its page, on tiny models and texts.

A tiny checkpoint stands for `demo` and `./ckpt`, tiny GGUF files for those that a page names,
a server over the tiny model for every endpoint, short texts for every file, and small numbers for large ones. Run
folders, policies and recordings that a page takes for granted are made before its first command that needs them.
Commands that cannot run here are in `ELSEWHERE`, with where they are tested; `test_docs.py` parses those too.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalgate.cli.app import invoke
from evalgate.server.process import EmbeddedServer
from evalgate.store.runs import write_run
from tests.checkpoints import texts
from tests.evalgate.cli.test_cli import MemoryOutput
from tests.evalgate.sample_run import source, summary, token_table
from tests.test_docs import BLOCKS, ROOT

pytestmark = pytest.mark.slow

# What is not run, by a part of the command, and why.
ELSEWHERE = {
    "evalgate serve ": "stays up until it is stopped: tests/serve/api/test_operations.py",
    "evalgate doctor": "loads what is installed: tests/evalgate/doctor/test_doctor.py",
    "evalgate view": "stays up until it is stopped: tests/evalgate/viewer/test_viewer.py",
    "--install-completion": "writes into the user's shell",
    "llama.cpp:": "starts llama.cpp: tests/evalgate/measure/test_endpoints_llamacpp.py",
    "org/name": "a data set of the hub, which no test asks: tests/evalgate/corpora/test_hub.py",
    "--device cuda": "needs a GPU",
    "--ray": "needs the extra of that name: tests/evalgate/measure/test_ray.py",
    "s3://": "somebody's store; what is like one: tests/evalgate/cli/test_urls.py",
    "--python": "another environment: tests/evalgate/measure/test_load_mode.py",
    "+./adapter": "needs an adapter: tests/serve/models/test_formats.py",
    "--load-mode both": "needs a checkpoint that can be loaded both ways: tests/evalgate/measure/test_load_mode.py",
}
MEASURE = {"kl", "agree", "ppl", "gate", "record", "sweep"}
MOST = {"--limit": 4, "--positions": 16, "--prompts": 3, "--context": 32, "--stride": 16}
CODES = {"gate": {0, 1, 3}, "verify": {0, 1, 3}}
POLICY = '[[rules]]\nmetric = "kl"\nmax = 0.01\n'


def commands(block_text: str) -> Iterator[str]:
    for line in block_text.splitlines():
        for part in re.split(r"(?<=\s)\|\s|(?<=\s)>\s\S+", line.split(" # ")[0]):
            if part.strip().startswith("evalgate "):
                yield part.strip()


SHOWN: dict[str, list[str]] = {}
for _block in BLOCKS:
    if _block.language == "sh" and not _block.page.startswith("reports/"):
        SHOWN.setdefault(_block.page, []).extend(commands(_block.text))
PAGES = sorted(page for page, lines in SHOWN.items() if lines)


class Desk:
    """What a reader of a page has before him."""

    def __init__(self, folder: Path, models: tuple[str, str], endpoint: str) -> None:
        self.folder = folder
        ref, cand = models
        gguf = [str(Path(ref).parent / name) for name in ("model.gguf", "model-q4.gguf")]
        self.named = {
            **dict.fromkeys(("demo", "./ckpt", "./checkpoint", "./reference", "./big"), ref),
            **dict.fromkeys(("./ckpt-quantized", "./new", "./old"), cand),
            **dict(zip(("model.gguf", "model-q4.gguf"), gguf, strict=True)),
        }
        self.endpoint = endpoint
        self.kept = folder.parent / "kept"
        self.kept.mkdir()
        self.done: dict[str, Path | None] = {}  # by command: a copy of what it wrote to --out

    def begin(self, page: str) -> None:
        """A fresh folder with the texts and policies that a page may name."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        texts(self.folder / "texts")
        long = "".join(f"# {n}\n{'a fox and a dog and ' * 8}\n" for n in range(6))
        for name in ("notes.txt", "book.txt", "file.txt", "text.txt"):
            (self.folder / name).write_text(long)
        (self.folder / "reviews.csv").write_text("body\n" + "".join(f"good fox number {n}\n" for n in range(4)))
        for name in ("policy.toml",):
            (self.folder / name).write_text(POLICY)
        listed = f"ref = {json.dumps(self.named['demo'])}\ncandidates = [{json.dumps(self.named['./new'])}]\n"
        (self.folder / "list.toml").write_text(listed)
        self.candidates = self._candidates(SHOWN[page])

    def words(self, line: str) -> list[str]:
        """The command's words after `evalgate`, with what is here in the place of what is named."""
        found = [self._word(word) for word in shlex.split(line)[1:]]
        for place, word in enumerate(found[:-1]):
            if word in MOST and found[place + 1].isdigit():
                found[place + 1] = str(min(MOST[word], int(found[place + 1])))
        ref = found[found.index("--ref") + 1] if "--ref" in found else ""
        if found[0] in MEASURE and not {"--data", "--run"} & set(found) and not ref.endswith((".trace", ".kld")):
            found += ["--data", "texts/"]
        for command, option in (("record", "--context"), ("verify", "--prompts")):
            if found[0] == command and option not in found:
                found += [option, str(MOST[option])]
        return found

    def ready(self, words: list[str]) -> list[str]:
        """Make what the command reads and clear where it writes; the words, with `--overwrite` where a run is there."""
        out = _out(words)
        for word in words:
            if word != out and word.startswith("runs/") and not (self.folder / word).exists():
                self.run(self.folder / word, beside=[self.folder / one for one in words if one.startswith("runs/")])
            if word != out and word.endswith(".trace") and not (self.folder / word).exists():
                self.record(word)
        place = self.folder / out
        if out and (place / "summary.json").exists():
            return [*words, "--overwrite"]
        if out and place.exists():
            shutil.rmtree(place) if place.is_dir() else place.unlink()
        return words

    def run(self, folder: Path, *, beside: list[Path]) -> None:
        """A run that the page takes for granted: of the same positions as those that the command names beside it."""
        for made in (*beside, *(path.parent for path in sorted((self.folder / "runs").glob("*/summary.json")))):
            if (made / "summary.json").exists():
                shutil.copytree(made, folder)
                return
        table = token_table(self.candidates, documents=6)
        write_run(folder, manifest={}, table=table, summary=summary(table, reference=source("demo")), token_texts=TEXTS)

    def again(self, words: list[str]) -> bool:
        """Whether the command ran before, on another page; what it wrote is then put where it was."""
        said = shlex.join(words)
        if said not in self.done:
            return False
        kept = self.done[said]
        if kept is not None:
            place = self.folder / _out(words)
            shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
            _copy(kept, place)
        return True

    def keep(self, words: list[str]) -> None:
        """Remember that the command ran."""
        place = self.folder / _out(words)
        kept = self.kept / str(len(self.done)) if _out(words) and place.exists() else None
        if kept is not None:
            _copy(place, kept)
        self.done[shlex.join(words)] = kept

    def record(self, name: str) -> None:
        """A recording that the page takes for granted."""
        words = ["record", "--ref", self.named["demo"], "--data", PARTS.get(name, "texts/"), "--out", name]
        assert invoke([*words, "--context", "32"], MemoryOutput()) == 0

    def _candidates(self, lines: list[str]) -> tuple[str, ...]:
        """The names of candidates that the page asks stored runs for."""
        names = [self._word(n) for line in lines for n in re.findall(r"--candidate(?:-[ab])? (\S+)", line)]
        return tuple(dict.fromkeys(names)) or ("demo@int8",)

    def _word(self, word: str) -> str:
        if re.match(r"https?://", word):
            return self.endpoint
        if word == "fox.txt":
            return "prose/fox.txt"
        base, at, conversion = word.partition("@")
        conversion = conversion.replace("-g128", "-g16")  # a tiny model's rows are no longer
        return f"{self.named[base]}{at}{conversion}" if base in self.named else word


def _out(words: list[str]) -> str:
    return words[words.index("--out") + 1] if "--out" in words else ""


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)


TEXTS = {token: ("the", " x_1", "12", "\n", ".")[token % 5] for token in range(1000)}
PARTS = {"part1.trace": "texts/prose", "part2.trace": "texts/code"}


@pytest.fixture(scope="module")
def desk(tiny: tuple[str, str], warm: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    from tests.gguf_files import write_llama
    from tests.serve.architectures import built
    from tests.serve.tiny_models import byte_level

    beside = Path(tiny[0]).parent
    for name, rounded in (("model.gguf", "-"), ("model-q4.gguf", "q_proj")):
        write_llama(built("llama"), byte_level(bos=True), beside / name, q8_0=rounded)
    with (
        pytest.MonkeyPatch.context() as patch,
        EmbeddedServer([tiny[0]], options=("--served-model-name", "my-model")) as server,
    ):
        patch.setenv("EVALGATE_ENDPOINT_KEY", server.key)
        patch.setenv("EVALGATE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield Desk(tmp_path_factory.mktemp("desk") / "page", tiny, f"{server.url}/v1#my-model")


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page: str, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.begin(page)
    monkeypatch.chdir(desk.folder)
    for line in SHOWN[page]:
        if any(part in line for part in ELSEWHERE):
            continue
        words = desk.words(line)
        if desk.again(words):
            continue
        output = MemoryOutput()
        with (desk.folder / "notes.txt").open() as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            code = invoke(desk.ready(words), output)
        said = f"{page}: {line}\nran as: evalgate {shlex.join(words)}\n{output.text}"
        assert code in CODES.get(words[0], {0}), said
        desk.keep(words)


def test_what_is_not_run_is_shown_somewhere_and_tested_elsewhere() -> None:
    lines = [line for page in PAGES for line in SHOWN[page]]
    assert len(lines) > 80
    for part, why in ELSEWHERE.items():
        assert any(part in line for line in lines) or part == "--install-completion", part
        for file in re.findall(r"tests/\S+\.py", why):
            assert (ROOT / file).exists(), file
    run = [line for line in lines if not any(part in line for part in ELSEWHERE)]
    assert len(run) > 0.8 * len(lines)
