"""How many tokens a text has, as far as that can be told without loading a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalgate.core import Document
from evalgate.specs import SourceSpec, split_conversion
from evalgate.store.rates import Rate

USUAL, FEWEST, MOST = 4.0, 2.5, 5.5  # bytes of a token: prose and code under usual vocabularies, and how far they vary
_COUNTED = 32 << 20  # bytes of text that are tokenized; more is taken to be like it


@dataclass(frozen=True)
class Lengths:
    """Tokens of each document: as they are best estimated, and the fewest and most they are taken to be.

    head: ids before each document. how: where the numbers come from, in words. exact: whether they were counted.
    """

    likely: Sequence[int]
    fewest: Sequence[int]
    most: Sequence[int]
    head: int
    how: str
    exact: bool = False


def lengths(documents: Sequence[Document], lead: SourceSpec | None, earlier: Rate | None) -> Lengths:
    """The lengths of the documents under the tokenizer of `lead`, None = not a model that is named.

    They are counted where `lead` is a checkpoint folder with a tokenizer.json, which takes neither weights nor a
    server; else estimated from the bytes of a token: as an earlier run of these models has them, or a guess.
    """
    texts = [_shown(document) for document in documents]
    sizes = [len(text.encode()) for text in texts]
    tokenizer = None if lead is None else tokenizer_of(lead)
    chats = any(document.messages for document in documents)
    said = "; of chats the contents, without what the template adds" if chats else ""
    if tokenizer is not None:
        return _counted(tokenizer, texts, sizes, said)
    if earlier is not None and earlier.tokens and earlier.bytes:
        per = earlier.bytes / earlier.tokens
        how = f"estimated at {per:.2f} bytes a token, as in the run of {earlier.created[:10]}{said}"
        return _estimated(sizes, (per, 1.1 * per, per / 1.1), how)
    how = f"a guess at {USUAL:g} bytes a token ({FEWEST:g} to {MOST:g}): no tokenizer is loaded for it{said}"
    return _estimated(sizes, (USUAL, MOST, FEWEST), how)


def _estimated(sizes: Sequence[int], per: tuple[float, float, float], how: str) -> Lengths:
    likely, fewest, most = ([max(1, round(size / each)) for size in sizes] for each in per)
    return Lengths(likely, fewest, most, head=1, how=how)


def _counted(tokenizer: Any, texts: Sequence[str], sizes: Sequence[int], said: str) -> Lengths:
    """Tokens as the tokenizer gives them; of a long text a part is counted, and the rest is taken to be like it."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    with_head = tokenizer.encode("a").ids
    head = with_head.index(plain[0]) if plain and plain[0] in with_head else 0
    shown, total = 0, 0
    while shown < len(texts) and (total == 0 or total + sizes[shown] <= _COUNTED):
        total += sizes[shown]
        shown += 1
    counts = [len(one.ids) for one in tokenizer.encode_batch(list(texts[:shown]), add_special_tokens=False)]
    if shown == len(texts) and not said:
        return Lengths(counts, counts, counts, head, "counted with its tokenizer.json", exact=True)
    per = max(total, 1) / max(sum(counts), 1)
    rest = _estimated(sizes[shown:], (per, 1.1 * per, per / 1.1), "")
    part = "" if shown == len(texts) else f" over the first {shown:,} of {len(texts):,} documents"
    how = f"counted with its tokenizer.json{part}{said}"
    parts = (rest.likely, rest.fewest, rest.most)
    likely, fewest, most = ([*counts, *more] for more in parts)
    return Lengths(likely, fewest, most, head, how)


def tokenizer_of(spec: SourceSpec) -> Any | None:
    """The fast tokenizer of a checkpoint folder; None where there is none, or nothing to read it with."""
    folder = checkpoint_folder(spec)
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:  # it comes with the extra `serve`
        return None
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # the library raises no narrower class; the server says later what is wrong with it
        return None


def checkpoint_folder(spec: SourceSpec) -> Path | None:
    """The folder of a model that is loaded here from one."""
    if spec.kind != "embedded":
        return None
    source, _ = split_conversion(spec.spec)
    path = Path(source).expanduser()
    return path if path.is_dir() else None


def config_of(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json; empty where it cannot be read."""
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def scored_share(documents: Sequence[Document]) -> float:
    """The share of the text that is scored: all of a text, and of a chat what the assistant says."""
    total = sum(len(_shown(document)) for document in documents)
    others = sum(len(m.content) for document in documents for m in document.messages if m.role != "assistant")
    return 1.0 - others / total if total else 1.0


def _shown(document: Document) -> str:
    return document.text or "".join(message.content for message in document.messages)
