"""Notebooks are stored without outputs and run from top to bottom, offline, on a tiny model in the demo's place."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.stuck import STUCK

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_the_notebooks_are_those_that_the_site_names() -> None:
    named = set(re.findall(r"notebooks/(\w+)\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert {path.stem for path in NOTEBOOKS} == named


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebook_runs(path: Path, tiny: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of its own. `demo` is a tiny checkpoint; everything else is as published."""
    nbclient = pytest.importorskip("nbclient", reason="needs the extra 'notebook'")
    pytest.importorskip("plotly", reason="needs the extra 'notebook'")
    nbformat = pytest.importorskip("nbformat")
    text = path.read_text(encoding="utf-8")
    assert re.search(r"\bdemo\b", text)
    book = nbformat.reads(text, as_version=4)
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.source = re.sub(r"(?<=[\"'])demo(?=[@\"'])", tiny[0], cell.source)
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    client = nbclient.NotebookClient(book, timeout=STUCK, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises at the first cell that fails
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert "text/html" in kinds
    assert ("application/vnd.plotly.v1+json" in kinds) == ("run.plot." in text)
