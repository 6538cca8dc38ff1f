"""The rows rung: everything from the plan to the kernels' arguments is production code, over a cache of digests.

What it sees: a row, slot, position, block or static buffer that is wrong by one, padding that touches a request, a graph that
reads somebody else's buffer, memory that is trusted although it was not computed. The whole cache is compared after every
iteration. What it cannot see: arithmetic. That is for ``tiny``. ``staged`` is the same with the copies that a GPU needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from engine.control.record import StepRecord
from engine.trace import Shape, Submit, prompt_tokens
from properties.cache_cells import Touched, place
from properties.checks import Fact
from properties.compute_rung import ComputeRung, must_fit, some
from properties.diff import Known
from properties.digest_network import DigestNetwork
from properties.digests import Chain, allowed
from properties.reports import told
from properties.sampled import sampling_of
from properties.solo import askable

POISON = np.array(
    [0x0BADBADBADBADBAD, -1]
)  # what lies where nobody owns anything: a digest of nothing, written by nobody

MOST_CELLS = 1 << 20


class DigestOracle:
    """A request alone: its tokens as a function of its prompt. Blocks, rows and iterations do not exist here."""

    def __init__(self, shape: Shape) -> None:
        self._longest = shape.max_model_len
        self._requests: dict[int, _Alone] = {}
        self._asked: dict[int, Mapping[str, bool]] = {}

    def stop_ids(self, first_id: int, event: Submit) -> frozenset[int]:
        """All choices of a submission are told the same: a digest knows no seed."""
        prompt = prompt_tokens(event.prompt)
        if not askable(prompt) or len(prompt) >= self._longest:
            return frozenset()  # the door refuses it, so nobody will ask
        stops: frozenset[int] = frozenset()
        if event.stop_at is not None and len(prompt) + event.stop_at <= self._longest:
            stops = frozenset({_Alone(prompt).token(event.stop_at - 1)})
        for request, sampling in enumerate(sampling_of(event, stops), first_id):
            self._requests[request] = _Alone(prompt, stops, event.min_tokens)
            self._asked[request] = sampling.asked
        return stops

    def token(self, request: int, k: int) -> int:
        return self._requests[request].token(k)

    def asked(self, request: int) -> Mapping[str, bool]:
        return self._asked[request]


class _Alone:
    def __init__(self, prompt: tuple[int, ...], stops: frozenset[int] = frozenset(), min_tokens: int = 0) -> None:
        self._chain = Chain(prompt)
        self._masked, self._min_tokens = sorted(stops), min_tokens
        self._tokens: list[int] = []

    def token(self, k: int) -> int:
        while len(self._tokens) <= k:
            token = self._chain.following
            if len(self._tokens) < self._min_tokens:
                token = allowed(token, self._masked)
            self._tokens.append(token)
            self._chain.append(token)
        return self._tokens[k]


class DigestWatch:
    """The whole cache against what it must hold, cell by cell and stamp by stamp."""

    def __init__(self, network: DigestNetwork, shape: Shape) -> None:
        self._network, self._block_size = network, shape.block_size
        self._cells = shape.blocks * shape.block_size
        self._rows = network.pool.rows.numpy()
        self._rows[:] = POISON
        self._held = self._rows.copy()  # as it must be
        self._chains: dict[int, Chain] = {}
        self._published: dict[int, object] = {}  # contents that were found true; unchanged cells keep them so
        self._known: Mapping[int, Known] = {}
        self._after: Mapping[str, Any] = {}

    def told(self, after: Mapping[str, Any], known: Mapping[int, Known]) -> None:
        self._after, self._known = after, known

    def before(self, expected: Touched) -> None:
        """Nobody's cells are poisoned, so that whoever reads one is seen by what comes of it."""
        nobody = ~expected.owned.ravel()
        self._rows[: self._cells][nobody] = POISON
        self._held[: self._cells][nobody] = POISON
        self._network.stamp += 1

    def after(self, expected: Touched) -> tuple[Fact, ...]:
        held, cells = self._held, list(expected.scheduled)
        if expected.failed:  # how far a step came that raised is nobody's business, as long as it wrote nothing else
            held[cells] = self._rows[cells]
        else:
            for cell, (request, position) in expected.scheduled.items():
                held[cell] = _signed(self._digests(request, position)[position]), self._network.stamp
        trash = slice(self._cells, None)
        wrote = bool((self._rows[trash, 1] == self._network.stamp).any())
        held[trash] = self._rows[trash]
        facts = self._differing(expected)
        if not facts:
            facts = [*self._untrue(), *self._misnamed()]
        if wrote != expected.padded and not expected.failed:
            said = ("written", "untouched")
            facts.append(Fact("trash block", *(said if wrote else said[::-1])))
        return some(facts)

    def _digests(self, request: int, position: int) -> list[int]:
        chain = self._chains.setdefault(request, Chain(()))
        tokens = self._known[request].tokens
        while len(chain.digests) <= position:
            chain.append(tokens[len(chain.digests)])
        return chain.digests

    def _differing(self, expected: Touched) -> list[Fact]:
        if np.array_equal(self._rows, self._held):
            return []
        wrong = np.flatnonzero((self._rows != self._held).any(axis=1))
        return [
            Fact(
                place(int(cell), self._block_size, expected.scheduled.get(int(cell))),
                *(_told(rows[cell], self._network.stamp) for rows in (self._rows, self._held)),
            )
            for cell in wrong
        ]

    def _untrue(self) -> list[Fact]:
        """Computed positions of tables whose digest is not that of their request: what the specification's own tables say
        of the cache must be true as well, shared blocks included."""
        untrue = []
        for request, table in self._after["tables"].items():
            computed = self._after["computed"][request]
            if not computed:
                continue
            first = np.asarray(table) * self._block_size
            cells = (first[:, None] + np.arange(self._block_size)).ravel()[:computed]
            digests = np.array(self._digests(request, computed - 1)[:computed], dtype=np.uint64).view(np.int64)
            for position in np.flatnonzero(self._rows[cells, 0] != digests).tolist():
                owner = (request, position)
                held = (f"{self._rows[cells[position], 0] & 0xFFFFFFFF:08x}", f"{digests[position] & 0xFFFFFFFF:08x}")
                untrue.append(Fact(place(int(cells[position]), self._block_size, owner), *held))
        return untrue

    def _misnamed(self) -> list[Fact]:
        """Published blocks that do not hold what they are published as."""
        wrong: list[Fact] = []
        published = self._after.get("published", {})
        for block, content in published.items():
            if self._published.get(block) == content:
                continue
            _, tokens = content
            cells = slice(block * self._block_size, (block + 1) * self._block_size)
            digests = np.array(Chain(tokens).digests[-self._block_size :], dtype=np.uint64).view(np.int64)
            if not np.array_equal(self._rows[cells, 0], digests):
                wrong.append(Fact(f"published block {block}", "other digests", f"those of {list(tokens)}"))
        self._published = dict(published)
        return wrong


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _told(row: Any, stamp: int) -> str:
    digest, written = (int(value) for value in row)
    if written < 0:
        return "nobody's"
    when = "in this step" if written == stamp else f"{stamp - written} steps ago"
    return f"{digest & 0xFFFFFFFF:08x}, written {when}"


class RowsRung(ComputeRung):
    name: ClassVar[str] = "rows"

    def __init__(self, shape: Shape) -> None:
        must_fit(shape, self.name, MOST_CELLS)
        self._oracle = DigestOracle(shape)
        super().__init__(shape, DigestNetwork, self._oracle)

    def watch(self) -> DigestWatch:
        assert isinstance(self.network, DigestNetwork)
        self._digests = DigestWatch(self.network, self._shape)
        return self._digests

    def expect(self, step: Mapping[str, Any], after: Mapping[str, Any], known: Mapping[int, Known]) -> None:
        super().expect(step, after, known)
        self._digests.told(after, known)

    def misled(self, record: StepRecord, known: Mapping[int, Known]) -> tuple[Fact, ...]:
        return told(record, known, self._oracle.asked)


class StagedRung(RowsRung):
    """What a step reads lies in memory of its own, into which the runner copies it: on a CPU just as on a GPU."""

    name: ClassVar[str] = "staged"
    staged: ClassVar[bool | None] = True
