"""The documentation says what is there: commands parse, links resolve, lists are complete, figures are published."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from typer.main import get_command

import evalgate
from evalgate import dialects, errors, table
from evalgate.cli.app import app
from evalgate.measure.run import RunRequest
from evalgate.metrics import registry
from evalgate.summary import Summary
from serve.__main__ import _parser as serve_parser

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "reports" / "demo"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("reports/**/*.md")])
REQUIRED = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/semantics.md", "docs/cli.md", "docs/python-api.md"}
ALIASES = {"-h", "--help", "--help-all", "--version", "--install-completion", "--show-completion"}


class Block(NamedTuple):
    """A fenced block: the page it is on, its first line's number, its language, the comment above it, its text."""

    page: str
    line: int
    language: str
    source: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    start, language, source = None, "", ""
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("```"):
            continue
        if start is None:
            comment = re.fullmatch(r"<!-- from (\S+) -->", lines[number - 2]) if number > 1 else None
            start, language, source = number, line.strip()[3:].strip(), comment[1] if comment else ""
        else:
            text = dedent("\n".join(lines[start : number - 1]))
            yield Block(str(page.relative_to(ROOT)), start + 1, language, source, text)
            start = None
    assert start is None, f"{page}: the block of line {start} has no end"


BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = [
    pytest.param(part.strip(), id=f"{block.page}:{block.line}:{part.strip()[:40]}")
    for block in BLOCKS
    if block.language == "sh"
    for line in block.text.splitlines()
    if line.strip() and not line.lstrip().startswith("#")
    for part in re.split(r"(?<=\s)\|\s|(?<=\s)>\s\S+", line)
    if part.strip()
]
PYTHON = [pytest.param(b.text, id=f"{b.page}:{b.line}") for b in BLOCKS if b.language == "python"]


def test_pages_and_blocks_are_found() -> None:
    assert {str(page.relative_to(ROOT)) for page in PAGES} >= REQUIRED
    assert len(COMMANDS) >= 20
    assert len(PYTHON) >= 4
    assert {block.language for block in BLOCKS} <= {"sh", "python", "text", "json", "toml", "yaml", "mermaid"}


@pytest.mark.parametrize("line", COMMANDS)
def test_command_parses(line: str) -> None:
    """Every command of an `sh` block is one whose options, targets or extras exist."""
    program, *args = shlex.split(line)
    match [Path(program).name, *args]:
        case ["evalgate", *rest]:
            _parse_evalgate(rest)
        case ["make", *words]:
            targets = {word for word in words if "=" not in word}
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert targets and targets <= _make_targets()
            assert all(f"$({word.partition('=')[0]})" in makefile for word in words if "=" in word)
        case ["python", "-m", module, *rest] if module.startswith("benchmarks"):
            texts = [ROOT / f"{module.replace('.', '/')}.py", ROOT / "benchmarks" / "result.py"]
            text = "".join(path.read_text(encoding="utf-8") for path in texts)
            assert all(option in text for option in rest if option.startswith("-"))
        case ["python", "-m", "serve", *rest]:
            _parse_serve(rest)
        case ["python", script, *rest] if script.endswith(".py"):
            text = (ROOT / script).read_text(encoding="utf-8")
            assert all(option in text for option in rest if option.startswith("-"))
        case ["pip", "install", *rest]:
            for extra in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
                assert set(extra.split(",")) <= _extras()
        case ["docker", "build", "--target", target, "-t", "evalgate", "."]:
            assert f" AS {target}\n" in (ROOT / "Dockerfile").read_text(encoding="utf-8")
        case ["docker", "run", *rest]:
            _parse_evalgate(rest[rest.index("evalgate") + 1 :])
        case ["python", "-m", "pytest" | "venv", *_] | ["curl" | "cat" | "source" | "export", *_]:
            pass
        case other:
            pytest.fail(f"no rule for the command {other}")


def test_a_wrong_command_is_noticed() -> None:
    for wrong in ("evalgate kl --ref demo", "evalgate kl --ref a --cand b --nope", "evalgate nope", "make nope"):
        with pytest.raises((Exception, AssertionError)):
            test_command_parses(wrong)
    with pytest.raises(SystemExit):
        test_command_parses("python -m serve demo --nope")


@pytest.mark.parametrize("source", PYTHON)
def test_python_block_uses_what_exists(source: str) -> None:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "evalgate":
            assert node.attr in evalgate.__all__
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("evalgate.compare", "evalgate.perplexity"):
            assert {str(keyword.arg) for keyword in node.keywords} <= _api_options()
    imported = _imported(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in imported:
            known = inspect.signature(imported[node.func.id]).parameters
            assert {str(keyword.arg) for keyword in node.keywords} <= set(known), ast.unparse(node)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        assert file.is_relative_to(ROOT), f"{page.name} links out of the repository: {target}"
        if anchor:
            assert anchor in _anchors(file), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    """Paths in backticks that start with a folder of the repository."""
    for path in re.findall(r"`((?:evalgate|serve|tests|docs|reports|notebooks)/[^`*\s]*)`", _prose(page)):
        example = path.replace("NAME", "kl")
        assert (ROOT / example).exists(), f"{page.name} names {path}"


def test_every_option_is_on_the_page_of_the_command_line() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", _code(text)))
    known = {option for command in _commands().values() for p in command.params for option in _spellings(p)}
    missing = sorted(known - ALIASES - named)
    assert not missing, f"docs/cli.md does not name {', '.join(missing)}"
    unknown = sorted(named - known - ALIASES)
    assert not unknown, f"docs/cli.md names {', '.join(unknown)}, which no command has"


def test_every_command_is_on_the_page_of_the_command_line() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert [name for name in _commands() if f"`evalgate {name}`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_options_in_pages_exist(page: Path) -> None:
    known = {option for command in _commands().values() for p in command.params for option in _spellings(p)} | ALIASES
    known |= {option for action in serve_parser()._actions for option in action.option_strings}
    known |= {"--save-all-logits", "--kl-divergence", "--kl-divergence-base"}  # llama.cpp's
    for folder in ("benchmarks", "reports", "tools"):
        for script in (ROOT / folder).glob("*.py"):
            known |= set(re.findall(r'add_argument\("(--[a-z-]+)"', script.read_text(encoding="utf-8")))
    unknown = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", _code(_prose(page)))) - known
    assert not unknown, f"{page.name} names {unknown}"


def test_every_option_of_the_server_is_on_its_page() -> None:
    named = set(re.findall(r"--[a-z][\w-]*", (ROOT / "docs" / "server.md").read_text(encoding="utf-8")))
    shown = [action for action in serve_parser()._actions if action.help != argparse.SUPPRESS]
    assert {option for action in shown for option in action.option_strings} - ALIASES - named == set()


def test_the_layers_on_the_page_are_those_that_are_enforced() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    layered = [contract for contract in contracts if contract["type"] == "layers"]
    assert len(layered) == 3
    for contract in layered:
        assert "\n".join([*contract["containers"], *(f"  {layer}" for layer in contract["layers"])]) + "\n" in text


def test_every_room_is_on_the_page_of_the_design() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    rooms = {f"{p.parent.parent.name}/{p.parent.name}/" for p in ROOT.glob("[es]*/*/__init__.py")}
    assert len(rooms) >= 13
    assert sorted(room for room in rooms if f"`{room}`" not in text) == []


def test_the_drawing_shows_the_rooms_that_there_are() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    drawing = text.split("```mermaid\n")[1].split("```")[0]
    drawn = set(re.findall(r"(\w+)\[", drawing))
    assert all(
        (ROOT / "evalgate" / name).is_dir() or (ROOT / "evalgate" / f"{name}.py").is_file()
        for name in drawn - {"serve"}
    )
    assert drawn >= {p.parent.name for p in ROOT.glob("evalgate/*/__init__.py")}


def test_every_dialect_is_on_the_page_of_endpoints() -> None:
    text = (ROOT / "docs" / "endpoints.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) >= set(dialects.names())


def test_every_metric_and_column_is_defined_in_semantics() -> None:
    text = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")
    names = {*registry(), *table.KEY_COLUMNS, *table.PAIR_COLUMNS}
    names |= {f"{side}_{column}" for side in ("ref", "cand") for column in table.SIDE_COLUMNS}
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def test_the_metrics_table_lists_only_metrics() -> None:
    text = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")
    table = text.split("## Metrics")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(registry())


def test_every_api_option_is_described() -> None:
    text = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    assert sorted(name for name in _api_options() if f"`{name}`" not in text) == []
    assert sorted(name for name in evalgate.__all__ if f"evalgate.{name}" not in text) == []


def test_exit_codes_and_errors_are_the_real_ones() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    codes = {errors.PASS, errors.FAIL, errors.CANNOT_MEASURE, errors.UNDECIDED, errors.INTERRUPTED}
    table = text.split("## Exit codes")[1].split("\n## ")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == codes
    tree = {
        name: kind.exit_code
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.EvalgateError) and kind is not errors.EvalgateError
    }
    rows = {name: int(code) for name, code in re.findall(r"^\| `(\w+)` \| (\d+) \|", text, re.MULTILINE)}
    assert rows == tree
    gate = (ROOT / "docs" / "how-to" / "release-gate.md").read_text(encoding="utf-8")
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", gate, re.MULTILINE)} == codes


def test_routes_exist() -> None:
    sources = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "serve" / "api" / "routes").glob("*.py"))
    real = {f"{method.upper()} {path}" for method, path in re.findall(r"@routes\.(get|post)\(\s*\"([^\"]+)\"", sources)}
    named = set(re.findall(r"`((?:GET|POST) /[\w/]+)`", (ROOT / "docs" / "server.md").read_text(encoding="utf-8")))
    assert len(named) >= 6
    assert named <= real


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.source], ids=lambda b: f"{b.page}:{b.line}")
def test_output_blocks_are_quoted(block: Block) -> None:
    """An output block is the published file's lines, in order and next to each other but for `...`."""
    published = (ROOT / block.source).read_text(encoding="utf-8").splitlines()
    position, skipping = 0, True
    for line in block.text.splitlines():
        if line == "...":
            skipping = True
            continue
        assert line in published[position:], f"{block.page}: {line!r} is not in {block.source} from line {position + 1}"
        found = published.index(line, position)
        assert skipping or found == position, f"{block.page}: {line!r} needs a '...' before it"
        position, skipping = found + 1, False


def test_the_readme_quotes_the_published_screen_and_semantics_its_table() -> None:
    text = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")
    assert [b.source for b in BLOCKS if b.page == "README.md" and b.source] == ["reports/demo/screen.txt"]
    table = text.split("<!-- from reports/demo/README.md -->\n")[1].split("\n\n")[0].splitlines()
    assert len(table) >= 3
    published = (DEMO / "README.md").read_text(encoding="utf-8").splitlines()
    assert [row for row in table if row not in published] == []


def test_the_readmes_words_about_the_figures_hold() -> None:
    """bf16: the perplexity ratio cannot be told from 1, the mean KL can be told from 0, and the head matters."""
    main_run, own_head = _published()
    int8, bf16 = (comparison.overall.metrics for comparison in main_run.comparisons)
    ratio, kl = bf16["perplexity"].statistics["ratio"], bf16["kl"].statistics["mean"]
    assert ratio.low is not None and ratio.high is not None and ratio.low < 1 < ratio.high
    assert kl.low is not None and kl.low > 0
    with_own_head = own_head.comparisons[0].overall.metrics["kl"].statistics["mean"]
    assert with_own_head.low is not None
    assert bf16["kl"].statistics["mean"].value < with_own_head.low
    assert {m.exactness for m in int8.values()} == {"exact"}


def test_the_published_page_and_block_are_rendered_from_the_summaries() -> None:
    from evalgate.reports import screen, terminal

    main_run, own_head = _published()
    demo = _make_demo()
    hint = "run .venv/bin/python reports/make_demo.py --render"
    assert (DEMO / demo.PAGE).read_text(encoding="utf-8") == demo.page(main_run, own_head), hint
    assert (DEMO / demo.SCREEN).read_text(encoding="utf-8") == screen.render(main_run), hint
    assert (DEMO / demo.BLOCK).read_text(encoding="utf-8") == terminal.render(main_run), hint


def test_the_published_page_has_the_summarys_figures() -> None:
    """Read without the code that writes the page."""
    page = (DEMO / "README.md").read_text(encoding="utf-8")
    for name, logits in (("summary.json", "float32"), ("summary-logits-model.json", "the model's own")):
        for comparison in json.loads((DEMO / name).read_bytes())["comparisons"]:
            metrics = comparison["overall"]["metrics"]
            kl = metrics["kl"]["statistics"]["mean"]
            row = f"| `{comparison['candidate']['spec']}` | {logits} | {kl['value']:.5f} | "
            row += f"{kl['low']:.5f} .. {kl['high']:.5f} |"
            assert row in page
            assert f"{100 * metrics['top1_agreement']['statistics']['mean']['value']:.2f}%" in page


def test_the_published_schema_is_the_real_one() -> None:
    from evalgate.reports.json import schema

    published = json.loads((ROOT / "docs" / "summary.schema.json").read_bytes())
    assert published == json.loads(schema()), "run .venv/bin/evalgate schema > docs/summary.schema.json"


def test_the_published_schema_of_sweeps_is_the_real_one() -> None:
    from evalgate.reports.leaderboard_json import schema

    published = json.loads((ROOT / "docs" / "sweep.schema.json").read_bytes())
    assert published == json.loads(schema()), "run .venv/bin/evalgate schema sweep > docs/sweep.schema.json"


def test_licence_is_the_whole_apache_text() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text and len(text) > 11_000


def _imported(source: str) -> dict[str, Any]:
    """What a block imports by `from evalgate... import NAME`; fails where it is not there."""
    return {
        alias.name: getattr(importlib.import_module(str(node.module)), alias.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("evalgate")
        for alias in node.names
    }


def _prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def _code(text: str) -> str:
    """What stands in backticks."""
    return " ".join(re.findall(r"`([^`\n]+)`", text))


def _anchors(page: Path) -> set[str]:
    """GitHub's anchors of the page's headings."""
    headings = re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _commands(group: Any = None, prefix: str = "") -> dict[str, Any]:
    """Every command by the words that call it."""
    found: dict[str, Any] = {}
    root: Any = get_command(app) if group is None else group
    for name, command in root.commands.items():
        if getattr(command, "hidden", False):
            continue
        words = f"{prefix}{name}"
        found |= _commands(command, f"{words} ") if hasattr(command, "commands") else {words: command}
    return found


def _spellings(parameter: Any) -> list[str]:
    if parameter.param_type_name != "option":
        return []
    return [*parameter.opts, *parameter.secondary_opts]


def _parse_evalgate(args: list[str]) -> None:
    """Parse without running; Typer raises where an option, a command or a value does not exist."""
    command, words = get_command(app), list(args)
    context = None
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no command {words[0]}"
        context = command.make_context("evalgate", [words[0]], parent=context, resilient_parsing=True)
        command, words = command.commands[words[0]], words[1:]
    if set(words) & ALIASES:
        assert set(words) <= ALIASES
        return
    command.make_context("command", words, parent=context)


def _parse_serve(args: list[str]) -> None:
    assert isinstance(serve_parser().parse_args(args), argparse.Namespace)


def _make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, re.MULTILINE))


def _extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def _api_options() -> set[str]:
    """What compare and perplexity take: the request's fields, less those that the functions set."""
    return (set(RunRequest.__dataclass_fields__) - {"kind", "reference", "candidates"}) | {"observer"}


def _published() -> tuple[Summary, Summary]:
    main_run, own_head = (
        Summary.model_validate_json((DEMO / name).read_bytes())
        for name in ("summary.json", "summary-logits-model.json")
    )
    return main_run, own_head


def _make_demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_demo", ROOT / "reports" / "make_demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
