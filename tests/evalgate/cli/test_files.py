"""Files that a command leaves are whole or not there, and places that cannot be written are refused in time."""

import os
import resource
import stat
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from evalgate.cli.app import invoke
from evalgate.errors import InputError, UsageError
from evalgate.store.files import check_writable, write_file
from evalgate.store.runs import check_target
from tests.evalgate.cli.test_cli import MemoryOutput


@pytest.fixture(autouse=True)
def inside(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@contextmanager
def no_room():
    """No file of this process grows beyond 10 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_without_room_the_old_file_stays_and_no_new_one_is_left():
    Path("old").write_text("before")
    with no_room():
        for name in ("old", "new"):
            with pytest.raises(InputError, match=f"cannot write {name}: File too large"):
                write_file(Path(name), "a" * 100)
    assert Path("old").read_text() == "before" and [p.name for p in Path().iterdir()] == ["old"]


def test_a_policy_that_could_not_be_written_can_be_written_again(capsys):
    command = ("policy", "init", "--out", "p.toml")
    with no_room():
        assert invoke(command, MemoryOutput()) == 2
    assert capsys.readouterr().err == "evalgate: cannot write p.toml: File too large\n"
    assert list(Path().iterdir()) == [] and invoke(command, MemoryOutput()) == 0
    assert invoke(command, MemoryOutput()) == 2 and "left alone" in capsys.readouterr().err


def test_links_and_modes_are_kept():
    Path("file").write_text("before")
    Path("file").chmod(0o640)
    Path("link").symlink_to("file")
    write_file(Path("link"), "after\n")
    assert Path("link").is_symlink() and Path("file").read_bytes() == b"after\n"
    assert stat.S_IMODE(Path("file").stat().st_mode) == 0o640
    before = os.umask(0o027)
    try:
        write_file(Path("new"), "")
    finally:
        os.umask(before)
    assert stat.S_IMODE(Path("new").stat().st_mode) == 0o640


def test_pipes_and_open_streams_are_written_to_as_they_are():
    os.mkfifo("pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_text()))
    reader.start()
    check_writable(Path("pipe"))
    write_file(Path("pipe"), "through")
    reader.join(10)
    assert read == ["through"] and stat.S_ISFIFO(Path("pipe").stat().st_mode)
    with Path("stream").open("w+") as stream:
        here = Path(f"/dev/fd/{stream.fileno()}")
        check_writable(here)
        write_file(here, "streamed")
        assert stream.read() == "streamed"
    write_file(Path("/dev/null"), "gone")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="this system has no /proc")
@pytest.mark.parametrize("command", ["kl", "gate", "record"])
def test_a_folder_that_no_one_can_make_is_refused_before_measuring(capsys, command):
    sides = {
        "kl": ["kl", "--ref", "demo", "--cand", "demo@int8"],
        "gate": ["gate", "--policy", "8bit", "--ref", "demo", "--cand", "demo@int8"],
        "record": ["record", "--ref", "demo"],
    }
    assert invoke([*sides[command], "--out", "/proc/x/y.trace"], MemoryOutput()) == 2
    assert capsys.readouterr().err.startswith(
        "evalgate: /proc/x/y.trace cannot be made, for /proc is not a folder that can be written ("
    )


def test_a_refused_place_is_found_by_trying_and_nothing_is_left(tmp_path):
    check_target(tmp_path / "a" / "b")
    check_writable(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
    if Path("/proc").is_dir():
        with pytest.raises(UsageError, match="cannot be written"):
            check_writable(Path("/proc/nothing.xml"))
