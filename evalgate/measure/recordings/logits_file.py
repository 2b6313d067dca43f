"""llama.cpp's logits file as the reference of a run: intervals that its 16-bit codes and -16 nat floor allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evalgate.core import LEAST_LOGPROB, Document, SourceInfo, Window, WindowPolicy
from evalgate.measure.bounds import narrowed
from evalgate.measure.recordings.base import Columns, Recorded, whole_rows
from evalgate.store.alternatives import LISTED
from evalgate.traces import LogitsRows, llamacpp_kl, llamacpp_kl_interval, read_logits_file

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from evalgate.server.client import EmbeddedClient

_OWN = "kl_llama_cpp"  # llama.cpp's own figure of a position


class RecordedLogits(Recorded):
    """A logits file, mapped. Raises InputError naming what is wrong with it."""

    def __init__(self, spec: str) -> None:
        self._file = read_logits_file(spec)
        n_ctx = self._file.n_ctx
        self.info = SourceInfo(
            spec=spec,
            name=spec,
            kind="trace",
            vocab_size=self._file.n_vocab,
            context_length=n_ctx,
            logits_dtype="16-bit codes, floor -16 nats",
            load_mode="llama.cpp logits file",
        )
        self.policy = WindowPolicy("llama.cpp", n_ctx, n_ctx)
        self.corpus, self.corpus_hash = Path(spec).name, _digest(self._file.path)

    @property
    def chunks(self) -> int:
        """Chunks that the file holds, a window each."""
        return len(self._file.tokens)

    def windows(self, client: EmbeddedClient, model: str) -> tuple[Window, ...]:
        """A window a chunk. BOS and the bytes of tokens, which the file does not name, are the candidate's."""
        (probe,) = client.tokenize(model, [Document("probe", "", text="a")])
        bos = probe.prefix[0] if len(probe.prefix) == 1 else None
        return with_bytes(self._file.windows(bos_id=bos), client.vocabulary(model))

    def identity(self) -> dict[str, Any]:
        """The whole file's hash."""
        return {"logits": self.corpus_hash}

    def columns(self, client: EmbeddedClient, model: str, part: Sequence[Window]) -> Columns:
        """See `Recorded`. Raises ScoreError naming the window of a broken row."""
        found = [self._window(client, model, window) for window in part]
        return {name: np.concatenate([columns[name] for columns in found]) for name in found[0]}

    def _window(self, client: EmbeddedClient, model: str, window: Window) -> dict[str, NDArray[Any]]:
        rows = self._file.rows(window.index, window.positions)
        own = np.zeros((len(window.positions), 0), dtype=np.int32)
        answer = client.gather(model, [window], [own], top_k=min(LISTED, self.info.vocab_size))
        logits = whole_rows(client, model, window, self.info.vocab_size)
        interval = llamacpp_kl_interval(rows, logits)
        tokens = np.array([window.ids[p] for p in window.positions])
        columns: dict[str, NDArray[Any]] = {
            f"cand_{name}": answer[name] for name in ("nll", "entropy", "top1", "margin", "rank")
        }
        # Of ids that the file cannot tell apart the candidate may mask some: then nothing bounds KL from above.
        high = np.where(interval.high <= -LEAST_LOGPROB, interval.high, np.nan)
        columns |= {"kl_low": interval.low, "kl_high": high, _OWN: llamacpp_kl(rows, logits)}
        columns |= {f"cand_{name}": answer[name] for name in ("top_ids", "top_logprobs")}
        return columns | _nll(rows, tokens) | _choices(rows, answer["top1"]) | _likeliest(rows)

    def finished(self, table: pa.Table) -> tuple[pa.Table, list[str]]:
        """Intervals where the codes leave one, and llama.cpp's own figure in words."""
        values = table.column(_OWN).to_numpy().astype(np.float64)
        names = np.asarray(table.column("candidate").to_pylist())
        notes = [
            "the logits file names neither its model nor its vocabulary: only the vocabulary's size was checked",
            "the file is one joined text, so that no interval over documents is known",
        ]
        for name in dict.fromkeys(names.tolist()):
            mine = values[names == name]
            error = f" +- {mine.std(ddof=1) / np.sqrt(len(mine)):.6f}" if len(mine) > 1 else ""
            notes.append(
                f"llama.cpp's own mean KLD of {name} on this file, censored ids left out: {mine.mean():.6f}{error}"
            )
        return narrowed(table.drop_columns([_OWN])), notes


def with_bytes(windows: Sequence[Window], vocabulary: Sequence[bytes]) -> tuple[Window, ...]:
    """The windows with the bytes of their scored tokens; ids beyond the tokenizer have none."""
    sizes = [len(token) for token in vocabulary]
    return tuple(replace(w, bytes_per_token=tuple(sizes[t] if t < len(sizes) else 0 for t in w.ids)) for w in windows)


def _nll(rows: LogitsRows, tokens: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The actual token's nll as an interval: half a code, and without an upper end where it is censored."""
    at = np.arange(len(tokens)), tokens
    nll, off = -rows.logprobs[at].astype(np.float64), rows.rounding[at].astype(np.float64)
    return {"ref_nll_low": np.maximum(nll - off, 0.0), "ref_nll_high": np.where(rows.censored[at], np.nan, nll + off)}


def _likeliest(rows: LogitsRows) -> dict[str, NDArray[Any]]:
    """The ids of the reference's largest codes, of equal ones the smaller, and their logprobs; censored ids are not."""
    k = min(LISTED, rows.logprobs.shape[1])
    ids = np.full((len(rows.logprobs), k), -1, dtype=np.int64)
    logprobs = np.full(ids.shape, -np.inf, dtype=np.float32)
    for row, (values, censored) in enumerate(zip(rows.logprobs, rows.censored, strict=True)):
        least = np.partition(values, -k)[-k]
        found = np.flatnonzero((values >= least) & ~censored)
        found = found[np.lexsort((found, -values[found]))][:k]
        ids[row, : len(found)], logprobs[row, : len(found)] = found, values[found]
    return {"ref_top_ids": ids, "ref_top_logprobs": logprobs}


def _choices(rows: LogitsRows, top1: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
    """Top-1 of the reference where its code is the row's only largest, agreement, and the regret's interval."""
    best = rows.logprobs.max(axis=1)
    single = (rows.logprobs == best[:, None]).sum(axis=1) == 1
    ids = np.where(single, rows.logprobs.argmax(axis=1), -1)
    at = np.arange(len(top1)), top1.astype(np.int64)
    theirs = rows.logprobs[at]
    same, tied = ids == top1, theirs == best
    agreement = np.where(single, same.astype(np.float64), np.where(tied, np.nan, 0.0))
    step = 2 * rows.rounding.max(axis=1).astype(np.float64)
    cost = (best - theirs).astype(np.float64)
    low = np.where(same, 0.0, np.maximum(cost - step, 0.0))
    high = np.where(same, 0.0, np.where(rows.censored[at], np.nan, cost + step))
    return {
        "ref_top1": ids.astype(np.int32),
        "top1_agreement": agreement,
        "top1_agreement_low": np.where(np.isnan(agreement), 0.0, agreement),
        "top1_agreement_high": np.where(np.isnan(agreement), 1.0, agreement),
        "regret_low": low,
        "regret_high": high,
    }


def _digest(path: Path) -> str:
    import xxhash

    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            state.update(block)
    return str(state.hexdigest())
