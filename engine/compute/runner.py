"""PlanRunner: executes plans. Row operations first, then prefill, then one decode step, then the sampler.

    Plan -> row operations (block tables and sampler, before anything can raise)
         -> chunks: eager, together, in batches of at most PREFILL_TOKENS; one whose prompt logprobs are wanted goes alone,
            in batches as small as the head's buffer
         -> decodes: the captured step that the plan names, or the same step eagerly
         -> one sampler call over plan.sampling

If anything raises, the row operations stay applied, so that rows are what control believes them to be. What computes is a
``Network``; ``ModelRunner`` is the runner over a model's transformer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.compute.graphs import Shape, eagerly
from engine.compute.inputs import StaticInputs, as_rows
from engine.compute.kv import kv_bytes_per_block
from engine.compute.network import MakeNetwork, Sizes, Span, Tokens, draw_of
from engine.compute.row_state import RowState, RowView
from engine.compute.sampler import Sampler
from engine.compute.staging import Upload
from engine.compute.standing import Standing
from engine.compute.transformer import Transformer
from engine.compute.weights import Progress, Weights, load_weights
from engine.control.limits import Limits
from engine.control.plan import Chunk, Decode, Plan, Replay, Sampled
from engine.loading.model import LoadedModel

__all__ = ["ModelRunner", "PlanRunner", "kv_bytes_per_block"]

Places = npt.NDArray[np.int64] | int
PREFILL_TOKENS = 512  # in one batch; a longer prefill is cut, which changes no bit and bounds the scratch
PROMPT_LOGITS = 16  # rows of logits that a batch of prompt logprobs may have even where fewer requests can run


class PlanRunner:
    """Any network behind ``Runner``. ``prefill_tokens`` bounds one prefill batch.

    ``staged``: what a step reads goes to the device in one copy; by default on CUDA.
    """

    def __init__(
        self,
        limits: Limits,
        make_network: MakeNetwork,
        *,
        prefill_tokens: int = PREFILL_TOKENS,
        staged: bool | None = None,
    ) -> None:
        self.limits = limits
        sizes = sizes_of(limits, prefill_tokens)
        self._prefill_tokens = sizes.prefill_tokens
        self._prompt_logits = sizes.prefill_samples
        self.network = make_network(sizes)
        self.pool = self.network.pool
        self._device = self.network.device
        staged = self._device.type == "cuda" if staged is None else staged
        self.inputs = StaticInputs(sizes.rows, sizes.width, self.pool, self._device, staged=staged)
        tables = min(sizes.prefill_tokens, limits.max_num_seqs) * sizes.width
        self._upload = Upload(4 * sizes.prefill_tokens + tables, self._device) if staged else None
        self.rows = RowState(limits.max_num_seqs, sizes.width, self.pool.trash_block)
        self.sampler = Sampler(limits.max_num_seqs, self.network.vocab_size, self._device, draw=draw_of(self.network))
        self._graphs = self.network.graphs
        self.recorded = 0  # graphs; while serving, none is added
        self.sample_seconds = 0.0  # all time of the sampler; on CUDA it includes waiting for the logits
        self._logits: dict[tuple[int, int], Tensor] = {}  # the output buffer of each captured shape
        self._answers: dict[tuple[tuple[int, int], int], Tensor] = {}  # its first rows, for each number of them
        self._known_float32: Tensor | None = None
        self._standing: Standing | None = None  # what the static inputs hold
        # Torch's mode is for networks of torch operators; entering it costs a step of native kernels a tenth of the host's time.
        self._mode: Callable[[], AbstractContextManager[object]] = (
            torch.inference_mode if draw_of(self.network) is None else nullcontext
        )

    @property
    def kv_bytes(self) -> int:
        return self.pool.nbytes

    def rows_state(self) -> tuple[RowView, ...]:
        """Occupied rows with their requests and block tables, ascending."""
        return self.rows.view()

    # Start ---------------------------------------------------------------------------------------------------------

    def warm(self, progress: Progress | None = None) -> None:
        """Records every captured shape, the largest first, with inputs that touch the trash block only."""
        shapes = sorted(self.limits.captures, key=lambda shape: (shape[0] * shape[1], shape), reverse=True)
        with torch.inference_mode():
            for done, shape in enumerate(shapes, start=1):
                self._record(shape)
                if progress is not None:
                    progress("recording graphs", done, len(shapes))

    def _record(self, shape: tuple[int, int]) -> None:
        nobody = as_rows([])
        tables = nobody.reshape(0, shape[1])
        self._standing = None
        self.inputs.fill({"tokens": nobody, "positions": nobody, "slots": nobody, "tables": tables}, *shape)
        tokens, table_view = self.inputs.step(*shape)

        def step(do: Any) -> None:
            self._logits[shape] = self.network.decode(do, tokens, table_view)

        self._graphs.record(shape, step)
        self._answers.clear()
        self.recorded += 1

    # Iterations ----------------------------------------------------------------------------------------------------

    def execute(self, plan: Plan) -> Sequence[Sampled]:
        """See ``Runner``. Raises ``ValueError`` when the plan names rows, widths or shapes that do not fit."""
        self.rows.apply(plan, self.sampler)
        if not plan.forwards:
            return ()
        with self._mode():
            parts = self._prefill(plan.chunks) if plan.chunks else []
            if plan.decodes:
                parts.append(self._decode(plan))
            if not parts:
                return ()
            logits = parts[0] if len(parts) == 1 else torch.cat(parts)
            sampling = plan.sampling
            rows, positions = [entry.row for entry in sampling], [_next_position(entry) for entry in sampling]
            began = time.perf_counter()
            logits = self._float32(logits)
            sampled = self.sampler.sample(logits, rows, positions)
            self.sample_seconds += time.perf_counter() - began
            return sampled

    def _float32(self, logits: Tensor) -> Tensor:
        if logits is not self._known_float32:  # asked once: see Sampler._check
            if logits.dtype != torch.float32:
                return logits.float()
            self._known_float32 = logits
        return logits

    def slots(self, rows: Places, positions: Places) -> npt.NDArray[np.int64]:
        """Where the K/V of each (row, position) goes, int64 [n] or one, by the block tables of this moment."""
        blocks = self.rows.tables[rows, positions // self.limits.block_size]
        offsets: Any = positions % self.limits.block_size
        return self.pool.slots(blocks, offsets)

    def _decode(self, plan: Plan) -> Tensor:
        """Logits [d, vocab] of the decoding rows, in a buffer that the next decode step overwrites."""
        launch, decodes = plan.launch, plan.decodes
        rows = [decode.row for decode in decodes]
        longest = max([self.rows.lengths[row] for row in rows])
        shape = (launch.rows, launch.width) if isinstance(launch, Replay) else (len(rows), longest)
        if longest > shape[1] or len(rows) > shape[0]:
            raise ValueError(f"{len(rows)} rows with tables of up to {longest} blocks do not fit the shape {shape}")
        now = Standing(shape, rows, self.rows.epoch, [decode.position for decode in decodes])
        before, self._standing = self._standing, None  # until this step is written
        if not isinstance(launch, Replay):
            self._fill(decodes, self.rows.tables[rows], shape)
            return self.network.decode(eagerly, *self.inputs.step(*shape))
        if shape not in self._graphs:
            raise ValueError(f"the plan replays shape {shape}, which was not recorded")
        if before is not None and before.precedes(now):
            self._go_on(plan, now)
        else:
            # A recorded step reads the window of cache rows from row zero, which rule 12 makes the batch: one copy, no gather.
            self._fill(decodes, self.rows.tables[: len(rows)], shape)
        self._standing = now
        self._graphs.replay(shape)
        kept = self._answers.get((shape, len(rows)))
        if kept is None:
            kept = self._answers[shape, len(rows)] = self._logits[shape][: len(rows)]
        return kept

    def _fill(self, decodes: Sequence[Decode], tables: npt.NDArray[np.int64], shape: Shape) -> None:
        """All inputs of a decode step of this shape; ``tables`` [d, width] are those that its rows read."""
        batch = as_rows([(decode.row, decode.position, decode.token) for decode in decodes])
        rows, positions, tokens = batch.T
        slots = self.slots(rows, positions)
        self.inputs.fill({"tokens": tokens, "positions": positions, "slots": slots, "tables": tables}, *shape)

    def _go_on(self, plan: Plan, now: Standing) -> None:
        """The inputs of a step that the one before precedes."""
        size = self.limits.block_size
        entered = {
            i: int(self.slots(now.rows[i], position))
            for i, position in enumerate(now.positions)
            if position % size == 0
        }
        # Of a recorded step, line i of the tables is cache row i, whoever decodes.
        grown = {grow.row: self.rows.tables[grow.row] for grow in plan.grown if grow.row < len(now.rows)}
        self.inputs.go_on([decode.token for decode in plan.decodes], now.positions, entered, grown, *now.shape)

    def _prefill(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Logits of the chunks that sample, in order: tensors of [m, vocab]."""
        results = []
        for reports, together in groupby(chunks, lambda chunk: self.sampler.reports_prompt(chunk.row)):
            for batch in cut_chunks(list(together), self._prompt_logits if reports else self._prefill_tokens):
                logits = self._prefill_batch(batch)
                if logits is not None:
                    results.append(logits.clone())  # the next batch reuses the buffer
        return results

    def _prefill_batch(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """Logits [m, vocab] of the chunks that sample. Logits of prompt logprobs are handed to the sampler on the way."""
        counts = [len(chunk.tokens) for chunk in chunks]
        ends = np.cumsum(counts)
        rows = np.repeat(as_rows([chunk.row for chunk in chunks]), counts)
        positions = np.concatenate([np.arange(c.start, c.start + len(c.tokens), dtype=np.int64) for c in chunks])
        tokens = as_rows([token for chunk in chunks for token in chunk.tokens])
        last = as_rows([end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.samples])
        told = [self.sampler.prompt_positions(c.row, c.start, len(c.tokens)) for c in chunks]
        first = [end - count - c.start for c, end, count in zip(chunks, ends, counts, strict=True)]
        asked = as_rows([first[i] + position for i, positions in enumerate(told) for position in positions])
        wanted = np.concatenate([asked, last])
        numbers = {"tokens": tokens, "positions": positions, "slots": self.slots(rows, positions), "wanted": wanted}
        for chunk, count in zip(chunks, counts, strict=True):
            blocks = self.limits.blocks_for(chunk.start + count)
            numbers[f"table of row {chunk.row} from {chunk.start}"] = self.rows.tables[
                chunk.row : chunk.row + 1, :blocks
            ]
        on_device = list(self._to_device(numbers).values())
        spans = [
            Span(int(end) - count, count, chunk.start, table)
            for chunk, end, count, table in zip(chunks, ends, counts, on_device[4:], strict=True)
        ]
        logits = self.network.prefill(eagerly, Tokens(*on_device[:3]), spans, on_device[3] if len(wanted) else None)
        if logits is None or not len(asked):
            return logits
        done = 0
        for chunk, there in zip(chunks, told, strict=True):
            self.sampler.note_prompt(chunk.row, there, logits[done : done + len(there)].float())
            done += len(there)
        return logits[done:] if len(last) else None

    def _to_device(self, parts: dict[str, npt.NDArray[np.int64]]) -> dict[str, Tensor]:
        if self._upload is not None:
            return self._upload.write(parts)
        return {name: torch.from_numpy(np.ascontiguousarray(part)).to(self._device) for name, part in parts.items()}


class ModelRunner(PlanRunner):
    """A model's transformer on one device, behind ``Runner``.

    ``threads`` fixes torch's threads for the whole process: on CPU the bits of a row may depend on their number.
    ``weights`` lets several runners of one model share what ``load_weights`` made. Raises ``LoadError`` for a bad
    tensor and ``UnstableMachine`` when no kernel on this machine gives reproducible bits.
    """

    def __init__(
        self,
        model: LoadedModel,
        limits: Limits,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        threads: int | None = None,
        progress: Progress | None = None,
        weights: Weights | None = None,
    ) -> None:
        if threads is not None and threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        if weights is None:
            with torch.inference_mode():
                weights = load_weights(model, torch.device(device), dtype, progress)
        self.weights = loaded = weights
        super().__init__(limits, lambda sizes: Transformer(loaded, sizes))

    @property
    def probe_summary(self) -> str:
        """What was measured about reproducible row counts, for the capacity table."""
        return self.weights.report.summary

    @property
    def weight_bytes(self) -> int:
        return self.weights.nbytes


def sizes_of(limits: Limits, prefill_tokens: int = PREFILL_TOKENS) -> Sizes:
    """The largest steps that these limits allow."""
    widest = max(limits.blocks_for(limits.max_model_len), *(width for _, width in limits.captures), 1)
    possible = min(limits.max_num_batched_tokens, limits.max_num_seqs * limits.max_model_len)
    batch = min(prefill_tokens, possible)
    longest = min(batch, limits.max_model_len)
    return Sizes(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        rows=max(limits.max_num_seqs, *(rows for rows, _ in limits.captures), 1),
        width=widest,
        prefill_tokens=batch,
        prefill_samples=min(batch, max(limits.max_num_seqs, PROMPT_LOGITS)),
        positions=max(limits.max_model_len, widest * limits.block_size),
        span=(limits.max_model_len - longest, longest),
    )


def cut_chunks(chunks: Sequence[Chunk], most: int) -> list[list[Chunk]]:
    """Batches of at most ``most`` tokens; a chunk that does not fit is cut, and only its last part samples."""
    batches: list[list[Chunk]] = []
    left = 0
    for chunk in chunks:
        done = 0
        while done < len(chunk.tokens):
            if left == 0:
                batches.append([])
                left = most
            take = min(left, len(chunk.tokens) - done)
            end = done + take
            last = end == len(chunk.tokens)
            part = Chunk(chunk.request, chunk.row, chunk.start + done, chunk.tokens[done:end], chunk.samples and last)
            batches[-1].append(part)
            left -= take
            done = end
    return batches


def _next_position(entry: Any) -> int:
    """The index that the sampled token will occupy."""
    return int(entry.start + len(entry.tokens) if isinstance(entry, Chunk) else entry.position + 1)
