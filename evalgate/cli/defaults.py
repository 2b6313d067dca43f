"""Defaults of options from a file and from the environment.

What is typed goes first, then EVALGATE_COMMAND_OPTION, then the nearest `evalgate.toml` or `[tool.evalgate]` of a
`pyproject.toml`, upward from the working directory, then the option's own default. In the file a key is an option
without its dashes. At the top it counts for every command that shares the option, in a command's table for that one:

    data = "texts/"
    limit = 64

    [gate]
    policy = "policy.toml"

Keys that no command has are refused by name, and so are secrets: such files are shared.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from evalgate.errors import UsageError, choose
from evalgate.specs import LLAMA_CPP
from evalgate.store.remote import is_url

FILE, PROJECT = "evalgate.toml", "pyproject.toml"
# Options that decide about one command line alone, or are read before the file is.
TYPED = frozenset({"json", "markdown", "csv", "overwrite", "dry-run", "debug", "color", "help", "help-all", "version"})
# A relative path in a file is meant from the file's folder. Of these only where it is there, for it may be a name:
NAMES = frozenset({"data", "policy", "ref", "cand", "model", "tokenizer"})
PATHS = frozenset({"out", "run", "baseline", "api-key-file", "ca-file", "badge", "comment", "junit", "html"})
_SECRET = re.compile(r"key|token|passw|secret|bearer|credential|auth|cookie", re.IGNORECASE)
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class Setting:
    """An option's default that is not its own.

    value: as if it was typed: text, a list of texts for an option that is repeated, or whether a flag is set.
    origin: the variable or file that says so. written: what stands there. file: whether it is a file.
    """

    value: str | bool | list[str]
    origin: str
    written: Any
    file: bool


@dataclass(frozen=True)
class DefaultsFile:
    """The file that holds defaults: `table` is the whole of it, or `[tool.evalgate]`."""

    path: Path
    table: Mapping[str, Any]

    @property
    def shown(self) -> str:
        """The path as messages name it: alone where it is in the working directory."""
        return self.path.name if self.path.parent == Path.cwd() else str(self.path)


def find() -> DefaultsFile | None:
    """The nearest file with defaults, from the working directory upward; `evalgate.toml` before `pyproject.toml`.

    Passed over are a `pyproject.toml` without `[tool.evalgate]` and a policy that is called `evalgate.toml`, as the CI
    files of earlier versions call theirs. Raises UsageError for a file that cannot be read.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed
        return None
    for folder in (here, *here.parents):
        own, project = folder / FILE, folder / PROJECT
        if own.is_file() and "rules" not in (held := _toml(own)):
            return DefaultsFile(own, held)
        if project.is_file():
            tools = _toml(project).get("tool")
            table = tools.get("evalgate") if isinstance(tools, dict) else None
            if table is not None:
                if not isinstance(table, dict):
                    raise UsageError(f"{project}: tool.evalgate is not a table: write [tool.evalgate]")
                return DefaultsFile(project, table)
    return None


def _toml(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}", file=str(path)) from error
    except (ValueError, RecursionError) as error:
        said = str(error) or "it nests too deeply"
        raise UsageError(f"{path} is not TOML: {said}", file=str(path)) from None


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command below a group with its words: `kl`, `policy init`."""
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands(one, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", one


def settings(
    root: Any, words: str, *, file: DefaultsFile | None, environment: Mapping[str, str] = os.environ
) -> dict[str, Setting]:
    """The settings of one command by the names of its parameters. root: the group of all commands.

    Raises UsageError for a key that no command has, a secret, or a value that no option takes.
    """
    known = dict(commands(root))
    found: dict[str, Setting] = {}
    if file is not None:
        _check(file, root, known)
        own = _options(known[words])
        meant = {} if " " in words else _shared(known)
        top = {
            key: value
            for key, value in file.table.items()
            if not isinstance(value, dict) and _dashed(key) in own and own[_dashed(key)].help == meant.get(_dashed(key))
        }
        for table, place in ((top, ""), (_table(file.table, words), f" [{words.replace(' ', '.')}]")):
            for key, value in table.items():
                option = own.get(_dashed(key))
                if option is not None and not isinstance(value, dict):
                    found[option.name] = _setting(file, f"{file.shown}{place}", option, value)
    for key, option in _options(known[words]).items():
        variable = f"EVALGATE_{words}_{key}".upper().replace("-", "_").replace(" ", "_")
        if key not in TYPED and environment.get(variable):
            value = _of_variable(variable, environment[variable], option)
            found[option.name] = Setting(value, variable, environment[variable], file=False)
    return found


def _options(command: Any) -> dict[str, Any]:
    """The options of a command by every long name that sets them, without dashes."""
    return {
        name[2:]: option
        for option in command.params
        if option.param_type_name == "option"
        for name in option.opts
        if name.startswith("--")
    }


def _shared(known: Mapping[str, Any]) -> dict[str, str | None]:
    """What a key at the top of the file means: the help text of the option that most commands have under that name.

    A command whose option of that name says something else is only set in its table. None = no text is the most common
    one. Commands in groups (`policy init`) have tables alone.
    """
    texts: dict[str, list[str]] = {}
    for words, command in known.items():
        if " " not in words:
            for key, option in _options(command).items():
                texts.setdefault(key, []).append(str(option.help))
    found: dict[str, str | None] = {}
    for key, said in texts.items():
        (first, count), *others = Counter(said).most_common(2)
        found[key] = None if others and others[0][1] == count else first
    return found


def _check(file: DefaultsFile, root: Any, known: Mapping[str, Any]) -> None:
    """Refuse every key that means nothing, in whichever table it stands."""
    shared = _shared(known)
    _check_table(file, file.table, "", root, shared)
    for key, value in file.table.items():
        if shared.get(_dashed(key), "") is None and not isinstance(value, dict):
            which = [words for words, one in known.items() if " " not in words and _dashed(key) in _options(one)]
            raise UsageError(
                f"{file.shown}: {key} is not the same option in {', '.join(which)}: write it in a table, as in "
                f"[{which[0]}]",
                key=key,
            )


def _check_table(file: DefaultsFile, table: Mapping[str, Any], place: str, group: Any, options: Iterable[str]) -> None:
    """Check the keys of one table. place: its name and a dot, "" at the top. group: its commands have tables in it."""
    below = getattr(group, "commands", {})
    options = list(options)
    for key, value in table.items():
        where, name = f"{place}{key}", _dashed(key)
        if isinstance(value, dict) and key in below:
            inner = below[key]
            _check_table(file, value, f"{where}.", inner, [] if hasattr(inner, "commands") else _options(inner))
        elif name not in options or isinstance(value, dict):
            raise _unknown(file, where, key, [*(key for key in options if key not in TYPED), *below])
        elif name in TYPED:
            raise UsageError(f"{file.shown}: {where} belongs on the command line: leave it out", key=where)
        else:
            _check_secret(file, where, name, value)


def _unknown(file: DefaultsFile, where: str, key: str, known: Iterable[str]) -> UsageError:
    if _SECRET.search(key):
        return UsageError(
            f"{file.shown}: {where} may be a secret, and such files are shared: name the variable that holds a key "
            "with api-key-env, or its file with api-key-file",
            key=where,
        )
    return UsageError(f"{file.shown}: there is no option {where}: {choose(key, sorted(known))}", key=where)


def _check_secret(file: DefaultsFile, where: str, name: str, value: Any) -> None:
    texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    if name == "header" and any(_SECRET.search(text.partition(":")[0]) for text in texts):
        raise UsageError(
            f"{file.shown}: {where} holds a secret, and such files are shared: set EVALGATE_ENDPOINT_KEY, or type it",
            key=where,
        )
    if any(_has_password(text) for text in texts):
        raise UsageError(
            f"{file.shown}: {where} holds a password, and such files are shared: type it, or set it in a variable",
            key=where,
        )


def _has_password(text: str) -> bool:
    try:
        return bool(urlsplit(text).password)
    except ValueError:
        return False


def hidden(name: str, value: Any) -> bool:
    """Whether a value is not to be shown: a header that a variable brings may hold a key, and a URL a password."""
    texts = value if isinstance(value, list) else [value]
    return (name == "header" and bool(value)) or any(isinstance(text, str) and _has_password(text) for text in texts)


def _table(whole: Mapping[str, Any], words: str) -> Mapping[str, Any]:
    """The table of a command: [kl], [policy.init]."""
    table: Any = whole
    for word in words.split():
        table = table.get(word, {}) if isinstance(table, dict) else {}
    return table if isinstance(table, dict) else {}


def _setting(file: DefaultsFile, origin: str, option: Any, value: Any) -> Setting:
    """A value of the file as a setting. Raises UsageError for a kind of value that the option does not take."""
    name = option.opts[0].removeprefix("--")
    if option.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"{origin}: {name} is {value!r} and should be true or false", key=name)
        return Setting(value, origin, value, file=True)
    items = value if isinstance(value, list) and option.multiple else [value]
    if any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in items):
        raise UsageError(
            f"{origin}: {name} is {value!r} and should be text or a number{', or a list' * option.multiple}", key=name
        )
    texts = [_placed(file, name, str(item)) for item in items]
    return Setting(texts if option.multiple else texts[0], origin, value, file=True)


def _placed(file: DefaultsFile, name: str, text: str) -> str:
    """A path as it is found from the working directory: relative ones are meant from the file's folder."""
    folder = file.path.parent
    if name not in PATHS | NAMES or folder == Path.cwd() or not text or is_url(text) or Path(text).is_absolute():
        return text
    if name in PATHS:
        return str(folder / text)
    prefix = LLAMA_CPP if text.startswith(LLAMA_CPP) else ""
    rest = text.removeprefix(prefix)
    named = [path for path in (rest, rest.rpartition("@")[0]) if path]
    return f"{prefix}{folder / rest}" if any(_exists(folder / path) for path in named) else text


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or a NUL byte
        return False


def _of_variable(variable: str, text: str, option: Any) -> str | bool | list[str]:
    if option.is_flag:
        if text.lower() not in _YES + _NO:
            raise UsageError(f"{variable} is {text!r} and should be 1 or 0, true or false, yes or no")
        return text.lower() in _YES
    if not option.multiple:
        return text
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{variable} cannot be split into words ({error}): check its quotes") from None


def _dashed(key: str) -> str:
    return key.replace("_", "-")
