"""Scoring with the workers of a Ray cluster: the same table, however many there are and whichever of them die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from evalgate.core import Window
from evalgate.errors import InputError, ServerError
from evalgate.measure.kinds import embedded
from evalgate.measure.run import RunRequest, run
from evalgate.measure.sweep import SweepRequest
from evalgate.server import batches
from evalgate.server.client import EmbeddedClient
from evalgate.store.partial import partial_root
from evalgate.store.runs import TOKENS
from evalgate.sweeps import run_sweep
from evalgate.sweeps.names import named
from tests.checkpoints import texts
from tests.preloaded.sitecustomize import ADDRESS

ROOT = Path(__file__).parents[3]
ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'evalgate-lm[ray]'")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A local cluster that the runs of these tests share, as a notebook's session would be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ADDRESS, raising=False)  # workers start processes of their own
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Batches so small that a short text has many."""
    monkeypatch.setattr(batches, "BATCH_TOKENS", 128)
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def request(tiny: tuple[str, str], folder: Path, **options: Any) -> RunRequest:
    return RunRequest.of(
        "kl",
        tiny[0],
        [tiny[1]],
        data=texts(folder / "texts"),
        context=32,
        num_cpus=0.5 if "ray" in options else 1.0,
        **options,
    )


@pytest.fixture(scope="module")
def alone(tiny: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The table of the run without Ray."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "BATCH_TOKENS", 128)
        patch.setenv("EVALGATE_CACHE", str(folder / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv(ADDRESS, raising=False)
        run(request(tiny, folder, out=folder / "run"), page=False)
    return (folder / "run" / TOKENS).read_bytes()


class Dying:
    """An ask that ends its worker, or the server of it, in the third batch; `folder` counts the batches."""

    def __init__(self, ask: Any, folder: Path, what: str) -> None:
        self.ask, self.folder, self.what = ask, folder, what

    def __call__(self, client: EmbeddedClient, windows: Sequence[Window]) -> Any:
        self.folder.mkdir(exist_ok=True)
        (self.folder / f"{os.getpid()}-{windows[0].index}").touch()
        if len(list(self.folder.iterdir())) == 3:
            server = client._server.pid
            assert server is not None
            os.kill(os.getpid() if self.what == "worker" else server, signal.SIGKILL)
        return self.ask(client, windows)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_workers_gives_the_same_bytes(
    cluster: None, tiny: tuple[str, str], alone: bytes, tmp_path: Path, workers: int
) -> None:
    found = run(request(tiny, tmp_path, out=tmp_path / "run", ray="local", workers=workers), page=False)
    assert (tmp_path / "run" / TOKENS).read_bytes() == alone
    assert found.token_texts and found.alternatives_table is not None
    assert found.manifest["request"]["workers"] == workers
    assert not any(partial_root().iterdir())


@pytest.mark.parametrize("what", ["worker", "server"])
def test_a_worker_that_is_killed_loses_nothing(
    cluster: None, tiny: tuple[str, str], alone: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    pair = embedded.AskPair
    monkeypatch.setattr(embedded, "AskPair", lambda *given: Dying(pair(*given), tmp_path / "asked", what))
    run(request(tiny, tmp_path, out=tmp_path / "run", ray="local", workers=2), page=False)
    assert (tmp_path / "run" / TOKENS).read_bytes() == alone
    asked = [name.name.partition("-") for name in (tmp_path / "asked").iterdir()]
    again = len(asked) - len({window for _, _, window in asked})
    assert again == (1 if what == "worker" else 0)  # a server is started again by the same worker


def test_what_workers_scored_is_resumed_without_ray(
    cluster: None, tiny: tuple[str, str], alone: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop:
        def __init__(self) -> None:
            self.windows = 0

        def stage(self, text: str) -> None: ...
        def start(self, *, windows: int, positions: int) -> None: ...
        def finish(self) -> None: ...
        def advance(self, *, windows: int, positions: int, running: dict[str, float]) -> None:
            self.windows += windows
            if self.windows > 8:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(request(tiny, tmp_path, ray="local", workers=2), observer=Stop(), page=False)
    kept = len(list(partial_root().rglob("*.parquet")))
    assert kept >= 2
    monkeypatch.delenv(ADDRESS, raising=False)
    asked: list[int] = []
    pair = embedded.AskPair

    class Counted(pair):  # type: ignore[misc, valid-type]
        def __call__(self, client: EmbeddedClient, windows: Sequence[Window]) -> Any:
            asked.append(windows[0].index)
            return super().__call__(client, windows)

    monkeypatch.setattr(embedded, "AskPair", Counted)
    run(request(tiny, tmp_path, out=tmp_path / "run"), page=False)
    assert (tmp_path / "run" / TOKENS).read_bytes() == alone
    whole = len(list(batches.batches(_windows(tmp_path / "run"))))
    assert len(asked) == whole - kept


def _windows(folder: Path) -> list[Window]:
    """Windows of a run, as far as their lengths."""
    import pyarrow.parquet as pq

    table = pq.read_table(folder / TOKENS)
    lengths: dict[int, int] = {}
    for window, position in zip(table["window"].to_pylist(), table["position"].to_pylist(), strict=True):
        lengths[window] = max(lengths.get(window, 0), position + 1)
    return [Window(w, "", "", (0,) * n, 1, n, (0,) * n) for w, n in lengths.items()]


def test_a_sweep_leaves_out_what_cannot_be_loaded_there(
    cluster: None, tiny: tuple[str, str], alone: bytes, tmp_path: Path
) -> None:
    asked = RunRequest.of(
        "kl",
        tiny[0],
        [tiny[1], str(tmp_path / "missing")],
        data=texts(tmp_path / "texts"),
        context=32,
        out=tmp_path / "sweep",
        ray="local",
        workers=2,
        num_cpus=0.5,
    )
    done = run_sweep(SweepRequest(asked, named(asked.candidates, {}, {})), new_folder=lambda: tmp_path)
    measured = {entry.spec: entry for entry in done.board.entries}
    assert "missing" in measured[str(tmp_path / "missing")].reason
    folder = measured[tiny[1]].run
    assert folder is not None and measured[tiny[1]].speed
    assert (done.folder / folder / TOKENS).read_bytes() == alone


def test_an_error_of_a_worker_is_said_as_it_is(
    cluster: None, tiny: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def __init__(self, *given: Any) -> None: ...
        def __call__(self, client: EmbeddedClient, windows: Sequence[Window]) -> Any:
            raise InputError("the disk of this worker is full: empty it", file="x")

    monkeypatch.setattr(embedded, "AskPair", Failing)
    with pytest.raises(InputError, match="the disk of this worker is full: empty it") as caught:
        run(request(tiny, tmp_path, ray="local"), page=False)
    assert caught.value.context == {"file": "x"}


def test_a_model_that_cannot_be_loaded_is_named(cluster: None, tiny: tuple[str, str], tmp_path: Path) -> None:
    asked = RunRequest.of(
        "kl", tiny[0], [str(tmp_path / "none")], data=texts(tmp_path / "texts"), ray="local", num_cpus=0.5
    )
    with pytest.raises(ServerError, match="none"):
        run(asked, page=False)
