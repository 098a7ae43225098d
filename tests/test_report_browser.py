"""The report in a real browser: headless Chromium opens the file from disk, and its keys, tables and pages are used."""

import base64
import shutil
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from tiny_runs import run as train

from benchmarks.report import synthetic_run
from flows.audit.report import write_report

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install grpoflow[dev]")
CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no Chromium here: apt-get install chromium chromium-driver"
)

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


class Browser:
    """A page in Chromium."""

    def __init__(self, driver) -> None:
        self.driver = driver
        self.size(1280, 900)

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Be as wide as a screen, or as narrow as a phone."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})

    def open(self, path: Path, where: str = "#/") -> None:
        """Open a file anew at one of its pages."""
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get(path.as_uri() + where)
        self.at(where)

    def at(self, where: str) -> None:
        """Wait until a page is shown."""
        self.until(f"return document.body && document.body.dataset.ready === '{where}'", f"{where} was not shown")

    def until(self, script: str, what: str) -> None:
        """Wait until a script gives something true."""
        end = time.monotonic() + 60
        while not self.js(script):
            assert time.monotonic() < end, f"{what}; the log: {self.driver.get_log('browser')}"
            time.sleep(0.05)

    def js(self, script: str):
        """What a script returns."""
        return self.driver.execute_script(script)

    def press(self, *keys: str) -> None:
        """Press keys one after the other, wherever the focus is."""
        from selenium.webdriver import ActionChains

        actions = ActionChains(self.driver)
        for key in keys:
            actions.send_keys(key)
        actions.perform()

    def click(self, selector: str) -> None:
        """Click the first element that a selector finds."""
        self.driver.find_element("css selector", selector).click()

    def text(self, selector: str) -> str:
        """Text of the first element that a selector finds."""
        return self.js(f"return document.querySelector(`{selector}`).innerText")

    def texts(self, selector: str) -> list[str]:
        """Texts of all that a selector finds and that is shown."""
        found = f"[...document.querySelectorAll(`.view:not([hidden]) {selector}`)]"
        return self.js(f"return {found}.filter((one) => one.offsetParent).map((one) => one.innerText)")

    def errors(self) -> list[str]:
        """What the page complained of since it was opened."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


@pytest.fixture
def page(browser) -> Iterator[Browser]:
    """The browser; a test that used it must not have left an error in its console."""
    browser.size(1280, 900)
    yield browser
    assert browser.errors() == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_run_in) -> Path:
    """The report of a real run of three steps, which validates."""
    folder = tmp_path_factory.mktemp("trained")
    steps = ("trainer.total_training_steps=3", "trainer.total_epochs=9", "trainer.test_freq=1")
    the_run, _ = train(tiny_run_in(folder)(*steps))
    return write_report(the_run, folder / "report.html").path


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """The report of a step of 512 samples x 1,000 tokens, whose responses hold markup, NUL and right-to-left text."""
    folder = tmp_path_factory.mktemp("large")
    return write_report(synthetic_run(folder / "synthetic"), folder / "report.html").path


def columns(page: Browser, label: str) -> list[str]:
    """Cells of a column of the table of samples, by its heading."""
    place = 1 + [text.split("\n")[0].strip(" ▲▼") for text in page.texts("table.data thead th button")].index(label)
    return page.texts(f".table-place tbody td:nth-child({place})")


def sort_by(page: Browser, key: str) -> None:
    page.click(f'.view:not([hidden]) [data-key="{key}"]')


def numbers(cells: list[str]) -> list[float]:
    return [float(cell.replace("−", "-").replace(",", "")) for cell in cells]


# --------------------------------------------------------------------------------------------------------- the run page


def test_a_run_shows_curves_groups_times_metrics_and_events(page, trained):
    page.open(trained)
    titles = page.texts("#curves h3")
    assert {"Score", "Validation", "Entropy", "Gradient norm", "Time of a step"} <= set(titles)
    assert page.js("return document.querySelectorAll('#curves svg.lines').length") == len(titles)
    assert page.js("return document.querySelectorAll('#groups .share').length") == 3
    assert "rollouts" in page.js("return document.getElementById('clock').textContent")
    assert "finished" in page.text(".state")
    assert page.texts(".events .event")[0] == "closed"
    assert "critic/score/mean" in page.texts("#metrics td code")


def test_a_point_of_a_curve_opens_its_step_and_back_returns(page, trained):
    page.open(trained)
    name = page.text("h1")
    page.js("document.querySelector('#curves svg.lines').focus()")
    page.press("\ue012", "\ue007")  # left, enter: from step 3 to step 2
    page.at("#/step/2")
    assert page.text("h1") == "Step 2"
    page.driver.back()
    page.at("#/")
    assert page.text("h1") == name


def test_a_step_that_is_not_in_the_file_names_the_command(page, trained):
    page.open(trained, "#/step/77")
    assert "grpoflow report run --step 77" in page.text("#view-step")


def test_the_configuration_is_searched(page, trained):
    page.open(trained, "#/config")
    page.press("/", *"kl_loss_coef")
    page.until("return document.getElementById('config-count').textContent === '1 keys'", "nothing was filtered")
    shown = page.texts("#config-rows tr")
    assert len(shown) == 1 and "actor_rollout_ref.actor.kl_loss_coef" in shown[0]


def test_lineage_names_parents_and_their_digests(page, trained):
    page.open(trained, "#/lineage")
    assert page.text("#made-from tbody tr:nth-child(2) th") == "rollouts"
    assert "prompts ✓" in page.text("#made-from tbody tr:nth-child(2)")


def test_two_runs_are_on_the_same_axes(page, tmp_path):
    runs = [synthetic_run(tmp_path / name / name, samples=8, tokens=9, words=40, steps=3) for name in ("one", "two")]
    file = write_report(runs[0], tmp_path / "both.html", compare=runs[1]).path
    page.open(file)
    assert page.js("return document.querySelectorAll('#curves .line.other').length") > 0
    assert columns(page, "Step")[0] == "3" and "Difference" in page.text("#metrics thead")


# ----------------------------------------------------------------------------------------------------- steps and groups


def test_numbers_are_sorted_as_numbers_and_those_without_last(page, large):
    page.open(large, "#/step/1")
    sort_by(page, "length")
    falling = numbers(columns(page, "Tokens"))
    assert falling == sorted(falling, reverse=True) and falling[0] == 1000
    sort_by(page, "length")
    rising = numbers(columns(page, "Tokens"))
    assert rising == sorted(rising) and any(a < 10 <= b or a < 100 <= b for a, b in pairwise(rising))
    assert page.js("return document.querySelector('[data-key=length]').closest('th').ariaSort") == "ascending"


def test_words_and_comparisons_filter_the_samples(page, large):
    page.open(large, "#/step/1")
    assert page.text(".count") == "512 samples"
    page.press("/", *"score<0.3 finish_reason=stop")
    page.until("return document.querySelector('.count').innerText.includes(' of 512')", "nothing was filtered")
    assert all(score < 0.3 for score in numbers(columns(page, "Score")))
    assert set(columns(page, "End")) == {"stop"}
    page.js("const s = document.querySelector('[data-search]'); s.value = ''; s.focus()")
    page.press(*"000001-0007-003")
    page.until("return document.querySelector('.count').innerText.startsWith('1 of')", "the id was not found")
    page.js("document.querySelector('[data-search]').value = ''")
    page.press(*" colour=3")
    page.until("return document.querySelector('.count').innerText.includes('no column colour')", "no word of it")


def test_a_filter_over_512_rows_is_quick(page, large):
    page.open(large, "#/step/1")
    took = page.js(
        "const s = document.querySelector('[data-search]'); const start = performance.now();"
        "for (const text of ['ka', 'ka lo', 'score>0.5 ka', '']) {"
        "  s.value = text; s.dispatchEvent(new Event('input')); }"
        "return (performance.now() - start) / 4"
    )
    assert took < 500


def test_the_keyboard_reaches_from_the_run_to_a_token_and_back(page, trained):
    page.open(trained, "#/step/3")
    page.press("j")
    assert page.js("return document.activeElement.matches('tr.row')")
    page.press("j", "k", "j", "\ue007")  # the second row, opened
    second = page.js("return document.querySelectorAll('tr.row')[1].querySelector('a').innerText")
    page.at(f"#/step/3/sample/{second}")
    page.press("j")
    page.until("return document.querySelector('.summary nav').innerText.includes('3 of 32')", "j did not go on")
    page.press("k", "\ue00c")  # back, then up to the group
    page.at(f"#/step/3/group/{second[:-4]}")
    page.press("\ue00c")
    page.at("#/step/3")
    page.press("[")
    page.at("#/step/2")
    page.press("\ue00c")
    page.at("#/")


def test_tab_reaches_everything_and_the_focus_is_seen(page, trained):
    page.open(trained, "#/step/3")
    reached = set()
    for _ in range(60):
        page.press("\ue004")
        reached.add(page.js("const a = document.activeElement; return a.className.baseVal || a.className || a.tagName"))
    assert {"skip", "brand", "band", "search", "row"} <= set(reached)
    page.js("document.querySelector('#tabs a').focus()")
    page.press("\ue004")
    assert page.js("return getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_a_group_shows_where_its_responses_part(page, trained):
    page.open(trained, "#/step/3/group/000003-0000")
    assert page.js("return document.querySelectorAll('.card').length") == 4
    page.js(
        "const p = document.querySelector('.pick select'); p.selectedIndex = 1; p.dispatchEvent(new Event('change'))"
    )
    cards = page.texts(".card")
    assert "compared with" in cards[0] and "Shared" in cards[1]
    shared = [int(text.split()[0]) for text in page.texts(".card .facts div:last-child dd") if text.endswith("tokens")]
    assert shared[0] == max(shared)
    marks = page.js("return document.querySelectorAll('.card mark').length")
    lengths = [int(text) for text in page.texts(".card .facts div:nth-child(3) dd")]
    pairs = [*zip(shared, lengths, strict=True)][1:]
    assert marks == sum(0 < number < length for number, length in pairs)


def test_a_strip_opens_its_group_and_a_missing_sample_is_told(page, trained):
    page.open(trained, "#/step/3")
    page.js("document.querySelector('.band').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    page.until("return location.hash.startsWith('#/step/3/group/')", "the group was not opened")
    page.open(trained, "#/step/3/sample/000003-0099-000")
    assert "has no sample" in page.text("#view-step")


# --------------------------------------------------------------------------------------------------------------- tokens


def test_tokens_are_coloured_and_each_has_its_values(page, large):
    page.open(large, "#/step/1/sample/000001-0003-002?by=gap")
    assert page.js("return document.querySelectorAll('.token').length") == 1000
    assert page.js("return document.querySelectorAll('.token.over').length") > 100
    assert page.js("return document.querySelectorAll('.token.under').length") > 100
    page.js("document.querySelector('.token').focus()")
    page.press("\ue014", "\ue014")  # right, right
    assert "token 2 of 1,000" in page.text(".detail")
    values = dict(zip(page.texts(".values th"), page.texts(".values td.number"), strict=True))
    rollout, old, gap = (numbers([values[name]])[0] for name in ("… by engine", "Log-prob", "Gap"))
    assert rollout - old == pytest.approx(gap, abs=2e-4)
    for by in ("advantage", "ratio", "entropy", "kl", "log_prob", "mask"):
        page.click(f'[data-by="{by}"]')
        page.at(f"#/step/1/sample/000001-0003-002?by={by}")
        assert page.js("return document.querySelector('[aria-checked=true]').dataset.by") == by


def test_the_largest_are_listed_and_jumped_to(page, large):
    page.open(large, "#/step/1/sample/000001-0003-002?by=entropy")
    page.until("return document.querySelectorAll('.largest li').length === 10", "there are not ten")
    listed = numbers(page.texts(".largest .number"))
    assert listed == sorted(listed, reverse=True)
    place = page.texts(".largest .place")[0]
    page.click(".largest button")
    assert page.js("return document.activeElement.dataset.at - document.querySelector('.token').dataset.at") == int(
        place
    )
    assert page.js(
        "const r = document.activeElement.getBoundingClientRect(); return r.top > 0 && r.bottom < innerHeight"
    )


def test_what_a_response_says_is_text(page, large):
    page.open(large, "#/step/1/sample/000001-0003-002")
    tokens = page.texts(".token")
    assert "</script>" in tokens and "<b>" in tokens and "⟨U+202E⟩" in "".join(tokens) and "␀" in "".join(tokens)
    assert page.js("return document.querySelectorAll('.tokens b, .card b, main script').length") == 0
    page.open(large, "#/step/1/group/000001-0003")
    assert (
        "</script>" in page.text(".card .response")
        and page.js("return document.querySelectorAll('.card b').length") == 0
    )


def test_it_works_where_frames_are_sandboxed_as_in_mlflow(page, trained, tmp_path):
    frame = tmp_path / "viewer.html"
    frame.write_text(
        f'<iframe sandbox="allow-scripts" style="width:1200px;height:900px" src="{trained.as_uri()}"></iframe>'
    )
    page.driver.get(frame.as_uri())
    page.driver.switch_to.frame(0)
    try:
        page.at("#/")
        page.click("#tabs [data-tab=step]")
        page.at("#/step/3")
        page.click("#theme")
        assert page.js("return document.documentElement.dataset.theme") == "dark"
    finally:
        page.driver.switch_to.default_content()


# --------------------------------------------------------------------------------------------------------------- looks


@pytest.mark.parametrize("where", ["#/", "#/step/3", "#/step/3/group/000003-0000", "#/config", "#/lineage"])
def test_a_phone_shows_every_page_without_scrolling_sideways(page, trained, where):
    page.size(390, 844)
    page.open(trained, where)
    assert page.js("return document.documentElement.scrollWidth") == 390


@pytest.mark.parametrize("where", ["#/step/1", "#/step/1/group/000001-0003", "#/step/1/sample/000001-0003-002?by=gap"])
def test_a_phone_shows_a_large_step_too(page, large, where):
    page.size(390, 844)
    page.open(large, where)
    assert page.js("return document.documentElement.scrollWidth") == 390


def test_dark_and_light_follow_the_system_and_the_button(page, trained):
    ground = "return getComputedStyle(document.body).backgroundColor"
    page.open(trained)
    assert page.js(ground) == "rgb(255, 255, 255)"
    page.press("t")
    assert page.js(ground) == "rgb(21, 24, 30)"
    page.size(1280, 900, dark=True)
    page.open(trained)
    assert page.js(ground) == "rgb(21, 24, 30)"
    page.click("#theme")
    assert page.js(ground) == "rgb(255, 255, 255)"


_CONTRAST = """
const lum = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map((v) => { v /= 255;
  return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
return [...document.querySelectorAll('.token:not(.masked)')].filter((t) => t.style.backgroundColor)
  .map((t) => { const [a, b] = [lum(t.style.color), lum(t.style.backgroundColor)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05); }).reduce((a, b) => Math.min(a, b), 99);
"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("by", ["gap", "entropy", "log_prob"])
def test_every_colour_of_a_token_leaves_its_text_readable(page, large, by, dark):
    page.size(1280, 900, dark=dark)
    page.open(large, f"#/step/1/sample/000001-0003-002?by={by}")
    assert page.js(_CONTRAST) >= 4.5


def test_the_picture_of_a_page_is_not_empty(page, trained):
    page.open(trained)
    shot = page.driver.execute_cdp_cmd("Page.captureScreenshot", {})
    assert len(base64.b64decode(shot["data"])) > 20_000
