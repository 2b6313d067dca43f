"""Corpora from the Hugging Face hub, through `datasets`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from evalgate.core import Document, Skipped
from evalgate.corpora.parts import joined_rows
from evalgate.corpora.rows import needed_columns, row_document
from evalgate.errors import InputError

HUB_TIMEOUT = 10.0  # seconds until the hub counts as out of reach
DEFAULT_SPLIT = "test"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(#[\w.-]+)?")


def is_hub_id(data: str) -> bool:
    """Whether `data` reads as a data set on the hub: `org/name` or `name`, with `#config` where it has several."""
    return HUB_ID.fullmatch(data) is not None


def read_hub(data: str, *, split: str | None, text_column: str | None) -> Iterator[Document | Skipped]:
    """The rows of one split, streamed from the local copy that `datasets` makes. Rows are named ID:N, from 1.

    Without `split` the split `test` is taken. The environment variable HF_HUB_OFFLINE=1 uses an earlier download.

    Raises InputError when the hub cannot be reached, the data set cannot be loaded, there is no such split, or the
    text column is missing.
    """
    repo, _, config = data.partition("#")
    try:
        import datasets
    except ImportError as error:
        raise InputError("data sets from the hub need the package 'datasets'; run: pip install datasets.") from error
    _reach(repo, data)
    try:
        chosen = split or _default_split(datasets.get_dataset_split_names(repo, config or None), data)
        rows = datasets.load_dataset(repo, config or None, split=chosen)
    except InputError:
        raise
    except Exception as error:  # the hub, its cache and its builders raise everything
        raise _unusable(data, error) from error
    columns = needed_columns(rows.column_names, text_column, data)
    domain = repo.rpartition("/")[2]
    yield from joined_rows(
        row_document(row, place=f"{data}:{number}", domain=domain, text_column=text_column)
        for number, row in enumerate(rows.select_columns(columns), 1)
    )


def _default_split(splits: list[str], data: str) -> str:
    if DEFAULT_SPLIT in splits:
        return DEFAULT_SPLIT
    raise InputError(f"data set {data!r} has no split 'test'; choose one with --split: {', '.join(splits)}.")


def _reach(repo: str, data: str) -> None:
    """Asks the hub once for the data set: `datasets` itself retries for half a minute before it gives up.

    Raises InputError when there is no answer, or no such data set. Offline mode is left to `datasets` and its cache.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        HfApi().dataset_info(repo, timeout=HUB_TIMEOUT)
    except OfflineModeIsEnabled:
        return
    except Exception as error:  # the HTTP library below differs between versions
        raise _unusable(data, error) from error


def _unusable(data: str, error: Exception) -> InputError:
    cause = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return InputError(
        f"{data!r} is neither a file nor a data set that can be loaded ({type(error).__name__}: {cause}); check the "
        "name and the network, set HF_HUB_OFFLINE=1 to use an earlier download, or pass a file.",
        corpus=data,
    )
