"""A dialect is one file: a made-up one in a folder of its own is probed, chosen, forced, scored with and shown."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalgate import dialects
from evalgate.cli.completion import complete_dialect
from evalgate.cli.endpoint_options import EndpointOptions
from evalgate.endpoints.certify import certify, choose_dialect, own_probe_text
from evalgate.endpoints.channel import Channel
from evalgate.endpoints.settings import EndpointSettings
from evalgate.errors import EndpointError
from evalgate.measure.run import RunRequest, run
from tests.evalgate.fake_endpoint import MODEL, Fake, logprobs, serving

SOURCE = '''
"""POST /score {"tokens", "best"} -> {"rows": [[[id, logprob], ...], ...]}: own token first, from the second on."""

from evalgate.dialects.base import Dialect, Place, Request
from evalgate.dialects.body import read_body
from evalgate.dialects.rows import Entry, score_position, window_scores
from evalgate.errors import EndpointError


class MadeUp(Dialect):
    """A dialect of this test."""

    summary = "a made-up server: one request per window"
    order = 35
    prompt_scoring = True
    most_alternatives = 12

    def score_window(self, window, ask):
        """One request."""
        place = Place("/score", window.index)
        (reply,) = yield (Request("POST", "/score", {"tokens": list(window.ids), "best": ask.k}),)
        found = read_body(reply, place, k=ask.k).get("rows")
        if not isinstance(found, list) or len(found) != len(window.ids) - 1:
            raise place.error(EndpointError, "not one row for each token")
        rows = []
        for i in ask.positions_in(window):
            entries = [Entry(frozenset({t}), v) for t, v in found[i - 1]]
            rows.append(score_position(window.ids[i], entries, ask, place.at(i)))
        return window_scores(window, ask, rows, text_keyed=False)


DIALECT = MadeUp()
'''


class Strange(Fake):
    """A server that speaks the made-up dialect and nothing else."""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path != "/score":
            return (404, {"error": {"message": "no"}}) if "completions" in path else super().answer(path, body)
        if body["best"] > 200:
            return 400, {"error": {"message": "too many"}}
        self.asked.append(body)
        ids = tuple(body["tokens"])
        rows = [self.row(ids[:i], body["best"], ids[i]) for i in range(1, len(ids))]
        return 200, {"rows": [[[int(t), v["logprob"]] for t, v in row.items()] for row in rows]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that holds the dialect, on the path of the package."""
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "plug").mkdir()
    (tmp_path / "plug" / "made_up.py").write_text(SOURCE)
    monkeypatch.setattr(dialects, "__path__", [*dialects.__path__, str(tmp_path / "plug")])
    yield tmp_path / "plug"
    sys.modules.pop("evalgate.dialects.made_up", None)


def test_the_probe_finds_it_and_its_limit(folder: Path) -> None:
    with serving(Strange()) as fake:
        channel = Channel(fake.url, EndpointSettings(patience=0.2), key=None)
        found = certify(channel, MODEL, own_probe_text(channel, MODEL))
        channel.close()
    assert (found.best, found.dialects) == ("made_up", ("made_up",))
    assert (found.largest_k, found.k_is_limit) == (12, True)


@pytest.mark.parametrize("forced", ["", "made_up"])
def test_a_run_scores_with_it(folder: Path, tmp_path: Path, forced: str) -> None:
    (tmp_path / "a.txt").write_text("a quick fox and a slow dog")
    with serving(Strange() if forced else Fake()) as ref, serving(Strange(salt=1, noise=0.4)) as cand:
        found = run(
            RunRequest.of(
                kind="kl",
                reference=f"{ref.url}/v1",
                candidates=(f"{cand.url}/v1#{MODEL}",),
                data=str(tmp_path / "a.txt"),
                context=16,
                endpoint=EndpointOptions(dialect=forced, patience=0.2).settings(),
            )
        )
    assert found.summary.comparisons[0].candidate.extra["dialect"] == "made_up"
    ids = b"a quick fox and a slow dog"
    for row in found.tokens[found.tokens.window == 0].itertuples():
        q = logprobs(tuple(ids[: row.position]), salt=1, noise=0.4)
        assert row.cand_nll == pytest.approx(-q[ids[row.position]], abs=1e-5)
        assert row.kl_low <= (np.exp(p := logprobs(tuple(ids[: row.position]))) * (p - q)).sum() + 1e-6


def test_forced_dialects_are_checked_whatever_their_name(folder: Path) -> None:
    assert complete_dialect("made") == ["made_up"]
    assert EndpointOptions(dialect="made_up").settings().dialect == "made_up"
    with serving(Fake()) as fake:
        channel = Channel(fake.url, EndpointSettings(patience=0.2), key=None)
        found = certify(channel, MODEL, own_probe_text(channel, MODEL))
        channel.close()
    for name in dialects.names():
        if name in found.dialects:
            assert choose_dialect(found, fake.url, forced=name) == name
        else:
            with pytest.raises(EndpointError, match=f"does not honour the dialect '{name}'"):
                choose_dialect(found, fake.url, forced=name)
    assert "made_up" in dialects.names() and "made_up" not in found.dialects


def test_the_help_text_names_it(folder: Path) -> None:
    code = (
        f"from evalgate import dialects; dialects.__path__.append({str(folder)!r})\n"
        "from evalgate.cli import main\nmain(['kl', '--help-all'])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout
    assert "made_up" in shown and "prompt_logprobs" in shown


def test_no_other_file_knows_a_dialect_by_name() -> None:
    """Names of dialects are strings in their own files alone; a certificate's fields may be called alike."""
    package = Path(dialects.__file__).parents[1]
    fields = {"prompt_logprobs", "echo"}
    known = [name for name in dialects.names() if name not in fields]
    for file in package.rglob("*.py"):
        text = file.read_text()
        for name in known:
            found = f'"{name}"' in text
            assert not found or file.stem == name, f"{file} names the dialect {name}"
