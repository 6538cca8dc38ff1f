"""The server's own page in a real browser, on a real socket: asks, watches the engine work, opens a workload.

The engine's runner waits for permits, so a test says how far an answer has come while the page is looked at.
``pytest tests/browser --server-screenshot docs/server.png`` also renews the picture in the README, with the default model.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect
from watching import watched

from engine.config import EngineConfig
from engine.control.plan import Plan
from engine.engine import Engine
from engine.loading.synthetic import synthetic_model
from server.app import create_lazy_app
from server.bridge import Phase
from server.context import Context
from server.settings import ServerSettings
from server.sockets import bind
from tests.server.stub import StubRunner, stub_engine

SOME = re.compile("^[1-9]")
BIGGEST_SEED = 2**63 - 1  # no number of the page's language holds it


class PermitRunner(StubRunner):
    """Each decode step takes a permit. ``drift`` makes answers depend on what they must not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = threading.Semaphore(0)
        self.free = threading.Event()
        self.free.set()
        self.drift = False

    def execute(self, plan: Plan) -> Any:
        if plan.decodes:
            while not self.free.is_set() and not self.permits.acquire(timeout=0.01):
                pass
        sampled = super().execute(plan)
        if self.drift:
            sampled = [attrs.evolve(one, token=3 + (one.token + plan.iteration) % 90) for one in sampled]
        return sampled


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@attrs.frozen
class Served:
    url: str
    context: Context
    runner: PermitRunner

    def hold(self) -> None:
        """From now on decode steps wait."""
        while self.runner.permits.acquire(blocking=False):
            pass
        self.runner.free.clear()

    def drip(self, page: Page, ready: Callable[[], bool]) -> None:
        """One decode step after another: the engine is looked at between two of them."""
        for _ in range(60):
            if ready():
                return
            self.runner.permits.release()
            page.wait_for_timeout(50)
        raise AssertionError("60 steps were not enough")


@contextmanager
def serving(make: Callable[[], Engine], settings: ServerSettings | None = None) -> Iterator[tuple[str, Context]]:
    app = create_lazy_app(make, settings)
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: app.state.context.bridge.phase is Phase.READY, 90)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", app.state.context
    except BaseException:
        server.force_exit = True
        raise
    finally:
        server.should_exit = True
        thread.join(15)


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


def test_a_conversation_goes_on_and_a_refusal_is_told(opened: Page) -> None:
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
def test_a_phone_in_light_and_dark(opened: Page, scheme: Any) -> None:
    opened.emulate_media(color_scheme=scheme)
    opened.set_viewport_size({"width": 360, "height": 740})
    paper = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(23, 24, 28)")
    assert opened.evaluate("document.documentElement.scrollWidth") <= 360


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


class SlowRunner(StubRunner):
    def execute(self, plan: Plan) -> Any:
        time.sleep(0.02)
        return super().execute(plan)


@contextmanager
def crowd(url: str, people: int, bodies: list[dict[str, Any]]) -> Iterator[None]:
    """``people`` who ask one thing after another until the end. Not from the page: a browser opens six connections."""
    gone = threading.Event()

    def person(number: int) -> None:
        for k in itertools.count(number):
            if gone.is_set():
                return
            data = json.dumps({"seed": k, "priority": 1} | bodies[k % len(bodies)]).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)
            urllib.request.urlopen(request, timeout=60).read()

    with ThreadPoolExecutor(people) as pool:
        asking = [pool.submit(person, number) for number in range(people)]
        try:
            yield
        finally:
            gone.set()
    for one in asking:
        one.result()


def chat(text: str, max_tokens: int, system: str | None = None) -> dict[str, Any]:
    head = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*head, {"role": "user", "content": text}], "max_tokens": max_tokens}


SYSTEM = "You are a helpful assistant that answers in short, plain sentences, without lists and without jokes."
QUESTIONS = ("What is a block table?", "Why is the sea salty?", "Tell a story about a lighthouse.", "How do bees fly?")
REAL_CROWD = [chat(question, tokens, SYSTEM) for tokens in (90, 140, 60) for question in QUESTIONS]
STUB_CROWD = [chat("hi", 30), chat("hello", 20)]
