"""A page of its own: one offline file in the reader's theme, and tables that sort. Nothing in it asks for anything."""

from __future__ import annotations

from html import escape

from evalgate.printable import printable
from evalgate.reports._pareto import DARK, LIGHT

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
_STYLE = f"""
:root {{ {LIGHT}; --paper:#faf9f6; --tint:#f0eee8; --line:#d2cec5; color-scheme: light }}
@media (prefers-color-scheme: dark) {{
  :root:not([data-theme=light]) {{ {DARK}; --tint:#22262d; --line:#3a4048; color-scheme: dark }}
}}
:root[data-theme=dark] {{ {DARK}; --tint:#22262d; --line:#3a4048; color-scheme: dark }}
* {{ box-sizing: border-box }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }}
header, main {{ max-width: 66rem; margin: 0 auto; padding: 0 1rem }}
header {{ display: flex; gap: 1rem; align-items: baseline; justify-content: space-between; padding-top: 1.2rem }}
h1 {{ font-size: 1.5rem; margin: 0; overflow-wrap: anywhere }}
h2 {{ font-size: 1.15rem; margin: 2rem 0 .6rem }}
.lead {{ font-size: 1.1rem; overflow-wrap: anywhere }}
figure {{ margin: 1rem 0 }}
figure svg {{ width: 100%; min-width: 36rem; height: auto; display: block }}
figcaption, small, .soft {{ color: var(--soft) }}
code {{ overflow-wrap: anywhere }}
a {{ color: var(--front) }}
th a, td a, dt a {{ display: inline-block; min-height: 24px; min-width: 24px; line-height: 24px }}
button {{ font: inherit; color: inherit; background: none; border: 1px solid var(--line); border-radius: 4px;
  padding: .2rem .6rem; cursor: pointer }}
:focus-visible {{ outline: 3px solid var(--front); outline-offset: 2px }}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ padding: .45rem .6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  font-weight: 400 }}
thead th {{ background: var(--tint); font-weight: 600; white-space: nowrap }}
th button {{ border: 0; padding: 0; font-weight: 600 }}
th button::after {{ content: " \\2195"; color: var(--soft) }}
th[aria-sort=ascending] button::after {{ content: " \\2191"; color: inherit }}
th[aria-sort=descending] button::after {{ content: " \\2193"; color: inherit }}
.number {{ text-align: right; font-variant-numeric: tabular-nums }}
td small, th small {{ display: block; white-space: nowrap }}
th[scope=row] small {{ white-space: normal }}
.mark {{ border: 1px solid var(--front); color: var(--front); border-radius: 999px; padding: 0 .5em; font-size: .8em }}
dt {{ font-weight: 600; overflow-wrap: anywhere }}
dd {{ margin: 0 0 .6rem; overflow-wrap: anywhere }}
li {{ overflow-wrap: anywhere }}
@media print {{ #theme {{ display: none }} }}
"""
_SCRIPT = """
"use strict";
const root = document.documentElement, theme = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
const say = () => { theme.textContent = dark() ? "Light" : "Dark"; };
theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; say(); });
theme.hidden = false;
say();
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    const button = head.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const one of heads) one.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const numeric = head.classList.contains("number");
      const key = row => row.cells[column].dataset.v ?? row.cells[column].textContent;
      const rows = [...body.rows];
      rows.sort((a, b) => {
        const one = key(a), two = key(b);
        if (one === "" || two === "") return (one === "") - (two === "");
        const order = numeric ? Number(one) - Number(two) : one.localeCompare(two);
        return up ? order : -order;
      });
      body.append(...rows);
    });
  });
}
"""


def page(name: str, heading: str, body: str, *, style: str = "", forms: bool = False) -> str:
    """A whole page. name: of the tab, as plain text. heading, body: HTML that is safe already.

    forms: whether forms may be sent to where the page came from.
    """
    policy = _POLICY.replace("form-action 'none'", "form-action 'self'") if forms else _POLICY
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">
<link rel="icon" href="data:,">
<title>{escape(printable(name))}</title>
<style>{_STYLE}{style}</style>
</head>
<body>
<header><h1>{heading}</h1><button type="button" id="theme" hidden>Theme</button></header>
<main>
{body}
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""
