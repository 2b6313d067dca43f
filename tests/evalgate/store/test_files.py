"""Whatever is written is whole or absent, and what a killed process left is cleared away."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evalgate.errors import InputError
from evalgate.store import files
from evalgate.store.files import REPLACED, replacing, replacing_folder, write_file
from evalgate.store.manifest import FileEntry, Format, digest

OLD = time.time() - 2 * files.ABANDONED
FORMAT = Format("evalgate-test", 3, noun="box", wanted="name a box", anew="pack it again")


@pytest.fixture
def steps(monkeypatch):
    """What reaches the disk in order: syncs by what they sync, and renames."""
    seen = []
    sync, replace, rename = os.fsync, Path.replace, Path.rename

    def synced(handle):
        seen.append("sync " + ("folder" if Path(f"/proc/self/fd/{handle}").resolve().is_dir() else "file"))
        return sync(handle)

    def moved(way):
        def move(self, target):
            seen.append("rename")
            return way(self, target)

        return move

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", moved(replace))
    monkeypatch.setattr(Path, "rename", moved(rename))
    return seen


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="this system has no /proc")
def test_a_file_is_synced_before_it_is_renamed_and_its_folder_after(tmp_path, steps):
    write_file(tmp_path / "a", b"content")
    assert steps == ["sync file", "rename", "sync folder"]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="this system has no /proc")
def test_a_folder_is_synced_with_its_files_before_it_is_renamed(tmp_path, steps):
    with replacing_folder(tmp_path / "a") as filled:
        (filled / "one").write_text("1")
    assert steps == ["sync file", "sync folder", "rename", "sync folder"]
    assert [p.name for p in tmp_path.rglob("*")] == ["a", "one"]


def test_an_error_in_the_block_leaves_what_was_there(tmp_path):
    write_file(tmp_path / "a", "before")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "a") as file:
        file.write(b"after")
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), replacing_folder(tmp_path / "b") as filled:
        (filled / "one").write_text("1")
        raise ZeroDivisionError
    assert [p.name for p in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "before"


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_a_killed_process_left_is_removed_once_it_is_old(tmp_path, what):
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom evalgate.store.files import replacing, replacing_folder\n"
        f"with {'replacing' if what == 'file' else 'replacing_folder'}(Path('a')) as made:\n    os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 9
    (left,) = tmp_path.iterdir()
    write_file(tmp_path / "b", "")
    assert left.exists()  # its process might still be at work
    os.utime(left, (OLD, OLD))
    write_file(tmp_path / "b", "")
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_the_only_copy_of_a_replaced_folder_is_never_removed(tmp_path):
    scratch = tmp_path / ".evalgate.0.tmp"
    (scratch / REPLACED).mkdir(parents=True)
    os.utime(scratch, (OLD, OLD))
    write_file(tmp_path / "b", "")
    assert (scratch / REPLACED).is_dir()


def test_a_damaged_file_is_named_with_both_digests(tmp_path):
    path, entry = tmp_path / "rows", FileEntry.of(b"content", rows=1)
    path.write_bytes(b"cONtent")
    for check in (FORMAT.check, FORMAT.checked):
        with pytest.raises(InputError) as caught:
            check(path, entry)
        for part in (str(path), digest(b"cONtent")[:16], entry.sha256[:16], "copy the box again, or pack it again"):
            assert part in caught.value.message


def test_every_turned_bit_of_a_manifest_is_found(tmp_path):
    path = tmp_path / "manifest.json"
    whole = FORMAT.sealed({"name": "é", "numbers": (1, 0.5)}, {"rows": FileEntry.of(b"content", rows=1)})
    write_file(path, whole)
    assert FORMAT.entries(FORMAT.read(path)) == {"rows": FileEntry.of(b"content", rows=1)}
    for place, byte in enumerate(whole):
        path.write_bytes(whole[:place] + bytes([byte ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(InputError, match=r"manifest\.json"):
            FORMAT.read(path)


def test_a_manifest_that_is_spelled_otherwise_or_lists_nothing_is_refused(tmp_path):
    sealed = FORMAT.sealed({"name": "x"}, {})
    with pytest.raises(InputError, match="spelled"):
        FORMAT.parse(sealed.replace(b"  ", b"   "), tmp_path / "m")
    for listed in (b'{"format": "evalgate-test", "schema_version": 4}', b"[]", b"{"):
        with pytest.raises(InputError):
            FORMAT.parse(listed, tmp_path / "m")
