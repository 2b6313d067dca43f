"""The documentation as a site: a strict build, nothing from other hosts, and a reference that is the code's."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from evalgate import table
from evalgate.cli.app import app
from evalgate.gate import kinds, policy
from evalgate.gate.report import GateReport
from evalgate.leaderboard import Leaderboard
from evalgate.metrics import registry
from evalgate.summary import Summary
from tests.browser import Chromium, chromium  # noqa: F401 (a fixture)
from tests.test_docs import PAGES, _commands, _spellings

ROOT = Path(__file__).parent.parent
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The site, built as `make docs` builds it; a warning ends the build."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        config = pytest.importorskip("mkdocs.config", reason="needs the extra 'dev'")
        from mkdocs.commands.build import build

        folder = tmp_path_factory.mktemp("site")
        level = logging.getLogger("mkdocs").level
        build(config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
        logging.getLogger("mkdocs").setLevel(level)
        yield folder
        sys.modules.pop("reference", None)


class _Loads(HTMLParser):
    """What a page loads by itself, and what it links to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in LOADED and values.get(LOADED[tag]):
            self.loads.append(str(values[LOADED[tag]]))
        if tag == "a" and values.get("href"):
            self.links.append(str(values["href"]))


def pages(site: Path) -> list[Path]:
    """The site's pages, less reports, which are files of their own."""
    return [page for page in sorted(site.rglob("*.html")) if "md-" in page.read_text(encoding="utf-8")]


def text(site: Path, name: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", (site / name).read_text(encoding="utf-8")))


def test_a_page_loads_nothing_from_another_host(site: Path) -> None:
    found = {(page.name, url) for page in pages(site) for url in _Loads(page).loads if urlsplit(url).netloc}
    assert found == set()
    assert len(pages(site)) > 20


def test_what_a_page_loads_or_links_to_is_in_the_site(site: Path) -> None:
    for page in pages(site):
        seen = _Loads(page)
        for url in (*seen.loads, *seen.links):
            parts = urlsplit(url)
            if parts.scheme or parts.netloc or not parts.path:
                continue
            target = site / parts.path[1:] if parts.path.startswith("/") else page.parent / unquote(parts.path)
            if page.name != "404.html":
                assert target.exists(), f"{page.name} needs {url}"


def test_styles_load_nothing_from_another_host(site: Path) -> None:
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:|@import\s+['\"]?https?:", style.read_text(encoding="utf-8"))


def test_every_page_of_the_documentation_is_in_the_site(site: Path) -> None:
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        if name in ("README.md", "docs/pypi.md"):
            continue
        made = name.removeprefix("docs/").removesuffix(".md")
        path = f"{made.removesuffix('README')}index" if made.endswith("README") else made
        assert (site / f"{path}.html").exists(), name
    assert {p.stem for p in (site / "notebooks").glob("*.html")} == {p.stem for p in ROOT.glob("notebooks/*.ipynb")}


def test_the_reference_has_every_command_and_option(site: Path) -> None:
    said = text(site, "reference/commands.html")
    for words, command in _commands().items():
        section = said.split(f"\nevalgate {words}¶")[1].split("¶")[0]
        for parameter in command.params:
            assert all(option in section for option in _spellings(parameter)), words
    assert app.info.name == "evalgate"


def test_the_reference_has_every_key_of_a_policy(site: Path) -> None:
    said = text(site, "reference/policy.html")
    keys = {*policy.Settings.model_fields, *policy.Rule.model_fields, *policy.Slice.model_fields, *kinds.kinds()}
    assert sorted(key for key in keys if not re.search(rf"^{key}$", said, re.MULTILINE)) == []
    for model in (policy.Settings, policy.Rule, policy.Slice):
        assert [name for name, field in model.model_fields.items() if not field.description] == []
    assert all(f"Preset {name}" in said for name in policy.PRESETS)


def test_the_reference_has_every_metric_column_and_key_of_a_document(site: Path) -> None:
    metrics, columns = text(site, "reference/metrics.html"), text(site, "reference/columns.html")
    documents = text(site, "reference/documents.html")
    for metric in registry().values():
        section = metrics.split(f"\n{metric.name}¶")[1].split("¶")[0]
        assert all(statistic.name in section for statistic in metric.statistics)
    for column in (*table.KEY_COLUMNS, *table.score_columns(pair=True)):
        assert re.search(rf"^{column}\n(string|int32|float32)\b.*\n.+\n.+", columns, re.MULTILINE), column
    for model in (Summary, GateReport, Leaderboard):
        for definition in (model.model_json_schema(), *model.model_json_schema()["$defs"].values()):
            assert all(re.search(rf"^{key}$", documents, re.MULTILINE) for key in definition["properties"])


@pytest.mark.slow
@pytest.mark.parametrize("phone", [False, True], ids=["desktop", "phone"])
def test_the_site_opens_from_a_folder_and_its_search_finds(site: Path, chromium: Chromium, phone: bool) -> None:  # noqa: F811
    """In a browser, without a server: nothing on the console, and no request beyond the folder."""
    with chromium.open((site / "index.html").as_uri(), origin=site.as_uri(), phone=phone, dark=phone) as page:
        assert page.overflow() == 0
        page.shot(f"site-{'phone-dark' if phone else 'desktop-light'}", full=False)
        if phone:
            return
        page.locator("input.md-search__input").fill("clustered-t")
        found = page.locator(".md-search-result__link").first
        found.wait_for()
        assert ".html" in found.get_attribute("href")
    with chromium.open((site / "reference" / "commands.html").as_uri(), origin=site.as_uri(), phone=phone) as page:
        assert page.overflow() == 0
