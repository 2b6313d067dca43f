"""`evalgate cache`: hidden states of references that are kept on this machine."""

from __future__ import annotations

from dataclasses import asdict

import typer

from evalgate.cli import help, options
from evalgate.cli.command import Invocation, command
from evalgate.cli.examples import epilog
from evalgate.core import counted, sized
from evalgate.printable import printable

app = typer.Typer(
    name="cache",
    help="Hidden states of references, kept on this machine.",
    cls=help.Group,
    rich_markup_mode=None,
    no_args_is_help=True,
)


@app.command("info", cls=help.Command, epilog=epilog("cache info"))
@command
def info(call: Invocation, json: options.Json = False) -> None:
    """What is kept: references, sizes, and the limit."""
    from evalgate.store.documents import dump
    from evalgate.store.hidden import contents

    found = contents()
    if json:
        call.output.write(dump({**asdict(found), "bytes": found.bytes}, name="cache"))
        return
    lines = [f"folder      {found.folder}", f"limit       {sized(found.limit)}", f"kept        {sized(found.bytes)}"]
    if found.heads:
        shared = f", of which traces hold {sized(found.shared)} too" if found.shared else ""
        lines.append(f"heads       {found.heads}, {sized(found.head_bytes)}{shared}")
    lines += [
        f"reference   {model.spec}: {sized(model.bytes)} in {counted(model.batches, 'file')}, last used {model.used}"
        for model in found.models
    ]
    call.output.write("".join(f"{printable(line)}\n" for line in lines))


@app.command("clear", cls=help.Command, epilog=epilog("cache clear"))
@command
def clear(call: Invocation, json: options.Json = False) -> None:
    """Remove them all. Traces keep their own."""
    from evalgate.store import hidden
    from evalgate.store.documents import dump

    freed = hidden.contents().bytes
    hidden.clear()
    call.output.write(dump({"freed": freed}, name="cache") if json else f"freed {sized(freed)}\n")
