"""Faults between the plan and the kernels, and in the kernels: what the ledger rung cannot see, since it computes nothing.

``rows`` sees what is read and written where, ``staged`` also whether it is sent to the device; ``tiny`` sees what is computed of
it and how that is sampled.
"""

from __future__ import annotations

from properties.arming import Fault, in_area, instead, line
from properties.faults import compute_bodies as bodies

RUNNER = "engine.compute.runner:PlanRunner"
RUNNER_MODULE = "engine.compute.runner"
INPUTS = "engine.compute.inputs:StaticInputs"
UPLOAD = "engine.compute.staging:Upload"
ROW_STATE = "engine.compute.row_state:RowState"
SAMPLER = "engine.compute.sampler:Sampler"
SAMPLED_ROW = "engine.compute.sampling_row:RowState"
KERNELS = "engine.compute.attention"  # the names through which attention reaches its kernels

PADDING = in_area(
    "graph replay",
    Fault(
        "N01",
        "padded rows write where the last real row writes",
        ("writes", "solo"),
        line(
            INPUTS, "fill", "host[n:] = entry.fill", "host[n:] = host[n - 1] if entry.name == 'slots' else entry.fill"
        ),
        source="vllm-project/vllm#43810",
        rules=("12.6",),
        needs="padded",
    ),
    Fault(
        "N02",
        "padded rows write where row 0 writes",
        ("writes", "solo"),
        line(INPUTS, "fill", "host[n:] = entry.fill", "host[n:] = host[0] if entry.name == 'slots' else entry.fill"),
        source="m0at/rvllm PR#32",
        rules=("12.6",),
        needs="padded",
    ),
    Fault(
        "N03",
        "padded rows keep what the buffers held before",
        ("writes",),
        line(INPUTS, "fill", "host[n:] = entry.fill", "pass"),
        rules=("12.6",),
        needs="padded",
    ),
    Fault(
        "N04",
        "block tables are copied only for steps that pad",
        ("writes", "solo"),
        line(INPUTS, "fill", "host[:n] = value", "if not entry.wide or n < rows: host[:n] = value"),
        rules=("12.6",),
        needs="exact replay",
    ),
    Fault(
        "N05",
        "input tokens are copied only when the number of rows changes",
        ("writes", "solo"),
        instead(INPUTS, "fill", bodies.keeps_the_first_tokens),
        rules=("12.6",),
    ),
    Fault(
        "N06",
        "a graph is recorded over the block tables of the last rows instead of the first",
        ("writes", "solo"),
        line(
            RUNNER,
            "_record",
            "tokens, table_view = self.inputs.step(*shape)",
            "tokens, table_view = self.inputs.step(*shape)\n"
            "    table_view = self.inputs.host['tables'][-shape[0] :, : shape[1]]",
        ),
        rules=("12.6",),
    ),
    Fault(
        "N07",
        "the logits of a padded step are taken from its last rows",
        ("tokens", "solo"),
        line(RUNNER, "_decode", "self._logits[shape][: len(rows)]", "self._logits[shape][-len(rows) :]"),
        rules=("12.6",),
        needs="padded",
    ),
    Fault(
        "N08",
        "padded rows write to the first slot of the pool instead of the trash block",
        ("writes",),
        line("engine.compute.inputs", "declare", '"slots", False, pool.trash_slot', '"slots", False, 0'),
        rules=("12.6",),
        needs="padded",
    ),
    rung="rows",
)
STANDING = in_area(
    "graph replay",
    Fault(
        "N61",
        "a decode step goes on from the one before though rows were given or taken in between",
        ("writes", "solo"),
        line(ROW_STATE, "apply", "self.epoch += 1", "pass"),
        rules=("12.6",),
    ),
    Fault(
        "N62",
        "a row that enters a block writes behind the one before",
        ("writes", "solo"),
        line(INPUTS, "go_on", "entered[row] if row in entered else slots[row] + 1", "slots[row] + 1"),
        rules=("12.6",),
    ),
    Fault(
        "N63",
        "a new block is missing in the tables of a step that goes on from the one before",
        ("tokens", "solo"),
        line(INPUTS, "go_on", "in grown.items()", "in ()"),
        rules=("12.6",),
    ),
    Fault(
        "N64",
        "of several rows with a new block only the first is told to a step that goes on",
        ("tokens", "solo"),
        line(RUNNER, "_go_on", "for grow in plan.grown if", "for grow in plan.grown[:1] if"),
        rules=("12.6",),
    ),
    rung="rows",
)
STAGING = in_area(
    "graph replay",
    Fault(
        "N65",
        "a step that goes on from the one before is written, but not sent to the device",
        ("writes", "solo"),
        line(INPUTS, "go_on", "self.send(rows, width)", "pass"),
        rules=("12.6",),
    ),
    Fault(
        "N66",
        "the last number of what a step reads is not sent to the device",
        ("writes", "solo"),
        line(
            UPLOAD,
            "write",
            "self._device[:end].copy_(self._host[:end], non_blocking=True)",
            "self._device[: end - 1].copy_(self._host[: end - 1], non_blocking=True)",
        ),
    ),
    rung="staged",
)
PLACES = in_area(
    "rows",
    Fault(
        "N11",
        "the positions of a later chunk are off by one",
        ("writes", "solo"),
        line(RUNNER, "_prefill_batch", "dtype=np.int64) for c", "dtype=np.int64) - (c.start > 0) for c"),
        needs="chunked",
    ),
    Fault(
        "N12",
        "a decoding row at the start of a block writes into the block before",
        ("writes", "solo"),
        line(RUNNER, "slots", "positions // self", "(positions - 1) // self"),
    ),
    Fault(
        "N13",
        "a chunk samples from the token before its last",
        ("tokens", "solo"),
        line(RUNNER, "_prefill_batch", "as_rows([end - 1 for", "as_rows([max(end - 2, 0) for"),
    ),
    Fault(
        "N14",
        "all slots of a batch are taken from the table of its first row",
        ("writes", "solo"),
        line(
            RUNNER,
            "_prefill_batch",
            "self.slots(rows, positions)",
            "self.slots(np.full_like(rows, rows[0]), positions)",
        ),
    ),
    Fault(
        "N15",
        "a resumed request trusts its old rows",
        ("writes", "solo"),
        instead(RUNNER, "execute", bodies.resume_trusts_old_rows),
        rules=("6.3",),
        needs="resumed",
    ),
    Fault(
        "N17",
        "a chunk that is cut samples at each cut",
        ("raises",),
        line(RUNNER_MODULE, "cut_chunks", "chunk.samples and last", "chunk.samples"),
    ),
    Fault(
        "N18",
        "the second part of a cut chunk begins at its first position again",
        ("writes", "solo"),
        line(RUNNER_MODULE, "cut_chunks", "chunk.start + done", "chunk.start"),
    ),
    Fault(
        "N21",
        "a swap copies the table instead of exchanging two",
        ("writes", "solo"),
        line(
            ROW_STATE,
            "_move",
            "self.tables[[src, dst]] = self.tables[[dst, src]]",
            "self.tables[dst] = self.tables[src]",
        ),
        rules=("7.4", "7.5"),
        needs="swapped",
    ),
    Fault(
        "N22",
        "a move forgets how long the table is",
        ("writes", "solo"),
        line(ROW_STATE, "_move", "self.lengths[dst] = self.lengths[src]", "pass"),
        rules=("7.5",),
        needs="moved",
    ),
    Fault(
        "N23",
        "new blocks go to the rows as they are after the moves",
        ("writes",),
        instead(ROW_STATE, "apply", bodies.grows_after_moving),
        rules=("3.1",),
        needs="moved",
    ),
    Fault(
        "N24",
        "a move leaves the sampling state behind",
        ("raises",),
        line(ROW_STATE, "apply", "follower.move(move)", "pass"),
        rules=("7.5",),
        needs="moved",
    ),
    rung="rows",
)
SAMPLING = in_area(
    "sampler",
    Fault(
        "N31",
        "a swap leaves the displaced row with the other's sampling state",
        ("tokens", "solo"),
        line(SAMPLER, "move", "states[move.dst] if move.swap", "states[move.src] if move.swap"),
        source="vllm-project/vllm PR#49613",
        rules=("7.5",),
        needs="swapped",
    ),
    Fault(
        "N32",
        "noise is keyed by the position before",
        ("tokens", "solo"),
        line(RUNNER_MODULE, "_next_position", "entry.position + 1", "entry.position"),
        rules=("14.2",),
    ),
    Fault(
        "N34",
        "all rows of a step draw from the noise of the first",
        ("tokens", "solo"),
        line(SAMPLER, "sample", "states[i], positions[i], sampled", "states[i], positions[special[0]], sampled"),
        rules=("14.2",),
    ),
    rung="tiny",
)
MASKS = in_area(
    "sampler",
    Fault(
        "N33",
        "stop tokens are masked for one token longer than min_tokens",
        ("decisions", "solo"),
        line(SAMPLED_ROW, "__init__", "params.min_tokens if len", "params.min_tokens + 1 if len"),
        rules=("13.2",),
    ),
    Fault(
        "N35",
        "a resumed request counts min_tokens anew",
        ("decisions", "solo"),
        line(SAMPLED_ROW, "__init__", "seat.prompt_len + params", "len(seat.tokens) + params"),
        rules=("14.1",),
        needs="resumed",
    ),
    rung="rows",
)
ARITHMETIC = in_area(
    "rows",
    Fault(
        "N41",
        "attention reads one row short",
        ("tokens", "solo"),
        line(KERNELS, "context_rows", "torch.gt(lanes, last, out=outside)", "torch.ge(lanes, last, out=outside)"),
    ),
    Fault(
        "N42",
        "attention reads one row too many",
        ("decisions", "writes", "solo"),
        line(KERNELS, "context_rows", "torch.gt(lanes, last, out=outside)", "torch.gt(lanes, last + 1, out=outside)"),
    ),
    Fault(
        "N43",
        "a chunk's queries see the position behind them",
        ("tokens", "solo"),
        line(KERNELS, "mask_future", "torch.gt(lanes, queries, out=out)", "torch.gt(lanes, queries + 1, out=out)"),
    ),
    Fault(
        "N44",
        "values are written one head too far",
        ("decisions", "writes", "solo"),
        line(
            "engine.compute.kv:KVPool",
            "slots",
            "blocks * (self.kv_heads * self.block_size) + offsets",
            "blocks * (self.kv_heads * self.block_size) + offsets + (offsets == self.block_size - 1)",
        ),
    ),
    rung="tiny",
)
FAULTS: tuple[Fault, ...] = (*PADDING, *STANDING, *STAGING, *PLACES, *SAMPLING, *MASKS, *ARITHMETIC)
