"""A tokenizer is read in full once, then made of its file alone where that was found to be the same tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

from serve.models import tokenizerfiles as files
from serve.models.hashing import tokenizer_hash, vocabulary_hash
from tests.serve import tiny_models as tiny


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were read in full."""
    seen: list[Path] = []
    whole = AutoTokenizer.from_pretrained

    def counted(folder: Path, **options: Any) -> Any:
        seen.append(folder)
        return whole(folder, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", counted)
    return seen


def of_class(tokenizer: PreTrainedTokenizerFast, folder: Path, name: str = "") -> Path:
    tokenizer.save_pretrained(folder)
    if name:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": name}))
    return folder


def with_more_tokens() -> PreTrainedTokenizerFast:
    fast = tiny.byte_level(bos=True)
    fast.add_special_tokens(
        {"pad_token": AddedToken("<pad>", lstrip=True), "extra_special_tokens": ["<tool>", "<sep>"]}
    )
    fast.add_tokens([AddedToken("plain added", normalized=False, single_word=True)])
    fast.padding_side = "left"
    return fast


MADE = {
    "plain": lambda: tiny.byte_level(),
    "with a BOS": lambda: tiny.byte_level(bos=True),
    "without a template": lambda: tiny.byte_level(template=None),
    "with more tokens": with_more_tokens,
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_the_second_time_it_is_made_of_its_file_and_is_the_same(make: Any, tmp_path: Path, reads: list[Path]) -> None:
    folder = of_class(make(), tmp_path / "model")
    first = files.load_tokenizer(folder)
    assert len(reads) == 1
    files._loaded.clear()
    second = files.load_tokenizer(folder)
    assert len(reads) == 1 and second is not first
    assert type(second).__name__ == type(first).__name__
    assert files.same_tokenizer(first, second)
    for text in (*files.PROBES, "plain added tokens <tool><sep> <pad>  hello"):
        assert first(text, return_offsets_mapping=True) == second(text, return_offsets_mapping=True)
    assert second.get_chat_template() == first.get_chat_template() if first.chat_template else not second.chat_template
    rows = len(first)
    found = files.tokenizer_hashes(second, rows=rows)
    assert found == files.tokenizer_hashes(second, rows=rows)
    assert found.vocabulary == vocabulary_hash(first, rows=rows)
    assert found.rules == tokenizer_hash(first, vocabulary=found.vocabulary)
    assert files.tokenizer_hashes(second, rows=rows - 5).vocabulary == vocabulary_hash(first, rows=rows - 5)


def test_models_with_the_same_files_share_one(tmp_path: Path, reads: list[Path]) -> None:
    one, two = (of_class(tiny.byte_level(), tmp_path / name) for name in ("one", "two"))
    other = of_class(tiny.byte_level(bos=True), tmp_path / "other")
    first = files.load_tokenizer(one)
    assert files.load_tokenizer(two) is first
    assert files.load_tokenizer(other) is not first
    assert len(reads) == 2


def test_a_class_that_does_something_else_is_read_in_full_every_time(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shouting(PreTrainedTokenizerFast):
        """Encodes other text than its file says."""

        def __call__(self, text: str, **options: Any) -> Any:
            return super().__call__(text.upper(), **options)

    folder = of_class(tiny.byte_level(), tmp_path / "model")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda folder, **_: Shouting.from_pretrained(folder))
    first = files.load_tokenizer(folder)
    del first
    files._loaded.clear()
    assert type(files.load_tokenizer(folder)) is Shouting


def test_a_class_of_the_library_gives_what_it_gives_itself(tmp_path: Path, reads: list[Path]) -> None:
    folder = of_class(tiny.byte_level(), tmp_path / "model", "GPT2Tokenizer")
    first = files.load_tokenizer(folder)
    assert isinstance(first, GPT2Tokenizer)
    files._loaded.clear()
    second = files.load_tokenizer(folder)
    assert type(second).__name__ == "GPT2Tokenizer" and files.same_tokenizer(first, second)


def test_changed_files_are_another_tokenizer(tmp_path: Path, reads: list[Path]) -> None:
    folder = of_class(tiny.byte_level(), tmp_path / "model")
    first = files.load_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    second = files.load_tokenizer(folder)
    assert second is not first and second.chat_template == "{{ messages[0].content }}!"
    of_class(tiny.byte_level(bos=True), folder)
    assert files.load_tokenizer(folder)("hi").input_ids[0] == 0
    assert len(reads) == 3


def test_a_damaged_note_is_not_believed(tmp_path: Path, cache: Path, reads: list[Path]) -> None:
    folder = of_class(tiny.byte_level(bos=True), tmp_path / "model")
    ids = files.load_tokenizer(folder)("hello").input_ids
    (note,) = (cache / "tokenizers").glob("*.json")
    good = json.loads(note.read_text())
    damaged = [
        {**good, "value": {"name": "X", "settings": {"bos_token": 7}}},
        {**good, "value": {"name": "X"}},
        {**good, "value": ["x"]},
        {**good, "key": "another"},
    ]
    for text in [*map(json.dumps, damaged), "", "{"]:
        note.write_text(text)
        files._loaded.clear()
        assert files.load_tokenizer(folder)("hello").input_ids == ids
    assert len(reads) == 1 + len(damaged) + 2
