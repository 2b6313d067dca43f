"""`evalgate verify`: is an endpoint serving the model it names?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from evalgate.cli import options
from evalgate.cli.command import Invocation
from evalgate.cli.completion import complete_source
from evalgate.cli.endpoint_options import EndpointOptions
from evalgate.cli.probe import Lines
from evalgate.core import counted
from evalgate.errors import FAIL, PASS, UNDECIDED
from evalgate.printable import printable
from evalgate.reports._numbers import interval_text
from evalgate.specs import SourceSpec, parse

if TYPE_CHECKING:
    from evalgate.measure.verify import Verification

EXIT_CODES = {"same": PASS, "different": FAIL, "undecided": UNDECIDED}


def verify(
    call: Invocation,
    ref: options.Reference,
    cand: Annotated[
        SourceSpec,
        typer.Option(
            "--cand", metavar="URL#MODEL", parser=parse, autocompletion=complete_source, help="The endpoint to verify."
        ),
    ],
    endpoint: EndpointOptions,
    prompts: Annotated[
        int, typer.Option(min=2, metavar="N", help="Prompts to continue; each takes several requests.")
    ] = 100,
    data: options.Data = None,
    prompt_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens of a prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens drawn after each.")] = 16,
    tolerance: Annotated[
        float, typer.Option(metavar="NATS", help="Mean KL that other kernels and number formats may cause.")
    ] = 0.02,
    false_alarm: Annotated[
        float, typer.Option("--false-alarm", metavar="P", help="Probability of calling the same model different.")
    ] = 0.01,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Is the endpoint serving the model it names? Exit 0 same, 1 different, 3 undecided."""
    from evalgate.measure.verify import VerifyRequest, verify
    from evalgate.store.documents import dump

    asked = VerifyRequest(
        reference=ref,
        candidate=cand,
        prompts=prompts,
        data=data,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        tolerance=tolerance,
        alarm=false_alarm,
        seed=seed,
        device=device,
        endpoint=endpoint.settings(),
    )
    found = verify(asked, watch=Lines(quiet=quiet))
    document = {"reference": ref.spec, "candidate": cand.spec, **found.document()}
    call.output.write(dump(document, name="verification") if json else text(found))
    return EXIT_CODES[found.verdict]


def text(found: Verification) -> str:
    """The verdict, the figures with their limits, and what was assumed."""
    lines = [f"{found.verdict.upper()}: {found.reason}", ""]
    for e in found.evidence:
        f = e.figure
        interval = interval_text(f.interval, unit="nats")
        lines.append(
            f"{e.name:<52}{f.known:.4g}  {interval} nats, {counted(f.n, 'token')}, {counted(f.documents, 'document')}"
        )
    floor = "unknown" if found.floor is None else f"{found.floor:.3g} nats"
    agreement = "unknown" if found.agreement is None else f"{found.agreement:.1%}"
    if found.differing is not None:
        few = found.differing
        lines.append(
            f"{few.found} of {counted(few.documents, 'document')} differ by more than the tolerance; up to "
            f"{few.most:.1%} of all prompts could"
        )
    lines += [
        f"same top-1 where known: {agreement}; largest change when asked again: {floor}",
        f"tolerance {found.tolerance:g} nats; false alarms at most {found.alarm:.2%}; "
        f"{counted(found.requests, 'request')} in the dialect {found.dialect}",
        *(f"assumed: {sentence}" for sentence in found.assumed),
        *(f"note: {note}" for note in found.notes),
    ]
    return "".join(f"{printable(line)}\n" for line in lines)
