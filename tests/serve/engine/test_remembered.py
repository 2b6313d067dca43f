"""The load-time check is done once for the same weights, versions and machine, and again where anything changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from serve.__main__ import _engine_config, _parser
from serve.config import ModelSpec
from serve.engine import remembered, selfcheck
from serve.engine.selfcheck import Checked
from serve.errors import LoadFailed
from serve.models.load import LoadedModel, load_models


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names of the models that were checked in full, with a cache of the test's own."""
    made: list[str] = []

    def counted(loaded: LoadedModel, **options: bool) -> Checked:
        made.append(loaded.name)
        return selfcheck.prepare(loaded, **options)

    monkeypatch.setattr(remembered, "prepare", counted)
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    return made


def loaded(spec: str) -> LoadedModel:
    return load_models([ModelSpec.parse(spec)], device="cpu")[0]


def notes(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "checks").glob("*"))


def same(one: Checked, two: Checked) -> bool:
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    logits = [c.head.logits(selfcheck.run_alone(c.runner, ids)) for c in (one, two)]
    return torch.equal(*logits)


@pytest.mark.parametrize("options", [{}, {"own_head": True}, {"deterministic": True}], ids=str)
def test_a_second_start_is_not_checked_and_runs_the_same(
    tiny: tuple[str, str], checks: list[str], options: dict[str, bool]
) -> None:
    first, second = (remembered.checked(loaded(tiny[0]), **options) for _ in range(2))
    assert len(checks) == 1
    assert (second.backend, second.deviation, second.kl_floor) == (first.backend, first.deviation, first.kl_floor)
    assert type(second.runner) is type(first.runner)
    assert type(second.head) is type(first.head)
    assert second.runner.token_bytes == first.runner.token_bytes > 0
    assert same(first, second)


def test_what_changes_the_numbers_is_checked_again(
    tiny: tuple[str, str], checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = 0

    def start(spec: str, **options: bool) -> None:
        nonlocal starts
        starts += 1
        remembered.checked(loaded(spec), **options)
        assert len(checks) == starts

    start(tiny[0])
    start(tiny[1])  # other weights
    start(f"{tiny[0]}@bf16")
    start(tiny[0], own_head=True)
    start(tiny[0], deterministic=True)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    start(tiny[0])
    for name in ("_processor", "_own_code"):
        monkeypatch.setattr(remembered, name, lambda: "another")
        start(tiny[0])
    monkeypatch.setattr(remembered, "_version", lambda name: "99.0")
    start(tiny[0])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    start(tiny[0])
    remembered.checked(loaded(tiny[0]))
    assert len(checks) == starts


def test_a_note_that_does_not_hold_is_not_believed(tiny: tuple[str, str], checks: list[str], tmp_path: Path) -> None:
    remembered.checked(loaded(tiny[0]))
    (note,) = notes(tmp_path)
    good = json.loads(note.read_text())
    value = good["value"]
    falsified = [
        value | {"logprobs": [value["logprobs"][0] + 0.5, *value["logprobs"][1:]]},
        value | {"logprobs": [float("nan")] * len(value["ids"])},
        value | {"logprobs": value["logprobs"][1:]},
        value | {"ids": [], "logprobs": []},
        value | {"ids": [1 << 40] * len(value["ids"])},
        value | {"backend": "quick", "kl_floor": 0.0},
        value | {"backend": ""},
        value | {"head": "Neck"},
        value | {"kl_floor": float("nan")},
        value | {"deviation": -1.0},
        [],
        None,
    ]
    texts = [json.dumps(good | {"value": content}) for content in falsified]
    for count, text in enumerate([*texts, "", "{", '{"key": 1}', "[" * 100_000], start=2):
        note.write_text(text)
        remembered.checked(loaded(tiny[0]))
        assert len(checks) == count, text[:100]
        assert json.loads(note.read_text())["value"].keys() == value.keys()


def test_a_failed_check_is_not_remembered(
    tiny: tuple[str, str], checks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(model: LoadedModel, **options: bool) -> Checked:
        raise LoadFailed("it does not repeat its own numbers")

    with monkeypatch.context() as patch:
        patch.setattr(remembered, "prepare", failing)
        with pytest.raises(LoadFailed):
            remembered.checked(loaded(tiny[0]))
    assert notes(tmp_path) == []


def test_a_cache_that_cannot_be_written_only_costs_time(
    tiny: tuple[str, str], checks: list[str], tmp_path: Path
) -> None:
    model = loaded(tiny[0])
    (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "cache" / "checks").write_text("a file where a folder should be")
    assert remembered.checked(model).backend == "packed"
    assert len(checks) == 1


def test_the_server_remembers_unless_it_is_told_to_check() -> None:
    assert _engine_config(_parser().parse_args(["demo"])).remember_checks
    assert not _engine_config(_parser().parse_args(["demo", "--check"])).remember_checks
