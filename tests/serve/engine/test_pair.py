"""Pair scoring against a slow float64 reimplementation, on every architecture."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from serve.engine.pair import Columns, ScoreJob, ScoreWindow
from serve.engine.runtime import ModelRuntime
from serve.errors import BadRequest, ScoringFailed
from tests.serve.architectures import BUILDERS, built, own_logits, perturbed, runtime, tokens
from tests.stuck import STUCK

WINDOWS = [ScoreWindow(tokens(n, seed=n), tuple(range(first, n))) for n, first in ((40, 1), (2, 1), (23, 11), (31, 1))]
K = 10


def score(
    reference: ModelRuntime | None,
    candidates: list[ModelRuntime],
    windows: list[ScoreWindow] = WINDOWS,
    *,
    top_k: int = 0,
) -> Columns:
    job = ScoreJob(reference, candidates, windows, K, on_end=lambda _: None, top_k=top_k)
    job.validate()
    while not job.finished:
        job.advance()
    return job.columns()


def brute_force(ref: Any, cand: Any, windows: list[ScoreWindow]) -> dict[str, list[float]]:
    """Every column by its definition, in float64, one position at a time."""
    rows: dict[str, list[float]] = {}
    for window in windows:
        p_all, q_all = own_logits(ref, window.ids), own_logits(cand, window.ids)
        for i in window.positions:
            for name, value in position_columns(p_all[i - 1].numpy(), q_all[i - 1].numpy(), window.ids[i]).items():
                rows.setdefault(name, []).append(value)
    return rows


def position_columns(p_logits: np.ndarray, q_logits: np.ndarray, token: int) -> dict[str, float]:
    def logprobs(x: np.ndarray) -> np.ndarray:
        return x - x.max() - math.log(np.exp(x - x.max()).sum())

    def order(x: np.ndarray) -> list[int]:
        return sorted(range(len(x)), key=lambda v: (-x[v], v))

    lp, lq = logprobs(p_logits), logprobs(q_logits)
    p, q = np.exp(lp), np.exp(lq)
    lm = np.log((p + q) / 2)
    op, oq = order(p_logits), order(q_logits)
    out: dict[str, float] = {}
    for side, ids, lx in (("ref", op, lp), ("cand", oq, lq)):
        out |= {
            f"{side}_nll": -lx[token],
            f"{side}_entropy": -(np.exp(lx) * lx).sum(),
            f"{side}_top1": ids[0],
            f"{side}_margin": lx[ids[0]] - lx[ids[1]],
            f"{side}_rank": ids.index(token) + 1,
        }
    return out | {
        "kl": (p * (lp - lq)).sum(),
        "reverse_kl": (q * (lq - lp)).sum(),
        "js": 0.5 * ((p * (lp - lm)).sum() + (q * (lq - lm)).sum()),
        "tv": 0.5 * np.abs(p - q).sum(),
        "regret": lp[op[0]] - lp[oq[0]],
        "topk_overlap": len(set(op[:K]) & set(oq[:K])) / K,
        "ref_rank_of_cand_top1": op.index(oq[0]) + 1,
        "cand_rank_of_ref_top1": oq.index(op[0]) + 1,
    }


@pytest.mark.parametrize("name", BUILDERS)
def test_every_column_agrees_with_float64_brute_force(name: str) -> None:
    ref, cand = built(name), perturbed(built(name))
    got = score(runtime(ref, "ref"), [runtime(cand, "cand")])
    expected = brute_force(ref, cand, WINDOWS)
    assert set(got) == set(expected) | {"window", "position", "candidate"}
    for column, values in expected.items():
        np.testing.assert_allclose(got[column], values, atol=1e-5, rtol=1e-5, err_msg=f"{name}: {column}")
    assert got["kl"].mean() > 1e-4  # the candidate really differs


@pytest.mark.parametrize("name", BUILDERS)
def test_every_architecture_runs_packed(name: str) -> None:
    model = runtime(built(name))
    assert model.backend == "packed"
    assert model.deviation < 1e-4
    assert model.head.dtype == "float32"


@pytest.mark.parametrize("name", ("llama", "gemma3", "bloom"))
def test_a_model_against_itself_is_exactly_zero(name: str) -> None:
    one, two = runtime(built(name), "one"), runtime(built(name), "two")
    got = score(one, [two, one])
    for column in ("kl", "reverse_kl", "js", "tv", "regret"):
        assert (got[column] == 0).all(), column
    assert (got["ref_top1"] == got["cand_top1"]).all()
    assert (got["topk_overlap"] == 1).all()


def test_several_candidates_get_the_rows_they_would_get_alone() -> None:
    ref, near, far = built("llama"), perturbed(built("llama")), perturbed(built("llama"), by=0.2)
    reference = runtime(ref, "ref")
    together = score(reference, [runtime(near, "near"), runtime(far, "far")])
    for number, model in enumerate((near, far)):
        alone = score(reference, [runtime(model, "alone")])
        rows = together["candidate"] == number
        for column in alone:
            if column != "candidate":
                np.testing.assert_array_equal(together[column][rows], alone[column])


def test_a_model_alone_gives_its_own_columns_only() -> None:
    model = runtime(built("qwen3"))
    got = score(None, [model])
    assert set(got) == {"window", "position", "candidate"} | {
        f"cand_{n}" for n in ("nll", "entropy", "top1", "margin", "rank")
    }
    pair = score(model, [model])
    for column in got:
        np.testing.assert_array_equal(got[column], pair[column])


def test_batches_and_tiles_do_not_change_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    ref, cand = built("gemma3"), perturbed(built("gemma3"))
    whole = score(runtime(ref), [runtime(cand)])
    # one row a tile, one window a batch, and windows beyond the budget in chunks through the pages
    cut = score(
        runtime(ref, max_batch_tokens=8, tile_bytes=4 * 320), [runtime(cand, max_batch_tokens=8, tile_bytes=4 * 320)]
    )
    worst = max(float(np.abs(whole[c] - cut[c]).max()) for c in whole if whole[c].dtype == np.float32)
    with capsys.disabled():
        print(f"\nbatches of one window in chunks of 8 against one batch: largest difference {worst:.2g}")
    for column in whole:
        np.testing.assert_allclose(whole[column], cut[column], atol=1e-5, rtol=1e-5, err_msg=column)


def test_what_cannot_be_scored_is_refused_by_name() -> None:
    model = runtime(built("llama"))
    bad = {
        "window 0 has token id 320": ScoreWindow((1, 320), (1,)),
        "window 0 has 130 tokens": ScoreWindow(tokens(130), (1,)),  # the context is 128, and the last is only predicted
        "outside 1..2": ScoreWindow((1, 2, 3), (3,)),
    }
    for message, window in bad.items():
        with pytest.raises(BadRequest, match=message):
            ScoreJob(None, [model], [window], K, on_end=lambda _: None).validate()


LISTS = tuple(f"{side}_{name}" for side in ("ref", "cand") for name in ("top_ids", "top_logprobs"))


@pytest.mark.parametrize("top_k", (1, 10, 40))
def test_the_likeliest_ids_of_both_sides_agree_with_float64(top_k: int) -> None:
    """At 40 they are more than the ranks are read off; no other column changes by a bit."""
    ref, cand = built("gemma3"), perturbed(built("gemma3"))
    models = runtime(ref, "ref"), runtime(cand, "cand")
    got = score(models[0], [models[1]], top_k=top_k)
    plain = score(models[0], [models[1]])
    assert set(got) == set(plain) | set(LISTS)
    for column in plain:
        np.testing.assert_array_equal(got[column], plain[column], err_msg=column)
    assert {got[name].dtype for name in LISTS} == {np.dtype(np.int32), np.dtype(np.float32)}
    for side, model in (("ref", ref), ("cand", cand)):
        rows = torch.cat([own_logits(model, w.ids)[[p - 1 for p in w.positions]] for w in WINDOWS])
        logprobs = torch.log_softmax(rows, 1).numpy()
        ids = got[f"{side}_top_ids"].astype(np.int64)
        assert ids.shape == (len(got["kl"]), top_k) and (np.diff(np.sort(ids, 1)) > 0).all()
        assert (ids[:, 0] == got[f"{side}_top1"]).all()
        values = np.take_along_axis(logprobs, ids, 1)
        np.testing.assert_allclose(got[f"{side}_top_logprobs"], values, atol=1e-5)
        np.testing.assert_allclose(values, -np.sort(-logprobs, 1)[:, :top_k], atol=1e-5)  # and none is left out


def test_likeliest_ids_are_ordered_as_ranks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal logits by id, at the cut too; masked ids have no probability; never more ids than the vocabulary has."""
    model = runtime(built("llama"))
    tile = model.tile

    def tied(*args: Any, **options: Any) -> torch.Tensor:
        logits = tile(*args, **options).clone()
        logits[:] = torch.where(torch.arange(logits.shape[1]) < 310, -1e30, 0.0)
        logits[:, [318, 312]] = 2.0
        return logits

    monkeypatch.setattr(model, "tile", tied)
    window = [ScoreWindow((5, 311, 311), (1, 2))]
    ten = score(None, [model], window, top_k=10)
    assert set(ten) & set(LISTS) == {"cand_top_ids", "cand_top_logprobs"}
    total = math.log(2 * math.exp(2.0) + 8)
    for ids, logprobs in zip(ten["cand_top_ids"], ten["cand_top_logprobs"], strict=True):
        assert ids.tolist() == [312, 318, 310, 311, 313, 314, 315, 316, 317, 319]
        np.testing.assert_allclose(logprobs, [2.0 - total] * 2 + [-total] * 8, atol=1e-6)
    all_ids = score(None, [model], window, top_k=1000)
    assert all_ids["cand_top_ids"].shape == (2, 320)
    assert np.isneginf(all_ids["cand_top_logprobs"][:, 10:]).all()


def test_different_vocabularies_are_refused() -> None:
    import transformers as t

    other = t.AutoModelForCausalLM.from_config(
        t.LlamaConfig(
            vocab_size=328,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=128,
        )
    ).eval()
    with pytest.raises(BadRequest, match="different vocabularies"):
        ScoreJob(runtime(built("llama")), [runtime(other)], WINDOWS, K, on_end=lambda _: None).validate()


def test_a_non_finite_logit_is_an_error_that_names_where() -> None:
    model = runtime(built("llama"))
    embedding = model.loaded.model.get_input_embeddings().weight
    windows = [ScoreWindow((5, 6, 8, 9), (1, 2, 3)), ScoreWindow((5, 7, 8, 9), (2, 3))]
    with torch.no_grad():
        embedding[7] = float("nan")
    with pytest.raises(ScoringFailed, match="non-finite nll at window 1, position 2"):
        score(None, [model], windows)


@pytest.mark.parametrize("mask", (-1e30, -1e4))
def test_a_masked_logit_is_an_error_that_names_where(mask: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a padded vocabulary or a grammar leaves it. It used to pass as a value, KL 4e29."""
    reference, candidate = runtime(built("llama")), runtime(built("llama"))
    tile = candidate.tile

    def masked(*args: Any, **options: Any) -> torch.Tensor:
        logits = tile(*args, **options).clone()
        logits[:, 9] = mask
        return logits

    monkeypatch.setattr(candidate, "tile", masked)
    with pytest.raises(ScoringFailed, match=r"non-finite kl at window 0, position 1 \(a logit is -inf or a mask\)"):
        score(reference, [candidate], [ScoreWindow((5, 6, 8), (1, 2))])
    with pytest.raises(ScoringFailed, match=r"non-finite nll at window 1, position 2 \(a logit is -inf or a mask\)"):
        score(None, [candidate], [ScoreWindow((5, 6, 8), (1, 2)), ScoreWindow((5, 6, 9), (1, 2))])


def apart(reference: ModelRuntime, candidates: list[ModelRuntime]) -> Columns:
    job = ScoreJob(reference, candidates, WINDOWS, K, on_end=lambda _: None, apart=True)
    while not job.finished:
        job.advance()
    return job.columns()


def test_apart_a_model_meets_itself_in_other_batch_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    import serve.engine.pair as pair

    model, other = runtime(built("llama")), runtime(perturbed(built("llama")))
    shapes: list[int] = []
    scored = pair.scored_rows
    monkeypatch.setattr(pair, "scored_rows", lambda m, w: (shapes.append(len(w)), scored(m, w))[1])
    itself = apart(model, [model])
    assert shapes == [4, 1, 1, 1, 1]
    alone = score(None, [model], [WINDOWS[0]])["cand_nll"]
    assert np.array_equal(itself["cand_nll"][: len(alone)], alone)
    assert np.abs(itself["ref_nll"] - itself["cand_nll"]).max() < 1e-4
    assert itself["kl"].max() < 1e-6
    together, separate = score(model, [other]), apart(model, [other])
    for name in together:
        assert np.allclose(together[name], separate[name], atol=1e-4), name


_MEMORY = """
import resource, sys, torch, transformers as t
sys.path.insert(0, {root!r})
from serve.config import EngineConfig
from serve.engine.pair import ScoreJob, ScoreWindow
from serve.engine.runtime import ModelRuntime
from tests.serve.architectures import loaded
torch.manual_seed(0)
sizes = dict(vocab_size=262144, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
             max_position_embeddings=4096)
models = [t.AutoModelForCausalLM.from_config(t.LlamaConfig(**sizes)).eval() for _ in range(2)]
config = EngineConfig(max_batch_tokens=5000)
ready = [ModelRuntime(loaded(m, str(i)), config, kv_memory=1 << 24) for i, m in enumerate(models)]
windows = [ScoreWindow(tuple(torch.randint(0, 262144, (129,)).tolist()), tuple(range(1, 129))) for _ in range(16)]
before = int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize()
open('/proc/self/clear_refs', 'w').write('5')  # forget the peak of loading
job = ScoreJob(ready[0], [ready[1]], windows, 10, on_end=lambda _: None)
while not job.finished:
    job.advance()
peak = next(int(l.split()[1]) * 1024 for l in open('/proc/self/status') if l.startswith('VmHWM'))
print(len(job.columns()['kl']), peak - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_peak_memory_of_pair_scoring_stays_under_one_gibibyte(capsys: pytest.CaptureFixture[str]) -> None:
    from pathlib import Path

    root = str(Path(__file__).parents[3])
    out = subprocess.run(
        [sys.executable, "-c", _MEMORY.format(root=root)], capture_output=True, text=True, check=True, timeout=STUCK
    )
    positions, extra = map(int, out.stdout.split())
    with capsys.disabled():
        print(f"\npair scoring of {positions} positions over 262,144 ids: {extra / 2**20:.0f} MiB over the weights")
    assert positions == 2048
    assert extra < 1 << 30
