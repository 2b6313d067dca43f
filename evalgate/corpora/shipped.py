"""The corpus that comes with evalgate: one compressed file of JSON lines per version, and its manifest.

A version never changes, so that two machines measure on the same text; another text is another version. Where the
texts come from and under which licences is in data/LICENSES.md; how the file is made, in corpus/build.py.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evalgate.core import Document, Skipped
from evalgate.corpora.chats import plain_text
from evalgate.corpora.rows import row_document
from evalgate.errors import InputError

FOLDER = Path(__file__).parent / "data"
LATEST = 1


@dataclass(frozen=True)
class Shipped:
    """A version of the corpus that comes with evalgate.

    sha256: of the rows, uncompressed. hash: what every run on it shows. domains and sources: documents by name.
    """

    version: int
    sha256: str
    hash: str
    domains: dict[str, int]
    sources: dict[str, int]

    @property
    def title(self) -> str:
        """What results call it."""
        return f"evalgate corpus v{self.version}"

    @property
    def path(self) -> Path:
        """The file of its rows."""
        return FOLDER / f"v{self.version}.jsonl.gz"


def manifest(version: int = LATEST) -> Shipped:
    """What the manifest says of a version. Raises InputError where the installation lacks it."""
    place = FOLDER / f"v{version}.json"
    try:
        return Shipped(**json.loads(place.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(version) from error


def rows(version: int = LATEST) -> list[dict[str, Any]]:
    """The rows of a version, in its order: `id`, `domain`, `source`, and `text`, or `messages` and perhaps `tools`.

    Raises InputError where the file is missing or is not the one that the manifest was written for.
    """
    corpus = manifest(version)
    try:
        raw = gzip.decompress(corpus.path.read_bytes())
    except (OSError, EOFError) as error:
        raise _damaged(version) from error
    if hashlib.sha256(raw).hexdigest() != corpus.sha256:
        raise _damaged(version)
    return [json.loads(line) for line in raw.decode().splitlines()]


def read_shipped(version: int = LATEST) -> Iterator[Document | Skipped]:
    """The documents of a version, its domains in turn. A chat has its plain text too. Raises InputError as `rows`."""
    for number, row in enumerate(rows(version), 1):
        place = f"v{version}.jsonl:{number}"
        document = row_document(row, place=place, domain=str(row["domain"]), text_column=None)
        if isinstance(document, Document) and document.messages:
            document = replace(document, text=plain_text(document.messages, document.tools))
        yield document


def _damaged(version: int) -> InputError:
    return InputError(
        f"the corpus that comes with evalgate (version {version}) is missing or damaged: install evalgate again",
        corpus=f"evalgate-v{version}",
    )
