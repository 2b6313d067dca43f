"""Help that fits a screen: options in groups, examples below, and the rare groups behind `--help-all`.

The group of an option is its `rich_help_panel`, declared with it; groups named in RARE are left out of `--help`. The
text is laid out by Typer's plain formatter, so that help costs no import of rich.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from evalgate.cli import colors, defaults
from evalgate.errors import CANNOT_MEASURE, UsageError, choose

if TYPE_CHECKING:
    from collections.abc import Iterable

MODELS, TEXT, OUTPUT, HELP = "Models", "Text", "Output", "Help"  # shown by --help
JUDGE, REPORTS = "Judge by", "Reports"
MORE_MODELS, MORE_TEXT, COMPUTING, RUNNING, ENDPOINTS, MORE_GATE = (
    "More about the models",
    "More about the text",
    "Computing",
    "Running",
    "Endpoints",
    "More about the gate",
)
RARE = frozenset({MORE_MODELS, MORE_TEXT, COMPUTING, RUNNING, ENDPOINTS, MORE_GATE})
_OTHERS, _ARGUMENTS, _COMMANDS = "Options", "Arguments", "Commands"
_ORDER = (_ARGUMENTS, JUDGE, MODELS, _OTHERS, TEXT, OUTPUT, REPORTS)  # then the others as declared, HELP last
_FIRST_COLUMN = 26  # widest name of an option beside its help; a longer one stands on a line of its own
_WIDEST = 100  # columns
_MANY = 4  # rare options; fewer are shown with the others
_ALL = "evalgate.cli.help.all"

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": _WIDEST}


def show_all(ctx: typer.Context, value: bool) -> None:
    """The callback of `--help-all`: print the help with every group, and end."""
    if value and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help(), color=ctx.color)
        raise typer.Exit


def has_rare(annotations: Iterable[object]) -> bool:
    """Whether so many of these parameters are options of rare groups that `--help` leaves them out."""
    declared = [one for annotation in annotations for one in getattr(annotation, "__metadata__", ())]
    return _many_rare(declared)


def _many_rare(options: Iterable[object]) -> bool:
    return sum(getattr(one, "rich_help_panel", None) in RARE for one in options) >= _MANY


class _Plain:
    """What commands and groups of commands share: the layout of their help."""

    epilog: str | None

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """The context, which knows whether its help is colored."""
        extra.setdefault("color", colors.wanted(terminal=_is_terminal()))
        return super().make_context(info_name, args, parent=parent, **extra)  # type: ignore[misc]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, summary, groups of options and examples."""
        this: Any = self
        this.format_usage(ctx, formatter)
        this.format_help_text(ctx, formatter)
        formatter.write_paragraph()
        this.format_options(ctx, formatter)
        this.format_epilog(ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples as they are, each on a line of its own."""
        if self.epilog:
            _heading(ctx, formatter, "Examples")
            formatter.write("".join(f"  {line}\n" for line in self.epilog.splitlines()))


class Command(_Plain, TyperCommand):
    """A command whose help shows its options in groups."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments over the defaults of the file and the environment (evalgate.cli.defaults)."""
        takes_words = any(p.param_type_name == "argument" for p in self.params)
        if args and not args[0].startswith("-") and not takes_words and not ctx.resilient_parsing:
            required = [f"{p.opts[0]} {p.metavar}" for p in self.params if p.required] or ["options"]
            raise UsageError(
                f"{ctx.command_path} takes no words of its own, as '{args[0]}': give {' and '.join(required)} "
                f"(see {ctx.command_path} --help)"
            )
        settings = self._settings(ctx, args)
        ctx.default_map = {name: setting.value for name, setting in settings.items()}
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:  # so that the message names this command's help
                error.ctx = ctx  # type: ignore[attr-defined]
            raise
        finally:
            for option in self.params:
                source = ctx.get_parameter_source(option.name)  # None where parsing ended before
                if option.name in settings and (source is None or source.name == "DEFAULT_MAP"):
                    getattr(ctx.obj, "settings", {})[option.opts[0]] = settings[option.name]

    def _settings(self, ctx: Any, args: list[str]) -> dict[str, defaults.Setting]:
        """None while completing, and for help where they are wrong: it must be there to see what is right."""
        if ctx.parent is None or ctx.resilient_parsing:
            return {}
        try:
            words = " ".join(str(one.command.name) for one in _ancestry(ctx)[1:])
            return defaults.settings(ctx.find_root().command, words, file=defaults.find())
        except UsageError:
            if {"-h", "--help", "--help-all"} & set(args):
                return {}
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What stands behind the command in the usage line: what is required by name, then the others."""
        required = [p for p in self.params if p.required and p.param_type_name == "option"]
        arguments = [str(p.metavar) for p in self.params if p.param_type_name == "argument"]
        return [*(f"{p.opts[0]} {p.metavar}" for p in required), *arguments, self.options_metavar or ""]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the groups that are asked for, and how to see the others."""
        parameters = self.get_params(ctx)
        whole = ctx.meta.get(_ALL) or not _many_rare(parameters)
        found = _groups(parameters, ctx, brief=not whole)
        _write(ctx, formatter, {name: rows for name, rows in found.items() if whole or name not in RARE | {HELP}})
        if not whole:
            said = ", ".join(name.removeprefix("More about the ").lower() for name in found if name in RARE)
            formatter.write_text(f"{_styled(ctx, 'All options:', bold=True)} --help-all ({said})")


class Group(_Plain, TyperGroup):
    """A group of commands, which are shown in groups too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what stands before the command; without one the help is shown, and the exit code says so."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), color=ctx.color)
            raise typer.Exit(CANNOT_MEASURE)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name. Raises UsageError for an unknown one, naming the one that was meant."""
        name = args[0]
        if self.get_command(ctx, name) is None and not ctx.resilient_parsing and not name.startswith("-"):
            known = self.list_commands(ctx)
            raise UsageError(f"there is no command {name}: {choose(name, known)} (see {ctx.command_path} --help)")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, then the options."""
        found: dict[str, list[tuple[str, str]]] = {}
        named = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        for name, command in named:
            if command is not None and not command.hidden:
                panel = getattr(command, "rich_help_panel", None) or _COMMANDS
                summary = (command.short_help or command.help or "").split("\n\n")[0].replace("\n", " ")
                found.setdefault(str(panel), []).append((name, summary))
        _write(ctx, formatter, found)
        _write(ctx, formatter, _groups(self.get_params(ctx), ctx, brief=False))


def _ancestry(ctx: Any) -> list[Any]:
    """The contexts from the root's to this one."""
    return [*(_ancestry(ctx.parent) if ctx.parent is not None else []), ctx]


def _groups(parameters: Iterable[Any], ctx: Any, *, brief: bool) -> dict[str, list[tuple[str, str]]]:
    """Name and help of every parameter that is not hidden, by group in the order in which groups are shown.

    brief: without second names, ranges, and the word that the usage line says too.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for parameter in parameters:
        record = parameter.get_help_record(ctx)
        if record is not None:
            if parameter.param_type_name == "argument":
                record = (str(parameter.metavar), parameter.help or "")
            record = _brief(parameter, *record) if brief else record
            usual = _ARGUMENTS if parameter.param_type_name == "argument" else _OTHERS
            usual = HELP if parameter.name == "help" else usual
            found.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
    places = {name: place for place, name in enumerate(_ORDER)} | {HELP: len(_ORDER) + 1}
    return dict(sorted(found.items(), key=lambda item: places.get(item[0], len(_ORDER))))


def _brief(parameter: Any, name: str, text: str) -> tuple[str, str]:
    for other in [opt for opt in parameter.opts if opt.startswith("--")][1:]:
        name = name.replace(f", {other}", "")
    said, bracket, extra = text.rpartition("  [")
    if not bracket:
        return name, text
    kept = [part for part in extra.removesuffix("]").split("; ") if part.startswith("default: ")]
    return name, said + "".join(f"  [{part}]" for part in kept)


def _write(ctx: Any, formatter: Any, groups: dict[str, list[tuple[str, str]]]) -> None:
    """Groups below each other, their second columns in line, without empty lines between them."""
    names = [name for rows in groups.values() for name, _ in rows]
    width = max((len(name) for name in names if len(name) <= _FIRST_COLUMN), default=0)
    for title, rows in groups.items():
        _heading(ctx, formatter, title)
        with formatter.indentation():
            formatter.write_dl(
                [(_styled(ctx, name, fg="cyan") + " " * (width - len(name)), text) for name, text in rows],
                col_max=width,
            )


def _heading(ctx: Any, formatter: Any, title: str) -> None:
    formatter.write(_styled(ctx, f"{title}:", bold=True) + "\n")


def _styled(ctx: Any, text: str, **style: Any) -> str:
    return typer.style(text, **style) if ctx.color else text


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()
