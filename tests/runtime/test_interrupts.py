"""Ctrl-C at the worst moment: it arrives, nothing is left behind, and the next step is right."""

from __future__ import annotations

import _thread
import contextlib
import gc
import operator
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

import poochplan
from poochplan.formats.plan import Plan
from poochplan.runtime.devices.cpu import CpuDevice
from tests.runtime.faults import CASE, _ctrl_c_is_heard, leaves_nothing, open_files, plan, swaps
from tests.runtime.nets import followed, train

pytestmark = [pytest.mark.cpu_device, pytest.mark.usefixtures("one_thread", "copied_by_threads")]


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class InterruptingOnce:
    """A system call of the copying threads in which the main thread, by then waiting for it, is interrupted."""

    def __init__(self, call: Callable[..., int]) -> None:
        self.call = call
        self.armed = False

    def __call__(self, *args: object) -> int:
        if self.armed and threading.current_thread() is not threading.main_thread():
            self.armed = False
            time.sleep(0.3)
            interrupt()
            time.sleep(0.3)
        return self.call(*args)


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("where", ["register_forward_hook", "register_full_backward_hook"])
def test_an_interrupt_in_forward_or_backward_arrives(plan: Plan, where: str) -> None:
    model, step, _ = CASE.fresh()
    getattr(model.blocks[1], where)(lambda *_: interrupt())  # type: ignore[index,union-attr]
    with pytest.raises(KeyboardInterrupt), poochplan.apply(plan, model):
        step().backward()


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("name", ["pwrite", "preadv"])
def test_an_interrupt_in_a_wait_for_a_copy_arrives(swaps: Plan, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, step, _ = CASE.fresh()
    call = InterruptingOnce(getattr(os, name))
    monkeypatch.setattr(os, name, call)
    with pytest.raises(KeyboardInterrupt) as caught, poochplan.apply(swaps, model):
        call.armed = True
        step().backward()
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "wait"
    assert ("pack" if name == "pwrite" else "unpack") in frames


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("then", ["another step", "the end"])
def test_an_interrupt_while_a_copy_dies_is_raised_at_the_next_point(
    swaps: Plan, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    # Nothing is released, so that the first to wait for a copy is the graph that dies.
    schedule = tuple(msgspec.structs.replace(actions, release=()) for actions in swaps.schedule)
    plan = msgspec.structs.replace(swaps, schedule=schedule)
    model, step, _ = CASE.fresh()
    call, dies = InterruptingOnce(os.pwrite), threading.Event()

    def write(descriptor: int, data: bytes, at: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            dies.wait()
        return call(descriptor, data, at)

    def fails(*_: object) -> None:
        call.armed = True
        dies.set()
        raise KeyError("in forward")

    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(KeyboardInterrupt) as caught:
        with poochplan.apply(plan, model) as session:
            with model.head.register_forward_pre_hook(fails), contextlib.suppress(KeyError):  # type: ignore[union-attr]
                step()
            assert not call.armed  # the signal has come
            assert not session._engine.cursor.holds_values
            if then == "another step":
                step()
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "raise_held_back"
    assert ("pack" if then == "another step" else "__exit__") in frames


@pytest.fixture
def without_gc_callbacks() -> Iterator[None]:
    """Nothing of hypothesis's runs as a collection begins."""
    before = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = before


@pytest.mark.usefixtures("without_gc_callbacks")
def test_a_device_that_is_collected_while_an_interrupt_waits_ends_its_threads_and_closes_its_file(
    tmp_path: Path,
) -> None:
    gc.collect()  # what Python code runs in the collection below would raise the interrupt, and Python drop it
    files, cycle = open_files(), [CpuDevice(tmp_path)]
    threads = [cycle[0].outward.thread, cycle[0].inward.thread]
    cycle.append(cycle)  # type: ignore[arg-type]
    del cycle
    with contextlib.suppress(KeyboardInterrupt):  # which other Python code in the collection may have dropped
        list(map(operator.call, (_thread.interrupt_main, gc.collect)))  # no Python code runs between the two
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert open_files() == files


@pytest.mark.usefixtures("leaves_nothing")
def test_interrupts_at_any_moment_leave_nothing_and_spoil_no_later_step(plan: Plan) -> None:
    """A timer interrupts sessions somewhere, each followed by a right step, until six were hit.

    An interrupt misses that comes behind the session, or in Python code that a collection runs, which drops it.
    """
    chance, hit = random.Random(0), 0
    start_s = time.perf_counter()
    followed(CASE, plan, 1)
    step_s = time.perf_counter() - start_s
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(60):
            if hit == 6:
                break
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.02, 1.0) * step_s)
                train(CASE, 1, plan)
            except KeyboardInterrupt:
                hit += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            followed(CASE, plan, 1)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert hit == 6
