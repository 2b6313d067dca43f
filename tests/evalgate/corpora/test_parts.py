"""A long text's own documents: wikitext's articles, `--split-on`, and rows that are paragraphs of one article."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalgate.core import Document
from evalgate.corpora import load_corpus
from evalgate.corpora.parts import parted

WIKITEXT = (
    "\n = First article = \n\n Some words = more words .\n\n = = A section = = \n\n And words .\n"
    " = Second ( article ) = \n Its words .\n"
)


def test_wikitext_is_cut_at_titles(tmp_path: Path) -> None:
    path = tmp_path / "wiki.test.txt"
    path.write_text(WIKITEXT)
    documents = load_corpus(path).documents
    assert [d.name for d in documents] == ["wiki.test.txt:1", "wiki.test.txt:2"]
    assert documents[1].text == " = Second ( article ) = \n Its words .\n"
    assert "".join(d.text for d in documents) == WIKITEXT
    assert {(d.domain, d.whole) for d in documents} == {("wiki.test", "wiki.test.txt")}
    whole = load_corpus(path, split_on="none").documents
    assert [(d.name, d.text, d.whole) for d in whole] == [("wiki.test.txt", WIKITEXT, "")]


@pytest.mark.parametrize("text", ["no title\n", " = One title = \nwords\n", "a = b = c\n x = y = z\n"])
def test_other_texts_stay_whole(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(text)
    assert [d.text for d in load_corpus(path).documents] == [text]


def test_split_on(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("preface\n\n# One\nwords\nmore # words\n# Two\n")
    found = load_corpus(path, split_on=r"^# ").documents
    assert [d.text for d in found] == ["preface\n\n", "# One\nwords\nmore # words\n", "# Two\n"]
    inside = load_corpus(path, split_on="words$").documents
    assert [d.text for d in inside] == ["preface\n\n# One\n", "words\n", "more # words\n# Two\n"]
    assert len(load_corpus(tmp_path, split_on="^# ").documents) == 3


@given(st.text(st.sampled_from("ab#\n"), max_size=40))
def test_parts_are_the_text(text: str) -> None:
    """Nothing is lost, doubled or moved, and every part but a leading one begins with a match."""
    found = parted(Document("n", "d", text=text), re.compile("^#", re.MULTILINE), least=1)
    assert "".join(part.text for part in found) == text
    assert all(part.text for part in found) or not text
    assert all("#" in part.text for part in found[1:])


def test_paragraph_rows_are_joined_to_articles(tmp_path: Path) -> None:
    rows = [
        "",
        " = First = \n",
        "",
        " A paragraph .\n",
        " = = Section = = \n",
        " Another .\n",
        " = Second = ",
        " Third .",
    ]
    path = tmp_path / "wiki.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    documents = load_corpus(path).documents
    assert [d.name for d in documents] == ["wiki.jsonl:2", "wiki.jsonl:7"]
    assert documents[0].text == " = First = \n A paragraph .\n = = Section = = \n Another .\n"
    assert documents[1].text == " = Second = \n Third ."
