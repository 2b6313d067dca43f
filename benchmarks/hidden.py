"""What a reference's hidden states save: a run from a recording, and a second run against the same reference.

    python -m benchmarks.hidden [--size quick] [--runs 5] [--json FILE]

On the demo model in float32 against its int8 rounding, over windows of the Python texts (tiny: a small random model):

candidate   the candidate alone: its body, its head and the sums over the vocabulary
head        the reference's head alone over its hidden rows: the product and the sums over the vocabulary
recorded    the candidate against the recorded rows and head: both of the above, and the pair's own sums
first       the candidate against the live reference, whose rows are written to the cache
second      the same again: the rows are read, and the reference's body does not run

`recorded` is held against `candidate` and `head` together, `second` against `first`. Loading is left out: it takes as
long as the model is large, and a second run loads no reference at all. The tables of `first`, `second` and `recorded`
must be the same in every bit.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import result, timing

if TYPE_CHECKING:
    from serve.engine.pair import KnownRows, ScoreWindow
    from serve.engine.runtime import HeadRuntime, ModelRuntime

SIZES = {"tiny": (3, 24), "quick": (4, 128), "full": (4, 512)}  # windows and their tokens
RECORDED, SECOND = 1.15, 0.6  # goals


@dataclass
class Bench:
    """Both models, the windows, and the recorded head and rows in a folder."""

    reference: ModelRuntime
    candidate: ModelRuntime
    windows: Sequence[ScoreWindow]
    folder: Path

    def __post_init__(self) -> None:
        from serve.engine.stored import GivenRows, HeadModel, head_written

        path, _ = head_written(self.reference, self.folder)
        self.head = HeadModel("recorded", path, self.reference.config)
        job = self._job(None, [self.reference], sends_hidden=True)
        self.rows = GivenRows(self.windows, job.hidden())
        self.tables: dict[str, Any] = {}
        self._number = 0

    def sides(self) -> dict[str, Any]:
        """Name -> what gives its seconds."""
        return {
            "candidate": lambda: self._timed(None, [self.candidate]),
            "head": self._head,
            "recorded": lambda: self._timed(self.head, [self.candidate], known=self.rows, name="recorded"),
            "first": lambda: self._kept(new=True),
            "second": lambda: self._kept(new=False),
        }

    def _timed(self, reference: HeadRuntime | None, candidates: list[Any], *, name: str = "", **more: Any) -> float:
        began = time.perf_counter()
        job = self._job(reference, candidates, **more)
        seconds = time.perf_counter() - began
        if name:
            self.tables[name] = job.columns()
        return seconds

    def _head(self) -> float:
        """The recorded rows as a candidate of their own: nothing of a body runs."""
        return self._timed(None, [self.head], known=self.rows)

    def _kept(self, *, new: bool) -> float:
        from serve.config import ModelSpec
        from serve.engine.kept import KeptRows, Store

        self._number += new
        rows = KeptRows(Store(self.folder, 1 << 40), f"run-{self._number}", ModelSpec(self.reference.name))
        rows.model = self.reference
        name = "first" if new else "second"
        seconds = self._timed(self.reference, [self.candidate], known=rows, name=name)
        if bool(rows.found) == new or rows.problem:
            raise RuntimeError(f"the cache did not do what is measured: {rows.facts()}")
        return seconds

    def _job(self, reference: HeadRuntime | None, candidates: list[Any], **more: Any) -> Any:
        from serve.engine.pair import ScoreJob

        known: KnownRows | None = more.pop("known", None)
        job = ScoreJob(reference, candidates, self.windows, 10, on_end=lambda _: None, top_k=10, known=known, **more)
        while not job.finished:
            job.advance()
        return job


def main() -> None:
    options = result.parser(__doc__ or "").parse_args()
    found = result.Result(name="hidden", size=options.size)
    with tempfile.TemporaryDirectory() as folder:
        bench = _bench(options, Path(folder))
        times = timing.interleaved(bench.sides(), options.runs, warm=1)
        _check(bench.tables)
    positions = sum(len(window.positions) for window in bench.windows)
    count, context = SIZES[options.size]
    found.settings = {"windows": count, "context": context, "positions": positions}
    for name, runs in times.items():
        found.figure(name, positions / median(runs), "positions/s")
    both = [a + b for a, b in zip(times["candidate"], times["head"], strict=True)]
    found.ratio("recorded to candidate and head", times["recorded"], both, better="lower", goal=RECORDED)
    found.ratio("second to first", times["second"], times["first"], better="lower", goal=SECOND)
    size = int(bench.head.loaded.model.linear.weight.shape[1])
    found.notes.append(f"hidden states of {size} numbers, a vocabulary of {bench.head.head.vocab_size:,} ids")
    found.publish(options)


def _bench(options: argparse.Namespace, folder: Path) -> Bench:
    import torch

    from serve.config import EngineConfig, ModelSpec
    from serve.engine.kernels import kernels
    from serve.engine.pair import ScoreWindow
    from serve.engine.runtime import ModelRuntime

    kernels()  # compiled before anything is timed
    count, context = SIZES[options.size]
    config = EngineConfig(device="cpu", remember_checks=options.size != "tiny")
    from serve.errors import LoadFailed
    from serve.models.load import load_models
    from serve.selftest.tiny import checkpoint

    tiny = options.size == "tiny"
    source = str(checkpoint(folder / "model")) if tiny else "demo"
    try:
        loaded = load_models([ModelSpec(source), ModelSpec(source, "int8")], device="cpu")
    except LoadFailed as error:
        result.skip(error.message)
    if tiny:
        generator = torch.Generator().manual_seed(0)
        texts = [torch.randint(3, loaded[0].vocab_size, (context,), generator=generator).tolist() for _ in range(count)]
    else:
        texts = _texts(loaded[0].tokenizer, count, context)
    reference, candidate = (ModelRuntime(model, config, kv_memory=1 << 26) for model in loaded)
    windows = [ScoreWindow(tuple(ids), tuple(range(1, len(ids)))) for ids in texts]
    return Bench(reference, candidate, windows, folder)


def _texts(tokenizer: Any, count: int, context: int) -> list[list[int]]:
    from evalgate.corpora import load_corpus
    from serve.models.tokenizer import encode_text, prefix_ids

    found: list[list[int]] = []
    for document in load_corpus("python").documents:
        ids = [*prefix_ids(tokenizer), *encode_text(tokenizer, document.text).ids][:context]
        if len(ids) == context:
            found.append(ids)
        if len(found) == count:
            break
    return found


def _check(tables: dict[str, Any]) -> None:
    first = tables["first"]
    for name in ("second", "recorded"):
        wrong = [column for column, values in first.items() if values.tobytes() != tables[name][column].tobytes()]
        if wrong:
            raise SystemExit(f"{name} gives another {wrong[0]} than first")


if __name__ == "__main__":
    main()
