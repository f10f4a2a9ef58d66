"""The page in a real Chromium: every view, keys, filters, and what axe says. It installs nothing:
without Chromium or its driver it is skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from run_files import episode, lines, turn, write_run

from marft_jax.extras.report import serving
from marft_jax.extras.report.page import render
from marft_jax.extras.report.reading import read_run

pytest.importorskip("playwright")
from axe_playwright_python.sync_playwright import Axe  # noqa: E402
from playwright.sync_api import Browser, Page, sync_playwright  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install)")
PATIENCE = 120_000  # milliseconds until an event has come
VIEWS = ["runs", "curves", "dialogues", "then", "evaluations"]
EVIL = "<img src=http://evil.example/ onerror=alert(1)></script><script>alert(1)</script>\u202e"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """A page of two seeds; step 2 has hostile text, tokens, a truncated and a failed episode."""
    root = tmp_path_factory.mktemp("runs")
    folders = [write_run(root / f"seed{i}", seed=i) for i in range(2)]
    tokens = {"pieces": ["six ", "plus ", "one"], "logprobs": [-0.1, -2.5, -0.7]}
    rows = [
        episode(0, ["plan", "needle"], 0.5),
        episode(1, [EVIL, "y" * 100_000], 0.0, task=EVIL),
        {"index": 2, "group": 2, "reward": 1.0, "task": "with tokens",
         "turns": [turn("solver", "six plus one", truncated=True, **tokens)]},
        {"index": 3, "group": 3, "reward": 0.0, "turns": [], "failed": "the environment raised"},
    ]  # fmt: skip
    lines(folders[0] / "transcripts" / "2.jsonl", rows)
    file = root / "page.html"
    file.write_text(render([read_run(folder) for folder in folders]), "utf-8")
    return file


@contextmanager
def opened(browser: Browser, file: Path, **options: Any) -> Iterator[Page]:
    """The page; whatever it says to the console or asks for is a fault."""
    context = browser.new_context(**options)
    context.set_default_timeout(PATIENCE)
    page, faults = context.new_page(), []
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    page.on("request", lambda request: faults.append(request.url))
    page.goto(file.as_uri())
    yield page
    assert faults == [file.as_uri()]
    context.close()


def turn_to(page: Page, view: str) -> None:
    """To a view by its key; the browser follows the address a little later."""
    page.keyboard.press(str(VIEWS.index(view) + 1))
    page.wait_for_selector(f"#{view}")


def shown(page: Page, selector: str) -> int:
    return page.locator(selector).locator("visible=true").count()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_every_view_opens_fits_and_is_accessible(browser, file, scheme, width):
    look = {"color_scheme": scheme, "viewport": {"width": width, "height": 800}}
    with opened(browser, file, **look) as page:
        for view in VIEWS:
            turn_to(page, view)
            assert shown(page, "main > section") == 1 and shown(page, f"#{view}") == 1
            if view in ("dialogues", "evaluations"):
                page.keyboard.press("n")
                page.keyboard.press("j")
                page.wait_for_function("document.querySelector('.group[open] .action')")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            found = Axe().run(page).response
            assert "color-contrast" in {rule["id"] for rule in found["passes"]}
            faults = found["violations"]
            assert [(f["id"], [n["html"] for n in f["nodes"]]) for f in faults] == []


def test_curves_are_drawn_smoothed_and_lead_to_a_step(browser, file):
    with opened(browser, file) as page:
        turn_to(page, "curves")
        assert shown(page, "#charts canvas") == 2
        page.locator("#smooth").fill("0.8")
        page.check("#seeds")
        page.locator("#more > summary").click()
        page.wait_for_selector("#others canvas")
        page.locator(".plot").first.focus()
        for key in ("ArrowRight", "ArrowLeft", "Enter"):
            page.keyboard.press(key)
        page.wait_for_selector("#r0-s1[open]")
        turn_to(page, "curves")
        page.locator("#charts .u-over").first.click()
        page.wait_for_selector("#r0-s2[open]")


@pytest.fixture(scope="module")
def curved(tmp_path_factory) -> Path:
    """A page of two runs that differ in a setting, with an outlier, tiny values and only zeros."""
    root = tmp_path_factory.mktemp("curves")
    folders = [write_run(root / name, steps=range(1, 41)) for name in ("one", "two")]
    for i, folder in enumerate(folders):
        rows = [{
            "step": s, "reward/mean": s / 40, "critic/loss": 500.0 if s == 9 else s % 5 / 5,
            "agent/planner/approx_kl": s * 1e-11, "agent/solver/approx_kl": s * 2e-11,
            "agent/planner/truncated": 0.0, "time/step_s": 60.0 * (i + 1),
        } for s in range(1, 41)]  # fmt: skip
        lines(folder / "metrics.jsonl", rows)
    settings = folders[1] / "config.yaml"
    settings.write_text(settings.read_text().replace("difficulty: 3", "difficulty: 4"))
    (file := root / "page.html").write_text(render([read_run(f) for f in folders]), "utf-8")
    return file


def chart(page: Page, name: str, what: str) -> Any:
    """A value of a chart, as its program has it."""
    find = "u.root.closest('figure').innerText.includes"
    find = f"[...charts.values()].find((u) => {find}('{name}'))"
    return page.evaluate(f"(() => {{ const u = {find}; return {what}; }})()")


def test_one_outlier_does_not_spoil_a_chart_and_labels_are_readable(browser, curved):
    with opened(browser, curved) as page:
        turn_to(page, "curves")
        assert chart(page, "critic/loss", "u.scales.y.max") < 2
        page.check("#whole")
        assert chart(page, "critic/loss", "u.scales.y.max") > 500
        labels = chart(page, "approx_kl", "u.axes[1]._values")
        assert len(set(labels)) == len(labels) and all("e-1" in one for one in labels if one != "0")
        assert all(float(one).is_integer() for one in chart(page, "reward", "u.axes[0]._values"))
        [flat] = page.locator("#charts figure:has(.flat)").all()
        assert "0 at every step" in flat.inner_text() and flat.bounding_box()["height"] < 150
        names = [one.inner_text() for one in page.locator("#charts .u-legend th").all()]
        assert {"one · planner", "one · solver", "two · planner", "two · solver"} <= {*names}


def test_all_charts_zoom_together_along_steps_or_time(browser, curved):
    with opened(browser, curved) as page:
        turn_to(page, "curves")
        box = page.locator("#charts .u-over").first.bounding_box()
        page.mouse.move(box["x"] + 20, box["y"] + 30)
        page.mouse.down()
        page.mouse.move(box["x"] + 120, box["y"] + 30, steps=3)
        page.mouse.up()
        spans = page.evaluate("[...charts.values()].map((u) => [u.scales.x.min, u.scales.x.max])")
        assert len({tuple(span) for span in spans}) == 1 and spans[0][1] < 40
        page.locator("#smooth").fill("0.5")
        assert chart(page, "critic/loss", "u.scales.x.max") == spans[0][1]
        page.select_option("#x", "minutes")
        assert chart(page, "reward", "u.scales.x.max") == 80
        page.locator(".plot").first.focus()
        for key in ("ArrowRight", "Enter"):
            page.keyboard.press(key)
        page.wait_for_function("location.hash.startsWith('#r0-s')")


def test_runs_are_grouped_by_a_setting(browser, curved):
    with opened(browser, curved) as page:
        turn_to(page, "curves")
        page.select_option("#by", "env.difficulty")
        text = page.inner_text("#charts figure:first-child .u-legend")
        assert "env.difficulty 3" in text and "env.difficulty 4" in text


def test_dialogues_are_searched_filtered_shaded_and_drawn(browser, file):
    with opened(browser, file) as page:
        page.goto(f"{file.as_uri()}#r0-s2")
        groups = "#r0-s2 > .group"
        assert shown(page, groups) == 4
        page.keyboard.press("/")
        page.keyboard.type("NEEDLE")
        assert shown(page, "#dialogues .chapter") == 1
        assert shown(page, groups) == 1 and "1 of 4" in page.inner_text("#r0-s2 .hits")
        page.fill("#search", "")
        for flag in ("truncated", "failed"):
            page.select_option("#filter", flag)
            assert shown(page, groups) == 1
        page.select_option("#filter", "")
        page.get_by_title("reward 0.5: 1 episodes").click()
        assert shown(page, groups) == 1
        page.keyboard.press("j")
        page.check("#graph")
        assert shown(page, f"{groups}[open] .graph path.node") == 2
        assert shown(page, f"{groups}[open] .graph .head") == 1
        assert "an arrow leads from an action" in page.inner_text(f"{groups}[open]")
        page.select_option("#shade", "advantage")
        assert page.inner_text("#scale") == "−0.25\n+0.25"
        shaded = page.locator(f"{groups}[open] .action").first
        assert shaded.get_attribute("title") == "advantage -0.25"
        page.get_by_title("reward 0.5: 1 episodes").click()
        page.select_option("#shade", "log-prob")
        page.locator("#r0-s2-t2 > summary").click()
        page.get_by_text("plus", exact=True).click()
        assert page.inner_text("#value") == "log-prob -2.5"
        assert page.inner_text("#r0-s2-t2 .action") == "six plus one"


def test_all_samples_are_listed_sorted_and_linked(browser, file):
    with opened(browser, file) as page:
        turn_to(page, "dialogues")
        page.locator("#list > summary").click()
        page.get_by_role("button", name="characters").click()
        rows = page.locator("#list tbody tr")
        assert rows.count() == 24 and "seed0: Step 2" in rows.first.inner_text()
        page.get_by_role("button", name="characters").click()
        assert page.locator("#list [aria-sort=ascending]").inner_text() == "characters"
        page.select_option("#filter", "failed")
        assert rows.count() == 1
        rows.first.get_by_role("link").click()
        page.wait_for_function("document.activeElement.id === 'r0-s2-t3-1'")
        assert shown(page, "#r0-s2-t3-1") == 1


def test_words_that_the_first_sample_has_not_are_marked(browser, tmp_path):
    folder = write_run(tmp_path / "mine", steps=(1, 2))
    texts = ["six plus one is seven", "six and one are seven"]
    for step in (1, 2):
        sampled = [episode(0, ["same", texts[m]], member=m) for m in range(2)]
        lines(folder / "transcripts" / f"{step}.jsonl", sampled[:: 3 - 2 * step])
    (file := tmp_path / "page.html").write_text(render([read_run(folder)]), "utf-8")
    with opened(browser, file) as page:
        turn_to(page, "dialogues")
        tops = {one.bounding_box()["y"] for one in page.locator("#r0-s1 .episode").all()}
        assert len(tops) == 1  # side by side
        page.check("#diff")
        marks = page.locator("#r0-s1 mark")
        assert [text.strip() for text in marks.all_inner_texts()] == ["and", "are"]
        page.uncheck("#diff")
        assert marks.count() == 0 and texts[1] in page.inner_text("#r0-s1")
        turn_to(page, "then")
        page.select_option("#right", label="Step 2")
        page.check("#changes")
        marked = page.locator("#pair > div:last-child .episode:first-child mark")
        assert [text.strip() for text in marked.all_inner_texts()] == ["and", "are"]


def test_a_served_page_follows_a_run_and_says_when_it_ended(browser, tmp_path):
    folder = write_run(tmp_path / "mine", steps=(1, 2))
    settings = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(settings.replace("steps: 2", "steps: 3"))
    with serving.open_server([folder], 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.set_default_timeout(PATIENCE)
        page.goto(f"http://127.0.0.1:{server.server_port}/#runs")
        page.get_by_text("following: mine: step 2 of 3").wait_for()
        turn_to(page, "dialogues")
        with (folder / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"step": 3, "reward/mean": 0.75}\n')
        page.get_by_text("ended: mine: step 3 of 3").wait_for()
        assert "0.75" not in page.content()  # a reader is not disturbed
        with page.expect_event("load"):
            page.get_by_text("show what is new").click()
        turn_to(page, "runs")
        page.get_by_text("0.10 → 0.75").wait_for()
        page.close()
        server.shutdown()


def test_hostile_text_is_shown_as_text(browser, file):
    with opened(browser, file) as page:
        page.goto(f"{file.as_uri()}#r0-s2-t1")
        action = page.locator("#r0-s2-t1 .action")
        assert action.first.inner_text() == EVIL.replace("\u202e", "\\u202e")
        assert "characters left out" in action.nth(1).inner_text()
        assert page.locator("img").count() == 0


def test_a_task_then_and_now_stands_side_by_side(browser, file):
    with opened(browser, file) as page:
        turn_to(page, "then")
        page.select_option("#task", label="task 1")
        page.select_option("#left", label="seed0: Step 1")
        page.select_option("#right", label="seed0: Step 3")
        both = page.inner_text("#pair")
        assert "answer at 1" in both and "answer at 3" in both


def test_keys_change_the_theme_and_show_themselves(browser, file):
    with opened(browser, file, color_scheme="light") as page:
        page.keyboard.press("t")
        assert page.get_attribute("html", "data-theme") == "dark"
        page.keyboard.press("?")
        assert "next and previous task" in page.inner_text("#help")
        page.click("#help button")
        assert shown(page, "#help") == 0


def test_all_text_is_there_without_a_program(browser, file):
    with opened(browser, file, java_script_enabled=False) as page:
        assert shown(page, "main > section") == 5 and shown(page, ".scripted, .tools") == 0
        page.locator("#r0-s1 > summary").click()
        page.locator("#r0-s1-t0 > summary").click()
        assert "answer at 1" in page.inner_text("#r0-s1-t0")
