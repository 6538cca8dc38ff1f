"""Mistakes for the laws: each is one that changing some setting shows, and what is told of it is told by no specification.

Every law has at least one mistake here that it alone sees (``properties.law_matrix`` judges that), because that mistake needs
the very setting that the law changes. They are patched into names of ``engine.*`` from outside, like the catalogue's. They are
no entries of it: they are hunted with lists of requests, not with workloads. ``expect`` names laws here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from properties import law_bodies as bodies
from properties.arming import Fault, arm, instead, line
from properties.faults import CATALOGUE

RUNNER = "engine.compute.runner:PlanRunner"
ROWS = "engine.compute.row_state:RowState"
SAMPLER = "engine.compute.sampler:Sampler"
SCHEDULER = "engine.control.scheduler:Scheduler"
DECODER = "engine.compute.decoder:Decoder"
ENGINE = "engine.engine:Engine"

_SEES = "asking = step.positions[part]"
_SEATED = "self.tables[seat.row, : len(seat.table)] = seat.table"
_FED = "request.tokens[request.computed : request.computed + count]"
_SPEC = "SamplingSpec(params, seed, masked) for seed in seeds"
_FIRST = "[request.tokens[0]] * count"

# Each is seen by the law that it is listed under and by no other.
_SOLE = (
    Fault(
        "W01",
        "whoever comes first and alone is fed its first token only, as if to warm up",
        ("neighbours",),
        line(SCHEDULER, "_chunk", _FED, f"{_FIRST} if (self.iteration, len(self.requests)) == (0, 1) else {_FED}"),
    ),
    Fault(
        "W02",
        "whether anybody samples is settled by the first request of the engine",
        ("order",),
        instead(ENGINE, "submit", bodies.the_first_request_settles_whether_anybody_samples),
    ),
    Fault(
        "W03",
        "where there is a single row, the first block stands in its whole table",
        ("rows",),
        line(ROWS, "_seat", _SEATED, f"{_SEATED}[0] if len(self.requests) == 1 else seat.table"),
    ),
    Fault(
        "W04",
        "a table has one place less than the pool has blocks, and its last place is taken twice",
        ("pool",),
        line(
            RUNNER,
            "slots",
            "positions // self.limits.block_size",
            "np.minimum(positions // self.limits.block_size, max(0, self.limits.num_blocks - 2))",
        ),
    ),
    Fault(
        "W05",
        "offsets in a block are cut to three bits",
        ("block size",),
        line(RUNNER, "slots", "positions % self.limits.block_size", "positions % self.limits.block_size & 7"),
    ),
    Fault(
        "W06",
        "with a budget below 16, a chunk that begins behind the second position of a block is one position early",
        ("budget",),
        line(
            RUNNER,
            "_prefill_batch",
            "dtype=np.int64) for c",
            "dtype=np.int64) - (self.limits.max_num_batched_tokens < 16 and c.start % self.limits.block_size > 1) for c",
        ),
    ),
    Fault(
        "W07",
        "where some shapes are missing, a step that is not captured reads the tables in reverse",
        ("captures",),
        line(
            RUNNER,
            "_decode",
            "self.rows.tables[rows],",
            "self.rows.tables[rows[::-1] if launch.reason == 'uncaptured' and self._logits else rows],",
        ),
    ),
    Fault(
        "W08",
        "without graphs, a decoding row is told the position of the token before",
        ("graphs",),
        line(RUNNER, "_fill", '"positions": positions', '"positions": positions - (not self._logits)'),
    ),
    Fault(
        "W09",
        "scattered rows read the tables of the first rows",
        ("persistent batch",),
        line(RUNNER, "_decode", "self.rows.tables[rows],", "self.rows.tables[: len(rows)],"),
    ),
    Fault(
        "W10",
        "without the prefix cache, a later chunk is one position early",
        ("prefix cache",),
        line(
            RUNNER,
            "_prefill_batch",
            "dtype=np.int64) for c",
            "dtype=np.int64) - (c.start > 0 and not self.limits.prefix_cache) for c",
        ),
    ),
    Fault(
        "W11",
        "whoever wakes an engine that has worked before is served for its first token only",
        ("warm",),
        line(
            SCHEDULER,
            "submit",
            "list(submission.prompt)",
            "list(submission.prompt[:1] if not self.requests and self.counters.sampled_tokens else submission.prompt)",
        ),
    ),
    Fault(
        "W12",
        "without the prefix cache, a resumed request is computed again from its first token",
        ("preemption",),
        line(
            SCHEDULER,
            "_chunk",
            _FED,
            f"{_FIRST} if request.preemptions and not self.limits.prefix_cache else {_FED}",
        ),
    ),
    Fault(
        "W13",
        "an abort frees the last block of the youngest other request as well",
        ("aborts",),
        instead(SCHEDULER, "_reap", bodies.an_abort_frees_the_block_of_another),
    ),
    Fault(
        "W14",
        "sampling options stand in one table for the process, and rows that an engine left occupied keep theirs",
        ("restart",),
        instead(ROWS, "apply", bodies.one_table_of_options_for_all_engines),
    ),
    Fault(
        "W15",
        "every choice is drawn with the first one's seed",
        ("choices",),
        line(ENGINE, "submit", _SPEC, "SamplingSpec(params, seeds[0], masked) for _ in seeds"),
    ),
    Fault(
        "W16",
        "logits of a step with several padded rows are rotated when a resumed request takes its row in it",
        ("mixture",),
        instead(RUNNER, "_decode", bodies.a_resumed_request_turns_padded_logits),
    ),
)

# These are nearer to what happens, and more than one law sees them.
_SHARED = (
    Fault(
        "W21",
        "a product's last bits depend on the number of rows",
        ("neighbours",),
        instead("engine.compute.linear:Linear", "apply", bodies.rows_change_the_product),
    ),
    Fault("W22", "noise is keyed by the row as well", ("order",), instead(SAMPLER, "sample", bodies.noise_of_the_row)),
    Fault(
        "W23",
        "rows from the fourth on get the noise of another position",
        ("rows",),
        instead(SAMPLER, "sample", bodies.noise_of_the_fourth_row),
    ),
    Fault(
        "W24",
        "what a resumed request generated is computed again as its first token",
        ("pool",),
        line(
            SCHEDULER,
            "_chunk",
            _FED,
            "request.tokens[min(at, request.prompt_len)] for at in range(request.computed, request.computed + count)",
        ),
    ),
    Fault(
        "W25",
        "a chunk that begins inside a block of four sees one position less",
        ("budget",),
        line(DECODER, "prefill", _SEES, f"{_SEES} - int(span.start % 4 > 0)"),
    ),
    Fault(
        "W26",
        "padded rows repeat the first row's token and slot",
        ("captures",),
        line(
            "engine.compute.inputs:StaticInputs",
            "fill",
            "host[n:] = entry.fill",
            "host[n:] = entry.fill if entry.wide else host[:1] + 0",
        ),
    ),
    Fault(
        "W27",
        "every fifth replay is left out, and the last one's logits are read again",
        ("graphs",),
        line(RUNNER, "_decode", "self._graphs.replay(shape)", "plan.iteration % 5 == 4 or self._graphs.replay(shape)"),
    ),
    Fault(
        "W28",
        "a request that moves draws with the seed of its new row",
        ("persistent batch",),
        instead(ROWS, "apply", bodies.the_seed_stays_with_the_row),
    ),
    Fault(
        "W29",
        "of a block's tokens the first alone is its key",
        ("prefix cache",),
        instead("engine.control.prefix", "block_key", bodies.a_block_is_its_first_token),
    ),
    Fault(
        "W30",
        "behind a hit, attention reads one position short",
        ("warm",),
        line(DECODER, "prefill", _SEES, f"{_SEES} - int(span.start > 0)"),
    ),
    Fault(
        "W31",
        "a resumed request draws from another stream",
        ("preemption",),
        instead(ROWS, "apply", bodies.a_resumed_request_has_another_seed),
    ),
    Fault(
        "W32",
        "noise depends on the engine's number",
        ("restart",),
        instead(SAMPLER, "sample", bodies.each_engine_draws_its_own_noise),
    ),
    Fault(
        "W33",
        "logits of a padded step are rotated when prompts are computed beside it",
        ("mixture",),
        instead(RUNNER, "_decode", bodies.prompts_turn_padded_logits),
    ),
)
LAW_FAULTS: Mapping[str, Fault] = {fault.id: fault for fault in (*_SOLE, *_SHARED)}


def any_fault(fault: str) -> Fault:
    """Of the laws or of the catalogue. Raises ``KeyError``."""
    return LAW_FAULTS[fault] if fault in LAW_FAULTS else CATALOGUE[fault]


@contextmanager
def armed_for_laws(fault: str | None) -> Iterator[None]:
    """As ``faults.armed``, for the laws' own faults too."""
    if fault is None:
        yield
        return
    with arm(any_fault(fault).change()):
        yield
