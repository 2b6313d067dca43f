"""Pages: one offline HTML file each, with its style sheet, script and data inside.

Everything that others wrote (names, texts, errors) is escaped: in templates by autoescaping, after `printable` has
made control characters visible; in data by JSON whose `<`, `>` and `&` are escapes, read by a script as text and never
as markup. The policy of the page lets no request leave it, and runs no script and no style sheet but its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from evalgate.core import VERSION
from evalgate.printable import printable

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

STYLES = ("colors.css", "page.css", "plots.css")
_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")


def page(
    *,
    title: str,
    sections: Sequence[tuple[str, str]],
    body: Markup,
    footer: Markup | str = "",
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
    data: Mapping[str, Any] | None = None,
    connect: bool = False,
) -> str:
    """A page. sections: (id, name) of what its navigation links to. styles, scripts: more of each, as text. data: what
    scripts read, by the id of its element. connect: scripts may ask the server that the page came from."""
    from markupsafe import Markup

    style = "\n".join([*(asset(__name__, name) for name in STYLES), *styles])
    script = "\n".join([asset(__name__, "page.js"), *scripts])
    rules = {
        "default-src": "'none'",
        "style-src": _hash(style),
        "script-src": _hash(script),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        **({"connect-src": "'self'"} if connect else {}),
    }
    whole = render(
        __name__,
        "page.html.jinja",
        policy=Markup("; ".join(f"{name} {value}" for name, value in rules.items())),
        version=VERSION,
        title=title,
        sections=list(sections),
        body=body,
        footer=footer,
        style=Markup(style),
        script=Markup(script),
        data=[(name, Markup(json_text(value))) for name, value in (data or {}).items()],
    )
    return str(whole)


def render(package: str, template: str, /, **values: Any) -> Markup:
    """A template of a package, filled. Raises jinja2.UndefinedError for a value that is not given."""
    from markupsafe import Markup

    return Markup(environment(package).get_template(template).render(values))


@cache
def environment(package: str) -> Environment:
    """The templates of a package; everything that is put into them is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader(package, package_path=""),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def asset(package: str, name: str) -> str:
    """A text file that lies beside a package's modules."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def json_text(value: Any) -> str:
    """JSON for a script element: nothing in it ends the element, and lone surrogates are escapes.

    Raises ValueError for a number that is not finite.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _shown(value: Any) -> Any:
    from markupsafe import Markup

    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
