import json
import os
import re
import sys
from pathlib import Path

import pytest

import evalgate
from evalgate import reports
from evalgate.cli.app import invoke
from evalgate.cli.completion import complete_source
from evalgate.errors import EndpointError, MismatchError, UsageError
from evalgate.server.process import module_command
from evalgate.specs import conversions
from evalgate.store.runs import read_run
from tests.evalgate import fake_pipeline

KL = ["kl", "--ref", "demo", "--cand", "demo@int8"]


class MemoryOutput:
    width = 80
    color = False

    def __init__(self):
        self.text = ""
        self.guarded = False

    def guard(self):
        self.guarded = True

    def write(self, text):
        self.text += text


@pytest.fixture
def pipeline(monkeypatch, tmp_path):
    """Installs a fake pipeline; calling it with a function replaces `run`. Requests are kept in `.requests`."""
    monkeypatch.chdir(tmp_path)

    def install(run=fake_pipeline.measured):
        def recorded(request, *, observer=None, **more):
            install.requests.append(request)
            return run(request, observer=observer)

        monkeypatch.setitem(sys.modules, "evalgate.measure.run", fake_pipeline.module(recorded))

    install.requests = []
    install()
    return install


def call(*args):
    output = MemoryOutput()
    return invoke(args, output), output.text


def test_kl_prints_a_screen_and_keeps_the_run(pipeline, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = call(*KL, "--out", "r")
    assert code == 0
    assert "Mean KLD" in text
    assert "rest r; report.html has plots and tokens; every figure: evalgate show --full RUN" in " ".join(text.split())
    assert len(text.splitlines()) < 24
    out, err = capfd.readouterr()
    assert out == "" and "run folder" not in err  # said once
    assert read_run(tmp_path / "r").summary.kind == "kl"
    assert call("show", "r") == (0, text)


def test_full_prints_every_figure(pipeline, tmp_path, capfd):
    folder = str(tmp_path / "r")
    code, text = call(*KL, "--full", "--out", folder)
    assert code == 0 and "Median KLD" in text and "====== By domain" in text
    assert capfd.readouterr().err.splitlines()[-1] == f"run folder: {folder}"
    assert call("show", folder, "--full") == call("show", folder, "--format", "terminal") == (0, text)
    assert "Median KLD" not in call("show", folder)[1]


@pytest.mark.parametrize("args", [(*KL, "--full", "--json"), ("ppl", "--model", "a", "--full", "--json")])
def test_full_has_no_place_beside_json(pipeline, args, capfd):
    assert call(*args)[0] == 2
    assert pipeline.requests == []


def test_show_prints_one_report(pipeline, tmp_path, capfd):
    call(*KL, "-q", "--out", str(tmp_path / "r"))
    assert call("show", str(tmp_path / "r"), "--full", "--format", "json")[0] == 2
    assert "--full and --format json ask for 2 documents" in capfd.readouterr().err


def test_every_option_reaches_the_request(pipeline, tmp_path):
    options = {
        "--data": "text.txt",
        "--split": "test",
        "--text-column": "body",
        "--split-on": "^# ",
        "--windows": "sliding",
        "--context": "128",
        "--stride": "64",
        "--limit": "9",
        "--seed": "5",
        "--confidence": "0.9",
        "--device": "cuda:1",
        "--out": "r",
    }
    call("agree", "--ref", "a", "--cand", "b", "--cand", "c", "--no-resume", "--overwrite", "-q")
    call("kl", "--ref", "a", "--cand", "b", *(part for pair in options.items() for part in pair))
    first, second = pipeline.requests
    assert (first.kind, first.reference_spec, first.candidate_specs) == ("agree", "a", ["b", "c"])
    assert (first.resume, first.overwrite, first.data, first.context, first.windows) == (
        False,
        True,
        None,
        None,
        "disjoint",
    )
    assert (second.data, second.split, second.text_column) == ("text.txt", "test", "body")
    assert second.split_on == "^# "
    assert (second.windows, second.context, second.stride, second.limit) == ("sliding", 128, 64, 9)
    assert (second.seed, second.confidence, second.device, str(second.out)) == (5, 0.9, "cuda:1", "r")
    assert (second.resume, second.overwrite) == (True, False)


def test_ppl_takes_models(pipeline):
    code, text = call("ppl", "--model", "a", "--model", "b", "--quiet")
    assert code == 0
    assert (pipeline.requests[0].reference, pipeline.requests[0].candidate_specs) == (None, ["a", "b"])
    assert "evalgate ppl: 2 models" in text and "bits" in text


def test_default_folders_are_named_by_kind_and_time_and_never_shared(pipeline, tmp_path):
    for _ in range(3):
        assert call(*KL, "-q")[0] == 0
    names = sorted(p.name for p in (tmp_path / "runs").iterdir())
    assert len(names) == 3
    assert all(re.fullmatch(r"kl-\d{8}-\d{6}(-\d)?", name) for name in names)


def test_json_is_one_valid_document(pipeline):
    from jsonschema import validate

    code, text = call(*KL, "--json")
    assert code == 0
    validate(json.loads(text), json.loads(call("schema")[1]))
    folder = pipeline.requests[0].out
    assert call("show", str(folder), "--json") == (0, text)


def test_the_published_schema_is_the_printed_one():

    published = Path(__file__).parents[3] / "docs" / "summary.schema.json"
    assert call("schema") == (0, published.read_text(encoding="utf-8"))


def test_output_is_guarded_before_the_pipeline_runs(pipeline):
    output = MemoryOutput()
    pipeline(lambda request, observer: fake_pipeline.measured(request) if output.guarded else pytest.fail("open"))
    assert invoke(KL, output) == 0


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["kl", "--ref", "a"], "--cand is missing: give --cand SPEC"),
        (["kl", "--cand", "a"], "--ref is missing: give --ref SPEC"),
        (["ppl"], "--model is missing: give --model SPEC"),
        ([*KL, "--windows", "huge"], "--windows cannot be 'huge': use one of disjoint, sliding, llama.cpp, lm-eval"),
        ([*KL, "--windows", "slidin"], "--windows cannot be 'slidin': did you mean sliding?"),
        (
            ["kl", "demo", "demo@int8"],
            "evalgate kl takes no words of its own, as 'demo': give --ref SPEC and --cand SPEC",
        ),
        (["kl", "--ref"], "--ref needs a value: write one after it (see evalgate kl --help)"),
        ([*KL, "--resume=3"], "--resume takes no value: write it alone"),
        ([*KL, "--context", "1"], "--context"),
        ([*KL, "--limit", "0"], "--limit should be 1 or more (see evalgate kl --help)"),
        ([*KL, "--limit", "many"], "--limit should be a whole number"),
        ([*KL, "--stride", "-1"], "--stride"),
        ([*KL, "--confidence", "95"], "--confidence 95.0 is outside (0, 1)"),
        ([*KL, "--confidence", "nan"], "--confidence nan is outside (0, 1)"),
        ([*KL, "--cand", "demo@int8"], "demo@int8 is given twice"),
        ([*KL, "--nonsense"], "--nonsense"),
        (["klx"], "did you mean kl?"),
        (["show"], "RUN is missing: name it after the command"),
        (["show", "nowhere"], "there is no run folder"),
        (["serve"], "SPEC... is missing"),
        (["serve", "demo", "--port", "70000"], "--port should be 65535 or less"),
    ],
)
def test_usage_errors_are_one_sentence_and_exit_2(pipeline, capsys, args, part):
    assert call(*args) == (2, "")
    err = capsys.readouterr().err
    assert part in err
    assert err.startswith("evalgate: ") and err.count("\n") == 1
    assert pipeline.requests == []


@pytest.mark.parametrize(
    "args",
    [
        ("kl", "--ref", "", "--cand", "nowhere"),
        ("ppl", "--model", " "),
        ("gate", "--policy", "8bit", "--ref", "", "--cand", "nowhere"),
    ],
)
def test_an_empty_model_is_refused_before_anything_is_measured(capsys, args):
    assert call(*args) == (2, "")
    assert "a model has an empty name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ref", "options", "part"),
    [
        (None, {}, "a comparison needs a reference"),
        ("nowhere", {"confidence": 2}, "confidence must be between 0 and 1"),
        ("nowhere", {"limit": "x"}, "the option 'limit' is 'x' and should be a valid integer"),
        ("nowhere", {"limit": True}, "the option 'limit' is True and should be a valid integer"),
        ("nowhere", {"seed": "a"}, "the option 'seed' is 'a' and should be a valid integer"),
        ("nowhere", {"logits": "f8"}, "the option 'logits' is 'f8' and should be 'float32' or 'model'"),
        ("nowhere", {"out": 5}, "the option 'out' is 5 and should be "),
        ("nowhere", {"budget": {"requests": 3}}, "the option 'budget' is .* and should be an instance of Budget"),
        ("nowhere", {"kind": "ppl"}, "there is no option 'kind': use one of data, split, "),
    ],
)
def test_the_python_api_refuses_before_anything_is_measured(ref, options, part):
    with pytest.raises(UsageError, match=part):
        evalgate.compare(ref, "elsewhere", **options)


def test_bare_evalgate_shows_help_and_measures_nothing(capsys):
    assert call() == (2, "")
    assert "agree" in capsys.readouterr().out


@pytest.mark.parametrize("args", [["--help"], ["-h"], ["kl", "--help"], ["--version"]])
def test_help_and_version_exit_0(capsys, args):
    assert call(*args) == (0, "")
    assert capsys.readouterr().out


def test_an_existing_folder_is_refused_before_anything_runs(pipeline, tmp_path, capsys):
    assert call(*KL, "--out", "r", "-q")[0] == 0
    assert call(*KL, "--out", "r") == (2, "")
    assert "--overwrite" in capsys.readouterr().err
    assert len(pipeline.requests) == 1
    assert call(*KL, "--out", "r", "--overwrite")[0] == 0


def fail_with(error):
    def run(request, observer):
        raise error

    return run


def test_an_error_of_the_tree_keeps_its_sentence_code_and_context(pipeline, capsys):
    pipeline(fail_with(EndpointError("the endpoint gave no logprobs: ask vLLM", window=3, position=float("nan"))))
    code, text = call(*KL, "--json")
    assert code == 2
    assert json.loads(text) == {
        "error": {
            "type": "EndpointError",
            "message": "the endpoint gave no logprobs: ask vLLM",
            "exit_code": 2,
            "context": {"window": 3, "position": "nan"},
        }
    }
    err = capsys.readouterr().err
    assert err == "evalgate: the endpoint gave no logprobs: ask vLLM\n"


def test_debug_shows_the_traceback_and_nothing_else_does(pipeline, capsys):
    pipeline(fail_with(MismatchError("vocabularies differ: compare like with like")))
    call(*KL)
    assert "Traceback" not in capsys.readouterr().err
    call(*KL, "--debug")
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_is_one_sentence_and_exit_2(pipeline, capsys):
    pipeline(fail_with(ZeroDivisionError("division\nby zero")))
    code, text = call(*KL, "--json")
    assert code == 2
    assert json.loads(text)["error"]["type"] == "UnexpectedError"
    wanted = "evalgate failed unexpectedly: ZeroDivisionError: division by zero; run again with --debug and report it"
    assert capsys.readouterr().err == f"evalgate: {wanted}\n"


def test_an_interrupt_exits_130_and_says_how_to_go_on(pipeline, capsys):
    pipeline(fail_with(KeyboardInterrupt()))
    code, text = call(*KL, "--out", "r", "--json")
    assert code == 130
    error = json.loads(text)["error"]
    assert (error["type"], error["exit_code"], error["context"]) == ("Interrupted", 130, {})
    assert "run the same command again to resume" in capsys.readouterr().err


def test_a_usage_error_is_a_document_too(capsys):
    code, text = call("kl", "--json")
    assert code == 2
    assert json.loads(text)["error"]["type"] == "UsageError"


def test_serve_becomes_the_server(monkeypatch):
    calls = []
    monkeypatch.setattr(os, "execv", lambda path, argv: calls.append((path, argv)))
    assert call("serve", "demo", "demo@int8") == (0, "")
    options = ["--host", "0.0.0.0", "--port", "8000", "--device", "cpu", "--api-key-env", "KEY"]
    assert call("serve", "demo", *options)[0] == 0
    own = ["--kv-memory", "2G", "--deterministic", "--max-logprobs", "-1"]
    assert call("serve", "demo", *own)[0] == 0
    prefix = module_command("serve")
    assert prefix[:2] == [sys.executable, "-P"]
    assert calls == [
        (sys.executable, [*prefix, "demo", "demo@int8"]),
        (sys.executable, [*prefix, *options, "demo"]),
        (sys.executable, [*prefix, "demo", *own]),
    ]


def test_serve_without_torch_says_what_to_install(monkeypatch, capsys):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert call("serve", "demo")[0] == 2
    assert "pip install 'evalgate-lm[serve]'" in capsys.readouterr().err


def test_sources_complete(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model.gguf", "notes.txt", "ref.trace", ".hidden.gguf"):
        (tmp_path / name).touch()
    (tmp_path / "models" / "inner").mkdir(parents=True)
    assert {value for value, _ in complete_source("")} == {"demo", "llama.cpp:", "model.gguf", "models/", "ref.trace"}
    assert [value for value, _ in complete_source("demo@")] == [f"demo@{name}" for name in conversions()]
    assert {"bf16", "int8", "int4", "q4_k", "dequantized"} <= set(conversions())
    assert [value for value, _ in complete_source("m/x@b")] == ["m/x@bf16"]
    assert [value for value, _ in complete_source("models/i")] == ["models/inner/"]
    assert [value for value, _ in complete_source("llama.cpp:mod")] == [
        "llama.cpp:model.gguf",
        "llama.cpp:models/",
    ]
    assert complete_source("nowhere/x") == []


@pytest.mark.parametrize("name", ["markdown", "csv"])
def test_other_documents_take_the_place_of_the_block(pipeline, name):
    code, text = call(*KL, "--out", "r", "-q", f"--{name}")
    assert code == 0
    assert text == reports.get("summary", name).text(read_run(Path("r")).summary)
    for again in ([f"--{name}"], ["--format", name], ["--format", name, f"--{name}"]):
        assert call("show", "r", *again) == (0, text)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([*KL, "--json", "--csv"], "--json and --csv ask for 2 documents: give one of them"),
        (["ppl", "--model", "a", "--csv", "--markdown"], "--markdown and --csv ask for 2 documents"),
        (["show", "r", "--json", "--markdown", "--csv"], "--json and --markdown and --csv ask for 3 documents"),
        (["show", "r", "--markdown", "--format", "csv"], "--markdown and --format csv ask for 2 documents"),
    ],
)
def test_two_documents_are_refused_before_anything_is_measured(pipeline, capsys, args, said):
    assert call(*args)[0] == 2
    assert said in capsys.readouterr().err
    assert pipeline.requests == []


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["serve", "--list", "demo"], "--list and --stop are of all kept servers"),
        (["serve", "--list", "--stop"], "--list and --stop are of all kept servers"),
        (["serve", "--keep"], "SPEC... is missing"),
        (["serve", "demo", "--keep", "--port", "8000"], "a port and a key of its own"),
        (["serve", "demo", "--keep", "--kv-memory", "2G"], "runs, which ask for no --kv-memory"),
        (["serve", "demo", "--keep", "--logits", "f64"], "--logits is 'f64': use float32 or model"),
    ],
)
def test_what_a_kept_server_cannot_be_is_refused(capsys, args, part):
    assert call(*args) == (2, "")
    assert part in capsys.readouterr().err


def test_keep_passes_on_what_runs_have_and_list_and_stop_name_it(monkeypatch, tmp_path):
    from evalgate.server import kept

    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path))
    asked, ended = [], []

    class One:
        pid, files, idle = 7, {"demo": [], "evil\x1b[2J": []}, 90.0

        def end(self):
            ended.append(self.pid)

    monkeypatch.setattr(kept, "keep", lambda specs, **how: asked.append((specs, how.pop("on_stage") and how)) or One())
    code, text = call("serve", "demo", "--logits", "model", "--keep", "--idle-minutes", "1.5", "--device", "cpu")
    line = "process 7 keeps demo, evil\\u001b[2J; it ends after 1.5 minutes without a request\n"
    assert (code, text) == (0, line)
    assert asked == [(["demo"], {"device": "cpu", "logits": "model", "idle": 90.0})]
    assert call("serve", "--list") == (0, "no server is kept\n") == call("serve", "--stop")
    monkeypatch.setattr(kept, "all_kept", lambda: [One()])
    assert call("serve", "--list") == (0, line)
    assert call("serve", "--stop") == (0, "ended process 7: demo, evil\\u001b[2J\n") and ended == [7]
