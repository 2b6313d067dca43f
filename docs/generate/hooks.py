"""What the build of the site adds to docs/: the pages written from the code, and those that lie outside docs/.

A link in a page is written for the repository, so that it also works where the files are read as they are. Here it is
turned into the site's own; a link to a file that is not in the site keeps its words only.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

import reference  # beside this file: mkdocs loads a hook with its folder on the path
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")
SHOWN = {".md", ".txt", ".json", ".html", ".png", ".svg", ".csv", ".yaml"}  # files of reports/ that are in the site
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^\s*```.*?^\s*```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from elsewhere."""
    for path in outside():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for name, text in reference.pages().items():
        files.append(File.generated(config, name, content=text))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebook(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page to where the site has their targets."""
    known = {file.src_uri for file in files}
    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(lambda found: _link(found, page.file.src_uri, known), part) for part in parts[::2]]
    return "".join(parts)


def outside() -> list[str]:
    """The files of the repository outside docs/ that are in the site under their own path."""
    published = [p for p in sorted((ROOT / "reports").rglob("*")) if p.suffix in SHOWN]
    return [name for name in OUTSIDE if (ROOT / name).exists()] + [p.relative_to(ROOT).as_posix() for p in published]


def notebook(path: Path) -> str:
    """A notebook as a page: its text and its code."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for kind, text in texts) + "\n"


def in_site(path: str) -> str:
    """Where the site has a file of the repository: docs/ is its root."""
    path = path.removeprefix("docs/") if path.startswith("docs/") else path
    path = "index.md" if path == "README.md" else path
    return f"{path.removesuffix('.ipynb')}.md" if path.startswith("notebooks/") else path


def in_repository(name: str) -> str:
    """Where the repository has a page of the site; the reference and the home page count as files of docs/."""
    return name if name in OUTSIDE or name.startswith(("reports/", "notebooks/")) else f"docs/{name}"


def _link(found: re.Match[str], page: str, known: set[str]) -> str:
    image, text, target = found.groups()
    if re.match(r"[a-z]+:|#", target):
        return found[0]
    name, anchor = (*target.split("#", 1), "")[:2]
    wanted = in_site(posixpath.normpath(posixpath.join(posixpath.dirname(in_repository(page)), name)))
    if wanted not in known:
        inside = (ROOT / posixpath.normpath(posixpath.join(posixpath.dirname(in_repository(page)), name))).exists()
        return text if inside and not image else found[0]  # a strict build reports what is nowhere
    relative = os.path.relpath(wanted, posixpath.dirname(page) or ".").replace(os.sep, "/")
    return f"{image}[{text}]({relative}{'#' + anchor if anchor else ''})"
