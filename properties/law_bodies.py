"""Bodies of the laws' faults that are more than one place in a line. Each gets the function that stands there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs


def the_first_request_settles_whether_anybody_samples(real: Any) -> Any:
    greedy: dict[int, bool] = {}  # by engine; an id may come back, but a new engine has submitted nothing

    def submit(self: Any, prompt: Any, params: Any, **rest: Any) -> Any:
        if not self.scheduler.counters.submitted:
            greedy[id(self)] = params.greedy
        if greedy[id(self)]:
            params = attrs.evolve(params, temperature=0.0)
        return real(self, prompt, params, **rest)

    return submit


def an_abort_frees_the_block_of_another(real: Any) -> Any:
    def reap(self: Any) -> Any:
        if any(request.aborted for request in self.running):
            left = [request for request in self.running if not request.aborted]
            self.pool._blank += [request.table[-1] for request in left[-1:]]
        return real(self)

    return reap


def one_table_of_options_for_all_engines(real: Any) -> Any:
    options: dict[int, Any] = {}

    def apply(self: Any, plan: Any, follower: Any) -> None:
        for row in plan.vacated:
            options.pop(row, None)
        for move in plan.moves:
            moved, displaced = options.pop(move.src), options.pop(move.dst, None)
            options[move.dst] = moved
            if move.swap:
                options[move.src] = displaced
        seated = tuple(attrs.evolve(s, sampling=options.setdefault(s.row, s.sampling)) for s in plan.seated)
        real(self, attrs.evolve(plan, seated=seated), follower)

    return apply


def rows_change_the_product(real: Any) -> Any:
    def apply(self: Any, do: Any, x: Any, rows: int, out: Any) -> None:
        real(self, do, x, rows, out)
        do(lambda part: part.mul_(1 + rows * 2.0**-22), out[:rows])

    return apply


def noise_of_the_row(real: Any) -> Any:
    def sample(self: Any, logits: Any, rows: Sequence[int], positions: Sequence[int]) -> Any:
        return real(self, logits, rows, [position + row for position, row in zip(positions, rows, strict=True)])

    return sample


def noise_of_the_fourth_row(real: Any) -> Any:
    def sample(self: Any, logits: Any, rows: Sequence[int], positions: Sequence[int]) -> Any:
        return real(self, logits, rows, [position + (row > 2) for position, row in zip(positions, rows, strict=True)])

    return sample


def each_engine_draws_its_own_noise(real: Any) -> Any:
    made: list[Any] = []

    def sample(self: Any, logits: Any, rows: Any, positions: Sequence[int]) -> Any:
        if self not in made:
            made.append(self)
        return real(self, logits, rows, [position + 1000 * made.index(self) for position in positions])

    return sample


def a_block_is_its_first_token(real: Any) -> Any:
    return lambda parent, tokens: real(parent, tokens[:1])


def the_seed_stays_with_the_row(real: Any) -> Any:
    """A move seats the request anew, with what it was when it was seated and the number of the row as its seed."""
    seats: dict[tuple[int, int], Any] = {}  # by engine and request

    def apply(self: Any, plan: Any, follower: Any) -> None:
        real(self, plan, follower)
        seats.update({(id(self), seat.request): seat for seat in plan.seated})
        for move in plan.moves:
            seat = seats[id(self), move.request]
            follower.seat(attrs.evolve(seat, row=move.dst, sampling=attrs.evolve(seat.sampling, seed=move.dst)))

    return apply


def a_resumed_request_has_another_seed(real: Any) -> Any:
    def seated(seat: Any) -> Any:
        seed = seat.sampling.seed + len(seat.tokens) - seat.prompt_len
        return attrs.evolve(seat, sampling=attrs.evolve(seat.sampling, seed=seed))

    def apply(self: Any, plan: Any, follower: Any) -> None:
        real(self, attrs.evolve(plan, seated=tuple(map(seated, plan.seated))), follower)

    return apply


def prompts_turn_padded_logits(real: Any) -> Any:
    def decode(self: Any, plan: Any) -> Any:
        logits = real(self, plan)
        return logits.roll(1, 0) if plan.chunks and _padding(plan) else logits

    return decode


def a_resumed_request_turns_padded_logits(real: Any) -> Any:
    def decode(self: Any, plan: Any) -> Any:
        logits = real(self, plan)
        resumed = any(len(seat.tokens) > seat.prompt_len for seat in plan.seated)
        return logits.roll(1, 0) if resumed and _padding(plan) > 1 else logits

    return decode


def _padding(plan: Any) -> int:
    """Padded rows of a replay; an eager step has none."""
    return getattr(plan.launch, "padding", 0)
