"""Is the endpoint the model it names? Fakes whose distributions are known, and the rule that decides."""

import json
import math

import numpy as np
import pytest

from evalgate.cli.app import invoke
from evalgate.core import Figure, Interval
from evalgate.endpoints.settings import EndpointSettings
from evalgate.errors import UsageError
from evalgate.measure.unseen import MOST_UNSEEN, differing, documents_needed
from evalgate.measure.verify import DrawnMean, VerifyRequest, _evidence, decide, unless_rare, verify
from evalgate.specs import parse
from tests.evalgate.cli.test_cli import MemoryOutput as Captured
from tests.evalgate.fake_endpoint import Fake, logprobs, serving

QUICK = EndpointSettings(concurrency=4, patience=0.2)


class Silent:
    def stage(self, text: str) -> None: ...


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(96):
        (folder / f"{n}.txt").write_text(" ".join(f"{n}-{i}" for i in range(6)))
    return folder


def asked(ref, cand, corpus, **options):
    options = {"prompts": 10, "prompt_tokens": 8, "new_tokens": 6, **options}
    return VerifyRequest(parse(f"{ref.url}/v1"), parse(f"{cand.url}/v1"), data=str(corpus), endpoint=QUICK, **options)


def test_the_same_model_passes_with_prompts_enough_to_find_a_rare_other_one(corpus):
    with serving(Fake()) as ref, serving(Fake()) as cand:
        found = verify(asked(ref, cand, corpus, prompts=90, new_tokens=2), watch=Silent())
        few = verify(asked(ref, cand, corpus, prompts=20, new_tokens=2), watch=Silent())
    assert found.verdict == "same"
    assert found.differing.most == pytest.approx(1 - 0.01 ** (1 / 90)) and found.differing.found == 0
    assert few.verdict == "undecided"
    assert few.differing.most == pytest.approx(1 - 0.01 ** (1 / 20))
    assert (found.agreement, found.floor) == (1.0, 0.0)
    assert all(e.figure.value == pytest.approx(0, abs=1e-6) for e in found.evidence)
    assert len(found.evidence) == 3


def test_another_model_is_found_out_and_the_estimate_is_right(corpus):
    with serving(Fake()) as ref, serving(Fake(salt=1, noise=1.0)) as cand:
        found = verify(asked(ref, cand, corpus, new_tokens=20), watch=Silent())
        prompts = [tuple(b["prompt"]) for b in ref.asked if b.get("prompt_logprobs") == 20 and len(b["prompt"]) == 28]
    assert found.verdict == "different"
    truth = []
    for ids in prompts[:10]:  # the first ten are those drawn from the reference
        for i in range(8, 28):
            p, q = logprobs(ids[:i]), logprobs(ids[:i], salt=1, noise=1.0)
            truth.append((np.exp(p) * (p - q)).sum())
    forward = next(e for e in found.evidence if e.name.startswith("KL(reference || endpoint), drawn"))
    assert forward.figure.low < np.mean(truth) < forward.figure.high
    bound = next(e for e in found.evidence if e.only_different)
    assert bound.figure.value <= np.mean(truth)


def evidence(low, high, only_different=False):
    return DrawnMean("x", Figure((low + high) / 2, Interval(low, high), n=10, documents=5), only_different)


def test_the_rule():
    assert decide([evidence(0.001, 0.01)], 0.02)[0] == "same"
    assert decide([evidence(0.001, 0.01), evidence(0.03, 0.04, True)], 0.02)[0] == "different"
    assert decide([evidence(0.001, 0.03)], 0.02)[0] == "undecided"
    assert decide([evidence(0.0, 0.001, True)], 0.02)[0] == "undecided"
    assert decide([DrawnMean("x", Figure(0.0, Interval(None, None), n=10, documents=1))], 0.02)[0] == "undecided"


def test_no_end_is_negative_where_no_value_is():
    """One document far from the others makes an interval that is wider than its mean."""
    values, documents = np.array([0.001, 0.002, 0.001, 0.9]), ["a", "b", "c", "d"]
    found = _evidence("x", values, documents, only_different=False, alarm=0.01, tolerance=0.02)
    assert found.figure.low == 0.0 and found.figure.high > 0.9
    assert found.figure.value == pytest.approx(0.226)


@pytest.mark.parametrize("prompts", [20, 50, 90, 150])
def test_a_mixed_server_is_the_same_no_more_often_than_promised(prompts):
    """5 % of the prompts go to a model at KL 0.05; 400 servers of each size."""
    rng, alarm, same = np.random.default_rng(prompts), 0.05, 0
    names = [str(i) for i in range(prompts) for _ in range(16)]
    for _ in range(400):
        other = np.repeat(rng.random(prompts) < 0.05, 16)
        log_r = np.where(other, rng.normal(-0.05, np.sqrt(0.1), len(names)), rng.normal(0, 1e-3, len(names)))
        rare = differing([((np.expm1(log_r) - log_r).tolist(), names)], tolerance=0.02, alarm=alarm)
        same += unless_rare("", rare, alarm=alarm)[0] == "same"
    assert same <= 400 * alarm + 3 * np.sqrt(400 * alarm * (1 - alarm))
    assert prompts >= documents_needed(alarm) or same == 0


def test_the_share_that_may_be_unseen_solves_the_binomial():
    """The limit is where so few documents, or fewer, come with the probability of a false alarm."""
    values, names = [0.0] * 28 + [0.1, 0.5], [str(i) for i in range(30)]
    found = differing([(values, names), ([0.9], ["29"])], tolerance=0.02, alarm=0.01)
    assert (found.documents, found.found) == (30, 2)
    tail = sum(math.comb(30, k) * found.most**k * (1 - found.most) ** (30 - k) for k in range(3))
    assert tail == pytest.approx(0.01, rel=1e-9)
    assert differing([], tolerance=0.02, alarm=0.01) is None
    assert documents_needed(0.01) == 90 == math.ceil(math.log(0.01) / math.log(1 - MOST_UNSEEN))


def test_options_that_make_no_sense(corpus):
    for options in ({"prompts": 1}, {"alarm": 0.7}, {"tolerance": 0.0}):
        with pytest.raises(UsageError):
            verify(VerifyRequest(parse("http://a"), parse("http://b"), **{"prompts": 5, **options}), watch=Silent())
    with pytest.raises(UsageError, match="loaded here"):
        verify(VerifyRequest(parse("http://a"), parse("demo"), 5), watch=Silent())


def test_the_command_gives_a_document_and_an_exit_code(corpus):
    with serving(Fake()) as ref, serving(Fake(salt=1, noise=1.0)) as cand:
        output = Captured()
        lengths = ["--prompts", "8", "--prompt-tokens", "8", "--new-tokens", "8"]
        sources = ["--ref", f"{ref.url}/v1", "--cand", f"{cand.url}/v1", "--data", str(corpus)]
        code = invoke(["verify", *sources, *lengths, "--patience", "0.2", "--json", "-q"], output)
        assert code == 1
        found = json.loads(output.text)
        assert (found["verdict"], found["dialect"]) == ("different", "prompt_logprobs")


def test_the_probe_command(corpus):
    with serving(Fake()) as fake:
        output = Captured()
        assert invoke(["probe", f"{fake.url}/v1", "--patience", "0.2", "-q"], output) == 0
        assert "dialect: prompt_logprobs, 20 alternatives per position" in output.text
        output = Captured()
        assert invoke(["probe", f"{fake.url}/v1", "--patience", "0.2", "-q", "--json"], output) == 0
        found = json.loads(output.text)["certificates"][fake.url]
        assert found["largest_k"] == 256
        assert found["tokenizer"] == "unknown"  # its own tokens agree with themselves, which says nothing
    assert invoke(["probe", "http://127.0.0.1:9/v1", "--patience", "0.1", "-q"], Captured()) == 2
    assert invoke(["probe", "demo", "-q"], Captured()) == 2
