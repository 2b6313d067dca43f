"""GGUF on llama.cpp's own kernels against the same file on ours, and a child that leaves with us."""

import json
import time
from pathlib import Path

import pytest

from evalgate.endpoints.llamacpp_server import LlamaCppServer
from evalgate.endpoints.settings import EndpointSettings, LlamaSettings
from evalgate.errors import ServerError
from evalgate.measure.run import RunRequest, run
from tests.gguf_files import write_llama
from tests.serve.architectures import built
from tests.serve.tiny_models import byte_level
from tests.stuck import STUCK


def test_a_file_that_is_not_there():
    with pytest.raises(ServerError, match="there is no file none"), LlamaCppServer("none.gguf", LlamaSettings()):
        pass


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "x.gguf").write_text("nonsense")
    with pytest.raises(ServerError), LlamaCppServer(str(tmp_path / "x.gguf"), LlamaSettings(threads=1)):
        pass


@pytest.mark.demo
def test_the_demo_on_llama_cpp_is_the_demo(tmp_path, monkeypatch):
    text = tmp_path / "text"
    text.mkdir()
    for n, word in enumerate(("river", "engine")):
        (text / f"{n}.txt").write_text(
            f"The {word} is one of the oldest in the country. It was first described in 1840. " * 2
        )
    settings = EndpointSettings(llama=LlamaSettings(threads=1))
    asked = RunRequest.of(
        "kl", "demo", ("llama.cpp:demo",), data=str(text), context=32, endpoint=settings, resume=False
    )
    found = run(asked)
    table = found.tokens
    assert found.summary.comparisons[0].candidate.extra["dialect"] == "llamacpp"
    certificate = json.loads(found.summary.comparisons[0].candidate.extra["certificate"])
    (measured,) = [one["excess"] for one in certificate.values()]
    assert 0 <= measured < 5e-3
    nll = table.cand_nll_low if "cand_nll_low" in table else table.cand_nll  # an interval where the sum exceeds 1
    assert ("cand_nll_low" in table) == (measured > 1e-6)
    assert abs((nll - table.ref_nll).mean()) < 0.02
    assert (table.ref_top1 == table.cand_top1).mean() > 0.9


def test_the_server_ends_with_the_block(tmp_path):
    file = write_llama(built("llama"), byte_level(bos=True), tmp_path / "tiny.gguf")
    with LlamaCppServer(str(file), LlamaSettings(threads=1), context=64) as server:
        pid = server.pid
        assert Path(f"/proc/{pid}").exists()
    until = time.monotonic() + STUCK
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()
