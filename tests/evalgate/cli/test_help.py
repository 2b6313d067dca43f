"""Help fits a screen, says all of it with --help-all, and its examples are commands that can be typed."""

import shlex

import pytest
from typer.main import get_command

from evalgate.cli import colors
from evalgate.cli.app import app
from evalgate.cli.examples import EXAMPLES
from evalgate.cli.help import RARE
from tests.evalgate.cli.test_cli import call
from tests.test_docs import _commands, _parse_evalgate

COMMANDS = _commands()
SCREEN = 24


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """80 columns, and no colors that the terminal of the tests would bring in."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def shown(capsys, *args):
    capsys.readouterr()
    assert call(*args)[0] == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", COMMANDS)
def test_help_is_at_most_80_columns_wide(words, capsys):
    """Examples are commands, which are not wrapped."""
    for option in ("--help", "--help-all") if "help_all" in {p.name for p in COMMANDS[words].params} else ("--help",):
        text = shown(capsys, *words.split(), option).partition("Examples:\n")[0]
        assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("words", ["kl", "agree", "ppl"])
def test_help_of_a_measuring_command_fits_a_screen(words, capsys):
    text = shown(capsys, words, "--help")
    assert len(text.splitlines()) <= SCREEN
    assert "--data" in text and "--json" in text and "--llama-threads" not in text
    assert "All options: --help-all (text, computing, models, running, endpoints)" in text


@pytest.mark.parametrize("words", COMMANDS)
def test_every_option_is_in_the_whole_help(words, capsys):
    command = COMMANDS[words]
    whole = "--help-all" if "help_all" in {p.name for p in command.params} else "--help"
    text = shown(capsys, *words.split(), whole)
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    assert [p.opts[0] for p in options if p.opts[0] not in text] == []


def test_what_help_leaves_out_is_in_rare_groups_alone(capsys):
    text = shown(capsys, "kl", "--help")
    left_out = {p.rich_help_panel for p in COMMANDS["kl"].params if f"  {p.opts[0]} " not in text}
    assert left_out <= RARE | {"Help"} and left_out & RARE


def test_required_options_stand_in_the_usage_line(capsys):
    assert shown(capsys, "kl", "-h").startswith("Usage: evalgate kl --ref SPEC --cand SPEC [OPTIONS]\n")
    assert shown(capsys, "compare", "-h").startswith("Usage: evalgate compare RUN_A RUN_B [OPTIONS]\n")


def test_every_command_has_examples_and_help_shows_them(capsys):
    assert set(EXAMPLES) == set(COMMANDS)
    for words, lines in EXAMPLES.items():
        assert lines and all(f"{line} ".startswith(f"evalgate {words} ") for line in lines)
        assert shown(capsys, *words.split(), "--help").endswith("Examples:\n" + "".join(f"  {x}\n" for x in lines))


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_an_example_parses(line):
    _parse_evalgate(shlex.split(line)[1:])


def test_help_of_all_commands_is_in_groups(capsys):
    text = shown(capsys, "--help")
    assert text.index("Measure:") < text.index("  kl ") < text.index("Judge:") < text.index("  gate ")
    assert [name for name in get_command(app).commands if f"\n  {name} " not in text] == []


@pytest.mark.parametrize("words", [(), ("trace",), ("policy",)])
def test_a_group_without_a_command_shows_its_help_and_exits_2(words, capsys):
    assert call(*words) == (2, "")
    out, err = capsys.readouterr()
    assert out.startswith("Usage: evalgate") and err == ""


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["klx"], "there is no command klx: did you mean kl? (see evalgate --help)"),
        (["trace", "infos"], "there is no command infos: did you mean info? (see evalgate trace --help)"),
        (["zzz"], "there is no command zzz: use one of kl, agree, "),
        (["kl", "--limti", "3"], "there is no option --limti: did you mean --limit? (see evalgate kl --help)"),
        (["kl", "--no_resume"], "there is no option --no_resume: did you mean --no-resume?"),
        (["kl", "--zzzz"], "there is no option --zzzz (see evalgate kl --help)"),
        (["--limit", "3", "kl"], "the option --limit stands after its command: write evalgate kl --limit"),
        (["kl", "--ref", "a", "--cand", "b", "--dialect", "Echo"], "there is no dialect 'Echo': did you mean echo?"),
        (["gate", "--max", "kll=1", "--run", "r"], "there is no metric 'kll': did you mean kl?"),
        (["gate", "--max", "kl.p9999=1", "--run", "r"], "did you mean p99.9?"),
        (["show", "r", "--format", "jsn"], "there is no report 'jsn' of a summary: did you mean json?"),
        (["gate", "--policy", "8bits", "--run", "r"], "there is no policy file 8bits: did you mean 8bit?"),
        (["policy", "init", "--preset", "8bits"], "there is no preset '8bits': did you mean 8bit?"),
    ],
)
def test_a_slip_of_the_pen_is_answered_with_what_was_meant(args, said, capsys):
    assert call(*args)[0] == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_run_folder_that_is_missing_is_answered_with_one_beside_it(tmp_path, capsys):
    (tmp_path / "kl-20260101").mkdir()
    assert call("show", str(tmp_path / "kl-20260102"))[0] == 2
    assert f"there is no run folder {tmp_path / 'kl-20260102'}: did you mean {tmp_path / 'kl-20260101'}?" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("environment", "terminal", "wanted"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm"}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({}, True, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, False, True),
        ({"TERM": "xterm", "FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_colors_follow_the_environment(environment, terminal, wanted):
    assert colors.wanted(terminal=terminal, environment=environment) is wanted


def test_the_color_option_goes_before_the_environment():
    environment = {"NO_COLOR": "1"}
    colors.apply(["kl", "--color", "always"], environment)
    assert environment == {"FORCE_COLOR": "1"}
    colors.apply(["kl", "--color=never"], environment)
    assert environment == {"NO_COLOR": "1"}
    for other in (["--color", "auto"], ["--color"], ["--", "--color", "always"], ["--color", "blue"]):
        colors.apply(other, environment)
        assert environment == {"NO_COLOR": "1"}


def test_help_is_colored_where_asked_for(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    colored = shown(capsys, "kl", "--help")
    assert "\x1b[36m--ref SPEC\x1b[0m" in colored
    monkeypatch.setenv("NO_COLOR", "1")
    plain = shown(capsys, "kl", "--help")
    assert "\x1b" not in plain and len(plain.splitlines()) == len(colored.splitlines())


def test_an_unknown_color_is_refused(capsys):
    assert call("schema", "--color", "blue")[0] == 2
    assert "--color cannot be 'blue': use one of auto, always, never" in capsys.readouterr().err
