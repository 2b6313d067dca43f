"""Sizes that a user writes, and what control groups of both versions leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.errors import LoadFailed
from serve.models import room


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("8G", 8 << 30),
        ("8gib", 8 << 30),
        ("8GB", 8 * 10**9),
        ("1.5M", 3 << 19),
        ("500 MiB", 500 << 20),
        ("4096", 4096),
        ("4096B", 4096),
        ("80%", 800),
        ("100%", 1000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert room.size_of(text, free=1000) == size


@pytest.mark.parametrize("text", ["", "8X", "G", "-1G", "8 apples", "1e9", "0", "0%", "101%", "8GiBs", "%"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(LoadFailed, match=r"write (8GiB|1% to 100%)"):
        room.size_of(text, free=1000)


def test_a_share_of_the_unknown_is_refused() -> None:
    with pytest.raises(LoadFailed, match="how much memory is free is not known here"):
        room.size_of("80%", free=None)


def group(folder: Path, **files: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("memory_", "memory.")).write_text(f"{content}\n")


def test_the_strictest_control_group_holds(tmp_path: Path) -> None:
    """Of both versions, and of all above the process's own: a slice may leave less than the container in it."""
    own = tmp_path / "cgroup"
    own.write_text("5:memory:/a/b\n0::/c/d\n")
    root = tmp_path / "fs"
    v1 = {"memory_usage_in_bytes": 300, "memory_stat": "total_inactive_file 50"}
    group(root / "memory" / "a" / "b", memory_limit_in_bytes=2000, **v1)
    group(root / "memory" / "a", memory_limit_in_bytes=1000, **v1)
    group(root / "memory", memory_limit_in_bytes=9223372036854771712, **v1)
    group(root / "c" / "d", memory_max="max", memory_current=1, memory_stat="inactive_file 0")
    group(root / "c", memory_max=900, memory_current=400, memory_stat="inactive_file 100")
    assert sorted(room._containers(root, own)) == [600, 750, 1750]
    assert room._containers(tmp_path / "none", tmp_path / "nothing") == []


def test_bytes_as_people_read_them() -> None:
    assert [room.shown(size) for size in (3 << 29, 350 << 20, 40 << 10)] == ["1.5 GiB", "350 MiB", "40 KiB"]
