import pytest

from evalgate.errors import UsageError
from evalgate.gate.policy import PRESETS, load_policy, parse_policy, policy_text

RULE = '[[rules]]\nmetric = "kl"\nmax = 0.01\n'


def refused(text):
    with pytest.raises(UsageError) as caught:
        parse_policy(text, name="p.toml")
    message = caught.value.message
    assert message.startswith("p.toml") and "\n" not in message
    return message


def test_a_whole_policy():
    policy = parse_policy(
        """
        [policy]
        name = "release"
        confidence = 0.9
        on_undecided = "fail"
        correction = "holm"
        noise_floor = false
        clip = 20

        [[rules]]
        metric = "kl"
        max = 0.01

        [[rules]]
        name = "the tail"
        metric = "kl"
        statistic = "p99"
        max = 0.1
        slice = {by = "domain", name = "code"}

        [[rules]]
        metric = "top1_agreement"
        min = 0.97
        slice = {by = "position", name = "256-511"}

        [[rules]]
        metric = "kl"
        against = "baseline"
        max_ratio = 1.1

        [[rules]]
        metric = "delta_logprob"
        min = -0.01
        max = 0.01

        [[rules]]
        metric = "kl"
        statistic = "p97.5"
        against = "floor"
        max = 0.005
        """,
        name="p.toml",
    )
    assert policy.policy.model_dump() == {
        "name": "release",
        "confidence": 0.9,
        "on_undecided": "fail",
        "correction": "holm",
        "baseline": "required",
        "population": "documents",
        "noise_floor": False,
        "clip": 20,
        "unit": "documents",
    }
    assert [rule.text for rule in policy.rules] == [
        "kl mean <= 0.01",
        "kl p99 in domain code <= 0.1",
        "top1_agreement mean in position 256-511 >= 0.97",
        "kl mean / baseline <= 1.1",
        "-0.01 <= delta_logprob mean <= 0.01",
        "kl p97.5 above the noise floor <= 0.005",
    ]
    assert (policy.needs_baseline, policy.needs_floor) == (True, True)
    plain = parse_policy(RULE, name="p.toml")
    assert (plain.needs_baseline, plain.needs_floor, plain.policy.on_undecided) == (False, False, "undecided")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[policy", "is not TOML"),
        ("", "has no rule: write one under [[rules]]"),
        ("rules = []", "has no rule: write one"),
        ("[policies]\n" + RULE, "there is no key policies: did you mean policy?"),
        ('[policy]\nonundecided = "fail"\n' + RULE, "no key policy onundecided: did you mean on_undecided?"),
        ('[policy]\non_undecided = "ignore"\n' + RULE, "policy on_undecided"),
        ("[policy]\nconfidence = 95\n" + RULE, "policy confidence"),
        ("[policy]\nclip = 0.5\n" + RULE, "policy clip"),
        (RULE + "maximum = 1\n", "no key rule 1 maximum"),
        (RULE + RULE + "mx = 1\n", "no key rule 2 mx: did you mean max?"),
        (RULE + 'slice = {bye = "domain", name = "x"}\n', "rule 1 slice bye: did you mean by?"),
        ('[[rules]]\nmetric = "kl"\n', "rule 1: has no limit"),
        ("[[rules]]\nmax = 1.0\n", "rule 1 metric is missing: add the key"),
        ('[[rules]]\nmetric = "kl"\nmax = nan\n', "rule 1 max"),
        ('[[rules]]\nmetric = "kl"\nmax = "0.1x"\n', "rule 1 max"),
        ('[[rules]]\nmetric = "k1"\nmax = 1.0\n', "rule 1: there is no metric 'k1'"),
        (RULE + 'statistic = "avg"\n', "rule 1: kl has no statistic 'avg'"),
        (RULE + 'statistic = "max"\n', "set a limit on p99.9"),
        (RULE + 'statistic = "min"\n', "set a limit on p0.1"),
        (RULE + 'statistic = "p100"\n', "no statistic 'p100'"),
        ('[[rules]]\nmetric = "perplexity"\nmax = 20.0\n', "perplexity has no statistic 'mean'"),
        ('[[rules]]\nmetric = "perplexity"\nstatistic = "correlation"\nmin = 0.9\n', "set a limit on log_ratio"),
        ('[[rules]]\nmetric = "nll"\nagainst = "floor"\nmax = 0.1\n', "has no noise floor"),
        (RULE + "max_ratio = 1.1\n", "max_ratio stands alone"),
        ('[[rules]]\nmetric = "kl"\nstatistic = "p99"\nagainst = "baseline"\nmax_ratio = 1.1\n', "plain means"),
        ('[[rules]]\nmetric = "kl"\nagainst = "floor"\nmin = 0.1\n', "a max only"),
        (RULE + "min = 0.02\n", "min 0.02 is above max 0.01"),
        (RULE + 'domain = "a"\n', 'no key rule 1 domain: write slice = {by = "domain", name = "a"}'),
        (RULE + "domain = 3\n", 'write slice = {by = "domain", name = "3"}'),
        ('[[rules]]\nmetric = "top1_agreement"\nmin = 97\n', "at most 1, so for 97 % write 0.97"),
        ('[[rules]]\nmetric = "flip"\nmax = 5\n', "max 5 can never be met or missed: flip is at most 1"),
        ('[[rules]]\nmetric = "kl"\nmax = -0.1\n', "kl is at least 0"),
        ('[[rules]]\nmetric = "js"\nstatistic = "p99"\nmax = 1\n', "js is at most 0.693"),
        ('[[rules]]\nmetric = "kl"\nmax = true\n', "rule 1 max"),
        ('[[rules]]\nmetric = "kl"\nmax = "0.1"\n', "rule 1 max"),
        ('[policy]\nnoise_floor = "no"\n' + RULE, "policy noise_floor"),
        (RULE + RULE, "rules 1 and 2 are both called 'kl mean <= 0.01'"),
    ],
)
def test_mistakes_are_named(text, part):
    assert part in refused(text)


def test_files(tmp_path):
    path = tmp_path / "evalgate.toml"
    path.write_text(RULE)
    assert load_policy(path) == parse_policy(RULE, name="p")
    with pytest.raises(UsageError, match="evalgate policy init"):
        load_policy(tmp_path / "nowhere.toml")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot read"):
        load_policy(path)
    with pytest.raises(UsageError, match="cannot read"):
        load_policy(tmp_path)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load_and_a_file_of_that_name_goes_first(name, tmp_path, monkeypatch):
    assert load_policy(name).policy.name == name
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(RULE)
    assert load_policy(name).policy.name == "policy"


def test_the_documented_policies_load():
    import re
    from pathlib import Path

    text = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    found = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    assert [len(parse_policy(block, name="docs").rules) for block in found if "[[rules]]" in block] == [6]


def test_the_presets_are_made_of_the_stored_run():
    """No limit was typed by hand: each is what reports/make_presets.py makes of reports/presets/summary.json."""
    import importlib.util
    from pathlib import Path

    pytest.importorskip("gguf")
    pytest.importorskip("torch")
    path = Path(__file__).parents[3] / "reports" / "make_presets.py"
    spec = importlib.util.spec_from_file_location("make_presets", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    summary = made.published()
    assert set(made.PRESETS) == set(PRESETS)
    for name in PRESETS:
        assert policy_text(name) == made.policy(name, summary), "run .venv/bin/python reports/make_presets.py --render"
    limits = {name: load_policy(name).rules[0].max for name in PRESETS}
    assert limits["lossless"] < limits["8bit"] < limits["4bit"]
    for name, (schemes, _) in made.PRESETS.items():
        for comparison in summary.comparisons:
            if comparison.candidate.spec in schemes:
                assert made.interval(comparison, "kl", "mean")[2] < limits[name]
