"""Pieces of a job side by side: the same rows in the same order, whichever lane does what, and errors as without."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from serve.engine import lanes as lanes_module
from serve.engine import pair
from serve.engine.lanes import Lanes, buffer, lanes
from serve.engine.pair import Columns, ScoreJob, ScoreWindow
from serve.engine.runtime import ModelRuntime
from serve.errors import ScoringFailed
from tests.serve.architectures import built, perturbed, runtime, tokens

WINDOWS = [ScoreWindow(tokens(n, seed=n), tuple(range(1, n))) for n in (40, 2, 23, 31, 17)]


@pytest.fixture
def two_lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two lanes for work of any size, whatever the machine."""
    before = torch.get_num_threads()
    monkeypatch.setattr(pair, "_LEAST_TILE", 1)
    monkeypatch.setattr(pair, "_LEAST_GROUP", 1)
    monkeypatch.setattr(pair, "_MOST_GROUP", 50)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def score(reference: ModelRuntime | None, candidates: list[ModelRuntime], windows: list[ScoreWindow]) -> Columns:
    job = ScoreJob(reference, candidates, windows, 10, on_end=lambda _: None, top_k=3)
    while not job.finished:
        job.advance()
    return job.columns()


def models() -> tuple[ModelRuntime, list[ModelRuntime]]:
    tile = 4 * built("llama").config.vocab_size * 7  # bytes: tiles of up to 7 rows
    made = [built("llama"), perturbed(built("llama")), built("llama")]
    return (ready := [runtime(m, str(i), tile_bytes=tile) for i, m in enumerate(made)])[0], ready[1:]


def test_the_same_rows_in_the_same_order_as_in_one_lane(two_lanes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, candidates = models()
    used: set[str] = set()
    scored = pair.scored_rows
    monkeypatch.setattr(pair, "scored_rows", lambda m, w: (used.add(threading.current_thread().name), scored(m, w))[1])
    side_by_side = score(reference, candidates, WINDOWS)
    assert used and all(name.startswith("lane") for name in used)
    again = score(reference, candidates, WINDOWS)
    for model in (reference, *candidates):
        model.in_lanes = False
    used.clear()
    plain = score(reference, candidates, WINDOWS)
    assert used == {threading.current_thread().name}
    assert list(side_by_side) == list(plain)
    for name, values in plain.items():
        assert np.array_equal(side_by_side[name], again[name]), name
        assert np.allclose(side_by_side[name], values, rtol=1e-4, atol=1e-5), name
    same = side_by_side["candidate"] == 1
    assert (side_by_side["kl"][same] == 0).all() and (side_by_side["kl"][~same] > 0).all()


def test_the_speed_counts_each_lane_as_its_share_of_the_machine(two_lanes: None) -> None:
    reference, candidates = models()
    score(reference, candidates, WINDOWS)
    for model in (reference, *candidates):
        assert model.scored_tokens == sum(len(window.ids) for window in WINDOWS)
        assert model.scoring_seconds > 0


def test_the_first_failure_by_position_is_the_one_that_is_told(
    two_lanes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, candidates = models()
    tile = candidates[0].tile

    def broken(hidden: torch.Tensor, **options: str) -> torch.Tensor:
        return tile(hidden, **options).clone().fill_(float("nan"))

    monkeypatch.setattr(candidates[0], "tile", broken)
    with pytest.raises(ScoringFailed, match="at window 0, position 1"):
        score(reference, candidates, WINDOWS)


def test_no_lanes_where_a_model_cannot_be_shared(two_lanes: None) -> None:
    fixed = runtime(built("llama"), deterministic=True)
    own = runtime(built("llama"), logits="model")
    assert not fixed.in_lanes and not own.in_lanes and not fixed.runner.parallel
    assert runtime(built("llama")).in_lanes and runtime(built("llama")).runner.parallel


def test_lanes_share_the_threads_and_leave_the_callers_alone() -> None:
    before = torch.get_num_threads()
    made = Lanes(5)
    try:
        assert made.count == 2 and torch.get_num_threads() == 5
        assert made.run([torch.get_num_threads] * 4) == [2, 2, 2, 2]
        assert made.run([torch.is_inference_mode_enabled]) == [True]
        assert Lanes(1).run([torch.get_num_threads]) == [1]
    finally:
        torch.set_num_threads(before)
    assert lanes() is lanes()


def test_all_pieces_end_before_the_first_failure_is_raised() -> None:
    made, release, ended = Lanes(2), threading.Event(), []

    def slow() -> None:
        release.wait(30)
        ended.append(1)

    def fail() -> None:
        release.set()
        raise ValueError("this one")

    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="this one"):
        made.run([slow, fail])
    assert ended == [1]
    torch.set_num_threads(before)


def test_a_buffer_is_the_threads_own_and_grows() -> None:
    device = torch.device("cpu")
    first = buffer("test", 3, 5, device)
    assert first.shape == (3, 5) and buffer("test", 5, 3, device).data_ptr() == first.data_ptr()
    assert buffer("other", 3, 5, device).data_ptr() != first.data_ptr()
    assert buffer("test", 30, 5, device).shape == (30, 5)
    elsewhere: list[int] = []
    thread = threading.Thread(target=lambda: elsewhere.append(buffer("test", 3, 5, device).data_ptr()))
    thread.start()
    thread.join()
    assert elsewhere[0] != buffer("test", 3, 5, device).data_ptr()
    del lanes_module._here.buffers
