"""Our own server asked as an endpoint through each dialect it speaks, against its exact scores."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest

from evalgate.endpoints.settings import EndpointSettings
from evalgate.measure.run import RunRequest, run
from evalgate.server.process import EmbeddedServer
from tests.serve.tiny_models import byte_level, llama, save

pytestmark = pytest.mark.slow

TEXTS = ["hello world, hello there. the quick brown fox", "user says hello; assistant says hi", "the fox says hi"]


DIALECTS = ("prompt_logprobs", "echo", "continuation")


@pytest.fixture(scope="module")
def models(tmp_path_factory, warm):
    """Two tiny checkpoints of one vocabulary: the second one's weights moved a little."""
    import torch

    folder = tmp_path_factory.mktemp("models")
    warm.folders.add(str(folder))
    model = llama()
    save(model, folder / "ref", byte_level(bos=True))
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(0.02 * torch.randn_like(weights))
    save(model, folder / "cand", byte_level(bos=True))
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for n, text in enumerate(TEXTS):
        (folder / f"{n}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def endpoint(models):
    with EmbeddedServer([str(models / "cand")], device="cpu", options=["--max-logprobs", "-1"]) as server:
        yield server


@pytest.fixture(scope="module")
def exact(models, corpus):
    request = RunRequest.of(
        "kl", str(models / "ref"), (str(models / "cand"),), data=str(corpus), context=32, resume=False
    )
    return run(request).tokens


@pytest.fixture(scope="module")
def asked(models, corpus, endpoint, tmp_path_factory):
    """(dialect, k) -> the table of a whole run against the endpoint; each run is made once."""

    @cache
    def table(dialect, k):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EVALGATE_CACHE", str(tmp_path_factory.mktemp("cache")))
            patch.setenv("KEY", endpoint.key)
            settings = EndpointSettings(dialect=dialect, key_variable="KEY", top_k=k, concurrency=8)
            sides = (str(models / "ref"), (f"{endpoint.url}/v1",))
            return run(RunRequest.of("kl", *sides, data=str(corpus), context=32, endpoint=settings)).tokens

    return table


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_dialect_says_what_the_exact_path_says(exact, asked, dialect):
    found = asked(dialect, 24)
    assert found[["window", "position", "token"]].equals(exact[["window", "position", "token"]])
    assert np.abs(found.cand_nll - exact.cand_nll).max() < 1e-5
    assert np.abs(found.ref_nll - exact.ref_nll).max() < 1e-5
    assert (found.ref_top1 == exact.ref_top1).all() and (found.cand_top1 == exact.cand_top1).all()
    assert (found.kl_low <= exact.kl + 1e-6).all() and (found.kl_low > 0).any()
    for name in ("tv", "js"):
        assert (found[f"{name}_low"] <= exact[name] + 1e-6).all()
        assert (found[f"{name}_high"] >= exact[name] - 1e-6).all()


@pytest.mark.parametrize(("one", "other"), list(combinations(DIALECTS, 2)))
def test_the_dialects_agree_with_each_other(asked, one, other):
    first, second = asked(one, 24), asked(other, 24)
    numbers = [name for name in first.columns if first[name].dtype.kind == "f"]
    assert {"cand_nll", "kl_low", "tv_low", "tv_high", "js_low", "js_high"} <= set(numbers)
    for name in numbers:
        a, b = first[name].to_numpy(dtype=float), second[name].to_numpy(dtype=float)
        assert np.allclose(a, b, rtol=0, atol=1e-5, equal_nan=True), name
    assert first.cand_top1.equals(second.cand_top1)


def test_the_whole_vocabulary_on_both_sides_is_no_interval(exact, asked):
    found = asked("", 304)
    assert np.abs(found.kl_low - exact.kl).max() < 1e-5
    assert (found.tv_high - found.tv_low).max() < 1e-4


def test_a_pair_that_is_loaded_here_stays_exact_beside_an_endpoint(models, corpus, exact, endpoint, monkeypatch):
    monkeypatch.setenv("KEY", endpoint.key)
    settings = EndpointSettings(key_variable="KEY", top_k=8)
    served, loaded = f"{endpoint.url}/v1", str(models / "cand")
    found = run(
        RunRequest.of(
            *("kl", str(models / "ref"), (served, loaded)),
            data=str(corpus),
            context=32,
            endpoint=settings,
            resume=False,
        )
    )
    remote, local = found.summary.comparisons
    assert (remote.candidate.kind, local.candidate.kind) == ("endpoint", "embedded")
    assert remote.overall.metrics["kl"].exactness == "bounded"
    assert {m.exactness for m in local.overall.metrics.values()} == {"exact"}
    mine = found.tokens[found.tokens.candidate == local.candidate.name].reset_index(drop=True)
    for name in ("kl", "reverse_kl", "js", "tv", "cand_entropy", "cand_nll", "ref_nll"):
        assert np.abs(mine[name] - exact[name]).max() < 1e-6, name
    low = found.tokens[found.tokens.candidate == remote.candidate.name].kl_low.to_numpy()
    assert (low <= exact.kl.to_numpy() + 1e-5).all()  # the same weights behind the endpoint
