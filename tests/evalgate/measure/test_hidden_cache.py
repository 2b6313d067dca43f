"""The cache of a reference's hidden states: the next run needs no body, and its table is the same to the last bit."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from evalgate.cli.app import invoke
from evalgate.core import Window
from evalgate.errors import MismatchError, UsageError
from evalgate.measure.run import RunRequest, run
from evalgate.server.client import EmbeddedClient, KeptRows
from evalgate.server.process import EmbeddedServer
from evalgate.store import hidden
from evalgate.store.runs import Run
from tests.checkpoints import texts
from tests.evalgate.cli.test_cli import MemoryOutput
from tests.evalgate.measure.test_trace import Stops
from tests.serve.architectures import built, perturbed
from tests.serve.tiny_models import byte_level, metaspace, save

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(hidden.VARIABLE, "1G")
    monkeypatch.setattr("evalgate.server.batches.BATCH_TOKENS", 250)  # several batches
    return tmp_path / "cache"


class Seen:
    """Runs, and what their servers say of the reference's rows at the end of each."""

    def __init__(self, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data, self.rows = data, []
        asked = EmbeddedClient.kept_rows

        def noted(client: EmbeddedClient, model: str) -> KeptRows | None:
            self.rows.append(asked(client, model))
            return self.rows[-1]

        monkeypatch.setattr(EmbeddedClient, "kept_rows", noted)

    def __call__(self, ref: str, *cands: str, observer: Any = None, **options: Any) -> Run:
        self.rows.clear()
        options = {"data": self.data, "context": 32, "resume": False, **options}
        return run(RunRequest.of("kl", ref, cands, **options), observer=observer)

    @property
    def last(self) -> KeptRows | None:
        return self.rows[-1] if self.rows else None


@pytest.fixture
def seen(data: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(data, monkeypatch)


def row_files(cache: Path) -> list[Path]:
    return sorted(cache.glob("hidden/*/*.rows"))


def test_the_second_run_needs_no_body(tiny: tuple[str, str], seen: Seen, cache: Path) -> None:
    """Of another candidate, of several, of the reference itself; the table is that of a run without a cache."""
    ref, cand = tiny
    first = seen(ref, cand)
    count = seen.last.kept
    assert count == len(row_files(cache)) > 2 and not seen.last.stored and seen.last.found == 0
    second = seen(ref, cand)
    assert seen.last == KeptRows(found=count, kept=0, rebuilt=0, problem="", stored=True)
    without = seen(ref, cand, cache=False)
    assert seen.last is None
    for other in (second, without):
        assert other.table.equals(first.table) and other.alternatives_table.equals(first.alternatives_table)
        ours, theirs = (each.summary.reference.model_dump(exclude={"load_seconds"}) for each in (other, first))
        assert ours == theirs
        assert other.token_texts == first.token_texts
    several = seen(ref, f"{cand}@bf16", cand, ref)
    assert seen.last.stored and seen.last.found == count
    mine = several.tokens[several.tokens["candidate"] == cand].reset_index(drop=True)
    assert mine["kl"].tolist() == first.tokens["kl"].tolist()
    # the noise floor measures how far the model repeats itself: its body is loaded for that
    noisy = seen(ref, cand, noise_floor=True)
    assert noisy.table.equals(first.table) and noisy.summary.comparisons[0].noise is not None


def test_what_changes_numbers_is_another_entry(tiny: tuple[str, str], seen: Seen, cache: Path) -> None:
    """Another dtype, other windows, other weights: nothing of the first run is used."""
    ref, cand = tiny
    seen(ref, cand)
    kept = seen.last.kept
    for spec, more in ((f"{ref}@bf16", {}), (cand, {})):
        seen(spec, ref, **more)
        assert not seen.last.stored and seen.last.found == 0 and seen.last.kept == kept
    seen(ref, cand, context=24)  # the same model and other windows: its body is loaded when the first batch is missing
    assert seen.last.stored and seen.last.found == 0 and seen.last.kept > 0
    seen(ref, cand, logits="model")
    assert seen.last is None
    assert len(list(cache.glob("hidden/*/about.json"))) == 3


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "swapped", "head", "about", "head gone"])
def test_what_cannot_be_trusted_is_computed_anew(tiny: tuple[str, str], seen: Seen, cache: Path, damage: str) -> None:
    first = seen(*tiny)
    one, two = row_files(cache)[:2]
    head = next(cache.glob("heads/*.safetensors"))
    about = next(cache.glob("hidden/*/about.json"))
    content = one.read_bytes()
    if damage == "cut":
        one.write_bytes(content[:-7])
    elif damage == "flipped":
        one.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif damage == "empty":
        one.write_bytes(b"")
    elif damage == "swapped":  # whole, and of another batch
        one.write_bytes(content.replace(b'"xxh3"', b'"xxh4"'))
    elif damage == "head":
        raw = bytearray(head.read_bytes())
        raw[-5] ^= 1
        head.chmod(0o600)
        head.write_bytes(raw)
    elif damage == "head gone":
        head.unlink()
    else:
        about.write_text(about.read_text().replace('"head"', '"hat"'))
    again = seen(*tiny)
    assert again.table.equals(first.table)
    rows = damage in ("cut", "flipped", "empty", "swapped")
    assert seen.last.rebuilt == (1 if rows else 0) and seen.last.stored == rows
    assert any("computed anew" in note for note in again.summary.notes) == rows
    assert seen(*tiny).table.equals(first.table) and seen.last.stored and seen.last.kept == 0
    assert two.exists() or not rows


def test_interrupted_and_side_by_side(
    tiny: tuple[str, str], seen: Seen, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an interrupted run computed is used by the next, and two runs at once write the same files."""
    monkeypatch.setattr("evalgate.server.batches.BATCH_TOKENS", 64)  # more batches than are under way at once
    with pytest.raises(KeyboardInterrupt):
        seen(*tiny, observer=Stops(after=2))
    some = len(row_files(cache))
    assert some > 0 and not list(cache.glob("hidden/*/.evalgate.*"))
    (cache / "hidden" / "x").mkdir()
    abandoned = row_files(cache)[0].parent / ".evalgate.0123.tmp"
    abandoned.write_bytes(b"half a file")
    os.utime(abandoned, (1, 1))
    whole = seen(*tiny)
    assert seen.last.stored and seen.last.found >= some and seen.last.kept > 0
    shutil.rmtree(cache / "hidden")
    found: list[Run] = []
    threads = [threading.Thread(target=lambda: found.append(seen(*tiny))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one.table.equals(whole.table) for one in found) and len(found) == 2
    assert seen(*tiny).table.equals(whole.table) and seen.last.stored and seen.last.kept == 0


def test_the_limit_is_kept_and_the_oldest_goes_first(
    tiny: tuple[str, str], seen: Seen, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = seen(*tiny)
    size = hidden.contents().bytes
    old = row_files(cache)
    for path in [*old, *cache.glob("heads/*")]:
        os.utime(path, (time.time() - 9e6,) * 2)
    monkeypatch.setenv(hidden.VARIABLE, str(size + 4000))
    seen(tiny[1], tiny[0])
    assert seen.last.problem == "" and seen.last.kept > 0
    assert hidden.contents().bytes <= size + 4000 and not any(path.exists() for path in old)
    monkeypatch.setenv(hidden.VARIABLE, "9000")
    small = seen(tiny[0], f"{tiny[1]}@bf16")
    assert seen.last.kept == 0 and any("limit of 9,000 bytes" in note for note in small.summary.notes)
    monkeypatch.setenv(hidden.VARIABLE, "0")
    assert seen(*tiny).table.equals(first.table) and seen.last is None
    monkeypatch.setenv(hidden.VARIABLE, "much")
    with pytest.raises(UsageError, match="EVALGATE_CACHE_HIDDEN is 'much'"):
        seen(*tiny)


def test_a_disk_that_refuses_costs_only_the_cache(tiny: tuple[str, str], seen: Seen, cache: Path) -> None:
    cache.mkdir()
    (cache / "hidden").write_text("in the way")
    found = seen(*tiny)
    assert found.table.num_rows and any("are not kept for the next run" in note for note in found.summary.notes)


def test_another_vocabulary_is_refused_without_the_body_too(tiny: tuple[str, str], seen: Seen, tmp_path: Path) -> None:
    seen(*tiny)
    other = str(save(perturbed(built("gpt2")), tmp_path / "other", metaspace()))
    with pytest.raises(MismatchError, match="different vocabularies"):
        seen(tiny[0], other)


def test_a_changed_tokenizer_loads_the_model_again(seen: Seen, tmp_path: Path) -> None:
    """The weights are the same, and what they are shown is not."""
    ref = save(built("llama"), tmp_path / "ref", byte_level(bos=True))
    cand = str(save(perturbed(built("llama")), tmp_path / "cand", byte_level(bos=True)))
    seen(str(ref), cand)
    byte_level(bos=False).save_pretrained(ref)
    byte_level(bos=False).save_pretrained(Path(cand))
    seen(str(ref), cand)
    assert seen.last.kept > 0


def test_info_and_clear(tiny: tuple[str, str], seen: Seen, cache: Path) -> None:
    seen(*tiny)
    out = MemoryOutput()
    assert invoke(["cache", "info", "--json"], out) == 0
    found = json.loads(out.text)
    assert [model["spec"] for model in found["models"]] == [tiny[0]] and found["heads"] == 1
    assert found["limit"] == 1 << 30 and found["bytes"] == hidden.contents_bytes()
    out = MemoryOutput()
    assert invoke(["cache", "info"], out) == 0 and f"reference   {tiny[0]}: " in out.text
    assert invoke(["cache", "clear"], MemoryOutput()) == 0
    assert hidden.contents().bytes == 0 and invoke(["cache", "clear"], MemoryOutput()) == 0
    seen(*tiny)
    assert not seen.last.stored


def test_the_default_limit_is_a_part_of_the_free_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(hidden.VARIABLE)
    assert 0 < hidden.hidden_limit() <= min(hidden.MOST, shutil.disk_usage(cache.parent).total // 10)
    for text, size in (("512M", 512 << 20), ("0", 0), ("1.5K", 1536), ("7", 7)):
        monkeypatch.setenv(hidden.VARIABLE, text)
        assert hidden.hidden_limit() == size


def test_a_server_without_bodies_says_so(tiny: tuple[str, str], seen: Seen) -> None:
    """Its tokenizer answers, and what needs the body is refused by name."""
    seen(*tiny)
    options = ["--keep-rows", tiny[0]]
    with EmbeddedServer([*tiny], device="cpu", options=options) as server:
        client = EmbeddedClient(server)
        try:
            assert set(client.models()) == set(tiny) and client.vocabulary(tiny[0])
            with pytest.raises(Exception, match="output head alone"):
                client.record(
                    tiny[0], [Window(0, "d", "d", (1, 2, 3), 1, 3, (1, 1, 1))], top_k=2, tail_samples=2, seed=0
                )
        finally:
            client.close()
