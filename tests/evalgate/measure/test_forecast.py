"""A dry run says what the run then does, and asks, loads and measures nothing."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import pytest

import evalgate
from evalgate.core import Document
from evalgate.errors import InputError, MismatchError, UsageError
from evalgate.measure.forecast import Amount, forecast, forecast_recording
from evalgate.measure.kinds.recording import RecordRequest
from evalgate.measure.lengths import lengths
from evalgate.measure.request import RunRequest
from evalgate.server.process import EmbeddedServer
from evalgate.specs import parse
from evalgate.store import partial, rates
from tests.checkpoints import texts
from tests.evalgate.cli.test_cli import call

URL = "http://127.0.0.1:9/v1#m"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a cache folder of its own and a folder of texts."""
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    texts(tmp_path / "texts")
    return tmp_path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is started and a connection that is made end the test."""

    def refuse(*_: object) -> None:
        raise AssertionError("a dry run started or asked something")

    monkeypatch.setattr(EmbeddedServer, "start", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def kl(*models: str, **options: Any) -> RunRequest:
    return RunRequest.of("kl", models[0], models[1:], **{"data": "texts", "context": 16, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"limit": 5},
        {"windows": "sliding", "stride": 4},
        {"windows": "llama.cpp"},
        {"windows": "lm-eval"},
        {"positions": 9},
    ],
    ids=str,
)
def test_a_run_measures_what_its_dry_run_said(options: Any, place: Path, tiny: Any, warm: object) -> None:
    """A checkpoint's own tokenizer.json counts exactly, with no weights."""
    request = kl(*tiny, **options)
    before = forecast(request)
    assert before.seconds is None and "counted with its tokenizer.json" in before.counted
    run = evalgate.compare(tiny[0], tiny[1], data="texts", **{"context": 16, **options})
    group = run.summary.comparisons[0].overall
    assert before.positions == Amount.exactly(group.positions)
    if "positions" in options:
        assert before.windows.least <= group.windows <= before.windows.most and before.tokens is None
    else:
        assert before.windows == Amount.exactly(group.windows)
        assert before.tokens == Amount.exactly(run.summary.corpus.tokens)
    assert before.text.hash == run.summary.corpus.hash
    after = forecast(request)
    assert after.seconds is not None and 0 < after.seconds < 3600
    assert f"over {group.positions} positions took" in after.pace
    assert forecast(dataclasses.replace(request, device="cpu")).seconds is None  # another description


def test_nothing_is_started_asked_or_measured(place: Path, tiny: Any, offline: None) -> None:
    for models in (tiny, (tiny[0], URL), (URL, "http://127.0.0.1:9/v1#n")):
        found = forecast(kl(*models))
        assert found.models[0].spec == models[0]
    assert not list(place.glob("runs*"))


def test_a_model_is_described_by_its_files(place: Path, tiny: Any) -> None:
    found = forecast(kl(tiny[0], f"{tiny[1]}@int8"))
    size = sum(path.stat().st_size for path in Path(tiny[0]).glob("*.safetensors"))
    assert [model.role for model in found.models] == ["reference", "candidate"]
    assert found.models[0].bytes == size
    assert found.models[1].what == "checkpoint folder, loaded here, converted to int8"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("{tiny}x", "did you mean {tiny}"),
        ("./nowhere.gguf", "does not exist"),
        ("{tiny}@int9", "there is no conversion @int9 in '{tiny}@int9': did you mean int8?"),
        ("texts", "'texts' has no config.json"),
        ("texts/code/loop.txt", "is a file but not GGUF"),
        ("nowhere", "does not exist"),
        ("ref.trace", "is a recording, which can only be the reference"),
    ],
)
def test_a_model_that_is_not_there_is_refused_as_the_run_would(spec: str, said: str, place: Path, tiny: Any) -> None:
    with pytest.raises((InputError, UsageError, MismatchError)) as caught:
        forecast(kl(tiny[0], spec.format(tiny=tiny[1])))
    assert said.format(tiny=tiny[1]) in caught.value.message


def test_a_hub_id_and_a_hub_data_set_are_not_asked_for(
    place: Path, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(place / "hub"))
    found = forecast(kl("org/name", "org/other@bf16", data="org/texts"))
    assert found.models[0].what == "from the hub, downloaded first: it is not in the hub's cache"
    assert (found.windows, found.positions, found.text.documents) == (None, None, None)
    assert "may be downloaded first" in found.counted


def test_requests_are_counted_by_dialect_and_ended_by_the_budget(place: Path, tiny: Any) -> None:
    from evalgate.endpoints.budget import Budget
    from evalgate.endpoints.settings import EndpointSettings

    def asked(dialect: str, **options: Any) -> Any:
        found = forecast(kl(tiny[0], URL, endpoint=EndpointSettings(dialect=dialect), **options))
        assert found.windows is not None and found.positions is not None
        return found.windows.likely, found.positions.likely, found.requests[0]

    windows, positions, one = asked("echo")
    assert one.requests == Amount.exactly(windows) and "one a window in the dialect echo" in one.how
    windows, positions, one = asked("openai")
    assert one.requests == Amount.exactly(positions)
    windows, positions, one = asked("")
    assert (one.requests.least, one.requests.most) == (windows, positions)
    _, _, one = asked("openai", budget=Budget(requests=7))
    assert one.requests == Amount.exactly(7) and "the budget ends it at 7" in one.how


def test_tokens_are_guessed_from_bytes_and_then_taken_from_an_earlier_run(place: Path) -> None:
    documents = [Document("a", "prose", "x" * 4000), Document("b", "prose", "")]
    guess = lengths(documents, parse("demo"), None)
    assert (list(guess.likely), guess.exact) == ([1000, 1], False)
    assert guess.fewest[0] < 1000 < guess.most[0] and guess.how.startswith("a guess at 4 bytes a token")
    rate = rates.Rate(1, 2, 3, positions=10, tokens=10, bytes=50, created="2026-01-02T00:00:00+00:00")
    known = lengths(documents, parse("demo"), rate)
    assert known.likely[0] == 800 and "5.00 bytes a token, as in the run of 2026-01-02" in known.how


def test_an_interrupted_run_of_the_same_models_and_text_is_named(place: Path, tiny: Any) -> None:
    import pyarrow as pa

    request = kl(*tiny)
    hash = forecast(request).text.hash
    assert forecast(request).resumes.startswith("no interrupted run")
    for corpus in ("other", hash):
        identity = {"reference": tiny[0], "candidates": [tiny[1]], "corpus": corpus}
        with partial.partial_run(identity, resume=True) as kept:
            kept.keep(0, 1, pa.table({"x": [1]}))
    assert len(partial.unfinished()) == 2
    assert "has kept answers (1 file)" in forecast(request).resumes
    assert forecast(dataclasses.replace(request, resume=False)).resumes == "no: it starts anew"


def test_a_run_that_kept_no_answer_leaves_no_folder(place: Path) -> None:
    with partial.partial_run({"a": 1}, resume=True) as kept:
        assert json.loads((kept.folder / partial.ABOUT).read_text()) == {"a": 1}
    assert not kept.folder.exists() and partial.unfinished() == []


def test_a_recording_says_where_and_how_large(place: Path, tiny: Any, offline: None) -> None:
    text = RunRequest.of("ppl", None, (tiny[0],), data="texts", context=16)
    found = forecast_recording(RecordRequest(text, Path("ref.trace")))
    assert found.kind == "record" and found.models[0].role == "reference"
    assert found.writes[0].startswith("the trace folder ref.trace, at most about ")
    whole = forecast_recording(RecordRequest(text, Path("ref.trace"), full=True))
    assert whole.writes != found.writes
    with pytest.raises(UsageError, match=r"NAME|\.trace"):
        forecast_recording(RecordRequest(text, Path("ref")))


@pytest.mark.slow
def test_a_recording_counts_its_own_windows(place: Path, tiny: Any, warm: object) -> None:
    assert call("record", "--ref", tiny[0], "--data", "texts", "--context", "16", "--out", "ref.trace", "-q")[0] == 0
    found = forecast(RunRequest.of("kl", "ref.trace", (tiny[1],)))
    made = evalgate.compare("ref.trace", tiny[1])
    group = made.summary.comparisons[0].overall
    assert (found.windows, found.positions) == (Amount.exactly(group.windows), Amount.exactly(group.positions))
    assert found.models[0].what == "recorded: read from its files, not run"
    sample = forecast(RunRequest.of("kl", "ref.trace", (tiny[1],), positions=7))
    assert sample.positions == Amount.exactly(7)


def test_rates_are_kept_by_description_and_a_broken_note_is_none(place: Path) -> None:
    rate = rates.Rate(1.0, 10.0, 2.0, positions=100, tokens=100, bytes=400, created="2026-01-02T00:00:00+00:00")
    rates.remember({"a": 1}, rate)
    assert rates.recall({"a": 1}) == rate and rates.recall({"a": 2}) is None
    assert rate.seconds(200) == 23.0
    (note,) = (place / "cache" / "rates").iterdir()
    for broken in ("", "{", '{"key": {"a": 1}, "rate": {"before": 1}}', '{"key": {"a": 2}, "rate": {}}', "[]"):
        note.write_text(broken)
        assert rates.recall({"a": 1}) is None
    rates.remember({"b": 1}, dataclasses.replace(rate, positions=0))
    assert rates.recall({"b": 1}) is None


def test_the_command_line_prints_it_and_leaves_nothing_behind(
    place: Path, tiny: Any, offline: None, capsys: Any
) -> None:
    options = ["--data", "texts", "--context", "16", "--dry-run"]
    code, text = call("kl", "--ref", tiny[0], "--cand", tiny[1], *options)
    assert code == 0 and text.startswith("dry run    evalgate kl: nothing is loaded, asked or measured now\n")
    assert capsys.readouterr().err == ""
    code, text = call("ppl", "--model", tiny[0], *options, "--json")
    document = json.loads(text)
    assert code == 0 and document["dry_run"] is True and document["kind"] == "ppl"
    assert document["windows"]["likely"] > 0 and document["seconds"] is None
    code, text = call("record", "--ref", tiny[0], "--out", "ref.trace", *options)
    assert code == 0 and "the trace folder ref.trace" in text
    gate = ["gate", "--ref", tiny[0], "--cand", tiny[1], "--max", "kl=1", "--junit", "gate.xml", *options]
    code, text = call(*gate)
    assert code == 0 and "junit: gate.xml" in text and "1 rule" in text
    assert call(*gate, "--sequential")[0] == 0
    code, text = call("sweep", "--ref", tiny[0], "--cand", tiny[1], "--out", "swept", *options)
    assert code == 0 and "the sweep folder swept" in text and "no candidate of it was measured before" in text
    assert {path.name for path in place.iterdir()} == {"texts", "cache"}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["kl", "--ref", "a", "--cand", "b", "--dry-run", "--csv"], "--dry-run has no figures for --csv"),
        (["gate", "--dry-run", "--junit", "gate.xml"], "there is nothing to judge by"),
        (["gate", "--dry-run", "--junit", "gate.xml", "--nope"], "there is no option --nope"),
        (["kl", "--ref", URL, "--cand", "b", "--dry-run", "--data", "./txts"], "did you mean texts?"),
    ],
)
def test_a_mistake_is_refused_and_leaves_nothing_behind(args: Any, said: str, place: Path, capsys: Any) -> None:
    assert call(*args)[0] == 2
    assert said in capsys.readouterr().err
    assert not (place / "gate.xml").exists()


def test_a_stored_run_is_only_read(place: Path, capsys: Any) -> None:
    from evalgate.store.runs import write_run
    from tests.evalgate.sample_run import source, summary, token_table

    table = token_table(("demo@int8",))
    write_run(Path("r"), manifest={}, table=table, summary=summary(table, reference=source("demo")))
    code, text = call("gate", "--policy", "8bit", "--run", "r", "--dry-run", "--json", "--no-github")
    document = json.loads(text)
    assert (code, document["seconds"], document["models"]) == (0, 0.0, [])
    assert document["positions"]["likely"] == 120
    assert call("gate", "--policy", "8bit", "--run", "nowhere", "--dry-run")[0] == 2


def test_of_chats_the_assistants_words_are_counted_as_scored(place: Path, tiny: Any) -> None:
    turns = [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y" * 100}]
    Path("chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    found = forecast(kl(*tiny, data="chats.jsonl"))
    assert found.positions is not None and found.tokens is not None
    assert found.positions.least < found.positions.likely < found.positions.most <= found.tokens.most
    assert found.positions.likely == pytest.approx(found.positions.most / 4, rel=0.3)
    assert "of chats the contents" in found.counted
