"""Worker processes that end when their parent does, however it ends: by Ctrl-C, by SIGTERM, or killed outright.

Ctrl-C at a terminal goes to the whole process group. Workers are started with SIGINT blocked, so that only the parent hears
it and one line is printed; the parent then kills them and waits for nothing that is still queued.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class Terminated(SystemExit):
    """SIGTERM came while workers ran."""


@contextmanager
def pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of ``jobs`` processes. On any exception its workers are killed, and what was submitted is forgotten.

    In the main thread SIGTERM raises ``Terminated`` inside the block; elsewhere only the death of this process ends them.
    """
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")  # a fork would copy whatever threads the caller has
    executor = _Pool(jobs, mp_context=context, initializer=_with_parent, initargs=(os.getpid(),))
    with _terminable():
        try:
            yield executor
        except BaseException:
            for process in set(multiprocessing.active_children()) - before:
                process.kill()
            executor.shutdown(cancel_futures=True)
            raise
        executor.shutdown()


class _Pool(ProcessPoolExecutor):
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Processes are started here, and inherit what is blocked."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(fn, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _terminable() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: Any) -> NoReturn:
    raise Terminated(128 + number)


def _with_parent(parent: int) -> None:
    """Runs in the worker: from here on the kernel kills it when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died while this process was starting
        os._exit(1)
