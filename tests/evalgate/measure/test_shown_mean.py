"""What progress shows while a run goes on: the mean of what is measured, and a bound as a bound."""

import pytest

from evalgate.measure.recordings import shown_mean
from evalgate.measure.request import RunRequest
from evalgate.traces.llamacpp_logits import MAGIC


@pytest.mark.parametrize(
    ("kind", "reference", "candidate", "expected"),
    [
        ("kl", "demo", "demo@int8", ("kl", "KL")),
        ("kl", "demo", "http://h/v1#m", ("kl_low", "KL, at least")),
        ("kl", "llama.cpp:demo", "demo", ("kl_low", "KL, at least")),
        ("kl", "ref.trace", "demo", ("kl", "KL")),
        ("kl", "ref.trace", "http://h/v1#m", ("kl_low", "KL, at least")),
        ("agree", "demo", "demo@int8", ("top1_agreement", "agreement")),
        ("agree", "demo", "http://h/v1#m", ("top1_agreement_low", "agreement, at least")),
        ("ppl", None, "http://h/v1#m", ("cand_nll", "nll")),
    ],
)
def test_the_mean_that_is_shown(kind, reference, candidate, expected):
    assert shown_mean(RunRequest.of(kind, reference, (candidate,))) == expected


def test_a_logits_file_gives_bounds(tmp_path):
    (tmp_path / "logits").write_bytes(MAGIC)
    assert shown_mean(RunRequest.of("kl", str(tmp_path / "logits"), ("demo",))) == ("kl_low", "KL, at least")
