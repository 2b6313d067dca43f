"""What every command shares: its output, --debug, and groups of options declared once.

A command is a plain function. `command` turns it into what Typer takes: a parameter whose type is an `OptionGroup`
becomes one option per field of the group, `--debug` and `--color` are added, `--help-all` too where some options are
rare (evalgate.cli.help), and a parameter of type `Invocation` receives the
output, which is guarded before the function starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, wraps
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from evalgate.cli import help as panels
from evalgate.cli.defaults import Setting
from evalgate.cli.streams import Output

Result = TypeVar("Result")  # an exit code, or None
Debug = Annotated[bool, typer.Option("--debug", rich_help_panel=panels.HELP, help="Show the traceback of an error.")]
Color = Annotated[
    Literal["auto", "always", "never"],
    typer.Option("--color", metavar="WHEN", rich_help_panel=panels.HELP, help="auto, always or never."),
]
All = Annotated[
    bool,
    typer.Option(
        "--help-all",
        is_eager=True,
        callback=panels.show_all,
        rich_help_panel=panels.HELP,
        help="Show this message with every option and exit.",
    ),
]


class OptionGroup:
    """Base of frozen dataclasses whose fields are options: `name: Annotated[type, typer.Option(...)] = default`."""


@dataclass(frozen=True)
class Invocation:
    """One command line being run: its output, and the flags that hold even where parsing it fails.

    settings: options in effect that were not typed but come from a file or the environment, as `--limit`; filled while
    the command line is parsed.
    """

    output: Output
    json: bool
    debug: bool
    settings: dict[str, Setting] = field(default_factory=dict)

    @classmethod
    def of(cls, args: Sequence[str], output: Output) -> Invocation:
        """Read the flags off the arguments as typed."""
        options = args[: args.index("--")] if "--" in args else args
        return cls(output, json="--json" in options, debug="--debug" in options)


def command(function: Callable[..., Result]) -> Callable[..., Result]:
    """The function as a Typer command; see the module's docstring."""
    own = inspect.signature(function, eval_str=True).parameters
    groups = {name: p.annotation for name, p in own.items() if _is_group(p.annotation)}
    invocation = next((name for name, p in own.items() if p.annotation is Invocation), None)
    context = next((name for name, p in own.items() if p.annotation is typer.Context), None)
    spread: list[inspect.Parameter] = []
    for name, p in own.items():
        if name not in (invocation, context):
            spread += _parameters(p.annotation) if name in groups else [p]

    @wraps(function)
    def wrapped(_context: typer.Context, **values: Any) -> Result:
        for name in ("debug", "color", "help_all"):  # were read off the command line before it was parsed
            values.pop(name, None)
        if getattr(_context.obj, "settings", None):
            values |= _fitting(_context, values)
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        if context is not None:
            values[context] = _context
        if invocation is not None:
            values[invocation] = _context.obj
            values[invocation].output.guard()
        return function(**values)

    parameters = [
        inspect.Parameter("_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in spread),
        inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug),
        inspect.Parameter("color", inspect.Parameter.KEYWORD_ONLY, default="auto", annotation=Color),
    ]
    if panels.has_rare(p.annotation for p in spread):
        parameters.append(inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=All))
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


def _fitting(context: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The own defaults of options that a file or the environment sets and that change nothing for the models named.

    Such an option is refused where it is typed. A default counts for many commands, and applies where it can.
    """
    models = [values[name] for name in ("ref", "cand", "model", "source") if values.get(name)]
    if not models:
        return {}
    from evalgate.measure.checks import inapplicable

    named = [model for one in models for model in (one if isinstance(one, list | tuple) else [one])]
    unfit = inapplicable(named, reference=values.get("ref"), tokenizer=bool(values.get("tokenizer")))
    found = {}
    for option in context.command.params:
        if option.opts[0] in unfit and option.opts[0] in context.obj.settings:
            del context.obj.settings[option.opts[0]]
            found[option.name] = option.process_value(context, option.default)
    return found


def _is_group(annotation: object) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, OptionGroup)


@cache
def _parameters(group: type[Any]) -> tuple[inspect.Parameter, ...]:
    hints = get_type_hints(group, include_extras=True)
    return tuple(
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    )
