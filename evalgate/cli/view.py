"""`evalgate view`: many runs in a browser, on this machine alone."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from evalgate.cli import options
from evalgate.cli.command import Invocation
from evalgate.cli.completion import complete_shown
from evalgate.cli.streams import say
from evalgate.errors import UsageError
from evalgate.store.remote import here


def view(
    call: Invocation,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUNS]...",
            parser=here,
            autocompletion=complete_shown,
            help="Folders of runs and sweeps, or of such folders. Default: runs.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="Port to listen on; 0: a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--open/--no-browser", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs and sweeps in a browser: a table that sorts, and two runs side by side.

    It listens on this machine alone, until Ctrl-C.
    """
    from evalgate.viewer import Viewer

    roots = runs or [options.RUNS]
    missing = next((root for root in roots if not root.is_dir()), None)
    if missing is not None:
        made = "measure one with `evalgate kl`" if not runs else "name a folder that holds runs"
        raise UsageError(f"there is no folder {missing}: {made}", folder=str(missing))
    viewer = Viewer(roots, port=port)
    call.output.write(f"{viewer.url}\n")
    say("Ctrl-C ends it")
    if browser:
        threading.Thread(target=webbrowser.open, args=(viewer.url,), daemon=True).start()
    try:
        viewer.serve()
    except KeyboardInterrupt:
        say("stopped")
    finally:
        viewer.close()
