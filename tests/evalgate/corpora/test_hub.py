"""Hub data sets, through the real `datasets` library on local data, and without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evalgate.core import Document, Message
from evalgate.corpora import hub, load_corpus
from evalgate.errors import InputError, UsageError


class FakeApi:
    """Stands in for the hub; `error` is what asking it raises."""

    error: Exception | None = None

    def dataset_info(self, repo: str, *, timeout: float) -> None:
        assert 0 < timeout <= 30
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def api(monkeypatch: pytest.MonkeyPatch) -> type[FakeApi]:
    monkeypatch.setattr("huggingface_hub.HfApi", FakeApi)
    monkeypatch.setattr(FakeApi, "error", None)
    return FakeApi


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Lets `datasets` read every id from a folder of JSON lines, one file per split."""
    import datasets

    root = tmp_path / "hub"
    root.mkdir()
    load, names = datasets.load_dataset, datasets.get_dataset_split_names
    asked: dict[str, Any] = {"cache_dir": str(tmp_path / "cache")}
    monkeypatch.setattr(datasets, "load_dataset", lambda repo, config, split: load(str(root), split=split, **asked))
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda repo, config: names(str(root)))
    return root


def put(root: Path, split: str, rows: list[dict[str, Any]]) -> None:
    (root / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_test_split_is_the_default(local: Path) -> None:
    put(local, "train", [{"text": "train", "extra": 0}])
    put(local, "test", [{"text": "one", "extra": 1}, {"text": "", "extra": 2}, {"text": "three", "extra": 3}])
    corpus = load_corpus("org/set")
    assert corpus.name == "org/set"
    assert corpus.documents == (
        Document("org/set:1", "set", text="one"),
        Document("org/set:3", "set", text="three"),
    )
    assert [(s.name, s.reason) for s in corpus.skipped] == [("org/set:2", "empty")]
    chosen = load_corpus("org/set", split="train")
    assert (chosen.name, [d.text for d in chosen.documents]) == ("org/set:train", ["train"])


def test_messages(local: Path) -> None:
    put(local, "test", [{"messages": [{"role": "assistant", "content": "q"}], "id": "c"}])
    assert load_corpus("set").documents == (Document("c", "set", messages=(Message("assistant", "q"),)),)


def test_no_test_split_lists_the_splits(local: Path) -> None:
    put(local, "train", [{"text": "a"}])
    put(local, "validation", [{"text": "a"}])
    with pytest.raises(InputError, match="no split 'test'; choose one with --split: train, validation"):
        load_corpus("org/set")
    with pytest.raises(InputError, match="nosuch"):
        load_corpus("org/set", split="nosuch")


def test_missing_column_lists_the_columns(local: Path) -> None:
    put(local, "test", [{"body": "b", "n": 1}])
    with pytest.raises(InputError, match=r"no column 'text' \(columns: body, n\)"):
        load_corpus("org/set")
    assert [d.text for d in load_corpus("org/set", text_column="body").documents] == ["b"]


def test_config_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[object] = []

    def load(repo: str, config: str | None, split: str) -> datasets.Dataset:
        asked.append((repo, config, split))
        return datasets.Dataset.from_dict({"text": ["a"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    load_corpus("Salesforce/wikitext#wikitext-2-raw-v1", split="validation")
    load_corpus("plain", split="test[:5]")
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", "validation"), ("plain", None, "test[:5]")]


def test_out_of_reach_is_one_sentence_and_quick(api: type[FakeApi]) -> None:
    api.error = ConnectionError("Name or service not known.\nlong explanation")
    with pytest.raises(InputError) as caught:
        load_corpus("org/nope")
    message = caught.value.message
    assert message.startswith("'org/nope' is neither a file nor a data set that can be loaded (ConnectionError: Name")
    assert "HF_HUB_OFFLINE=1" in message
    assert "\n" not in message and "long explanation" not in message


def test_offline_mode_goes_on_to_the_local_copy(api: type[FakeApi], local: Path) -> None:
    from huggingface_hub.errors import OfflineModeIsEnabled

    api.error = OfflineModeIsEnabled("offline")
    put(local, "test", [{"text": "cached"}])
    assert [d.text for d in load_corpus("org/set").documents] == ["cached"]


def test_what_reads_as_an_id() -> None:
    for data in ("wikitext", "org/name", "org/na.me-x", "org/name#config"):
        assert hub.is_hub_id(data)
    for data in ("./x", "/abs/x", "a/b/c", "~/x", "a b", "../x", "org/", "#config"):
        assert not hub.is_hub_id(data)


def test_an_existing_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wikitext").write_text("a file")
    assert [d.text for d in load_corpus("wikitext").documents] == ["a file"]
    with pytest.raises(UsageError, match="--split does not apply"):
        load_corpus("wikitext", split="test")
