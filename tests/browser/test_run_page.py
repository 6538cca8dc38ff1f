"""The page of a run in a real browser: a hunted and shrunk fault, its slider moved, its marked block read.

``pytest tests/browser --screenshot docs/replay.png`` also renews the picture in the README.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from watching import watched

from engine.trace import Shape, Submit, Workload
from properties.__main__ import main
from properties.faults import armed
from properties.hunt import numbered
from properties.lockstep import Run, run
from properties.page import page as write_page
from properties.shrink import shrink

FAULT = "A03"  # release drops the last block of a table


def failing(workload: Workload) -> Run:
    with armed(FAULT):
        return run(workload)


@pytest.fixture(scope="module")
def shrunk() -> Workload:
    """The first generated workload that meets the fault, made as small as it gets."""
    found = next(w for w in (numbered(1, number) for number in range(100)) if failing(w).first is not None)
    small, _ = shrink(found, lambda candidate: failing(candidate).first is not None)
    assert len(small.events) < len(found.events)
    return small.titled("a shrunk fault")


def opened(page: Page, text: str, folder: Path) -> Page:
    path = folder / "run.html"
    path.write_text(text, encoding="utf-8")
    page.goto(path.as_uri())
    return page


def test_the_slider_finds_the_marked_block(page: Page, shrunk: Workload, tmp_path: Path) -> None:
    outcome = failing(shrunk)
    assert outcome.first is not None
    lost = outcome.steps[-1].ledger
    assert lost is not None
    held = {block for table in lost.tables.values() for block in table}
    (missing,) = set(range(shrunk.shape.blocks)) - held - set(lost.blank)
    opened(page, write_page(shrunk, outcome, "the command"), tmp_path)

    engine, specification = page.locator(".side").all()
    marked = engine.locator(".block.differs")
    expect(page.locator("#heading")).to_contain_text("the first difference")  # it opens there
    slider = page.get_by_role("slider", name="iteration")
    slider.fill("0")
    expect(page.locator("#now")).to_have_text(f"1 of {outcome.first.iteration}")
    expect(marked).to_have_count(0)
    slider.fill(str(outcome.first.iteration - 1))
    expect(marked).to_have_count(1)
    expect(marked).to_have_attribute("data-block", str(missing))
    expect(marked.locator(".label")).to_have_text("lost")
    expect(marked).to_have_attribute("aria-label", f"block {missing}: lost, the two sides differ")
    expect(specification.locator(f'[data-block="{missing}"] .label')).to_have_text("blank")
    expect(page.locator("#finding")).to_contain_text(outcome.first.headline)
    expect(page.locator("#differs")).to_contain_text(f"block {missing} has no owner and is not free")
    expect(page.locator("#command")).to_have_text("the command")


def test_the_keyboard_does_what_the_mouse_does(page: Page, shrunk: Workload, tmp_path: Path) -> None:
    outcome = failing(shrunk)
    opened(page, write_page(shrunk, outcome, ""), tmp_path)
    last = len(outcome.steps)
    now = page.locator("#now")
    for key, iteration in (
        ("Home", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("ArrowLeft", 1),
        ("End", last),
        ("d", last),
    ):
        page.keyboard.press(key)
        expect(now).to_have_text(f"{iteration} of {last}")
    for control, iteration in (("First iteration", 1), ("One iteration on", 2), ("Last iteration", last)):
        page.get_by_role("button", name=control).click()
        expect(now).to_have_text(f"{iteration} of {last}")
    page.locator("#lines span").first.click()
    expect(now).to_have_text(f"1 of {last}")
    page.get_by_role("slider", name="iteration").focus()
    page.keyboard.press("ArrowRight")
    expect(now).to_have_text(f"2 of {last}")
    page.get_by_role("button", name="play").click()  # runs to the end, and stops there
    expect(now).to_have_text(f"{last} of {last}")
    expect(page.locator("#play")).to_have_attribute("aria-pressed", "false")


def test_what_a_file_says_does_nothing(page: Page, tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    workload = Workload(Shape(4, 2, 1), (Submit(0, ((hostile, 3),), 2),), title=hostile)
    opened(page, write_page(workload, run(workload), hostile), tmp_path)
    expect(page.locator("h1")).to_have_text(hostile)
    expect(page.locator("#command")).to_have_text(hostile)
    expect(page.locator("img")).to_have_count(0)


def test_trouble_on_a_page_is_seen(browser: Browser) -> None:
    page = browser.new_page()
    trouble = watched(page)
    page.set_content(
        "<img src='http://127.0.0.1:9/picture.png'><script>alert('hello'); throw new Error('broken')</script>"
    )
    page.wait_for_load_state("networkidle")
    page.close()
    for part in ("a dialog said hello", "broken", "asked for http://127.0.0.1:9/picture.png"):
        assert any(part in seen for seen in trouble), (part, trouble)


def test_cached_shared_and_published_blocks_look_different(page: Page, tmp_path: Path) -> None:
    workload = Workload(
        Shape(8, 2, 2, prefix_cache=True),
        (Submit(0, (("sys", 4), ("a", 1)), 4), Submit(1, (("sys", 4), ("b", 1)), 2), Submit(2, (("c", 2),), 2)),
    )
    opened(page, write_page(workload, run(workload), ""), tmp_path)
    engine = page.locator(".side").first
    seen: set[str] = set()
    for index in range(len(run(workload).steps)):
        page.get_by_role("slider", name="iteration").fill(str(index))
        for kind in ("shared", "cached", "owned", "blank"):
            for block in engine.locator(f".block.{kind}").all():
                label = block.locator(".label").inner_text()
                published = "published" in (block.get_attribute("aria-label") or "")
                seen.add(f"{kind}{' published' if published else ''}: {label}")
    assert {
        "shared published: r0 r1",
        "cached published: cached",
        "blank: blank",
        "owned: r0",
        "owned published: r0",
    } <= seen


def test_hundreds_of_iterations_stay_quick(page: Page, tmp_path: Path) -> None:
    events = tuple(Submit(k % 3, (("sys", 16), ("abcdef"[k % 6], 3 + k * 7 % 50)), 20 + k % 30) for k in range(36))
    workload = Workload(Shape(64, 4, 2, budget=64, max_model_len=160, prefix_cache=True), events)
    outcome = run(workload)
    assert len(outcome.steps) >= 500
    opened(page, write_page(workload, outcome, ""), tmp_path)
    shown = page.evaluate(
        """() => {
          const slider = document.getElementById("slider"), seen = new Set(), start = performance.now();
          for (let index = 0; index <= Number(slider.max); index++) {
            slider.value = index;
            slider.dispatchEvent(new Event("input"));
            seen.add(document.body.dataset.iteration);
          }
          return [seen.size, performance.now() - start];
        }"""
    )
    assert shown[0] == len(outcome.steps)
    assert shown[1] < 50 * len(outcome.steps)  # milliseconds; measured: below 3 each


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_and_print(page: Page, shrunk: Workload, tmp_path: Path, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    opened(page, write_page(shrunk, failing(shrunk), ""), tmp_path)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(23, 24, 28)")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    expect(page.locator("#slider")).to_be_hidden()
    expect(page.locator(".block.differs").first).to_be_visible()


def test_the_picture_of_the_readme(
    page: Page, tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published leak where it shows. With --screenshot FILE the picture is kept."""
    kept = pytestconfig.getoption("--screenshot", default=None)
    picture = None if kept is None else Path(kept).absolute()
    monkeypatch.chdir(pytestconfig.rootpath)  # so that the command on the page is the one that a reader would type
    out = tmp_path / "leak.html"
    assert main(["replay", "properties/regress/A05-the-published-leak.json", "--arm", "A05", "--html", str(out)]) == 1
    page.goto(out.as_uri())
    expect(page.locator(".side").first.locator(".block.lost")).to_have_count(1)
    taken = page.screenshot(clip={"x": 0, "y": 0, "width": 1180, "height": 820})
    assert taken.startswith(b"\x89PNG")
    if picture is not None:
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_bytes(taken)
