"""What every command shares: its output, --debug, and groups of options declared once.

A command is a plain function. `command` turns it into what Typer takes: a parameter whose type is an `OptionGroup`
becomes one option per field of the group, `--debug` is added, and a parameter of type `Invocation` receives the
output, which is guarded before the function starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache, wraps
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from evalgate.cli.streams import Output

Result = TypeVar("Result")  # an exit code, or None
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


class OptionGroup:
    """Base of frozen dataclasses whose fields are options: `name: Annotated[type, typer.Option(...)] = default`."""


@dataclass(frozen=True)
class Invocation:
    """One command line being run: its output, and the flags that hold even where parsing it fails."""

    output: Output
    json: bool
    debug: bool

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
        del values["debug"]  # Invocation.of has read it
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
    ]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


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
