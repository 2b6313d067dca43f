"""The report in a browser: filters, order, links, theme and keyboard, and what axe-core says of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from evalgate.reports import html
from evalgate.store.runs import Run
from tests.browser import Chromium, Page, Remote
from tests.evalgate.reports.worded_run import worded_run

pytestmark = pytest.mark.slow

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "\u202eevil",
    "\x1b[31mred",
    "\u200b",
    "\ud800",
    "<b>bold</b>",
    "  ",
    "\t",
)
SIX = ("demo@bf16", "demo@int8", "models/Q8_0.gguf", "models/Q4_0.gguf", "models/Q3_K_M.gguf", "models/Q2_K.gguf")


@pytest.fixture(scope="module")
def one() -> Run:
    return worded_run(3000, extra=HOSTILE)


@pytest.fixture(scope="module")
def pages(one: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of pages by name."""
    folder = tmp_path_factory.mktemp("pages")
    runs = {
        "one": one,
        "small": worded_run(300, documents=10, extra=HOSTILE),
        "six": worded_run(240, documents=8, candidates=SIX),
    }
    for name, run in runs.items():
        (folder / f"{name}.html").write_text(html.render(run), encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in runs}


@pytest.fixture
def opened(chromium: Chromium, pages: dict[str, str]):
    @contextmanager
    def open_page(name: str = "one", link: str = "", **more: object) -> Iterator[Page]:
        with chromium.open(pages[name] + link, **more) as page:
            yield page

    return open_page


def bads(page: Page) -> list[float]:
    texts = page.locator("#tokens-list > li .bad").all_text_contents()
    return [float(text.split()[-1].replace("−", "-")) for text in texts]


def chosen(page: Page, name: str) -> Remote:
    return page.locator(f"#explorer select[name={name}]")


def wheres(page: Page) -> list[str]:
    return page.locator("#tokens-list > li .where").all_text_contents()


LOOKS = [("small", False, False), ("small", True, True), ("six", False, True), ("six", True, False)]


@pytest.mark.parametrize(("name", "dark", "phone"), LOOKS)
def test_nothing_is_wrong_with_it(opened, name: str, dark: bool, phone: bool) -> None:
    look = f"{name}-{'dark' if dark else 'light'}-{'phone' if phone else 'desktop'}"
    with opened(name, dark=dark, phone=phone) as page:
        page.shot(f"report-{look}")
        # A few rows are enough to find what is wrong with each of them.
        page.evaluate("() => [...document.querySelectorAll('#tokens-list > li')].slice(2).forEach((e) => e.remove())")
        page.evaluate(
            "() => document.querySelectorAll('#summary details, #tokens details, #figure-domain details, pre')"
            ".forEach((e) => { (e.closest('details')).open = true })"
        )
        assert page.overflow() == 0
        assert page.violations() == []
        page.evaluate("() => document.getElementById('tokens').scrollIntoView()")
        page.shot(f"explorer-{look}", full=False)


def test_the_worst_come_first_and_more_are_shown(opened) -> None:
    with opened() as page:
        first = bads(page)
        assert len(first) == 25 and first == sorted(first, reverse=True)
        page.locator("#more").click()
        assert len(bads(page)) == 50 and bads(page)[:25] == first
        focused = page.evaluate(
            "() => [...document.querySelectorAll('#tokens-list > li')].indexOf(document.activeElement.closest('li'))"
        )
        assert focused == 25


def test_filters_show_what_they_say(opened) -> None:
    with opened() as page:
        domains = chosen(page, "domain").locator("option").all_text_contents()
        chosen(page, "domain").select_option(label=next(text for text in domains if text.startswith("arabic")))
        assert wheres(page) and all(text.startswith("arabic / ") for text in wheres(page))
        assert "match" in page.locator("#count").text_content()
        document = wheres(page)[0].split(" / ")[1].split(",")[0]
        option = next(
            t for t in chosen(page, "document").locator("option").all_text_contents() if t.startswith(document)
        )
        chosen(page, "document").select_option(label=option)
        assert {text.split(",")[0] for text in wheres(page)} == {f"arabic / {document}"}
        page.get_by_role("button", name="Reset").click()
        assert len(bads(page)) == 25 and "kept here" in page.locator("#count").text_content()
        label = next(t for t in chosen(page, "class").locator("option").all_text_contents() if t.startswith("code"))
        chosen(page, "class").select_option(label=label)
        assert len(bads(page)) == min(25, int(label.split("(")[1].rstrip(")")))
        chosen(page, "only").select_option("differ")
        for row in page.locator("#tokens-list > li").all():
            picks = row.locator("dd .tok").all_text_contents()
            assert picks[0] != picks[1]


def test_it_sorts(opened) -> None:
    with opened() as page:
        chosen(page, "sort").select_option("step")
        steps = [t.split("Δ log p ")[1] for t in page.locator(".head").all_text_contents()]
        changes = [float(t.removesuffix("link").replace("−", "-")) for t in steps]
        assert changes == sorted(changes) and changes[0] < 0
        chosen(page, "sort").select_option("text")
        windows = [int(text.split("window ")[1].split(",")[0]) for text in wheres(page)]
        assert windows == sorted(windows)


def test_a_link_opens_its_position_with_the_filters(opened, chromium: Chromium, pages: dict[str, str]) -> None:
    with opened() as page:
        chosen(page, "domain").select_option(index=2)
        chosen(page, "sort").select_option("change")
        row = page.locator("#tokens-list > li").nth(7)
        href, where = row.locator(".head a").get_attribute("href"), row.locator(".where").text_content()
        domain = chosen(page, "domain").evaluate("s => s.selectedOptions[0].text")
    with opened(link=href, phone=True) as page:
        linked = page.locator("li.linked")
        assert linked.count() == 1 and linked.locator(".where").text_content() == where
        assert chosen(page, "domain").evaluate("s => s.selectedOptions[0].text") == domain
        assert chosen(page, "sort").input_value() == "change"
        assert linked.locator("details").evaluate("d => d.open")
        assert linked.evaluate(
            "e => { const r = e.getBoundingClientRect(); return r.top < innerHeight && r.bottom > 0 }"
        )
        assert linked.evaluate("e => e.contains(document.activeElement)")


def test_a_link_beyond_the_first_rows_and_to_nowhere(opened) -> None:
    with opened() as page:
        page.locator("#more").click()
        page.locator("#more").click()
        href = page.locator("#tokens-list > li").nth(60).locator(".head a").get_attribute("href")
    with opened(link=href) as page:
        assert page.locator("#tokens-list > li").count() == 75
        assert page.locator("li.linked").count() == 1
        page.evaluate("() => { location.hash = '#p=0:999999:1' }")
        page.wait_for_function("() => document.getElementById('count').textContent.includes('999999:1 is not among')")
        page.evaluate("() => { location.hash = '#p=99:<b>:x&domain=%3Cscript%3E' }")
        page.evaluate("() => { location.hash = '#plots' }")
    with opened(link="#domain=nowhere&sort=no&class=%00") as page:
        assert len(bads(page)) == 25


def test_a_link_wins_over_a_filter_that_would_hide_it(opened) -> None:
    with opened() as page:
        href = page.locator("#tokens-list > li").first.locator(".head a").get_attribute("href")
        own = wheres(page)[0].split(" / ")[0]
        other = next(
            text.split(" (")[0]
            for text in chosen(page, "domain").locator("option").all_text_contents()[1:]
            if not text.startswith(own)
        )
    with opened(link=f"{href}&domain={other}") as page:
        assert page.locator("li.linked .where").text_content().startswith(own)


def test_filters_are_kept_in_the_address(opened) -> None:
    with opened() as page:
        chosen(page, "domain").select_option(index=1)
        assert page.evaluate("() => location.hash").startswith("#domain=")
        page.get_by_role("button", name="Reset").click()
        page.wait_for_function("() => location.hash === ''")


def test_candidates_are_chosen(opened) -> None:
    with opened("six") as page:
        assert chosen(page, "candidate").locator("option").all_text_contents() == list(SIX)
        before = bads(page)
        chosen(page, "candidate").select_option("5")
        assert bads(page)[0] > before[0]
        page.reload()
        assert chosen(page, "candidate").input_value() == "5"


def test_the_theme_is_switched_and_kept(opened) -> None:
    background = "() => getComputedStyle(document.body).backgroundColor"
    with opened() as page:
        light = page.evaluate(background)
        button = page.get_by_role("button", name="Use the dark theme")
        button.click()
        dark = page.evaluate(background)
        assert dark != light
        page.reload()
        assert page.evaluate(background) == dark
        page.get_by_role("button", name="Use the light theme").click()
        assert page.evaluate(background) == light
    with opened(dark=True) as page:
        assert page.evaluate(background) == dark


def test_it_is_used_by_keyboard(opened) -> None:
    with opened() as page:
        page.keyboard.press("Tab")
        assert page.evaluate("() => document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("() => document.activeElement.id") == "main"
        page.locator("#tokens-list summary").first.focus()
        page.keyboard.press("Enter")
        assert page.locator("#tokens-list details").first.evaluate("d => d.open && d.children.length > 1")
        page.keyboard.press("ArrowDown")
        row = "() => [...document.querySelectorAll('#tokens-list > li')].indexOf(document.activeElement.closest('li'))"
        assert page.evaluate(row) == 1
        page.keyboard.press("ArrowUp")
        assert page.evaluate(row) == 0
        chosen(page, "sort").focus()
        page.keyboard.press("ArrowDown")
        assert chosen(page, "sort").input_value() != "bad"


def test_hostile_texts_are_seen_and_do_nothing(opened) -> None:
    with opened("small") as page:
        while page.locator("#more").is_visible():
            page.locator("#more").click()
        seen = "\n".join(page.locator(".text").all_text_contents())
        for text in ("</script>", "<b>bold</b>", "\\u202e", "\\u001b", "\\u200b", "\\ud800", "⇥", "·"):
            assert text in seen, text
        assert "\u202e" not in seen and "\x1b" not in seen and "\u200b" not in seen
        assert page.locator("#explorer b, #explorer img, #explorer script").count() == 0


def test_scripts_are_shown_in_their_direction(opened) -> None:
    with opened() as page:
        for domain, direction in (("arabic", "rtl"), ("prose", "ltr")):
            select = chosen(page, "domain")
            label = next(t for t in select.locator("option").all_text_contents() if t.startswith(domain))
            select.select_option(label=label)
            directions = page.locator(".text").evaluate_all("all => all.map((e) => getComputedStyle(e).direction)")
            assert set(directions) == {direction}
        assert "↵" in "".join(page.locator(".text").all_text_contents())


def test_plots_have_their_data(opened) -> None:
    with opened() as page:
        assert page.get_by_role("img").count() >= 9
        plot = page.locator("#figure-domain")
        plot.locator("summary").click()
        assert plot.locator("tbody tr").count() == 5 and plot.locator("table").is_visible()
        assert plot.get_by_role("img").get_attribute("aria-labelledby") == "plot-domaint plot-domaind"


def test_without_scripts_the_figures_are_there(opened) -> None:
    with opened(java_script_enabled=False) as page:
        assert page.locator("figure.plot svg.chart").count() == 10
        assert page.locator("noscript").count() == 1 and not page.locator("#explorer").is_visible()
        assert not page.locator("#theme").is_visible()
