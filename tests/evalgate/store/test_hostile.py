"""Foreign and damaged files end in one sentence, whatever is in them: the digests are right, the contents are not."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stderr
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalgate.core import Window
from evalgate.dialects.base import PositionScore, Score, WindowScores
from evalgate.endpoints.answers import Answers, encode
from evalgate.endpoints.constancy import Named
from evalgate.errors import EvalgateError, InputError, UsageError
from evalgate.gate.policy import PRESETS, parse_policy, policy_text
from evalgate.measure.recordings import ShownMean
from evalgate.measure.recordings.trace import RecordedTrace
from evalgate.measure.stored import read_run
from evalgate.server.batches import score_batches
from evalgate.store.manifest import digest
from evalgate.store.partial import PartialRun
from evalgate.store.runs import write_run
from evalgate.table import build, score_columns
from evalgate.traces import TraceWriter, read_trace, verify
from tests.evalgate import hostile
from tests.evalgate.cli.test_cli import MemoryOutput
from tests.evalgate.sample_run import listed, reseal, source, summary, token_table
from tests.evalgate.trace_samples import meta, record, windows

V = 50


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    table = token_table(("demo@int8",), documents=2)
    folder = tmp_path_factory.mktemp("hostile") / "run"
    write_run(
        folder,
        manifest={"seed": 0},
        table=table,
        summary=summary(table, reference=source("demo")),
        token_texts=dict.fromkeys(table.column("token").to_pylist(), "x"),
        alternatives_table=listed(table),
    )
    (folder.parent / "policy.toml").write_text('[policy]\nnoise_floor = false\n[[rules]]\nmetric = "kl"\nmax = 0.1\n')
    return folder


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "t.trace"
    shown = windows(2, 9, V)
    writer = TraceWriter(folder, meta(V), windows=shown)
    writer.append(record(shown, vocabulary=V))
    writer.finish()
    return folder


def copied(folder: Path) -> Path:
    place = folder.parent / "changed" / folder.name
    shutil.rmtree(place.parent, ignore_errors=True)
    shutil.copytree(folder, place)
    return place


def rewrite(path: Path, document: object) -> None:
    # Escaped, so that half a surrogate pair can be written at all.
    path.write_text(json.dumps(document), encoding="ascii")


def seal(folder: Path, manifest: dict[str, object]) -> None:
    """Write a manifest with its own digest, spelled as evalgate does where that is possible."""
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    try:
        own = digest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
        text = json.dumps({**body, "sha256": own}, indent=2, ensure_ascii=False) + "\n"
        (folder / "manifest.json").write_text(text, encoding="utf-8")
    except UnicodeEncodeError:
        rewrite(folder / "manifest.json", manifest)


def read_by_every_command(folder: Path) -> None:
    """Every command that reads a run ends with a verdict or one sentence."""
    from evalgate.cli.app import invoke

    name, policy = str(folder), str(folder.parents[1] / "policy.toml")
    try:
        read_run(folder)
    except EvalgateError:
        commands = [["show", name]]
    else:
        commands = [
            ["show", name],
            ["show", name, "--json"],
            ["slices", name, "--by", "token"],
            ["compare", name, name, "--metric", "kl", "--metric", "top1_agreement"],
            ["plan", name, "--max", "kl=0.1"],
            ["gate", "--run", name, "--policy", policy, "--baseline", name],
        ]
    for command in commands:
        with redirect_stderr(io.StringIO()) as said:
            code = invoke(command, MemoryOutput())
        assert code in (0, 1, 2, 3) and "unexpectedly" not in said.getvalue(), (command, said.getvalue())


def with_another_manifest(stored, data) -> Path:
    """A copy whose manifest is another document, sealed as if it were meant."""
    folder = copied(stored)
    manifest = json.loads((folder / "manifest.json").read_text())
    seal(folder, data.draw(hostile.documents(manifest)))
    return folder


FEW = settings(max_examples=25)  # `make fuzz` tries others


@FEW
@given(data=st.data())
def test_manifests_of_runs(run, data):
    read_by_every_command(with_another_manifest(run, data))


@FEW
@given(data=st.data())
def test_summaries(run, data):
    folder = copied(run)
    rewrite(folder / "summary.json", data.draw(hostile.documents(json.loads((folder / "summary.json").read_text()))))
    reseal(folder)
    read_by_every_command(folder)


@FEW
@given(data=st.data(), name=st.sampled_from(["tokens.parquet", "token_texts.parquet", "alternatives.parquet"]))
def test_tables_of_runs(run, data, name):
    folder = copied(run)
    table = data.draw(hostile.tables(pq.read_table(folder / name)))
    pq.write_table(table, folder / name)
    reseal(folder, lambda m: m["files"][name].update(rows=table.num_rows) if "rows" in m["files"][name] else None)
    read_by_every_command(folder)


DEEP = b"[" * 100_000 + b"]" * 100_000
FILES = {
    "a list of files": lambda m: m.update(files=list(m["files"])),
    "no files": lambda m: m.pop("files"),
    "a file elsewhere": lambda m: m["files"].update({"../x": m["files"]["summary.json"]}),
    "a size of words": lambda m: m["files"]["summary.json"].update(bytes="many"),
}


@pytest.mark.parametrize("what", FILES)
def test_a_manifest_without_a_list_of_files_is_named(run, what):
    folder = copied(run)
    manifest = json.loads((folder / "manifest.json").read_text())
    FILES[what](manifest)
    seal(folder, manifest)
    with pytest.raises(InputError, match=r"manifest\.json has no list of files"):
        read_run(folder)


@pytest.mark.parametrize("content", [DEEP, b'{"a": 1e999}', b'{"a": NaN}', b'"\\ud800"', b"[]", b"\xff", b""])
def test_json_that_is_no_document_of_ours(run, content):
    folder = copied(run)
    (folder / "summary.json").write_bytes(content)
    reseal(folder)
    with pytest.raises(InputError, match=r"summary\.json"):
        read_run(folder)
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(InputError, match=r"manifest\.json"):
        read_run(folder)


def test_a_folder_called_as_hive_partitions_are_adds_no_column(run):
    place = run.parent / "kl=3" / "seed=1"
    shutil.copytree(run, place)
    assert read_run(place).table.equals(read_run(run).table)


def read_whole_trace(folder: Path) -> None:
    verify(folder)
    try:
        found = read_trace(folder)
        opened = RecordedTrace(read_trace(folder), str(folder))
        for window in found.windows:
            opened.rows(window)
        list(found.shards())
    except EvalgateError:
        pass


@FEW
@given(data=st.data())
def test_manifests_of_traces(trace, data):
    read_whole_trace(with_another_manifest(trace, data))


@FEW
@given(data=st.data(), name=st.sampled_from(["windows.parquet", "shard-00000.parquet"]))
def test_tables_of_traces(trace, data, name):
    folder = copied(trace)
    table = data.draw(hostile.tables(pq.read_table(folder / name)))
    pq.write_table(table, folder / name)
    reseal(folder, lambda m: m["files"][name].update(rows=table.num_rows))
    read_whole_trace(folder)


def test_an_impossible_row_of_a_trace_is_not_a_reference(trace):
    folder = copied(trace)
    path = folder / "shard-00000.parquet"
    table = pq.read_table(path)
    pq.write_table(hostile.with_column(table, "rank", "negative"), path)
    reseal(folder)
    with pytest.raises(InputError, match=r"shard-00000\.parquet: window 0, position 1: the rank is outside"):
        RecordedTrace(read_trace(folder), str(folder)).rows(read_trace(folder).windows[0])


def toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


POLICY = {
    "policy": {"name": "p", "confidence": 0.9, "correction": "holm", "clip": 4.0},
    "rules": [
        {"metric": "kl", "statistic": "p99", "max": 0.1, "slice": {"by": "domain", "name": "code"}},
        {"metric": "top1_agreement", "min": 0.9, "against": "baseline", "name": "same"},
    ],
}


@FEW
@given(document=hostile.documents(POLICY))
def test_policies(document):
    text = "".join(f"{key} = {toml(value)}\n" for key, value in document.items() if value is not None)
    try:
        parse_policy(text, name="p.toml")
    except UsageError as error:
        assert error.message.startswith("p.toml")


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a = 1" + "0" * 5000, "a = " + "{b=" * 50_000])
def test_policies_that_no_parser_reads(text):
    with pytest.raises(UsageError, match=r"p\.toml is not TOML"):
        parse_policy(text, name="p.toml")


def test_presets_are_policies():
    assert all(parse_policy(policy_text(name), name=name).rules for name in PRESETS)


WINDOW = Window(0, "doc", "prose", (1, 2, 3), 1, 3, (1, 1, 1))
ANSWER = WindowScores(
    0,
    "doc",
    2,
    tuple(
        PositionScore(p, Score(p + 1, -1.0, -1.0), 1, 1, 1, (2, 3), (-1.0, -2.0), (), False, (), 0.4, ())
        for p in (1, 2)
    ),
    text_keyed=False,
)


def kept(folder: Path, table: object) -> Answers:
    shutil.rmtree(folder, ignore_errors=True)
    PartialRun(folder).keep(0, 1, table)
    return Answers(folder)


@FEW
@given(data=st.data())
def test_kept_answers_are_believed_or_asked_again(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "answers"
    whole = encode(ANSWER, [Named("/v1", "m", "")])
    assert kept(folder, whole).get(WINDOW) == ANSWER
    document = json.loads(whole.schema.metadata[b"evalgate.answer"])
    if data.draw(st.booleans()):
        table = data.draw(hostile.tables(whole))
    else:
        said = json.dumps(data.draw(hostile.documents(document))).encode()
        table = whole.replace_schema_metadata({b"evalgate.answer": said})
    answers = kept(folder, table)
    answers.named(WINDOW)
    found = answers.get(WINDOW)
    assert found is None or [row.position for row in found.rows] == [1, 2]


@FEW
@given(data=st.data())
def test_kept_scores_are_believed_or_asked_again(tmp_path_factory, data):
    partial = PartialRun(tmp_path_factory.getbasetemp() / "scores")
    partial.discard()
    columns = {name: [1.0, 0.5] for name in score_columns(pair=True)}
    right = build(["m"], [WINDOW], {n: [1, 2] if "top1" in n or "rank" in n else v for n, v in columns.items()})
    partial.keep(0, 1, data.draw(hostile.tables(right)))
    shown = ShownMean("kl", "KL").values
    found = list(
        score_batches([WINDOW], lambda part: right, names=["m"], running=shown, partial=partial, abandon=lambda: None)
    )
    assert len(found) == 1 and found[0].table.num_rows == 2
    assert len(list(partial.folder.iterdir())) == 1
