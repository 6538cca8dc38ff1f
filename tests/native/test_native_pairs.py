"""P2 over logits, to the byte, on two layers of real width: every pair of settings that could change them occurs together.

Settings: weight type (8-bit activations too), type of K/V, rows and the request's place among them, chunk, context across
the first or second border of a tile, threads, tape, and history: fresh, preempted while decoding and computed anew in other
blocks, or begun from blocks that another request computed. Unused blocks are NaN. ``pytest -s`` prints the combinations.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from engine.control.plan import Chunk, Eager, Replay, Seat
from engine.loading import load_model
from engine.native.build import built
from engine.native.library import INTEGER, TYPES, Library
from engine.native.runner import library
from engine.native.weights import NativeWeights, load_native
from tests.compute.driver import Driver, text
from tests.models import write_gguf
from tests.native.kit import changed_source

SHAPE: dict[str, Any] = {
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "vocab_size": 320,
}
SETTINGS: dict[str, tuple[Any, ...]] = {
    "weights": (*TYPES, *INTEGER.values()),
    "kv": (torch.float32, torch.float16, torch.bfloat16),
    "rows": (1, 2, 5, 16, 33, 64),
    "place": ("first", "middle", "last"),
    "chunk": (1, 7, 16, 64, 1000),
    "prompt": (61, 125),
    "threads": (1, 2),
    "tape": ("none", "exact", "padded"),
    "history": ("fresh", "preempted", "warm"),
}
STEPS, BLOCK, WIDTH = 5, 16, 10
NEIGHBOURS = (3, 17, 1, 40, 9)


@attrs.frozen
class Case:
    weights: str
    kv: torch.dtype
    rows: int
    place: str
    chunk: int
    prompt: int
    threads: int
    tape: str
    history: str

    @property
    def row(self) -> int:
        return {"first": 0, "middle": self.rows // 2, "last": self.rows - 1}[self.place]

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}".replace("torch.", "") for name, value in attrs.asdict(self).items())


def pairs(case: Case) -> frozenset[tuple[Any, ...]]:
    return frozenset(itertools.combinations(attrs.asdict(case).items(), 2))


def covering(seed: int = 0, tries: int = 40) -> list[Case]:
    """Cases until each pair of values occurs; each the best of ``tries`` drawn ones."""
    draw = random.Random(seed)
    names = list(SETTINGS)
    left = {pair for a, b in itertools.combinations(names, 2) for pair in _pairs_of(a, b)}
    cases = []
    while left:
        (a, x), (b, y) = min(left, key=str)
        drawn = [Case(**{n: draw.choice(SETTINGS[n]) for n in names} | {a: x, b: y}) for _ in range(tries)]
        best = max(drawn, key=lambda case: len(pairs(case) & left))
        left -= pairs(best)
        cases.append(best)
    return cases


def _pairs_of(a: str, b: str) -> Iterator[tuple[Any, ...]]:
    for x, y in itertools.product(SETTINGS[a], SETTINGS[b]):
        yield (a, x), (b, y)


@functools.cache
def loaded(kind: str, folder: Path, of: Library | None = None) -> NativeWeights:
    stored = next((name for name, packed in INTEGER.items() if packed == kind), kind)
    place = folder / f"{stored}.gguf"
    model = load_model(place if place.exists() else write_gguf(place, "llama", stored, **SHAPE))
    weights = load_native(model, of or library(), integer=kind in INTEGER.values())
    assert kind in weights.types
    return weights


@functools.cache
def alone(kind: str, kv: torch.dtype, prompt: int, folder: Path, of: Library | None = None) -> dict[int, bytes]:
    return alone_on(loaded(kind, folder, of), kv, prompt)


def alone_on(weights: NativeWeights, kv: torch.dtype, prompt: int) -> dict[int, bytes]:
    """Logits by position: one row, one thread, no tape, the prompt in one piece."""
    driver = Driver(weights, rows=1, threads=1, block_size=BLOCK, poison=float("nan"), kv_dtype=kv)
    tokens = text(0, prompt + STEPS)
    driver.start({0: tokens[:prompt]})
    for position in range(prompt, prompt + STEPS):
        driver.decode({0: (position, tokens[position])})
    return {position: logits for (_, position), logits in driver.spy.logits.items()}


def crowd(case: Case, folder: Path, of: Library | None = None) -> dict[int, bytes]:
    return crowd_on(loaded(case.weights, folder, of), case)


def crowd_on(weights: NativeWeights, case: Case) -> dict[int, bytes]:
    """Logits of the request among ``case.rows - 1`` others."""
    recorded = min(64, case.rows + 3) if case.tape == "padded" else case.rows
    driver = Driver(
        weights,
        rows=65,
        block_size=BLOCK,
        num_blocks=400,
        captures=() if case.tape == "none" else ((recorded, WIDTH),),
        threads=case.threads,
        poison=float("nan"),
        kv_dtype=case.kv,
    )
    tokens = text(0, case.prompt + STEPS)
    texts = {row: text(row + 1, NEIGHBOURS[row % 5] + STEPS) for row in range(case.rows)} | {case.row: tokens}
    lengths = {row: len(texts[row]) - STEPS for row in texts}
    begin(driver, case, {row: texts[row][: lengths[row]] for row in texts})
    launch = Eager("test") if case.tape == "none" else Replay(recorded, WIDTH, recorded - case.rows)
    for step in range(STEPS):
        if step == 2 and case.history == "preempted":
            preempt(driver, case, tokens[: case.prompt + step])
        driver.decode({row: (lengths[row] + step, texts[row][lengths[row] + step]) for row in texts}, launch)
    return {position: logits for (row, position), logits in driver.spy.logits.items() if row == case.row}


def begin(driver: Driver, case: Case, prompts: dict[int, tuple[int, ...]]) -> None:
    """All prompts in chunks. Warm: the request's full blocks are those that the request in row 64 computed."""
    if case.history != "warm":
        driver.start(prompts, case.chunk)
        return
    mine = prompts[case.row]
    driver.start({64: mine})
    hits = (len(mine) - 1) // BLOCK
    if others := {row: prompt for row, prompt in prompts.items() if row != case.row}:
        driver.start(others, case.chunk)
    driver.tables[case.row] = driver.tables[64][:hits]
    driver.blocks(case.row, len(mine))
    fill(driver, case, mine, hits * BLOCK)


def preempt(driver: Driver, case: Case, known: tuple[int, ...]) -> None:
    """Row and blocks go back; what is known by then is prefilled in other blocks, up to the token that decodes next."""
    driver.execute(vacated=(case.row,))
    driver.tables[case.row] = []
    driver.blocks(case.row, len(known))
    fill(driver, case, known, 0)


def fill(driver: Driver, case: Case, tokens: tuple[int, ...], done: int) -> None:
    row = case.row
    seat = Seat(row, row, tokens, len(tokens), tuple(driver.tables[row]), None)
    for start in range(done, len(tokens), case.chunk):
        part = tokens[start : start + case.chunk]
        chunk = Chunk(row, row, start, part, start + case.chunk >= len(tokens))
        driver.execute(seated=(seat,) if start == done else (), chunks=(chunk,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wide")


CASES = covering()


def test_every_pair_occurs() -> None:
    """The floor of the test below, and its print."""
    for case in CASES:
        print(case)
    wanted = {pair for a, b in itertools.combinations(SETTINGS, 2) for pair in _pairs_of(a, b)}
    found = frozenset().union(*map(pairs, CASES))
    assert found == wanted
    print(f"{len(CASES)} cases, {len(wanted)} pairs")


@pytest.mark.parametrize("kind", SETTINGS["weights"])
@pytest.mark.timeout(600)
def test_same_bytes(kind: str, folder: Path) -> None:
    """Every case of one weight type, each against the request alone."""
    mine = [case for case in CASES if case.weights == kind]
    assert len(mine) >= 6
    wrong = []
    for case in mine:
        wanted = alone(kind, case.kv, case.prompt, folder)
        assert len(wanted) == STEPS + 1
        if crowd(case, folder) != wanted:
            wrong.append(str(case))
    assert wrong == []


def test_types_differ(folder: Path) -> None:
    """That bytes are compared which could differ: no two weight types, nor types of K/V, give the same."""
    seen = {alone(kind, kv, 61, folder)[66] for kind in SETTINGS["weights"] for kv in SETTINGS["kv"]}
    assert len(seen) == len(SETTINGS["weights"]) * len(SETTINGS["kv"])


@pytest.mark.timeout(600)
def test_a_broken_order_of_tiles_is_noticed(folder: Path, tmp_path: Path) -> None:
    """Where tiles of a row are spread over units, they are merged from the last to the first: only decoding among few
    rows on several threads does that, and only beyond the first tile does it matter."""
    source = changed_source(
        tmp_path,
        "attention.h",
        (
            "for (int64_t tile = first_tile(a, position); good && tile <= position / TILE; ++tile) {",
            "for (int64_t tile = position / TILE; good && tile >= first_tile(a, position); --tile) {",
        ),
    )
    broken = Library(built(folder=source, cache=tmp_path / "cache", extra=("-O1",)))
    fixed: dict[str, Any] = {"weights": "F32", "kv": torch.float32, "rows": 1, "place": "first", "chunk": 1000}
    wanted = alone("F32", torch.float32, 125, folder, broken)
    for threads, agrees in ((1, True), (2, False)):
        case = Case(**fixed, prompt=125, threads=threads, tape="exact", history="fresh")
        assert (crowd(case, folder, broken) == wanted) == agrees
