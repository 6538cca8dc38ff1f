"""One copy in and one out: the staging of a GPU, over a CPU's memory. It changes no number, and each step copies once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.compute.runner import PlanRunner
from engine.compute.staging import Readback, Upload
from engine.compute.transformer import Transformer
from engine.control.limits import Limits
from engine.control.plan import Chunk, Decode, Eager, Plan, Replay, Seat
from engine.request import SamplingParams, SamplingSpec
from tests.compute.driver import shared_weights

CPU = torch.device("cpu")


def test_parts_lie_one_behind_the_other() -> None:
    upload = Upload(11, CPU)
    table = np.arange(20, dtype=np.int64).reshape(4, 5)[:2, 1:4]  # a view with gaps
    there = upload.write({"tokens": np.array([7, 8], dtype=np.int64), "table": table})
    assert there["tokens"].tolist() == [7, 8]
    assert there["table"].tolist() == [[1, 2, 3], [6, 7, 8]]
    assert there["table"].is_contiguous()
    again = upload.views({"tokens": (2,), "table": (2, 3)})
    assert [again[name].data_ptr() for name in again] == [there[name].data_ptr() for name in there]
    assert upload.copies == 1
    with pytest.raises(ValueError, match="table ends at 12, but 11 numbers fit"):
        upload.write({"tokens": np.zeros(6, dtype=np.int64), "table": table})


class Pending:
    """An event that has not happened until somebody waits for it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def record(self) -> None:
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("wait")


def test_memory_is_written_again_only_when_its_copy_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    event = Pending()
    monkeypatch.setattr("engine.compute.staging._event", lambda device: event)
    upload = Upload(4, CPU)
    one = {"x": np.zeros(1, dtype=np.int64)}
    upload.write(one)
    upload.write(one)
    assert event.log == ["wait", "record", "wait", "record"]


def test_tokens_and_rows_come_back_in_one_copy() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0], [0.0, 0.0, 1.0], [-1.0, -2.0, -3.0]])
    readback = Readback(4, 3, CPU)
    tokens, whole = readback.read(logits, [3, 1])
    assert tokens == [1, 0, 2, 0]
    assert whole.tolist() == [logits[3].tolist(), logits[1].tolist()]
    tokens, whole = readback.read(logits[:2], [])
    assert (tokens, whole.shape, readback.copies) == ([1, 0], (0, 3), 2)
    with pytest.raises(ValueError, match="4 rows and 5 of them whole need 19 numbers, but 16 fit"):
        readback.read(logits, [0] * 5)


LIMITS = Limits(
    num_blocks=9,
    block_size=4,
    max_num_seqs=2,
    max_num_batched_tokens=64,
    max_model_len=20,
    vocab_size=512,
    captures=((2, 5),),
)


def digests(*, staged: bool) -> tuple[list[str | None], PlanRunner]:
    """Two prompts in one prefill, a padded replay, an eager step: each answer's digest."""
    weights = shared_weights("llama")
    runner = PlanRunner(LIMITS, lambda sizes: Transformer(weights, sizes), prefill_tokens=6, staged=staged)
    runner.warm()
    asks = SamplingSpec(SamplingParams(temperature=0.0, logits_digest=True), 0)
    seats = (Seat(0, 0, (3, 4, 5, 6, 7), 5, (2, 8), asks), Seat(1, 1, (9, 8, 7), 3, (4,), asks))
    chunks = tuple(Chunk(seat.request, seat.row, 0, seat.tokens, True) for seat in seats)
    found = list(runner.execute(Plan(0, seated=seats, chunks=chunks)))
    found += runner.execute(Plan(1, decodes=(Decode(0, 0, 5, 8),), launch=Replay(2, 5, 1)))
    found += runner.execute(Plan(2, decodes=(Decode(0, 0, 6, 9), Decode(1, 1, 3, 2)), launch=Eager("test")))
    return [sample.digest for sample in found], runner


def test_staging_changes_no_byte_and_copies_once_a_step() -> None:
    plain, without = digests(staged=False)
    staged, runner = digests(staged=True)
    assert staged == plain
    assert len(set(staged)) == len(staged) == 5
    assert without.inputs._upload is None
    assert runner.inputs._upload is not None
    assert runner._upload is not None
    assert runner.inputs._upload.copies == 3  # recording the one shape, and two decode steps
    assert runner._upload.copies == 2  # prefill batches of 6 tokens


def test_a_part_that_is_not_sent_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the check: an upload that leaves out the last number."""
    write = Upload.write

    def short(self: Upload, parts: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        views = write(self, parts)
        next(iter(views.values())).zero_()
        return views

    plain, _ = digests(staged=False)
    monkeypatch.setattr(Upload, "write", short)
    staged, _ = digests(staged=True)
    assert staged != plain
