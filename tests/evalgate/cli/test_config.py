"""Defaults from `evalgate.toml`, `[tool.evalgate]` and the environment, and `evalgate config`, which shows them."""

import inspect
import json
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest

from evalgate.cli import defaults
from evalgate.cli.app import _COMMANDS
from evalgate.cli.command import OptionGroup
from tests.evalgate.cli.test_cli import KL, call, pipeline  # noqa: F401  (a fixture)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file with defaults into the working directory, an empty folder; `name` may lie elsewhere."""
    monkeypatch.chdir(tmp_path)

    def written(text, name="evalgate.toml"):
        (tmp_path / name).write_text(text)

    return written


def refused(capsys, *args):
    capsys.readouterr()
    assert call(*args)[0] == 2
    return capsys.readouterr().err


def test_what_is_typed_goes_before_the_environment_the_file_and_the_default(pipeline, write, monkeypatch):  # noqa: F811
    write('limit = 5\nseed = 7\ncontext = 99\n[kl]\ncontext = 64\ncand = ["b", "c@int8"]\nresume = false\n')
    monkeypatch.setenv("EVALGATE_KL_SEED", "8")
    monkeypatch.setenv("EVALGATE_KL_LIMIT", "")
    call("kl", "--ref", "a", "-q")
    call("kl", "--ref", "a", "--limit", "6", "--seed", "9", "--cand", "d", "--resume", "-q")
    call("ppl", "--model", "a", "-q")
    first, second, third = pipeline.requests
    assert (first.limit, first.seed, first.context, first.resume) == (5, 8, 64, False)
    assert first.candidate_specs == ["b", "c@int8"]
    assert (second.limit, second.seed, second.candidate_specs, second.resume) == (6, 9, ["d"], True)
    assert (third.limit, third.seed, third.context, third.resume) == (5, 7, 99, True)


def test_variables_set_lists_and_flags(pipeline, write, monkeypatch):  # noqa: F811
    write("")
    for name, value in {"CAND": "b 'c d'", "NOISE_FLOOR": "yes", "RESUME": "0", "QUIET": "1"}.items():
        monkeypatch.setenv(f"EVALGATE_KL_{name}", value)
    call("kl", "--ref", "a")
    assert pipeline.requests[0].candidate_specs == ["b", "c d"]
    assert (pipeline.requests[0].noise_floor, pipeline.requests[0].resume) == (True, False)


def test_the_nearest_file_counts_and_a_project_without_the_table_is_passed_over(pipeline, write, tmp_path, monkeypatch):  # noqa: F811
    write("[tool.evalgate]\nlimit = 3\n", "pyproject.toml")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.ruff]\n")
    monkeypatch.chdir(inner)
    call(*KL, "-q")
    write("limit = 4\n", "a/evalgate.toml")
    call(*KL, "-q")
    assert [request.limit for request in pipeline.requests] == [3, 4]


def test_paths_are_meant_from_the_folder_of_the_file(pipeline, write, tmp_path, monkeypatch):  # noqa: F811
    write('data = "texts"\n[kl]\nref = "ckpt"\ncand = ["ckpt@int8", "org/name", "llama.cpp:m.gguf"]\nout = "runs/x"\n')
    for name in ("texts", "ckpt", "inner"):
        (tmp_path / name).mkdir()
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path / "inner")
    call("kl", "-q")
    request = pipeline.requests[0]
    assert (request.data, request.out) == (str(tmp_path / "texts"), tmp_path / "runs" / "x")
    assert request.reference_spec == str(tmp_path / "ckpt")
    assert request.candidate_specs == [f"{tmp_path / 'ckpt'}@int8", "org/name", f"llama.cpp:{tmp_path / 'm.gguf'}"]


def test_a_policy_of_that_name_holds_no_defaults(pipeline, write, tmp_path):  # noqa: F811
    write('[policy]\nname = "release"\n[[rules]]\nmetric = "kl"\nmax = 1.0\n')
    (tmp_path / "pyproject.toml").write_text("[tool.evalgate]\nlimit = 3\n")
    call(*KL, "-q")
    call("policy", "check", "evalgate.toml")
    assert [request.limit for request in pipeline.requests] == [3]


def test_every_option_that_names_a_path_is_known_as_one():
    def options(function):
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            kind = parameter.annotation
            if inspect.isclass(kind) and issubclass(kind, OptionGroup):
                yield from get_type_hints(kind, include_extras=True).items()
            else:
                yield parameter.name, kind

    named = {
        name.replace("_", "-")
        for function in _COMMANDS.values()
        for name, kind in options(function)
        if get_origin(kind) is Annotated and Path in (get_args(kind)[0], *get_args(get_args(kind)[0]))
        if type(kind.__metadata__[0]).__name__ == "OptionInfo"
    }
    assert named and named - defaults.PATHS == set()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("limti = 3\n", "evalgate.toml: there is no option limti: did you mean limit?"),
        ("[kll]\nlimit = 3\n", "there is no option kll: did you mean kl?"),
        ("[kl]\nlimti = 3\n", "there is no option kl.limti: did you mean limit?"),
        ("[policy.init]\npresett = '8bit'\n", "there is no option policy.init.presett: did you mean preset?"),
        ("[show]\nlimit = 3\n", "there is no option show.limit: use one of "),
        ("limit = [3]\n", "evalgate.toml: limit is [3] and should be text or a number"),
        ("limit = true\n", "limit is True and should be text or a number"),
        ("[kl]\nquiet = 'yes'\n", "evalgate.toml [kl]: quiet is 'yes' and should be true or false"),
        ("[kl]\ncand = [1979-01-01]\n", "should be text or a number, or a list"),
        ("[kl.limit]\nx = 1\n", "there is no option kl.limit"),
        ("json = true\n", "json belongs on the command line: leave it out"),
        ("[kl]\noverwrite = true\n", "kl.overwrite belongs on the command line"),
        ("format = 'json'\n", "format is not the same option in record, show: write it in a table, as in [record]"),
        ("api_key = 'sk-1'\n", "api_key may be a secret, and such files are shared"),
        ("[kl]\npassword = 'x'\n", "kl.password may be a secret"),
        ("header = ['Authorization: Bearer x']\n", "header holds a secret"),
        ("header = ['X-Trace: 1', 'api-key: x']\n", "header holds a secret"),
        ("proxy = 'http://me:word@host:1'\n", "proxy holds a password"),
        ("limit = \n", "evalgate.toml is not TOML: "),
        ("limit = 0\n", "--limit should be 1 or more"),
    ],
)
def test_what_a_file_may_not_say_is_refused_by_name(write, capsys, text, said):
    write(text)
    err = refused(capsys, *KL)
    assert said in err and err.count("\n") == 1
    assert "sk-1" not in err and "Bearer" not in err and "word" not in err.replace("password", "")
    capsys.readouterr()
    assert call("kl", "--help")[0] == 0 and "--limit" in capsys.readouterr().out


def test_the_values_of_secrets_are_never_shown(write, monkeypatch):
    write("")
    monkeypatch.setenv("EVALGATE_KL_HEADER", "'Authorization: Bearer abcdef'")
    monkeypatch.setenv("EVALGATE_KL_PROXY", "http://me:abcdef@host:1")
    for flags in ((), ("kl",), ("--json",), ("kl", "--json")):
        code, text = call("config", *flags)
        assert code == 0 and "abcdef" not in text and "(not shown)" in text


def test_a_broken_pyproject_is_named(write, capsys):
    write("[tool]\nevalgate = 3\n", "pyproject.toml")
    assert "tool.evalgate is not a table" in refused(capsys, *KL)
    write("[tool\n", "pyproject.toml")
    assert "pyproject.toml is not TOML" in refused(capsys, *KL)


def test_a_mistake_names_the_default_that_made_it(write, capsys, monkeypatch):
    write("limit = 0\nstride = 5\n")
    assert "(evalgate.toml sets --limit)" in refused(capsys, *KL)
    monkeypatch.setenv("EVALGATE_KL_LIMIT", "3")
    assert "a stride does not apply" in refused(capsys, *KL, "--context", "64")
    err = refused(capsys, *KL, "--context", "64")
    assert err.endswith("(evalgate.toml sets --stride; EVALGATE_KL_LIMIT sets --limit)\n")
    monkeypatch.setenv("EVALGATE_KL_RESUME", "maybe")
    assert "EVALGATE_KL_RESUME is 'maybe' and should be 1 or 0, true or false" in refused(capsys, *KL)


def test_a_default_that_does_not_apply_to_the_models_is_left_out(pipeline, write):  # noqa: F811
    write('concurrency = 4\ntimeout = 9\nbudget = "requests=5"\ndevice = "cpu"\nllama-threads = 2\ndialect = "echo"\n')
    call("kl", "--ref", "a", "--cand", "b", "-q")
    call("kl", "--ref", "http://h:1/v1#m", "--cand", "http://h:2/v1#m", "-q")
    local, remote = pipeline.requests
    assert (local.endpoint.concurrency, local.endpoint.timeout, local.endpoint.dialect) == (16, 120.0, "")
    assert (local.budget.requests, local.device) == (None, "cpu")
    assert (remote.endpoint.concurrency, remote.endpoint.dialect, remote.budget.requests) == (4, "echo", 5)
    assert (remote.device, remote.endpoint.llama.threads) == ("auto", None)


def test_a_typed_option_that_does_not_apply_is_still_refused(write, capsys):
    write("concurrency = 4\n")
    assert "--concurrency applies to endpoints" in refused(capsys, *KL, "--concurrency", "4")


def test_a_stored_run_is_judged_whatever_the_file_says_of_measuring(pipeline, write, tmp_path):  # noqa: F811
    write("limit = 5\n")
    call(*KL, "--out", "r", "-q")
    code, _ = call("gate", "--run", "r", "--max", "kl=9", "--no-github")
    assert code in (0, 3)


def test_config_shows_every_value_and_where_it_comes_from(write, monkeypatch):
    code, text = call("config")
    assert code == 0 and text.startswith("file: none: there is no evalgate.toml")
    write('limit = 5\n[gate]\npolicy = "8bit"\n')
    monkeypatch.setenv("EVALGATE_KL_DEVICE", "cpu")
    code, text = call("config")
    rows = [line.split(maxsplit=2) for line in text.splitlines()]
    assert ["--limit", "5", "evalgate.toml"] in rows and ["--policy", "8bit", "evalgate.toml [gate]"] in rows
    assert ["--device", "cpu", "EVALGATE_KL_DEVICE"] in rows
    code, text = call("config", "kl", "--json")
    document = json.loads(text)
    assert document["file"].endswith("evalgate.toml") and list(document["commands"]) == ["kl"]
    values = document["commands"]["kl"]
    assert values["limit"] == {"value": "5", "origin": "evalgate.toml"}
    assert values["ref"] == {"value": None, "origin": "required"}
    assert values["confidence"] == {"value": 0.95, "origin": "default"}
    assert "debug" not in values and "json" not in values
    assert json.loads(call("config", "policy", "init", "--json")[1])["commands"]["policy init"]


def test_an_option_that_most_commands_share_is_not_set_for_one_that_differs(write):
    write('out = "runs/x"\ntop-k = 5\nlimit = 7\n[record]\ntop-k = 9\n')
    set_for = json.loads(call("config", "--json")[1])["commands"]
    assert {"kl", "agree", "ppl", "gate"} <= {words for words, values in set_for.items() if "out" in values}
    assert set_for["record"]["top-k"] == {"value": "9", "origin": "evalgate.toml [record]"}
    assert "out" not in set_for["record"] and set_for["record"]["limit"]["value"] == "7"
    assert set_for["probe"]["top-k"]["value"] == "5"
    assert "out" not in set_for.get("trace cut", {}) and "diff" not in set_for


def test_config_refuses_an_unknown_command_and_a_wrong_file(write, capsys):
    write("")
    assert "there is no command klx: did you mean kl?" in refused(capsys, "config", "klx")
    write("nope = 1\n")
    assert "there is no option nope" in refused(capsys, "config")


def test_help_shows_the_defaults_of_the_file(write, capsys):
    write('windows = "sliding"\n')
    call("kl", "--help")
    assert "[default: sliding]" in " ".join(capsys.readouterr().out.split())
