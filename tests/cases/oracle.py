"""What every case is compared with: the same request alone in a fresh large engine, and a dense forward in fp64.

``play`` drives an engine through arrivals and aborts and looks after every iteration: the audit, a second opinion on the
blocks that shares no code with it, and compute's rows against control's. ``Watched`` stands in front of a runner and
judges memory: before each step everything that nobody may read holds NaN, after it exactly the scheduled positions
have changed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from engine.build import settle
from engine.compute.runner import ModelRunner, PlanRunner
from engine.compute.weights import Weights, load_weights
from engine.config import EngineConfig
from engine.control.plan import Move, Plan, Sampled
from engine.control.record import Finished, StepRecord
from engine.engine import Engine
from engine.loading.model import LoadedModel
from engine.loading.synthetic import synthetic_model
from engine.native.runner import NativeRunner, library
from engine.native.weights import NativeWeights, load_native
from engine.request import SamplingParams

CPU = torch.device("cpu")
T = TypeVar("T")
T0: dict[str, Any] = {
    "block_size": 4,
    "num_kv_blocks": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "capture_rows": (1, 2, 4, 8),
    "watermark": 0,
    "threads": 1,
}
EOS = 2


@functools.cache
def model() -> LoadedModel:
    """The Llama of the cases: 2 layers, 4 heads over 2, vocabulary 512, end-of-sequence 2."""
    return synthetic_model()


@functools.cache
def weights() -> Weights:
    """Loaded and probed once per process; runners share them."""
    with torch.inference_mode():
        return load_weights(model(), CPU, torch.float32)


@functools.cache
def native_weights() -> NativeWeights:
    return load_native(model(), library())


def engine(
    *, watched: bool = False, eos: frozenset[int] = frozenset({EOS}), compute: str = "torch", **knobs: Any
) -> Engine:
    """T0 with ``knobs`` (fields of ``EngineConfig``) changed; ``watched`` puts ``Watched`` before the runner; ``compute`` is
    ``torch`` or ``native``."""
    config = EngineConfig(compute=compute, **T0 | knobs)
    limits = settle(config, model(), "cpu", torch.float32, compute)
    runner: PlanRunner
    if compute == "native":
        runner = NativeRunner(model(), limits, weights=native_weights(), threads=config.threads)
    else:
        runner = ModelRunner(model(), limits, weights=weights())
    runner.warm()
    return Engine(limits, Watched(runner) if watched else runner, eos_token_ids=eos, seed=0, model=model())


@attrs.frozen
class Ask:
    """A request of a play: it arrives before iteration ``at`` and is aborted before iteration ``abort``."""

    prompt: tuple[int, ...]
    params: SamplingParams
    at: int = 0
    abort: int | None = None
    priority: int = 0


@attrs.define
class Answer:
    sampled: list[Sampled] = attrs.field(factory=list)
    ends: list[Finished] = attrs.field(factory=list)

    @property
    def tokens(self) -> list[int]:
        return [one.token for one in self.sampled]

    @property
    def reason(self) -> str:
        (end,) = self.ends
        return end.reason


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    """Runs to ``max_tokens`` and reports logprobs and the digest of the logits, so that bytes are compared."""
    shown: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "logits_digest": True, "logprobs": 2}
    return SamplingParams(max_tokens=max_tokens, **shown | more)


def seeded(max_tokens: int, seed: int, **more: Any) -> SamplingParams:
    return greedy(max_tokens, **{"temperature": 0.9, "seed": seed} | more)


def text(seed: int, length: int) -> tuple[int, ...]:
    """A prompt as a function of seed and position, without the special tokens."""
    return tuple(3 + (seed * 131 + at * 37 + at * at * (seed % 7 + 1)) % 489 for at in range(length))


# The oracle --------------------------------------------------------------------------------------------------------

_SOLO: dict[str, Answer] = {}


def solo(ask: Ask, eos: frozenset[int] = frozenset({EOS}), compute: str = "torch") -> Answer:
    """The request alone in a fresh engine: one row, large blocks, whole prompt at once, nothing recorded."""
    key = repr((ask.prompt, ask.params, sorted(eos), compute))
    if key not in _SOLO:
        alone = engine(
            eos=eos,
            compute=compute,
            block_size=16,
            num_kv_blocks=8,
            max_num_seqs=1,
            max_num_batched_tokens=128,
            max_model_len=128,
            enforce_eager=True,
            capture_rows=None,
        )
        (_SOLO[key],) = play(alone, [attrs.evolve(ask, at=0, abort=None, priority=0)])
    return _SOLO[key]


def differences(asks: Sequence[Ask], answers: Sequence[Answer], compute: str = "torch") -> list[str]:
    """Where tokens, logprobs, logits digests or ends differ from the solo run; an aborted answer must be its beginning."""
    found = []
    for index, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        alone = solo(ask, compute=compute)
        if len(answer.ends) != 1:
            found.append(f"request {index} ended {len(answer.ends)} times")
            continue
        whole = answer.reason != "abort"
        expected = alone.sampled if whole else alone.sampled[: len(answer.sampled)]
        if answer.sampled != expected:
            at = next((i for i, pair in enumerate(zip(answer.sampled, expected)) if pair[0] != pair[1]), "the end")  # noqa: B905
            found.append(f"request {index} differs at {at}: {answer.tokens} is not {[s.token for s in expected]}")
        if whole and answer.reason != alone.reason:
            found.append(f"request {index} ended with {answer.reason}, alone with {alone.reason}")
    return found


def dense_logits(model: LoadedModel, tokens: Sequence[int]) -> Tensor:
    """Logits [len(tokens), vocab] by full attention over everything, in fp64, from the model's own tensors."""
    config = model.config

    def weight(name: str) -> Tensor:
        return model.source.load(name).double()

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * weight(name)

    size, half = config.head_dim, config.head_dim // 2
    angles = torch.outer(
        torch.arange(len(tokens)).double(), config.rope_theta ** (-torch.arange(half).double() * 2 / size)
    )

    def rotated(x: Tensor) -> Tensor:
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def linear(x: Tensor, name: str) -> Tensor:
        out = x @ weight(f"{name}.weight").T
        return out + weight(f"{name}.bias") if f"{name}.bias" in config.tensors() else out

    x = weight("model.embed_tokens.weight")[list(tokens)]
    future = torch.full((len(tokens), len(tokens)), float("-inf"), dtype=torch.float64).triu(1)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        inner = norm(x, f"{prefix}input_layernorm.weight")
        q, k, v = (linear(inner, f"{prefix}self_attn.{part}_proj").unflatten(-1, (-1, size)) for part in "qkv")
        if config.qk_norm:
            q, k = norm(q, f"{prefix}self_attn.q_norm.weight"), norm(k, f"{prefix}self_attn.k_norm.weight")
        groups = config.num_heads // config.num_kv_heads
        k, v = rotated(k).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", rotated(q), k) / size**0.5 + future
        x = x + linear(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1), f"{prefix}self_attn.o_proj")
        inner = norm(x, f"{prefix}post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(linear(inner, f"{prefix}mlp.gate_proj"))
        x = x + linear(gate * linear(inner, f"{prefix}mlp.up_proj"), f"{prefix}mlp.down_proj")
    return (
        norm(x, "model.norm.weight")
        @ weight("model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight").T
    )


# Running -----------------------------------------------------------------------------------------------------------


def play(engine: Engine, asks: Sequence[Ask], records: list[StepRecord] | None = None) -> list[Answer]:
    """Runs ``asks`` to the end and returns their answers; every iteration is judged by ``faults``, the end by ``held``.

    ``records``: where to keep what the iterations did.
    """
    answers = [Answer() for _ in asks]
    ids: dict[int, int] = {}
    iteration = 0
    last = max((max(ask.at, ask.abort or 0) for ask in asks), default=0)
    while engine.has_work or iteration <= last:
        for index, ask in enumerate(asks):
            if ask.at == iteration:
                ids[engine.submit(ask.prompt, ask.params, priority=ask.priority).requests[0]] = index
        for request, index in ids.items():
            if asks[index].abort == iteration:
                engine.abort(request)
        record = engine.step()
        for request, sampled in record.sampled:
            answers[ids[request]].sampled.append(sampled)
        for end in (*record.aborted, *record.finished):
            answers[ids[end.request]].ends.append(end)
        assert faults(engine, record) == [], f"iteration {iteration}"
        if records is not None:
            records.append(record)
        iteration += 1
        assert iteration < 20_000, "no end in sight"
    assert held(engine) == []
    return answers


def faults(engine: Engine, record: StepRecord) -> list[str]:
    """POOL-OK after one iteration, and whether it got anywhere."""
    found = [*engine.audit()]
    ledger = engine.ledger()
    owned = Counter(block for table in ledger.tables.values() for block in table)
    if sorted((*owned, *ledger.blank, *ledger.cached)) != list(range(engine.limits.num_blocks)):
        found.append(f"tables {ledger.tables}, blank {ledger.blank} and cached {ledger.cached} are not each block once")
    if list(ledger.references) != [owned[block] for block in range(engine.limits.num_blocks)]:
        found.append(f"references {ledger.references} do not count tables {ledger.tables}")
    if not engine.limits.prefix_cache and (ledger.cached or ledger.published or max(owned.values(), default=1) > 1):
        found.append(f"blocks are shared {owned} or cached {ledger.cached} without a prefix cache")
    if len(set(ledger.rows.values())) != len(ledger.rows) or ledger.rows.keys() != set(ledger.running):
        found.append(f"rows {ledger.rows} are not one for each of {ledger.running}")
    if ledger.waiting and not ledger.running:
        found.append(f"{ledger.waiting} wait, but nobody runs")
    if [request for request, _ in record.sampled] != [
        entry.request for entry in record.plan.sampling
    ] and not record.error:
        found.append("somebody got a token who was not to sample, or did not get it")
    if hasattr(engine.runner, "rows_state"):
        compute = {view.request: (view.row, view.table) for view in engine.runner.rows_state()}
        control = {request: (ledger.rows[request], ledger.tables[request]) for request in ledger.running}
        if compute != control:
            found.append(f"compute has {compute}, control {control}")
    return found


def held(engine: Engine) -> list[str]:
    """What is left when everything should be free."""
    ledger, limits = engine.ledger(), engine.limits
    found = [*engine.audit()]
    if ledger.waiting or ledger.running or engine.has_work:
        found.append(f"{ledger.waiting} wait and {ledger.running} run")
    if sorted((*ledger.blank, *ledger.cached)) != list(range(limits.num_blocks)) or any(ledger.references):
        found.append(f"blank are {ledger.blank}, cached {ledger.cached}, references {ledger.references}")
    if ledger.cached and not limits.prefix_cache:
        found.append(f"{ledger.cached} are cached without a prefix cache")
    if engine.scheduler.rows.num_free != limits.max_num_seqs or any(o is not None for o in engine.scheduler.rows.owner):
        found.append(f"rows belong to {engine.scheduler.rows.owner}")
    if hasattr(engine.runner, "rows_state") and engine.runner.rows_state():
        found.append(f"compute still has {engine.runner.rows_state()}")
    return found


class Watched:
    """A runner whose memory is watched. Tables are rebuilt here from the plans alone, slots in plain Python.

    ``complaints`` are collected, not raised, since the engine contains what execute raises.
    """

    def __init__(self, runner: PlanRunner) -> None:
        self.inner = runner
        self.complaints: list[str] = []
        self.tables: dict[int, list[int]] = {}  # by row
        self.filled: dict[int, int] = {}  # positions with K/V, by row
        self.full: set[int] = set()  # blocks written to the end since they were handed out: content that may be hit

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def execute(self, plan: Plan) -> Sequence[Sampled]:
        self._follow(plan)
        expected = {self._cell(row, position) for row, position in _written(plan)}
        self._poison()
        before = [part.clone() for part in self.inner.pool.parts]
        sampled = self.inner.execute(plan)
        changed: set[tuple[int, int]] = set()
        for old, new in zip(before, self.inner.pool.parts, strict=True):
            differs = (old.view(torch.int32) != new.view(torch.int32)).any(dim=3)
            everywhere, anywhere = differs.all(dim=1), differs.any(dim=1)
            changed |= {(int(b), int(o)) for b, o in anywhere.nonzero() if b != self.inner.pool.trash_block}
            if not all(everywhere[block, offset] for block, offset in expected):
                self.complaints.append(f"iteration {plan.iteration}: a layer did not write all of {sorted(expected)}")
        if changed != expected:
            self.complaints.append(f"iteration {plan.iteration}: wrote {sorted(changed)}, not {sorted(expected)}")
        for row, position in _written(plan):
            self.filled[row] = max(self.filled[row], position + 1)
            if position % self.inner.limits.block_size == self.inner.limits.block_size - 1:
                self.full.add(self._cell(row, position)[0])
        return sampled

    def _follow(self, plan: Plan) -> None:
        size = self.inner.limits.block_size
        for row in plan.vacated:
            del self.tables[row], self.filled[row]
        for grow in plan.grown:
            self.full.discard(grow.block)
            if grow.row in self.tables:
                self.tables[grow.row].append(grow.block)
        for move in plan.moves:
            _relabel(self.tables, move)
            _relabel(self.filled, move)
        starts = {chunk.request: chunk.start for chunk in plan.chunks}
        for seat in plan.seated:
            hits = starts[seat.request] // size
            self.tables[seat.row], self.filled[seat.row] = list(seat.table), hits * size
            if not self.full.issuperset(seat.table[:hits]):
                self.complaints.append(
                    f"iteration {plan.iteration}: {seat.table[:hits]} are hits, full are {self.full}"
                )
            self.full.difference_update(seat.table[hits:])

    def _cell(self, row: int, position: int) -> tuple[int, int]:
        size = self.inner.limits.block_size
        return self.tables[row][position // size], position % size

    def _poison(self) -> None:
        """NaN wherever no live request has computed K/V and no hit can lie; the zero block is the engine's own."""
        pool = self.inner.pool
        keep = torch.zeros(pool.layers[0].shape[1], pool.block_size, dtype=torch.bool)
        keep[pool.zero_block] = True
        for row, count in self.filled.items():
            for position in range(count):
                keep[self._cell(row, position)] = True
        if self.inner.limits.prefix_cache:
            keep[list(self.full)] = True
        for part in pool.parts:
            part.masked_fill_(~keep[:, None, :, None], float("nan"))


def _written(plan: Plan) -> list[tuple[int, int]]:
    """(row, position) of all K/V that a plan computes."""
    chunks = [(chunk.row, chunk.start + at) for chunk in plan.chunks for at in range(len(chunk.tokens))]
    return chunks + [(decode.row, decode.position) for decode in plan.decodes]


def _relabel(store: dict[int, T], move: Move) -> None:
    entry, other = store.pop(move.src), store.pop(move.dst, None)
    store[move.dst] = entry
    if other is not None:
        store[move.src] = other
