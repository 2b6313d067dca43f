"""`evalgate config`: the value of every option, and where it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from evalgate.cli import defaults, options
from evalgate.cli.command import Invocation
from evalgate.cli.completion import complete_command
from evalgate.errors import UsageError, choose
from evalgate.printable import printable

_HIDDEN = "(not shown)"


def config(
    call: Invocation,
    ctx: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COMMAND]", autocompletion=complete_command, help="Every option of this one, as in: policy init."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Show which options a file or the environment sets, or all options of a command."""
    root = ctx.find_root().command
    known = dict(defaults.commands(root))
    words = " ".join(command or ())
    if words and words not in known:
        raise UsageError(f"there is no command {words}: {choose(words, known)}")
    file = defaults.find()
    found = {
        name: _values(known[name], defaults.settings(root, name, file=file), whole=name == words)
        for name in ([words] if words else known)
    }
    if json:
        from evalgate.store.documents import dump

        body = {"file": None if file is None else str(file.path), "commands": {k: v for k, v in found.items() if v}}
        call.output.write(dump(body, name="config"))
    else:
        call.output.write(_text(file, found))


def _values(command: Any, settings: dict[str, defaults.Setting], *, whole: bool) -> dict[str, dict[str, Any]]:
    """Value and origin by option; whole: of those that have their own default, too."""
    found: dict[str, dict[str, Any]] = {}
    for option in command.params:
        name = option.opts[0].removeprefix("--")
        if option.param_type_name != "option" or name in defaults.TYPED:
            continue
        setting = settings.get(option.name)
        if setting is not None:
            value = _HIDDEN if defaults.hidden(name, setting.value) else setting.value
            found[name] = {"value": value, "origin": setting.origin}
        elif whole:
            found[name] = {"value": _plain(option.default), "origin": "required" if option.required else "default"}
    return found


def _plain(value: Any) -> Any:
    """A declared default as JSON and the terminal show it."""
    value = getattr(value, "value", value)  # of an Enum
    return str(value) if isinstance(value, Path) else value


def _text(file: defaults.DefaultsFile | None, found: dict[str, dict[str, dict[str, Any]]]) -> str:
    where = (
        f"none: there is no {defaults.FILE} and no [tool.evalgate] in a {defaults.PROJECT} from {Path.cwd()} upward"
        if file is None
        else str(file.path)
    )
    lines = [f"file: {printable(where)}"]
    names = [name for values in found.values() for name in values]
    shown = {words: values for words, values in found.items() if values}
    cells = {name: _cell(values[name]["value"]) for values in shown.values() for name in values}
    first, second = (max(map(len, column), default=0) for column in (names, cells.values()))
    for words, values in shown.items():
        lines += ["", words]
        lines += [
            f"  --{name:<{first}}  {_cell(value['value']):<{min(second, 40)}}  {printable(value['origin'])}"
            for name, value in values.items()
        ]
    if not shown:
        lines.append("every option has its own default: `evalgate config kl` shows them")
    return "".join(f"{line}\n" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return printable(" ".join(map(str, value)) if isinstance(value, list) else str(value))
