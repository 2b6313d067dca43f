"""Tokenizers of models: notes where they differ, since all sources are shown one model's tokens, and texts of ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evalgate.core import Document, SourceInfo, Window, counted
from evalgate.errors import MismatchError
from evalgate.server.client import EmbeddedClient
from evalgate.store.alternatives import SIDES

if TYPE_CHECKING:
    import pyarrow as pa


def cut_notes(
    client: EmbeddedClient, sources: Sequence[SourceInfo], corpus: Sequence[Document], windows: Sequence[Window]
) -> list[str]:
    """A note for each model that tokenizes these texts differently from the first one, whose tokens all are given.

    All are loaded here. Another tokenizer hash is not enough: a GGUF file's can differ from its checkpoint's for the
    same tokens. Documents after the last one that has a window are not compared.
    """
    lead, others = _other_tokenizers(sources)
    if not others:
        return []
    named = {window.document for window in windows}
    documents = corpus[: 1 + max(i for i, d in enumerate(corpus) if d.name in named)]
    texts = [Document(d.name, d.domain, d.text or "\n".join(m.content for m in d.messages)) for d in documents]
    shown = _ids(client, lead, texts)
    notes = []
    for other in others:
        changed = sum(a != b for a, b in zip(shown, _ids(client, other, texts), strict=True))
        if changed:
            notes.append(
                f"{other.name} tokenizes {changed} of {counted(len(texts), 'document')} differently: "
                f"both were shown {lead.name}'s tokens"
            )
    return notes


def template_notes(sources: Sequence[SourceInfo], corpus: Sequence[Document], *, allowed: bool = False) -> list[str]:
    """A note for each model whose chat template differs from the first one's, by which all chats are shown.

    All are loaded here. Raises MismatchError where chats are shown and that is not allowed: a candidate is served with
    its own template.
    """
    here = [source for source in sources if source.kind == "embedded"]
    lead = here[0]
    changed = [other for other in here[1:] if other.template_hash != lead.template_hash]
    if not changed:
        return []
    if not any(document.messages for document in corpus):
        return [
            f"{other.name} has another chat template than {lead.name}: no chat is shown, and no figure depends on it"
            for other in changed
            if other.template_hash and lead.template_hash
        ]
    other = changed[0]
    if not allowed:
        what = "has another chat template than" if other.template_hash else "has no chat template, unlike"
        raise MismatchError(
            f"{other.name} {what} {lead.name}, by which chats would be shown to both: give it the reference's "
            "template, or pass --allow-template to measure what it says after the reference's",
            candidate=other.name,
        )
    return [f"{one.name} has another chat template than {lead.name}, by which both were shown chats" for one in changed]


def tokenizer_notes(sources: Sequence[SourceInfo]) -> list[str]:
    """A note for each source whose tokenizer may differ, by the hashes alone: the tokens cannot be compared."""
    lead, others = _other_tokenizers(sources)
    return [f"{o.name} may tokenize text differently: both were shown {lead.name}'s tokens" for o in others]


def token_texts(client: EmbeddedClient, model: str, table: pa.Table, alternatives: pa.Table | None) -> dict[int, str]:
    """Token id -> text for every id in the table and in the alternatives; bytes that are not a whole character become
    U+FFFD. An id beyond the tokenizer has no text."""
    vocabulary, ids = client.vocabulary(model), shown_ids(table, alternatives)
    return {i: vocabulary[i].decode("utf-8", "replace") for i in ids if i < len(vocabulary)}


def shown_ids(table: pa.Table, alternatives: pa.Table | None) -> list[int]:
    """Every id in the table and in the alternatives, ascending."""
    ids = set(table.column("token").unique().to_pylist())
    if alternatives is not None:
        for side in SIDES:
            ids.update(alternatives.column(f"{side}_top_ids").combine_chunks().flatten().unique().to_pylist())
    return sorted(ids)


def _other_tokenizers(sources: Sequence[SourceInfo]) -> tuple[SourceInfo, list[SourceInfo]]:
    """The first source with a known tokenizer, and those with another one."""
    hashed = [source for source in sources if source.tokenizer_hash] or list(sources[:1])
    return hashed[0], [other for other in hashed[1:] if other.tokenizer_hash != hashed[0].tokenizer_hash]


def _ids(client: EmbeddedClient, source: SourceInfo, documents: Sequence[Document]) -> list[tuple[int, ...]]:
    return [(*cut.prefix, *cut.ids) for cut in client.tokenize(source.name, documents)]
