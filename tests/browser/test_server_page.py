"""The server's own page in a real browser, on a real socket: asks, watches the engine work, opens a workload.

``pytest tests/browser --server-screenshot docs/server.png`` also renews the picture in the README, with the default model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from playwright.sync_api import Browser, Page, expect
from serving import PermitRunner, Served, SlowRunner, chat, crowd, serving, wait_until
from watching import watched

from engine.config import EngineConfig
from engine.engine import Engine
from engine.loading.synthetic import synthetic_model
from server.settings import ServerSettings
from tests.server.stub import stub_engine

SOME = re.compile("^[1-9]")
BIGGEST_SEED = 2**63 - 1  # no number of the page's language holds it


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    runner = PermitRunner()
    with serving(lambda: stub_engine(runner, num_blocks=40, max_model_len=120, captures=((1, 30), (4, 30)))) as (
        url,
        context,
    ):
        yield Served(url, context, runner)


@pytest.fixture
def opened(browser: Browser, served: Served) -> Iterator[Page]:
    served.runner.free.set()
    served.runner.drift = False
    page = browser.new_page(viewport={"width": 1180, "height": 1000})
    trouble = watched(page, served.url)
    page.goto(served.url)
    expect(page.locator("body[data-ready=yes]")).to_have_count(1)
    expect(page.locator("#link")).to_have_text("live")
    yield page
    page.close()
    wait_until(lambda: served.context.live.watchers == 0)
    assert trouble == []


def test_what_the_page_proposes_fits_the_context(opened: Page) -> None:
    """200 tokens are more than this model's 120."""
    assert opened.locator("[name=max_tokens]").input_value() == "60"
    ask(opened, "hello", temperature=1)
    expect(answer(opened).locator(".meta").first).to_contain_text(re.compile("finish: (length|stop)"))


def held(page: Page) -> int:
    data = page.locator("#grid").evaluate("canvas => ({...canvas.dataset})")
    return int(data["held"]) + int(data["shared"])


def ask(page: Page, prompt: str, **fields: object) -> None:
    for name, value in fields.items():
        page.locator(f"[name={name}]").fill(str(value))
    page.locator("#prompt").fill(prompt)
    page.locator("#prompt").press("Enter")


def answer(page: Page) -> Any:
    return page.locator(".turn.assistant").last


def test_text_and_blocks_move_while_the_answer_is_made(opened: Page, served: Served) -> None:
    assert held(opened) == 0
    served.hold()
    ask(opened, "hello", max_tokens=40, temperature=1)
    text = answer(opened).locator(".text")
    lengths = [0]
    for _ in range(3):
        served.drip(opened, lambda: len(text.inner_text()) > lengths[-1])
        lengths.append(len(text.inner_text()))
    served.drip(opened, lambda: held(opened) > 0)
    expect(opened.locator("#running")).to_have_text("1 of 4")
    expect(opened.locator("#rows .chip").first).to_have_text(re.compile(r"0: r\d+"))
    expect(opened.locator("#send")).to_be_disabled()
    served.runner.free.set()
    expect(answer(opened).locator(".usage")).to_contain_text("40 answered")
    expect(answer(opened).locator(".meta").first).to_have_text(re.compile(r"finish: length · seed \d+"))
    expect(opened.locator("#grid")).to_have_attribute("data-held", "0")
    expect(opened.locator("#running")).to_have_text("0 of 4")
    assert int(opened.locator("#grid").get_attribute("data-cached") or 0) > 0  # told apart from blank
    expect(opened.locator("#replayed")).to_have_text("100.0 %")
    for chart in ("first", "between", "load"):
        expect(opened.locator(f"[data-chart={chart}]")).to_have_attribute("aria-label", re.compile("now [0-9]"))


def test_the_same_seed_gives_the_same_text(opened: Page, served: Served) -> None:
    ask(opened, "hello", max_tokens=30, temperature=1)
    told = answer(opened).locator(".meta").first
    expect(told).to_contain_text("seed")
    first = told.inner_text()
    answer(opened).get_by_role("button", name="Same seed again").click()
    expect(opened.locator(".turn.assistant")).to_have_count(2)
    expect(answer(opened).locator(".same")).to_have_text("✓ the same text, to the byte")
    assert answer(opened).locator(".meta").first.inner_text() == first
    served.runner.drift = True
    answer(opened).get_by_role("button", name="Same seed again").click()
    expect(answer(opened).locator(".other")).to_have_text("✗ another text")


def test_a_seed_keeps_all_its_digits(opened: Page) -> None:
    ask(opened, "hello", max_tokens=3, seed=BIGGEST_SEED)
    expect(answer(opened).locator(".meta").first).to_contain_text(f"seed {BIGGEST_SEED}")


def test_several_answers_share_the_blocks_of_the_prompt(opened: Page, served: Served) -> None:
    served.hold()
    ask(opened, "one two three", n=3, max_tokens=40, temperature=1)
    served.drip(opened, lambda: opened.locator("#grid").get_attribute("data-shared") != "0")
    served.runner.free.set()
    expect(answer(opened).locator(".answers > div")).to_have_count(3)
    expect(answer(opened).locator(".usage")).to_contain_text("120 answered")


def test_stop_ends_the_request_in_the_engine(opened: Page, served: Served) -> None:
    before = served.context.bridge.engine.counters.finished["abort"]
    served.hold()
    ask(opened, "hello", max_tokens=60)
    for _ in range(3):
        served.runner.permits.release()
    expect(answer(opened).locator(".text")).not_to_have_text("")
    opened.get_by_role("button", name="Stop").click()
    expect(answer(opened).locator(".meta").first).to_have_text("finish: stopped here")
    served.runner.free.set()
    wait_until(lambda: served.context.bridge.num_open == 0 and not served.context.bridge.engine.has_work)
    assert served.context.bridge.engine.counters.finished["abort"] == before + 1
    expect(opened.locator("#grid")).to_have_attribute("data-held", "0")
    expect(opened.locator("#send")).to_be_enabled()


def test_a_conversation_goes_on(opened: Page) -> None:
    ask(opened, "a", max_tokens=2, stop="zz\n~~")
    expect(answer(opened).locator(".usage")).to_be_visible()
    with opened.expect_request("**/v1/chat/completions") as sent:
        ask(opened, "b")
    body = json.loads(sent.value.post_data or "")
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert (body["stop"], body["max_tokens"], body["stream_options"]) == (["zz", "~~"], 2, {"include_usage": True})
    expect(answer(opened).locator(".usage")).to_be_visible()
    opened.get_by_role("button", name="New conversation").click()
    expect(opened.locator(".turn")).to_have_count(0)


def test_a_refusal_is_told_and_is_no_part_of_the_conversation(browser: Browser, served: Served) -> None:
    page = browser.new_page()
    trouble = watched(page, served.url)
    page.goto(served.url)
    expect(page.locator("body[data-ready=yes]")).to_have_count(1)
    ask(page, "x" * 300)
    expect(answer(page).locator(".alarm")).to_contain_text("120")  # the context
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "short", max_tokens=2)
    assert [message["content"] for message in json.loads(sent.value.post_data or "")["messages"]] == ["short"]
    expect(answer(page).locator(".usage")).to_be_visible()
    page.close()
    assert len(trouble) == 1
    assert "400" in trouble[0]


def test_what_a_model_or_a_file_says_does_nothing(opened: Page, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    ask(opened, hostile, max_tokens=1)
    expect(opened.locator(".turn.user .text")).to_have_text(hostile)
    shape = {"blocks": 4, "block_size": 4, "rows": 1}
    event = {"wait": 0, "submit": {"prompt": [[hostile, 3]], "max_tokens": 2}}
    path = tmp_path / "it's; rm.json"
    path.write_text(json.dumps({"format": "workload/1", "title": hostile, "shape": shape, "events": [event]}))
    opened.set_input_files("#file", path)
    expect(opened.locator("#workload-title")).to_have_text(hostile)
    expect(opened.locator("#commands")).to_contain_text(r"replay './it'\''s; rm.json' --html")
    expect(opened.locator("img")).to_have_count(0)


def test_a_recorded_workload_is_drawn_and_listed(opened: Page, pytestconfig: pytest.Config) -> None:
    path = next((pytestconfig.rootpath / "properties/regress").glob("A05-*.json"))
    file = json.loads(path.read_text())
    submits = [event for event in file["events"] if "submit" in event]
    opened.set_input_files("#file", path)
    expect(opened.locator("#workload-title")).to_have_text(file["title"])
    expect(opened.locator("#workload-facts")).to_contain_text(f"{len(submits)} submits")
    opened.locator("#workload details summary").click()
    expect(opened.locator("#events tbody tr")).to_have_count(len(file["events"]))
    expect(opened.locator("#commands")).to_contain_text(f"python -m properties replay {path.name} --html run.html")
    drawn = opened.locator("#timeline-canvas").evaluate(
        "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"
    )
    assert drawn > 5  # colours


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is not JSON"),
        ('{"format": "workload/2"}', 'format is "workload/2", but must be "workload/1"'),
        ('{"format": "workload/1", "shape": {"blocks": 0}}', "shape.blocks is 0"),
        (
            '{"format": "workload/1", "shape": {"blocks": 1, "block_size": 1, "rows": 1}, "events": [{"wait": 1}]}',
            "event 1 must have one of submit, abort, fail_step, shutdown",
        ),
    ],
)
def test_a_file_that_is_no_workload(opened: Page, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    opened.set_input_files("#file", path)
    expect(opened.locator("#workload-error")).to_contain_text(message)
    expect(opened.locator("#workload-shown")).to_be_hidden()


def test_the_keyboard_reads_the_blocks(opened: Page) -> None:
    opened.locator("#grid").focus()
    for key, block in (("ArrowRight", 0), ("ArrowRight", 1), ("End", 39), ("ArrowLeft", 38), ("Home", 0)):
        opened.keyboard.press(key)
        expect(opened.locator("#readout")).to_have_text(re.compile(rf"block {block}: (blank|cached, held by nobody)"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_in_light_and_dark(opened: Page, scheme: Any, pytestconfig: pytest.Config) -> None:
    opened.emulate_media(color_scheme=scheme)
    opened.set_viewport_size({"width": 360, "height": 740})
    ask(opened, "x" * 60, max_tokens=5, n=2)
    expect(answer(opened).locator(".usage")).to_be_visible()
    opened.set_input_files("#file", next((pytestconfig.rootpath / "properties/regress").glob("A05-*.json")))
    opened.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    paper = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(23, 24, 28)")
    assert opened.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_page_that_nobody_sees_watches_nothing(opened: Page, served: Served) -> None:
    hide = "state => { Object.defineProperty(document, 'hidden', {get: () => state, configurable: true});"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    view = served.context.live
    assert view.watchers == 1
    opened.evaluate(hide, True)
    wait_until(lambda: view.watchers == 0)
    opened.evaluate(hide, False)
    wait_until(lambda: view.watchers == 1)


def test_ten_thousand_blocks_are_drawn_quickly(opened: Page) -> None:
    took = opened.evaluate(
        """async () => {
          const { Grid } = await import("/static/grid.js");
          const grid = new Grid(document.getElementById("grid"), document.getElementById("readout"));
          const whole = Array.from({ length: 10000 }, (_, block) => [block, 1, block % 40 - 4]).flat();
          const start = performance.now();
          for (let k = 0; k < 5; k++) grid.apply(whole, 10000);
          const middle = performance.now();
          for (let k = 0; k < 50; k++) grid.apply([k * 7, 32, k]);
          return [(middle - start) / 5, (performance.now() - middle) / 50, grid.counts().blank > 0, grid.canvas.clientHeight];
        }"""
    )
    assert took[0] < 1000  # milliseconds, for everything; measured: 30
    assert took[1] < 20  # for a change; measured: 0.2
    assert took[2]
    assert took[3] <= 310


def test_a_key_opens_the_page(browser: Browser) -> None:
    with serving(stub_engine, ServerSettings(api_keys=("a key",))) as (url, _):
        page = browser.new_page()
        trouble = watched(page, url)
        page.goto(url)
        expect(page.locator("#key-form")).to_be_visible()
        expect(page.locator("#link")).to_contain_text("a valid key is needed")
        page.get_by_label("API key").fill("a key")
        page.get_by_role("button", name="use").click()
        expect(page.locator("#link")).to_have_text("live")
        expect(page.locator("#model")).to_contain_text("context of 48 tokens")
        assert page.evaluate("localStorage.length + sessionStorage.length") == 0
        assert page.context.cookies() == []
        page.close()
        assert {"401" in seen for seen in trouble} == {
            True
        }  # the browser logs what was refused, and there was nothing else


def test_a_leaked_block_is_seen(browser: Browser) -> None:
    engine = stub_engine()
    engine.scheduler.pool.take()  # by nobody
    with serving(lambda: engine) as (url, _):
        page = browser.new_page()
        page.goto(url)
        expect(page.locator("#lost-key")).to_be_visible()
        expect(page.locator("#grid-summary")).to_have_text("0 held, 0 shared, 0 cached, 15 blank, 1 lost")
        page.close()


def test_a_model_without_a_template_continues_prompts(browser: Browser) -> None:
    model = attrs.evolve(synthetic_model(), template=None)
    with serving(lambda: stub_engine(model=model)) as (url, _):
        page = browser.new_page()
        trouble = watched(page, url)
        page.goto(url)
        expect(page.locator("#mode-hint")).to_be_visible()
        with page.expect_request("**/v1/completions"):
            ask(page, "once upon", max_tokens=5)
        expect(answer(page).locator(".text .given")).to_have_text("once upon")
        expect(answer(page).locator(".usage")).to_contain_text("5 answered")
        page.close()
        assert trouble == []


def test_the_page_runs_no_script_but_its_own(browser: Browser, served: Served) -> None:
    page = browser.new_page()
    trouble = watched(page, served.url)
    page.goto(served.url)
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.foreign = 1'}))"
    )
    page.evaluate("fetch('http://127.0.0.1:9/').catch(() => {})")
    page.wait_for_timeout(100)
    assert page.evaluate("window.foreign") is None
    page.close()
    assert len([seen for seen in trouble if "Content Security Policy" in seen]) >= 2, trouble


def test_the_picture_of_the_readme(browser: Browser, pytestconfig: pytest.Config) -> None:
    """A small pool under load: the same seed gives the same text, whoever else is there. With --server-screenshot FILE the
    picture is kept, of a run with the default model."""
    kept = pytestconfig.getoption("--server-screenshot", default=None)
    config = EngineConfig(max_num_seqs=8, num_kv_blocks=44, block_size=16, max_model_len=512)

    def make() -> Engine:
        return Engine.from_config(config) if kept else stub_engine(SlowRunner(), num_blocks=40, max_model_len=120)

    with serving(make) as (url, context):
        page = browser.new_page(viewport={"width": 1120, "height": 800})
        trouble = watched(page, url)
        page.goto(url)
        page.locator("body[data-ready=yes]").wait_for()
        with crowd(url, 12 if kept else 5, REAL_CROWD if kept else STUB_CROWD):
            ask(page, "Name the three largest rivers of Europe.", max_tokens=48 if kept else 8)
            answer(page).get_by_role("button", name="Same seed again").click(timeout=60_000)
            expect(page.locator(".same")).to_be_visible(timeout=60_000)
            if kept:
                expect(page.locator("#preemptions")).not_to_have_text("0", timeout=60_000)
            ask(page, "And of Asia?", max_tokens=200 if kept else 8)
            expect(answer(page).locator(".text")).to_have_text(re.compile(".{40}" if kept else "."), timeout=60_000)
            expect(page.locator("#grid")).to_have_attribute("data-held", SOME)
            page.locator("#transcript").evaluate("box => box.scrollTop = box.scrollHeight")
            picture = page.screenshot()
        assert picture.startswith(b"\x89PNG")
        page.close()
        assert trouble == []
        assert context.bridge.engine.counters.sampled_tokens > 0
    if kept is not None:
        Path(kept).parent.mkdir(parents=True, exist_ok=True)
        Path(kept).write_bytes(picture)


SYSTEM = "You are a helpful assistant that answers in short, plain sentences, without lists and without jokes."
QUESTIONS = ("What is a block table?", "Why is the sea salty?", "Tell a story about a lighthouse.", "How do bees fly?")
REAL_CROWD = [chat(question, tokens, SYSTEM) for tokens in (90, 140, 60) for question in QUESTIONS]
STUB_CROWD = [chat("hi", 30), chat("hello", 20)]
