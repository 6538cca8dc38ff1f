"""Prometheus metrics with vLLM's names and meanings behind a prefix of our own, and what only this engine counts.

Latencies are measured on the engine thread, step by step, and observed on the event loop while the next step computes.
Everything that the engine counts itself is not counted twice: each step leaves a frozen reading, and a scrape turns the
latest one into samples. A registry of its own per application.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import attrs
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.control.counters import Counters
from engine.control.record import StepRecord
from server.check import Checker
from server.outlet import Outlet
from server.sinks import StepTimes

if TYPE_CHECKING:
    from engine.engine import Engine

_Key = TypeVar("_Key", bound=tuple[str, ...])

_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_BETWEEN = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_COUNTED = tuple(field.name for field in attrs.fields(Counters))
_E2E = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


@attrs.frozen
class Reading:
    """The engine's gauges and totals between two steps."""

    waiting: int = 0
    running: int = 0
    blocks: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0  # of the free ones: their content is still a hit
    rows: int = 0
    free_rows: int = 0
    recorded: int = 0  # graphs, since start
    counters: Counters = attrs.field(factory=Counters)
    judged: Mapping[str, int] = attrs.field(factory=dict)  # of the ends in ``counters``, those that the server judges
    schedule_seconds: float = 0.0
    execute_seconds: float = 0.0  # the sampler included
    sample_seconds: float = 0.0

    @classmethod
    def of(cls, engine: Engine, judged: Mapping[str, int] | None = None) -> Reading:
        """Must be called on the engine thread."""
        scheduler = engine.scheduler
        return cls(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            blocks=engine.limits.num_blocks,
            free_blocks=scheduler.pool.num_free,
            cached_blocks=scheduler.pool.num_cached,
            rows=engine.limits.max_num_seqs,
            free_rows=scheduler.rows.num_free,
            recorded=getattr(engine.runner, "recorded", 0),
            counters=_kept(scheduler.counters),
            judged=judged or {},
            schedule_seconds=engine.seconds.schedule,
            execute_seconds=engine.seconds.execute,
            sample_seconds=getattr(engine.runner, "sample_seconds", 0.0),
        )


def _kept(counters: Counters) -> Counters:
    """A copy that the engine does not change. By hand, for ``copy`` and ``evolve`` take ten times as long, each step."""
    kept = object.__new__(Counters)
    for name in _COUNTED:
        value = getattr(counters, name)
        if isinstance(value, Count):
            value, found = Count(), value
            dict.update(value, found)  # Count's own goes through its keys one by one
        setattr(kept, name, value)
    return kept


class Metrics:
    """A sink of the bridge. ``model_name`` may be anything; the exposition format escapes it."""

    def __init__(
        self,
        prefix: str = "lockstep",
        model_name: str = "",
        checker: Checker | None = None,
        outlet: Outlet | None = None,
    ) -> None:
        self.prefix = prefix
        self.checker = checker or Checker()
        self.outlet = outlet or Outlet()
        self.model_name = model_name
        self.text_seconds = 0.0
        self.turned_away: Callable[[], int] = lambda: 0  # requests, by a glance at the queue
        self.told: Callable[[], Mapping[str, int]] = dict  # how the ends that the server judges were told
        self.reading = Reading()
        self._judged: Mapping[str, int] = {}  # replaced, never changed: readings hold it
        self.registry = CollectorRegistry()
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _TTFT)
        self._between = self._histogram("inter_token_latency_seconds", "Between two tokens of a request.", _BETWEEN)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end of an answer.", _E2E)
        self._prompt_tokens = Counter(
            f"{prefix}:prompt_tokens",
            "Prompt tokens of requests that reached their first token.",
            ["model_name", "engine"],
            registry=self.registry,
        )
        self._queries = Counter(
            f"{prefix}:prefix_cache_queries",
            "Tokens that admissions looked up in the prefix cache, those of resumed requests included.",
            ["model_name", "engine"],
            registry=self.registry,
        )
        self.registry.register(_Readings(self))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"{self.prefix}:{name}", text, ["model_name", "engine"], buckets=buckets, registry=self.registry
        )

    def start(self, engine: Engine) -> None:
        """The first reading, on the engine thread."""
        self.reading = Reading.of(engine)

    def step(self, engine: Engine, record: StepRecord, times: StepTimes) -> Callable[[], None]:
        """The reading is taken now; what it returns observes the latencies, on the event loop."""
        asked = sum(len(seat.tokens) for seat in record.plan.seated) if engine.limits.prefix_cache else 0
        self.text_seconds += times.text
        if times.judged:
            self._judged = Count(self._judged) + Count(times.judged)
        self.reading = Reading.of(engine, self._judged)
        return partial(self._observe, times, asked)

    def _observe(self, times: StepTimes, asked: int) -> None:
        labels = (self.model_name, "0")
        for histogram, values in (
            (self._ttft, times.first_tokens),
            (self._between, times.between_tokens),
            (self._e2e, times.ends),
        ):
            child = histogram.labels(*labels)
            for value in values:
                child.observe(value)
        self._prompt_tokens.labels(*labels).inc(times.prompt_tokens)
        self._queries.labels(*labels).inc(asked)

    def refused(self) -> Mapping[str, int]:
        """Requests that the queue refused, by reason: at the door, and at a glance before it."""
        return self.reading.counters.refused + Count(queue_full=self.turned_away())

    def ended(self) -> Mapping[str, int]:
        """Requests that ended, by the reason that their client was told: an answer that failed in the server is an error,
        whatever the engine made of it. What the engine ended well counts when it has been told, so nothing is counted twice."""
        return Count(self.reading.counters.finished) - Count(self.reading.judged) + Count(self.told())

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


class _Readings(Collector):
    """Turns the latest reading into samples."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        reading = self._metrics.reading
        counters = reading.counters
        checker = self._metrics.checker
        outlet = self._metrics.outlet
        finished = self._metrics.ended()
        used = reading.blocks - reading.free_blocks
        yield self._gauge("num_requests_running", "Requests that hold a row.", reading.running)
        yield self._gauge("num_requests_waiting", "Requests in the queue, preempted ones included.", reading.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used / max(1, reading.blocks))
        yield self._gauge("sends_blocked", "Sends that wait for their reader now.", outlet.blocked)
        yield self._states("blocks", "KV blocks.", {"used": used, "free": reading.free_blocks})
        yield self._gauge("cached_blocks", "Free KV blocks that still hold a prefix.", reading.cached_blocks)
        yield self._states("rows", "Cache rows.", {"used": reading.rows - reading.free_rows, "free": reading.free_rows})
        for name, text, value in (
            ("num_preemptions", "Requests that gave their blocks back and started over.", counters.preemptions),
            ("prefix_cache_hits", "Tokens that admissions found in the prefix cache.", counters.prefix_hit_tokens),
            ("generation_tokens", "Tokens sampled.", counters.sampled_tokens),
            ("iterations", "Iterations of the engine.", counters.iterations),
            ("decode_steps", "Iterations in which a row decoded.", counters.decode_steps),
            ("padded_rows", "Rows that a replayed graph computed for nobody.", counters.padded_rows),
            ("row_moves", "Requests relabelled by compaction.", counters.row_moves),
            ("recomputed_tokens", "Tokens computed again after a preemption.", counters.recomputed_tokens),
            ("failed_steps", "Iterations whose computation raised.", counters.failed_steps),
            ("invariant_checks", "Audits of the engine between iterations.", checker.checks),
            ("invariant_violations", "What those audits found.", checker.violations),
            ("invariant_check_seconds", "What they took.", checker.seconds),
            ("slow_readers_dropped", "Clients cut off because they did not read.", outlet.dropped),
            ("send_blocked_seconds", "What sends have waited for their readers.", outlet.blocked_seconds),
            ("requests_timed_out", "Requests ended by --request-timeout.", outlet.timed_out),
            (
                "requests_aborted",
                "Requests ended by their client, by --request-timeout or by a shutdown.",
                finished.get("abort", 0),
            ),
        ):
            yield self._total(name, text, (), {(): value})
        ended = {(reason,): count for reason, count in finished.items()}
        yield self._total("request_success", "Requests that ended, by reason.", ("finished_reason",), ended)
        refused = {(reason,): count for reason, count in self._metrics.refused().items()}
        yield self._total("requests_refused", "Requests that the queue refused.", ("reason",), refused)
        replays = {(str(rows), str(width)): count for (rows, width), count in counters.replays.items()}
        yield self._total("replays", "Decode steps replayed from a recorded graph.", ("rows", "width"), replays)
        in_text = self._metrics.text_seconds
        split = {
            ("schedule",): max(0.0, reading.schedule_seconds - in_text),
            ("execute",): reading.execute_seconds - reading.sample_seconds,
            ("sample",): reading.sample_seconds,
            ("text",): in_text,
        }
        yield self._total("step_seconds", "Where the time of iterations went.", ("stage",), split)
        eager = {(reason,): count for reason, count in counters.eager.items()}
        yield self._total("eager_steps", "Decode steps without a recorded graph.", ("reason",), eager)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self._metrics.prefix}:{name}", text, labels=["model_name", "engine"])
        family.add_metric([self._metrics.model_name, "0"], value)
        return family

    def _states(self, name: str, text: str, values: dict[str, int]) -> Metric:
        family = GaugeMetricFamily(f"{self._metrics.prefix}:{name}", text, labels=["model_name", "engine", "state"])
        for state, value in values.items():
            family.add_metric([self._metrics.model_name, "0", state], value)
        return family

    def _total(self, name: str, text: str, labels: tuple[str, ...], values: Mapping[_Key, float]) -> Metric:
        """A counter; Prometheus' text format adds ``_total`` to its name."""
        family = CounterMetricFamily(f"{self._metrics.prefix}:{name}", text, labels=["model_name", "engine", *labels])
        for key, value in values.items():
            family.add_metric([self._metrics.model_name, "0", *key], value)
        return family
