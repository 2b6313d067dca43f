"""Our own server asked as an endpoint through each dialect it speaks, against its exact scores."""

import numpy as np
import pytest

from evalgate.embedded import EmbeddedServer
from evalgate.endpoints.settings import EndpointSettings
from evalgate.pipeline import RunRequest, run
from tests.serve.tiny_models import byte_level, llama, save

TEXTS = ["hello world, hello there. the quick brown fox", "user says hello; assistant says hi", "the fox says hi"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two tiny checkpoints of one vocabulary: the second one's weights moved a little."""
    import torch

    folder = tmp_path_factory.mktemp("models")
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
    with EmbeddedServer([str(models / "cand")], device="cpu", options=["--max-logprobs", "64"]) as server:
        yield server


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch, request):
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def exact(models, corpus):
    asked = RunRequest("kl", str(models / "ref"), (str(models / "cand"),), data=str(corpus), context=32, resume=False)
    return run(asked).tokens


@pytest.mark.parametrize("dialect", ["prompt_logprobs", "echo", "continuation"])
def test_each_dialect_says_what_the_exact_path_says(models, corpus, endpoint, exact, dialect, monkeypatch):
    monkeypatch.setenv("KEY", endpoint.key)
    settings = EndpointSettings(dialect=dialect, key_variable="KEY", top_k=24, concurrency=8)
    cand = f"{endpoint.url}/v1"
    asked = RunRequest("kl", str(models / "ref"), (cand,), data=str(corpus), context=32, endpoint=settings)
    found = run(asked).tokens
    assert found[["window", "position", "token"]].equals(exact[["window", "position", "token"]])
    assert np.abs(found.cand_nll - exact.cand_nll).max() < 1e-5
    assert np.abs(found.ref_nll - exact.ref_nll).max() < 1e-5
    assert (found.ref_top1 == exact.ref_top1).all() and (found.cand_top1 == exact.cand_top1).all()
    assert (found.kl_low <= exact.kl + 1e-6).all() and (found.kl_low > 0).any()
    for name in ("tv", "js"):
        assert (found[f"{name}_low"] <= exact[name] + 1e-6).all()
        assert (found[f"{name}_high"] >= exact[name] - 1e-6).all()


def test_the_whole_vocabulary_on_both_sides_is_no_interval(models, corpus, exact, monkeypatch):
    with EmbeddedServer([str(models / "cand")], device="cpu", options=["--max-logprobs", "-1"]) as server:
        monkeypatch.setenv("KEY", server.key)
        settings = EndpointSettings(key_variable="KEY", top_k=304, concurrency=4)
        asked = RunRequest(
            "kl", str(models / "ref"), (f"{server.url}/v1",), data=str(corpus), context=32, endpoint=settings
        )
        found = run(asked).tokens
    assert np.abs(found.kl_low - exact.kl).max() < 1e-5
    assert (found.tv_high - found.tv_low).max() < 1e-4
