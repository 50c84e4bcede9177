"""Ctrl-C at the worst moment: it arrives, nothing is left behind, and the next step is right."""

from __future__ import annotations

import _thread
import contextlib
import gc
import math
import operator
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import poochplan
from poochplan.formats.plan import Plan
from poochplan.runtime.devices.cpu import CpuDevice
from poochplan.tensors.modes import ToggledMode
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
    on_disk: Path,
) -> None:
    gc.collect()  # what Python code runs in the collection below would raise the interrupt, and Python drop it
    files, cycle = open_files(), [CpuDevice(on_disk)]
    threads = [cycle[0].outward.thread, cycle[0].inward.thread]
    cycle.append(cycle)  # type: ignore[arg-type]
    del cycle
    with contextlib.suppress(KeyboardInterrupt):  # which other Python code in the collection may have dropped
        list(map(operator.call, (_thread.interrupt_main, gc.collect)))  # no Python code runs between the two
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert open_files() == files


@contextlib.contextmanager
def interrupt_at(number: int, within: CodeType | None = None) -> Iterator[None]:
    """A block that is interrupted at most once, where Python raises signals: as a function begins, after one of C's.

    ``number``: how many of these points pass before, of those in ``within`` if it is given.
    """
    passed = 0

    def at_point(frame: FrameType, event: str, _: object) -> None:
        nonlocal passed
        if event in ("call", "c_return") and within in (None, frame.f_code):
            passed += 1
            if passed > number:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(at_point)
    try:
        yield
    finally:
        sys.setprofile(None)


def of_each_point(run: Callable[[int], object]) -> int:
    """Calls ``run`` with each number until it is not interrupted, and returns that."""
    for number in range(1000):
        try:
            run(number)
        except KeyboardInterrupt:
            continue
        return number
    raise AssertionError("it is interrupted at every point")


class Passing(ToggledMode):
    """It changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


def test_a_mode_that_is_interrupted_anywhere_as_it_is_switched_can_be_taken_off() -> None:
    def switch(number: int) -> None:
        mode = Passing()
        try:
            with interrupt_at(number):
                mode.switch_on()
                mode.switch_off()
        finally:
            mode.switch_off()
            assert _get_current_dispatch_mode_stack() == []

    assert of_each_point(switch) > 20


@pytest.mark.usefixtures("leaves_nothing")
def test_a_session_that_is_interrupted_as_its_hooks_come_takes_them_off(plan: Plan) -> None:
    def enter(number: int) -> None:
        with interrupt_at(number, torch.autograd.graph.saved_tensors_hooks.__enter__.__code__):
            with poochplan.apply(plan, CASE.fresh()[0]):
                train(CASE, 1)

    assert of_each_point(enter) == 2


@pytest.mark.usefixtures("leaves_nothing")
def test_interrupts_at_any_moment_leave_nothing_and_spoil_no_later_step(plan: Plan) -> None:
    """A timer interrupts sessions somewhere, each followed by a right step, until twelve were hit.

    An interrupt misses that comes behind the session, or in Python code that a collection runs, which drops it.
    """
    chance, hit, step_s = random.Random(0), 0, math.inf
    followed(CASE, plan, 1)
    gc.collect()
    gc.freeze()  # so that collections are short
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(60):
            if hit == 12:
                break
            start_s = time.perf_counter()
            try:
                signal.setitimer(signal.ITIMER_REAL, 0 if step_s == math.inf else chance.uniform(0.02, 1.0) * step_s)
                train(CASE, 1, plan)
                step_s = min(step_s, time.perf_counter() - start_s)  # the first one takes longer
            except KeyboardInterrupt:
                hit += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            followed(CASE, plan, 1)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert hit == 12
