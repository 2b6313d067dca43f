"""The texts that every Python brings along: CPython's help topics (prose) and standard library sources (code)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import zip_longest

from evalgate.core import Document, Skipped

# Pure Python in every supported version, 3 to 50 kB each.
CODE_MODULES = (
    "bisect calendar cmd contextlib copy csv fractions functools graphlib gzip heapq linecache numbers operator "
    "pprint queue random reprlib sched selectors shelve shlex socketserver statistics string tabnanny tempfile "
    "textwrap timeit tokenize trace traceback types uuid weakref zipapp"
)


def read_python() -> Iterator[Document | Skipped]:
    """Two domains, interleaved one by one: `prose` (one document per help topic) and `code` (one per module).

    The texts belong to the running interpreter, so they differ between Python versions: the corpus hash tells.
    """
    for pair in zip_longest(_prose(), _code()):
        yield from (item for item in pair if item is not None)


def _prose() -> Iterator[Document | Skipped]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        yield Skipped("prose", "this Python comes without pydoc_data")
        return
    for topic in sorted(topics):
        yield Document(f"prose/{topic}", "prose", text=topics[topic])


def _code() -> Iterator[Document | Skipped]:
    for module in CODE_MODULES.split():
        source = _source(module)
        name = f"code/{module}"
        yield (
            Skipped(name, "this Python comes without its source")
            if source is None
            else Document(name, "code", text=source)
        )


def _source(module: str) -> str | None:
    """The module's source text, found without importing it; None where the interpreter has none."""
    spec = importlib.util.find_spec(module)
    get_source = getattr(spec.loader if spec else None, "get_source", None)
    if get_source is None:
        return None
    try:
        source = get_source(module)
    except OSError:
        return None
    return None if source is None else str(source)
