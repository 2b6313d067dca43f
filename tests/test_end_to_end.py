"""The commands as a user types them, on tiny checkpoints, with a real embedded server."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import evalgate
from evalgate.errors import MismatchError, ServerError, UsageError
from evalgate.server.process import EmbeddedServer
from tests.checkpoints import TEXTS, texts
from tests.serve.architectures import built, perturbed
from tests.serve.tiny_models import byte_level, llama, metaspace, save, unmerged
from tests.stuck import STUCK

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("end_to_end")


@pytest.fixture(scope="module")
def models(tiny: tuple[str, str], warm: object) -> tuple[str, str]:
    return tiny


@pytest.fixture(scope="module")
def data(place: Path) -> str:
    return texts(place / "texts")


@pytest.fixture(autouse=True)
def own_cache(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALGATE_CACHE", str(place / "cache"))


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "evalgate", *arguments], capture_output=True, text=True, timeout=STUCK, **options
    )


def test_kl_measures_writes_a_run_and_shows_it_again(place: Path, models: tuple[str, str], data: str) -> None:
    ref, cand = models
    out = place / "run"
    options = ("--data", data, "--context", "32", "--out", str(out))
    done = command("kl", "--ref", ref, "--cand", cand, *options)
    assert done.returncode == 0, done.stderr
    for words in ("Mean KLD", "Same top-1", "Perplexity ratio", "RMS delta-p", "exact", "4 documents"):
        assert words in done.stdout, words
    assert {p.name for p in out.iterdir()} >= {"manifest.json", "tokens.parquet", "summary.json"}
    shown = command("show", str(out))
    assert shown.stdout == done.stdout
    run = evalgate.load(out)
    assert run.summary.corpus.documents == 4
    assert {d.name for d in run.summary.comparisons[0].domains} == {"prose", "code"}
    frame = run.tokens
    assert frame["bytes"].sum() == sum(len(t.encode()) for t in TEXTS.values())  # BOS: every token is scored
    again = command("kl", "--ref", ref, "--cand", cand, *options)
    assert again.returncode == 2
    assert "--overwrite" in again.stderr


def test_json_is_one_document_on_a_pure_stdout(models: tuple[str, str], data: str, place: Path) -> None:
    import jsonschema

    done = command(
        *("agree", "--ref", models[0], "--cand", models[1], "--data", data, "--context", "32", "--json"),
        *("--limit", "4", "--out", str(place / "json")),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    schema = json.loads((Path(__file__).parents[1] / "docs" / "summary.schema.json").read_text())
    jsonschema.validate(document, schema)
    assert document["kind"] == "agree"
    assert document["corpus"]["limit"] == 4


def test_the_table_and_the_summary_say_the_same(models: tuple[str, str], data: str) -> None:
    run = evalgate.compare(models[0], models[1], data=data, context=32, windows="sliding", stride=8)
    frame, overall = run.tokens, run.summary.comparisons[0].overall
    statistics = overall.metrics["kl"].statistics
    assert statistics["mean"].value == pytest.approx(frame["kl"].mean(), rel=1e-6)
    assert statistics["max"].value == pytest.approx(frame["kl"].max(), rel=1e-6)
    perplexity = overall.metrics["perplexity"].statistics
    assert perplexity["reference"].value == pytest.approx(math.exp(frame["ref_nll"].astype(float).mean()), rel=1e-6)
    assert perplexity["candidate"].value == pytest.approx(math.exp(frame["cand_nll"].astype(float).mean()), rel=1e-6)
    bits = overall.metrics["bits_per_byte"].statistics["candidate"].value
    assert bits == pytest.approx(frame["cand_nll"].astype(float).sum() / math.log(2) / frame["bytes"].sum(), rel=1e-6)
    assert (frame["position"] >= 1).all()
    assert not frame.duplicated(["candidate", "window", "position"]).any()


def test_a_model_against_itself_and_several_candidates(models: tuple[str, str], data: str) -> None:
    run = evalgate.compare(models[0], [models[0], models[1], f"{models[0]}@bf16", f"{models[0]}@int8"], data=data)
    by_name = {c.candidate.spec: c.overall.metrics for c in run.summary.comparisons}
    itself = by_name[models[0]]
    assert itself["kl"].statistics["mean"].value == 0
    assert itself["top1_agreement"].statistics["mean"].value == 1
    assert by_name[models[1]]["kl"].statistics["mean"].value > 0
    assert by_name[f"{models[0]}@bf16"]["kl"].statistics["mean"].value > 0
    schemes = {c.candidate.spec: c.candidate.scheme for c in run.summary.comparisons}
    assert "symmetric per-output-channel" in schemes[f"{models[0]}@int8"]


@pytest.mark.parametrize("preset", ("disjoint", "sliding", "llama.cpp", "lm-eval"))
def test_perplexity_with_every_preset(preset: str, models: tuple[str, str], data: str) -> None:
    run = evalgate.perplexity(models[0], data=data, windows=preset, context=24)
    frame = run.tokens
    assert "kl" not in frame
    value = run.summary.comparisons[0].overall.metrics["perplexity"].statistics["candidate"].value
    assert value == pytest.approx(math.exp(frame["cand_nll"].astype(float).mean()), rel=1e-6)


def test_lm_eval_at_the_full_context(place: Path, models: tuple[str, str]) -> None:
    """That tool's rolling log-likelihood with max_length = the model's whole context, in float64."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.evalgate.test_windows import disjoint_pair, rolling

    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    most = model.config.max_position_embeddings
    text = " ".join([*TEXTS.values()] * (2 + 6 * most // len("".join(TEXTS.values()))))
    (place / "long.txt").write_text(text)
    frame = evalgate.perplexity(models[0], data=place / "long.txt", windows="lm-eval", context=most, limit=3).tokens
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    bos = tokenizer("a")["input_ids"][0]
    expected = []
    for given, predicted in [*map(disjoint_pair, rolling(ids, bos, most))][:3]:
        shown = [*given, *predicted][:-1]
        assert len(shown) == most
        with torch.inference_mode():
            logprobs = model(torch.tensor([shown])).logits[0].log_softmax(-1)[-len(predicted) :]
        expected += (-logprobs.gather(1, torch.tensor(predicted)[:, None])[:, 0]).tolist()
    assert frame["cand_nll"].astype(float).tolist() == pytest.approx(expected, abs=1e-5)


def test_several_tokens_before_every_text(place: Path) -> None:
    """As GLM's tokenizers put them: shown in every window, never scored."""
    import torch
    from tokenizers import processors

    tokenizer, model = byte_level(), llama()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> <|im_start|> $A", special_tokens=[("<s>", 0), ("<|im_start|>", 1)]
    )
    save(model, place / "glm", tokenizer)
    (place / "glm.txt").write_text("hello world, hello there")
    frame = evalgate.perplexity(str(place / "glm"), data=place / "glm.txt", context=64).tokens
    ids = tokenizer("hello world, hello there")["input_ids"]
    assert ids[:2] == [0, 1]
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    assert frame["position"].tolist() == list(range(2, len(ids)))
    expected = [-float(logprobs[at - 1, token]) for at, token in enumerate(ids)][2:]
    assert frame["cand_nll"].astype(float).tolist() == pytest.approx(expected, abs=1e-5)


def test_an_interrupted_run_leaves_nothing_and_goes_on_where_it_stopped(
    place: Path, models: tuple[str, str], data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during scoring: exit 130, no process, no folder; the same command then asks only what is missing."""
    out = place / "runs" / "interrupted"
    script = (
        "import sys, evalgate.server.batches as b; b.BATCH_TOKENS = 8; from evalgate.cli import main; sys.exit(main())"
    )
    arguments = ["kl", "--ref", models[0], "--cand", models[1], "--data", data, "--context", "8", "--out", str(out)]
    child = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    partial = place / "cache" / "partial"
    until = time.monotonic() + STUCK
    while len(list(partial.glob("*/*.parquet"))) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    children = _children(child.pid)
    child.send_signal(signal.SIGINT)
    stdout, stderr = child.communicate(timeout=STUCK)
    assert child.returncode == 130, stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    assert children and all(_gone(pid) for pid in children)
    assert not out.exists()
    assert not out.parent.exists() or not list(out.parent.iterdir())
    kept = {path: path.stat().st_mtime_ns for path in partial.glob("*/*.parquet")}
    assert kept

    asked: list[int] = []
    from evalgate.server import batches
    from evalgate.server.client import EmbeddedClient

    original = EmbeddedClient.score

    def counted(self: EmbeddedClient, candidates: Any, windows: Any, **rest: Any) -> Any:
        asked.extend(w.index for w in windows)
        return original(self, candidates, windows, **rest)

    monkeypatch.setattr(EmbeddedClient, "score", counted)
    monkeypatch.setattr(batches, "BATCH_TOKENS", 8)
    run = evalgate.compare(models[0], models[1], data=data, context=8, out=out)
    done = {int(path.stem.split("-")[0]) for path in kept}
    assert done.isdisjoint(asked)
    assert len(asked) == len(set(asked))
    assert not list(partial.glob("*/*.parquet"))
    fresh = evalgate.compare(models[0], models[1], data=data, context=8, resume=False)
    for column in ("window", "position", "token", "kl", "cand_nll"):
        np.testing.assert_array_equal(run.tokens[column], fresh.tokens[column])


def _children(pid: int) -> list[int]:
    found = []
    for task in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = task.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(task.parent.name))
    return found


def _gone(pid: int) -> bool:
    until = time.monotonic() + STUCK
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_models_that_cannot_be_compared_are_refused_by_name(place: Path, models: tuple[str, str], data: str) -> None:
    other = save(perturbed(built("llama")), place / "other-tokenizer", metaspace())
    with pytest.raises(MismatchError, match="different vocabularies"):
        evalgate.compare(models[0], str(other), data=data, context=16)
    import transformers as t

    wide = t.LlamaConfig(
        vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    padded = save(t.AutoModelForCausalLM.from_config(wide), place / "padded", byte_level(bos=True))
    with pytest.raises(MismatchError, match=r"320 output rows .* 384"):
        evalgate.compare(models[0], str(padded), data=data, context=16)


def test_only_a_tokenizer_that_gives_other_tokens_is_said_to(place: Path, models: tuple[str, str], data: str) -> None:
    model = perturbed(built("llama"))
    same = save(model, place / "same-tokens", byte_level(bos=True, trim=False))  # another hash, the same ids
    other = save(model, place / "other-tokens", unmerged(byte_level(bos=True)))
    run = evalgate.compare(models[0], [models[1], str(same), str(other)], data=data, context=16, limit=2)
    told = [note for note in run.summary.notes if "differently" in note]
    assert told == [f"{other} tokenizes 2 of 2 documents differently: both were shown {models[0]}'s tokens"]


def test_a_users_mistakes_end_in_one_sentence_and_exit_2(models: tuple[str, str], data: str) -> None:
    ref, cand = models
    mistakes = {
        "longer than the context": ("kl", "--ref", ref, "--cand", cand, "--data", data, "--context", "4096"),
        "no-such-file": ("ppl", "--model", ref, "--data", "no-such-file.txt"),
        "hub": ("ppl", "--model", "nobody/nothing-here", "--data", data),
        "no-such-option": ("kl", "--no-such-option"),
    }
    for words, arguments in mistakes.items():
        done = command(*arguments)
        assert done.returncode == 2, (words, done)
        assert words in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""


def test_an_unknown_option_of_the_api_is_refused_by_name(models: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match="contxt"):
        evalgate.compare(models[0], models[1], contxt=16)


def test_running_out_of_memory_is_said_and_the_server_lives(
    models: tuple[str, str], data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of 1 PiB of logits cannot be had on any machine, and is named as memory."""
    from evalgate.core import Document, Window
    from evalgate.server.client import EmbeddedClient

    with EmbeddedServer([models[0]], device="cpu", options=["--tile-bytes", "1024T"]) as server:
        client = EmbeddedClient(server)
        document = client.tokenize(models[0], [Document("d", "d", text="some text " * 4)])[0]
        window = Window(0, "d", "d", document.ids, 1, len(document.ids), document.bytes_per_token)
        with pytest.raises(ServerError, match="out of memory"):
            client.score([models[0]], [window], reference=None)
        assert client.models()
        client.close()
