"""Cells of a sweep in processes of their own: one that dies takes none of the others with it."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from typing import TypeAlias

from poochplan.formats.profile import Profile

from .planning import ILP
from .sweep_cells import Cell, Solving, SweepPoint, failed_cell, solve_cell

Tell: TypeAlias = Callable[[SweepPoint], None]
"""Called with each cell that is done."""
GRACE_S = 2.0
"""How long a process that was told to end may take."""
_given: tuple[Profile, Solving]
"""What every cell of a worker process needs, sent once."""


def _begin(profile: Profile, solving: Solving) -> None:
    global _given
    _given = profile, solving
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for cells for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _solve_given(cell: Cell) -> SweepPoint:
    return solve_cell(*_given, cell)


def solve_in_processes(
    profile: Profile, solving: Solving, cells: Sequence[Cell], processes: int, tell: Tell
) -> dict[Cell, SweepPoint]:
    """All cells; those that were lost with a process that died are tried again, each in a process of its own."""
    slow_first = sorted(cells, key=lambda cell: cell[0] != ILP)
    found = _in_pool(profile, solving, slow_first, processes, tell)
    for cell in cells:
        if cell not in found:
            found |= _in_pool(profile, solving, [cell], 1, tell)
        if cell not in found:
            found[cell] = failed_cell(cell, "its process died, perhaps of too little memory")
            tell(found[cell])
    return found


def _in_pool(
    profile: Profile, solving: Solving, cells: Sequence[Cell], processes: int, tell: Tell
) -> dict[Cell, SweepPoint]:
    """The cells whose process lived; an interrupt ends the processes and is raised again."""
    found: dict[Cell, SweepPoint] = {}
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context("spawn"), initializer=_begin, initargs=(profile, solving)
    )
    try:
        with _interrupts_held():
            futures = {pool.submit(_solve_given, cell): cell for cell in cells}
        for future in as_completed(futures):
            with contextlib.suppress(BrokenProcessPool):
                found[futures[future]] = future.result()
                tell(found[futures[future]])
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        _end([child for child in multiprocessing.active_children() if child not in before])
        raise
    pool.shutdown()
    return found


def _end(workers: Sequence[BaseProcess]) -> None:
    for worker in workers:
        worker.terminate()
    for worker in workers:
        # Not ``is_alive``: while the pool's own thread collects the exit code, it says yes of a process that has ended.
        if not multiprocessing.connection.wait([worker.sentinel], timeout=GRACE_S):
            worker.kill()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started inside never see the terminal's interrupt: it comes to the one that ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
