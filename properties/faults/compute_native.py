"""Faults of the native kernels' network, tape and drawing: what torch's kernels have no counterpart of.

A tape keeps addresses, so a copy that is taken while it is recorded is never filled again; and the drawing kernel knows of a
row only what was written beside its logits.
"""

from __future__ import annotations

from properties.arming import Fault, in_area, line

NETWORK = "engine.native.network:NativeNetwork"
DRAW = "engine.native.draw:NativeDraw"
SAMPLED_ROW = "engine.compute.sampling_row:RowState"

TAPE = in_area(
    "graph replay",
    Fault(
        "N51",
        "a tape reads the block tables that stood there while it was recorded",
        ("decisions", "writes", "tokens", "solo"),
        line(NETWORK, "_decode", "step.positions, tables)", "step.positions, tables.clone())"),
        rules=("12.6",),
        needs="replayed",
    ),
    Fault(
        "N52",
        "a tape attends up to the positions that stood there while it was recorded",
        ("tokens", "solo"),
        line(NETWORK, "_decode", "step.positions, tables)", "step.positions.clone(), tables)"),
        rules=("12.6",),
        needs="replayed",
    ),
    rung="native",
)
PLACES = in_area(
    "rows",
    Fault(
        "N53",
        "all requests of a prefill attend over the first one's block table",
        ("decisions", "writes", "solo"),
        line(NETWORK, "_prefill", "step.positions[part], span.table", "step.positions[part], spans[0].table"),
    ),
    Fault(
        "N54",
        "keys and values go where their token stands in its request, not where its block lies",
        ("decisions", "writes", "solo"),
        line(NETWORK, "_layers", "(step.positions, step.slots)", "(step.positions, step.positions)"),
    ),
    rung="native",
)
DRAWS = in_area(
    "sampler",
    Fault(
        "N55",
        "how a row is drawn is told to the kernel once, whoever sits there later",
        ("tokens", "solo"),
        line(DRAW, "__call__", "self._written[:n] != wishes", "b'' in self._written[:n]"),
        rules=("14.1",),
    ),
    Fault(
        "N56",
        "the noise of all rows of a step is that of the first one's position",
        ("tokens", "solo"),
        line(DRAW, "__call__", "self._cells[place] = position", "self._cells[place] = positions[0]"),
        rules=("14.2",),
    ),
    Fault(
        "N57",
        "the peaks of the last decode step are taken for those of any logits",
        ("raises",),
        line(DRAW, "_call", "self._peaks(n) if of_head else None", "self._peaks(n)"),
    ),
    Fault(
        "N58",
        "the kernel draws with the number of the row as its seed",
        ("tokens", "solo"),
        line(SAMPLED_ROW, "__init__", "struct.pack(_WISH, self.seed & MASK", "struct.pack(_WISH, seat.row & MASK"),
        rules=("14.2",),
    ),
    rung="native",
)
FAULTS: tuple[Fault, ...] = (*TAPE, *PLACES, *DRAWS)
