"""Run options are declared once: as fields of a group, which are fields of the request."""

from dataclasses import MISSING, dataclass, fields
from typing import Annotated

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from evalgate.cli.app import app
from evalgate.cli.command import Invocation, OptionGroup, command
from evalgate.cli.options import MeasureOptions, RunOptions
from evalgate.measure.request import RunRequest
from evalgate.specs import parse
from tests.evalgate.cli.test_cli import MemoryOutput


@pytest.mark.parametrize("option", fields(MeasureOptions), ids=lambda option: option.name)
def test_a_run_option_is_a_field_of_the_request_with_the_same_default(option):
    field = RunRequest.__dataclass_fields__[option.name]
    assert option.default is None or option.default == field.default
    assert field.default is not MISSING or option.default is None


@pytest.mark.parametrize(
    ("name", "group"), [(n, MeasureOptions) for n in ("kl", "agree", "ppl", "gate")] + [("record", RunOptions)]
)
def test_every_measuring_command_has_every_run_option(name, group):
    taken = {parameter.name for parameter in get_command(app).commands[name].params}
    assert {option.name for option in fields(group)} <= taken


def test_the_values_of_options_become_the_request():
    options = MeasureOptions(limit=9, windows="sliding", seed=5, budget=None)
    request = options.request("agree", parse("a"), [parse("b"), parse("c@int8")], confidence=0.9)
    assert request == RunRequest.of(
        "agree", "a", ("b", "c@int8"), limit=9, windows="sliding", seed=5, confidence=0.9, overwrite=False
    )


def test_a_group_becomes_options_and_comes_back_as_one_value():
    @dataclass(frozen=True)
    class Made(OptionGroup):
        times: Annotated[int, typer.Option(min=1, help="How often.")] = 2
        word: Annotated[str | None, typer.Option()] = None

    def repeat(call: Invocation, group: Made, end: str = "!") -> int:
        call.output.write(f"{group.word}{end}" * group.times)
        return 7

    repeat.__annotations__ |= {"call": Invocation, "group": Made, "end": str, "return": int}
    made = typer.Typer()
    made.command()(command(repeat))
    output = MemoryOutput()
    call = Invocation.of(["--debug"], output)
    assert call.debug and not call.json
    assert get_command(made)(["--word", "a", "--debug"], standalone_mode=False, obj=call) == 7
    assert (output.text, output.guarded) == ("a!a!", True)
    shown = CliRunner().invoke(made, ["--help"]).output
    assert "How often." in shown and "--debug" in shown
    assert CliRunner().invoke(made, ["--times", "0"]).exit_code == 2


def test_every_command_takes_debug():
    def leaves(group):
        for one in group.commands.values():
            yield from leaves(one) if hasattr(one, "commands") else [one]

    without = [one.name for one in leaves(get_command(app)) if "debug" not in {p.name for p in one.params}]
    assert without == []
