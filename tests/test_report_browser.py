"""The page of `linformer report` in a browser: phone and desktop, light and dark, mouse and keyboard."""

import re
import shutil

import pytest
from test_report import ATTACK, POINTS, attacked_copy, point, unfinished_copy, write_table
from training_zoo import command

from linformer_kit.plots.costs import COLORS

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = [
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
MEASUREMENTS = "Measurements of compare.csv"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("restore_global_state"),
    pytest.mark.skipif(BROWSER is None, reason="no browser is installed: chromium, chromium-browser or google-chrome"),
]


@pytest.fixture(scope="module")
def page_path(trained_run, tmp_path_factory):
    """A page with all sections, and with more rows than fit on a screen."""
    folder, run = tmp_path_factory.mktemp("browser"), trained_run("classification").run
    many = [
        point("linformer-kit", 2**n, 1e-6 * 2**n, 2**n, projected_length=k)
        for n in range(7, 17)
        for k in range(8, 128, 8)
    ]
    others = [point(name, 1024, 0.25, 8, cpu="a wide one" * 3, note="in words " * 30) for name in COLORS]
    table = write_table(folder / "compare.csv", [*POINTS, *many])
    wide = write_table(folder / "wide.csv", others)
    long = unfinished_copy(run, folder / ("a_run_with_a_long_name" * 8))
    given = (run, unfinished_copy(run, folder / "half"), attacked_copy(run, folder), long, table, wide)
    command("report", *given, "--output", folder / "page.html")
    return folder / "page.html"


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu", *QUIET])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, page_path):
    """Opens the page; any request and any message on the console fails the test."""
    contexts, requested, said = [], [], []

    def open_page(width=1440, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        context.set_default_timeout(10_000)
        page = context.new_page()
        page.on("request", lambda request: requested.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
        page.goto(page_path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in requested if not url.startswith("data:")] == [page_path.as_uri()] * len(contexts)


def column(page, table, heading):
    """The cells under a heading, from top to bottom."""
    return page.get_by_role("region", name=table, exact=True).evaluate(
        """(box, heading) => {
            const place = [...box.querySelectorAll("thead th")].findIndex((each) => each.textContent === heading);
            return [...box.querySelectorAll("tbody tr")].map((row) => row.cells[place].textContent);
        }""",
        heading,
    )


def heading(page, table, name):
    return page.get_by_role("region", name=table, exact=True).get_by_role("columnheader", name=name, exact=True)


def in_seconds(text):
    number, unit = re.fullmatch(r"([\d.]+) (ms|s)", text).groups()
    return float(number) * {"ms": 0.001, "s": 1}[unit]


# contrast (Web Content Accessibility Guidelines) of every element with text against its background
CONTRASTS = """() => {
    const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
    const luminance = (color) => {
        const linear = (each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4;
        const [r, g, b] = numbers(color).map((each) => linear(each / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
        for (let each = element; each; each = each.parentElement) {
            const color = getComputedStyle(each).backgroundColor, parts = numbers(color);
            if (parts.length === 3 || parts[3] === 1) return color;
            if (parts[3] !== 0) throw new Error("half transparent: " + color);
        }
        throw new Error("nothing behind it");
    };
    const isText = (node) => node.nodeType === Node.TEXT_NODE && node.data.trim();
    const hasText = (element) => [...element.childNodes].some(isText);
    return [...document.body.querySelectorAll(":not(script)")].filter(hasText).map((element) => {
        const both = [getComputedStyle(element).color, ground(element)].map(luminance);
        const [light, dark] = both.sort((one, other) => other - one);
        return (light + 0.05) / (dark + 0.05);
    });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1440])
def test_the_page_fits_the_screen_and_has_enough_contrast(opened, width, scheme):
    page = opened(width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.title() == "Report on 4 runs and 2 tables of measurements – linformer-kit"
    headings = [
        "Runs",
        "Differences between runs",
        "Figures",
        "Measurements",
        "Examples",
        "Environment",
    ]
    assert page.locator("h2:visible").all_inner_texts() == headings
    tables = page.locator("table")
    assert tables.count() == 10
    for box in (table.bounding_box() for table in tables.all()):
        assert box["height"] > 40
    for box in (region.bounding_box() for region in page.get_by_role("region").all()):
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 1000
    assert min(contrasts) >= 4.5
    # the background follows the scheme
    red = int(page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]"))
    assert (red < 60) == (scheme == "dark")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_have_a_white_background_and_a_readable_size(opened, scheme):
    page = opened(375, color_scheme=scheme)
    images = page.locator("figure img")
    assert images.count() >= 2
    for image in images.all():
        assert image.evaluate("image => image.complete && image.naturalWidth > 0")
        assert image.bounding_box()["width"] >= 600  # its own box scrolls
        assert image.evaluate("image => getComputedStyle(image.parentElement).backgroundColor") == "rgb(255, 255, 255)"
        assert len(image.get_attribute("alt")) > 30


def test_numbers_sort_by_value_with_missing_ones_last(opened):
    page = opened()
    time = heading(page, MEASUREMENTS, "time")
    assert time.get_attribute("aria-sort") == "none"
    unsorted = column(page, MEASUREMENTS, "time")
    for direction in ("ascending", "descending", "ascending"):
        time.get_by_role("button").click()
        assert time.get_attribute("aria-sort") == direction
        *shown, one, two, three = column(page, MEASUREMENTS, "time")
        assert [one, two, three] == ["–", "–", "–"]
        assert sorted([*shown, one, two, three]) == sorted(unsorted)
        seconds = [in_seconds(text) for text in shown]
        assert seconds == sorted(seconds, reverse=direction == "descending")
        assert shown != sorted(shown, reverse=direction == "descending")  # as texts they would be in another order
    heading(page, MEASUREMENTS, "N").get_by_role("button").click()
    assert time.get_attribute("aria-sort") == "none"
    lengths = [int(text.replace(",", "")) for text in column(page, MEASUREMENTS, "N")]
    assert lengths == sorted(lengths)
    # rows move as a whole
    first = page.get_by_role("region", name=MEASUREMENTS, exact=True).locator("tbody tr").first
    assert first.locator("td").nth(2).inner_text() == "128"
    assert first.locator("th").inner_text() == "linformer-kit"


def test_tables_sort_by_keyboard(opened):
    page = opened()
    run = heading(page, "Configuration", "K")
    run.get_by_role("button").focus()
    for key, wanted in (("Enter", ["4", "4", "8", "8"]), ("Space", ["8", "8", "4", "4"])):
        page.keyboard.press(key)
        assert column(page, "Configuration", "K") == wanted
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    assert run.get_attribute("aria-sort") == "none"
    assert heading(page, "Configuration", "attention").get_attribute("aria-sort") == "ascending"


def test_a_long_table_keeps_its_headings_visible(opened):
    page = opened()
    box = page.get_by_role("region", name=MEASUREMENTS, exact=True)
    assert box.bounding_box()["height"] < 900
    box.evaluate("box => box.scrollTo(0, box.scrollHeight)")
    assert heading(page, MEASUREMENTS, "time").bounding_box()["y"] == pytest.approx(box.bounding_box()["y"], abs=2)


def test_row_names_stay_visible_and_leave_room_for_the_other_columns(opened):
    page = opened(768)
    regions = [
        region for region in page.get_by_role("region").all() if "Examples" not in region.get_attribute("aria-label")
    ]
    assert len(regions) == 8
    for region in regions:
        region.evaluate("box => box.scrollTo(box.scrollWidth, 0)")
        first = region.locator("tbody th").last
        end, box = first.bounding_box()["x"] + first.bounding_box()["width"], region.bounding_box()
        assert first.bounding_box()["x"] == pytest.approx(box["x"], abs=2)  # it stays visible
        assert end - box["x"] < box["width"] / 2
        assert region.evaluate(
            "box => [...box.querySelectorAll('tbody th')].every((each) => each.scrollWidth <= each.clientWidth)"
        )
        # the last column is completely visible
        last = region.locator("tbody tr").last.locator("td").last.bounding_box()
        assert last["x"] >= end - 1
        assert last["x"] + last["width"] <= box["x"] + box["width"] + 1


def test_long_notes_wrap(opened):
    page = opened()
    notes = page.get_by_role("region", name="Measurements of wide.csv", exact=True).locator("td.words")
    assert max(note.bounding_box()["width"] for note in notes.all()) < 500


def test_in_print_all_columns_fit_on_white(opened):
    page = opened(1047, color_scheme="dark")  # the printable width of landscape A4
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(251, 251, 250)"
    assert page.evaluate("document.documentElement.scrollWidth") <= 1047
    for table in page.locator("table").all():
        assert table.evaluate("table => table.offsetWidth <= table.parentElement.clientWidth")
    positions = "() => [...document.querySelectorAll('th')].map((each) => getComputedStyle(each).position)"
    assert set(page.evaluate(positions)) == {"static"}
    is_cut = "(each) => each.scrollWidth > each.clientWidth + 1"
    assert page.evaluate(f"() => [...document.querySelectorAll('th, td')].filter({is_cut}).length") == 0
    page.set_viewport_size({"width": 500, "height": 900})
    assert all(image.bounding_box()["width"] <= 500 for image in page.locator("figure img").all())


def test_markup_in_a_text_is_shown_and_not_executed(opened):
    page = opened()
    assert ATTACK in column(page, "Examples of attacked", "source")
    page.get_by_text(ATTACK).scroll_into_view_if_needed()
    assert page.title() != "taken"
    assert page.locator("script").count() == 1
    assert page.locator("table img").count() == 0


def test_without_javascript_it_is_a_plain_page(opened):
    page = opened(java_script_enabled=False)
    assert page.locator("h2:visible").count() == 6
    assert page.locator("button").count() == 0
    rows = page.get_by_role("region", name=MEASUREMENTS, exact=True).locator("tbody tr")
    assert rows.count() == len(POINTS) + 150
    assert rows.first.locator("td").nth(2).inner_text() == "1,024"
    assert page.get_by_text("out of memory").first.is_visible()
