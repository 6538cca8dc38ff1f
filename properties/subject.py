"""Somebody else's scheduler under the harness: what it must offer, and what it may promise.

The lockstep compares our engine with our specification, decision by decision. Your scheduler decides otherwise, so nothing
can be compared; but much must hold of any scheduler, whatever it decides, and that is what is checked here, on the same
generated workloads, with the same hunter, reducer, files, reports and pages:

    raises      it raises nothing but ``Refused``, comes back from every call, and no plan is impossible to compute
    audit       its own invariants, if it has any (``audit``)
    decisions   the promises: the budget is kept, nobody is set back or overtaken where that was promised
    ledger      every block is free or held; none is both, none is lost, none is held twice unless sharing was promised
    rows        a running request has one row, within bounds, and shares it with nobody
    writes      every position is written into a block of its request, and nothing that is read was overwritten
    tokens      what is computed next is what was not computed yet, with the tokens that stand there
    solo        each request is told once, and exactly what it is told when it runs alone; an abort is told at once
    drain       it does not stand still while there is work, and at the end everything is free

**What you write** is a class with the five methods of ``Subject`` and a function ``make(shape) -> Subject``. One call of
``step`` is one iteration: plan, call ``compute`` at most once with everything that the iteration computes, take the sampled
tokens, say what ended. The harness plays the model: ``compute`` keeps a cache of its own and writes into each cell what a model
would have to know there, so a wrong block, a wrong position or an overwritten cell changes the next token.

**What you promise** is up to you. A promise that is not made is not checked; one that is made is hunted for.

Nothing needs to be imported from the engine. ``properties/examples`` has a scheduler of another shape, with faults to find.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import signature
from typing import Protocol

import attrs

from engine.trace import Shape


@attrs.frozen
class Ask:
    """One request. ``max_tokens`` is settled, at least 1; the prompt holds at least one token, all ids in 0..VOCAB-1."""

    request: int  # its name from now on; numbers grow in the order of arrival
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0  # lower goes first, if you know priorities
    stop_ids: frozenset[int] = frozenset()  # a sampled token that ends the request, with reason "stop"
    min_tokens: int = 0  # below so many generated tokens, stop_ids do not count
    salt: str | None = None  # requests of different salts must not share cached content


@attrs.frozen
class Work:
    """What is computed for one request in this iteration: ``tokens`` at positions ``start``, ``start + 1``, ...

    Position p is written to, and later read from, block ``table[p // block_size]`` at offset ``p % block_size``.
    ``samples`` when the last of all tokens known so far is among them: then the next one comes back.
    """

    request: int
    row: int  # 0..shape.rows - 1
    start: int
    tokens: tuple[int, ...]
    table: tuple[int, ...]  # all blocks of the request, those already written included
    samples: bool


@attrs.frozen
class Batch:
    """Everything that one iteration computes. ``copies`` (from, to) of whole blocks are made first, one after the other, and
    also where computing then fails: for copy on write, or to move a request. Swapping out of the pool has no words here."""

    work: tuple[Work, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()


Compute = Callable[[Batch], Mapping[int, int | None]]
"""Computes a batch and returns the sampled token of each request whose work samples. May raise ``ComputeFailed``; None stands for
a request that has no token, where its row's logits hold none. Each only at subjects that promise to survive it."""


@attrs.frozen
class Told:
    """What became of an iteration. ``ended`` pairs a request with ``length``, ``stop``, ``abort`` or ``error``."""

    ended: tuple[tuple[int, str], ...] = ()
    preempted: tuple[int, ...] = ()  # were running and have to compute again what they had


@attrs.frozen
class Holdings:
    """Who holds what after an iteration. A request that has ended holds nothing, or is still listed under ``running``."""

    waiting: tuple[int, ...]
    running: tuple[int, ...]
    tables: Mapping[int, tuple[int, ...]]  # request -> its blocks
    rows: Mapping[int, int]  # request -> its row
    free: tuple[int, ...]  # blocks that nobody holds; the next to be handed out first, if there is an order
    cached: tuple[int, ...] = ()  # those of them whose content is kept for later requests


@attrs.frozen
class Promises:
    """What you claim beyond what must hold anyway."""

    fifo: bool = False  # among equal priorities, whoever arrived first is computed first
    priorities: bool = False  # a waiting request of lower priority number is computed first
    preempts: bool = True  # False: what has started is never set back
    shares: bool = False  # True: tables may name the same block, as long as nobody writes it
    survives: bool = False  # a compute that raises ends the requests of its batch with "error", and only those
    survives_rows: bool = False  # a request that has no token ends with "error" in that iteration, and nobody else does


class Refused(Exception):
    """Raised by ``Subject.submit``: this request will never be served, and says why."""


class ComputeFailed(Exception):
    """Raised by ``compute`` when the workload says that it fails; only at subjects that promise to survive it."""


class Subject(Protocol):
    """A scheduler under test. Deterministic: the same calls lead to the same plans."""

    @property
    def promises(self) -> Promises: ...

    @property
    def has_work(self) -> bool:
        """Whether another iteration is due. While it is False, nothing is stepped."""
        ...

    def submit(self, ask: Ask) -> None:
        """Raises ``Refused``."""
        ...

    def abort(self, request: int) -> None:
        """Of any accepted request, ended or not. One that has not ended is told its end, ``abort``, by the next ``step``."""
        ...

    def step(self, compute: Compute) -> Told: ...

    def ledger(self) -> Holdings: ...

    def audit(self) -> list[str]:
        """Your own invariants: a sentence for each that does not hold."""
        ...


MakeSubject = Callable[[Shape], Subject]
_METHODS = ("has_work", "submit", "abort", "step", "ledger", "audit")


class NoSubject(ValueError):
    """What was named makes no scheduler at all; the message says in one sentence what is missing."""


def find(name: str) -> MakeSubject:
    """``package.module:function``, as the command line names a subject. Raises ``NoSubject``."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise NoSubject(f"the subject is {name!r}, but must be MODULE:FUNCTION")
    try:
        found: object = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise NoSubject(f"the subject {name!r} cannot be found: {error}") from None
    except Exception as error:  # noqa: BLE001 - a foreign module may raise anything
        raise NoSubject(f"the module of the subject {name!r} raises {type(error).__name__}: {error}") from None
    if not callable(found) or not _takes_a_shape(found):
        raise NoSubject(f"the subject {name!r} is no function of a shape")
    return found


def _takes_a_shape(found: Callable[..., object]) -> bool:
    try:
        signature(found).bind(None)
    except TypeError:
        return False
    except ValueError:  # of some built-in functions nothing is known
        return True
    return True


def judge(made: object) -> None:
    """Whether it has what ``Subject`` names. Raises ``NoSubject``."""
    if not isinstance(getattr(made, "promises", None), Promises):
        raise NoSubject(f"make returns {_kind(made)}, which is no subject: its promises are no Promises")
    missing = [name for name in _METHODS if not (hasattr(type(made), name) or hasattr(made, name))]
    if missing:
        raise NoSubject(f"make returns {_kind(made)}, which is no subject: it has no {', '.join(missing)}")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
