"""Lists of candidates, what candidates are called, and the folders that hold their runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalgate.errors import InputError, UsageError
from evalgate.specs import parse
from evalgate.store.sweeps import (
    DOCUMENT,
    Progress,
    check_sweep_target,
    folder_names,
    is_sweep,
    read_progress,
    read_sweep,
    unfinished,
    write_progress,
)
from evalgate.sweeps.listing import read_listing
from evalgate.sweeps.names import named
from tests.evalgate.sample_sweep import board

LIST = """
ref = "demo"
limit = 16
noise_floor = true
candidates = ["demo@int8", {spec = "http://h/v1#m", name = "served", bytes = 123}]
"""


def written(folder: Path, content: str) -> Path:
    path = folder / "list.toml"
    path.write_text(content, encoding="utf-8")
    return path


def test_a_list_gives_candidates_and_options(tmp_path: Path) -> None:
    found = read_listing(written(tmp_path, LIST))
    assert found.ref == "demo" and found.options == {"limit": 16, "noise_floor": True}
    assert [(one.spec, one.name, one.bytes) for one in found.candidates] == [
        ("demo@int8", None, None),
        ("http://h/v1#m", "served", 123),
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("candidates = [", "is not TOML"),
        ("ref = 'a'", "candidates: Field required"),
        ("candidates = []", "candidates: List should have at least 1"),
        ("candidates = ['a', 'a']", "names a twice"),
        ("candidates = ['a']\nlimits = 3", "has the key limits"),
        ("candidates = [{spec = 'a', size = 3}]", "has the key candidates.0.size"),
        ("candidates = [{spec = 'a', bytes = 0}]", "greater than 0"),
        ("candidates = ['a']\nlimit = '16'", "limit: Input should be a valid integer"),
        ("candidates = ['a']\nconfidence = 1.5", "less than 1"),
        ("candidates = ['a']\nwindows = 'whole'", "windows: Input should be"),
    ],
)
def test_a_wrong_list_is_refused_by_its_key(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_listing(written(tmp_path, content))
    assert words in caught.value.message and "\n" not in caught.value.message


def test_a_list_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_listing(tmp_path / "none.toml")
    (tmp_path / "list.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not TOML"):
        read_listing(tmp_path / "list.toml")


def test_options_that_are_typed_win_over_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evalgate import sweeps
    from tests.evalgate.cli.test_cli import call

    asked = []

    def taken(request, **more):  # type: ignore[no-untyped-def]
        asked.append(request)
        raise UsageError("enough")

    monkeypatch.setattr(sweeps, "run_sweep", taken)
    path = str(written(tmp_path, LIST.replace("noise_floor = true", "confidence = 0.9")))
    assert call("sweep", path, "--limit", "3", "--ref", "demo@bf16")[0] == 2
    assert call("sweep", path, "--cand", "x")[0] == 2
    (request,) = asked
    assert request.run.limit == 3 and request.run.confidence == 0.9 and request.run.reference_spec == "demo@bf16"
    assert [(c.name, c.bytes) for c in request.candidates] == [("demo@int8", None), ("served", 123)]


def test_names_are_short_where_they_are_clear(tmp_path: Path) -> None:
    for folder in ("a/one", "b/one", "b/two"):
        (tmp_path / folder).mkdir(parents=True)
    specs = [f"{tmp_path}/a/one", f"{tmp_path}/b/one", f"{tmp_path}/b/two@int8", "org/name", "llama.cpp:q.gguf", "demo"]
    found = named([parse(spec) for spec in specs])
    assert [one.name for one in found] == [*specs[:2], "two@int8", *specs[3:]]
    with pytest.raises(UsageError, match="two candidates are called x"):
        named([parse("a"), parse("b")], {"a": "x", "b": "x"})
    with pytest.raises(UsageError, match="name is empty"):
        named([parse("a")], {"a": " "})


@given(st.lists(st.text(max_size=80), max_size=6))
def test_folders_are_plain_names_and_none_twice(names: list[str]) -> None:
    """Whatever candidates are called, their folders lie in the sweep's and differ, also where cases do not."""
    found = folder_names(names, taken=["a", "candidate"])
    assert len({name.lower() for name in (*found, "a", "candidate")}) == len(names) + 2
    for name in found:
        assert name and name == Path(name).name and name not in (".", "..") and name.isascii() and len(name) <= 70


def test_a_folder_is_resumed_only_by_the_same_inputs(tmp_path: Path) -> None:
    inputs = {"text": "abc", "reference": ["r", [["f", 1, 2]]]}
    for folder in ("runs/one", "runs/two"):
        write_progress(tmp_path / folder, Progress(inputs=inputs))
    assert unfinished(tmp_path / "runs", inputs) in (tmp_path / "runs/one", tmp_path / "runs/two")
    assert (
        unfinished(tmp_path / "runs", {**inputs, "text": "b"}) is None and unfinished(tmp_path / "none", inputs) is None
    )
    check_sweep_target(tmp_path / "runs/one", inputs, overwrite=False)
    with pytest.raises(UsageError, match="another text: choose another --out"):
        check_sweep_target(tmp_path / "runs/one", {**inputs, "text": "b"}, overwrite=False)
    check_sweep_target(tmp_path / "runs/one", {**inputs, "text": "b"}, overwrite=True)
    check_sweep_target(tmp_path / "new", inputs, overwrite=False)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is not a folder"):
        check_sweep_target(tmp_path / "file", inputs, overwrite=True)
    (tmp_path / "runs/one/progress.json").write_text("{")
    with pytest.raises(UsageError, match="another version"):
        check_sweep_target(tmp_path / "runs/one", inputs, overwrite=False)
    assert read_progress(tmp_path / "runs/one") is None and is_sweep(tmp_path / "runs/one") and not is_sweep(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ('{"schema_version": 99}', "schema version 99"),
        ('{"schema_version": 1}', "is not a sweep"),
    ],
)
def test_a_broken_document_is_named(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / DOCUMENT).write_text(content)
    with pytest.raises(InputError, match=words):
        read_sweep(tmp_path)


def test_reading_a_folder_that_is_not_finished(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a sweep"):
        read_sweep(tmp_path)
    write_progress(tmp_path, Progress(inputs={}))
    with pytest.raises(InputError, match="was not finished"):
        read_sweep(tmp_path)
    (tmp_path / DOCUMENT).write_text(board().model_dump_json())
    assert read_sweep(tmp_path) == board().model_copy(update={"created": read_sweep(tmp_path).created})
