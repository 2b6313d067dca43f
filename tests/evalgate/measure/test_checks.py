"""Options that change nothing for the sources given are refused by name, before anything is started."""

from dataclasses import fields

import pytest

from evalgate.cli.app import invoke
from evalgate.cli.endpoint_options import EndpointOptions
from evalgate.endpoints.settings import EndpointSettings
from evalgate.measure.checks import check_applies
from evalgate.specs import parse
from tests.evalgate.cli.test_cli import MemoryOutput

CHANGED = {
    "--dialect": "echo",
    "--top-k": "5",
    "--tokenizer": "demo",
    "--concurrency": "3",
    "--timeout": "9",
    "--patience": "9",
    "--api-key-env": "KEY",
    "--api-key-file": "key",
    "--header": "A: b",
    "--proxy": "http://p:1",
    "--ca-file": "ca.pem",
    "--llama-threads": "2",
    "--llama-gpu-layers": "0",
}
URL_ONLY = ["--concurrency", "--api-key-env", "--api-key-file", "--header", "--proxy", "--ca-file"]
GATE = ["gate", "--policy", "8bit", "--no-noise-floor"]
COMMANDS = {
    "kl": ["kl", "--ref", "a", "--cand", "b"],
    "agree": ["agree", "--ref", "a.trace", "--cand", "b"],
    "ppl": ["ppl", "--model", "a"],
    "gate": [*GATE, "--ref", "a", "--cand", "b"],
}
ENDPOINTS = {
    "kl": ["kl", "--ref", "http://a/v1#m", "--cand", "http://b/v1#m"],
    "ppl": ["ppl", "--model", "http://a/v1#m"],
    "gate": ["gate", "--max", "js=0.01", "--ref", "http://a/v1#m", "--cand", "http://b/v1#m"],
    "probe": ["probe", "http://a/v1#m"],
    "verify": ["verify", "--ref", "http://a/v1#m", "--cand", "http://b/v1#m"],
}


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def refused(capsys, *args):
    output = MemoryOutput()
    assert invoke(args, output) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("evalgate: ")


def test_every_endpoint_option_is_known_here():
    assert len(CHANGED) == len(fields(EndpointOptions))


@pytest.mark.parametrize("option", CHANGED)
@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_endpoints_are_refused_where_all_is_loaded_here(capsys, command, option):
    said = refused(capsys, *COMMANDS[command], option, CHANGED[option])
    assert said.startswith(f"{option} applies to ") and said.endswith(" and no source is one: leave it out")


@pytest.mark.parametrize("option", ["--llama-threads", "--llama-gpu-layers", "--device"])
@pytest.mark.parametrize("command", ENDPOINTS)
def test_options_of_models_run_here_are_refused_where_all_are_urls(capsys, command, option):
    said = refused(capsys, *ENDPOINTS[command], option, {**CHANGED, "--device": "cpu"}[option])
    assert said.startswith(f"{option} applies to ")


@pytest.mark.parametrize("option", URL_ONLY)
def test_options_of_urls_are_refused_for_a_llama_cpp_server(capsys, option):
    said = refused(capsys, "kl", "--ref", "a", "--cand", "llama.cpp:b.gguf", option, CHANGED[option])
    assert said == f"{option} applies to endpoints at a URL and no source is one: leave it out"


def test_several_are_named_together(capsys):
    said = refused(capsys, *COMMANDS["kl"], "--top-k", "5", "--timeout", "3")
    assert said == "--top-k, --timeout apply to endpoints and no source is one: leave them out"


def test_logits_need_a_model_that_is_loaded_here(capsys):
    assert refused(capsys, *ENDPOINTS["kl"], "--logits", "model").startswith("--logits applies to models that are ")


def test_defaults_and_what_has_an_effect_pass():
    mixed = EndpointSettings(top_k=5, headers=(("A", "b"),))
    check_applies(EndpointSettings(), [parse("a"), parse("b")], local=["--device", "--logits"])
    check_applies(mixed, [parse("a"), parse("http://b")], local=["--device"])
    check_applies(EndpointSettings(tokenizer="a"), [parse("http://b")], local=["--device"])
    check_applies(EndpointSettings(top_k=5, timeout=3), [parse("llama.cpp:a.gguf")])


def test_a_noise_floor_is_not_asked_of_an_endpoint(capsys):
    assert refused(capsys, *ENDPOINTS["kl"], "--noise-floor").startswith("--noise-floor restarts and rebatches")


@pytest.mark.parametrize("option", [("--seed", "3"), ("--no-resume",)])
def test_a_logits_file_has_no_draws_and_no_second_half(capsys, option):
    command = ["record", "--ref", "a", "--out", "f", "--format", "llama.cpp", "--windows", "llama.cpp"]
    assert option[0] in refused(capsys, *command, *option)


def test_a_rule_on_a_part_that_the_text_lacks_is_named_before_models_are_looked_for(capsys, tmp_path):
    rule = '[[rules]]\nmetric = "kl"\nmax = 1\nslice = {by = "domain", name = "poetry"}\n'
    (tmp_path / "p.toml").write_text(rule)
    said = refused(
        capsys, "gate", "--policy", str(tmp_path / "p.toml"), "--ref", "./no-ref", "--cand", "./no-cand", "-q"
    )
    assert "has no domain 'poetry': use one of " in said and "prose" in said
