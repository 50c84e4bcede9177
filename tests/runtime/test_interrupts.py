"""Ctrl-C amid our code: it arrives, the session is closed, nothing of it is left, and later steps are plain."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Plan
from poochplan.runtime.attachment import INTERRUPTED
from poochplan.runtime.devices.cpu import CpuDevice
from poochplan.torch_private.hooks import topmost_hooks
from poochplan.torch_private.tensor_internals import mode_count
from tests.runtime.faults import CASE, _ctrl_c_is_heard, leaves_nothing, open_files, plan, swaps
from tests.runtime.injecting import Place, Watch, places
from tests.runtime.nets import equal, in_core, our_warnings, snapshot

__all__ = ["_ctrl_c_is_heard", "leaves_nothing", "plan", "swaps"]
pytestmark = [pytest.mark.cpu_device, pytest.mark.usefixtures("one_thread", "copied_by_threads")]

MOMENTS = 40
LAST_S = 10.0
"""A thread has so long to end."""


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
    assert ("acts_at_save" if name == "pwrite" else "unpack") in frames


def test_a_device_that_is_collected_ends_its_threads_and_closes_its_file(on_disk: Path) -> None:
    gc.collect()
    files, cycle = open_files(), [CpuDevice(on_disk)]
    threads = [cycle[0].outward.thread, cycle[0].inward.thread]
    cycle.append(cycle)  # type: ignore[arg-type]
    del cycle
    gc.collect()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert open_files() == files


# -- a share of all moments ------------------------------------------------------------------------------------------


class Interrupted:
    """A session with one step that is interrupted at a place. ``arrived``: not, if an object died there, of which
    Python tells itself.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.model, self.step, _ = CASE.fresh()
        self.arrived = False

    def train(self, watch: Watch) -> None:
        watch.phase = "forward"
        loss = self.step()
        watch.phase = "backward"
        loss.backward()  # type: ignore[no-untyped-call]
        watch.phase = ""

    def leaves_the_block(self, watch: Watch) -> None:
        try:
            with watch.watching():
                watch.phase = "entering"
                with poochplan.apply(self.plan, self.model):
                    self.train(watch)
                    watch.phase = "leaving"
                watch.phase = ""
        except KeyboardInterrupt:
            self.arrived = True
        watch.phase = ""

    def goes_on_in_the_block(self, watch: Watch) -> None:
        """The loop catches it, puts all back as before the step, and does the step again."""
        before = [one.clone() for one in (*self.model.parameters(), *self.model.buffers())]
        with our_warnings() as said, poochplan.apply(self.plan, self.model) as session:
            try:
                with watch.watching():
                    self.train(watch)
            except KeyboardInterrupt:
                self.arrived = True
            watch.phase = ""
            with torch.no_grad():
                for one, content in zip((*self.model.parameters(), *self.model.buffers()), before, strict=True):
                    one.copy_(content)
            self.again()
            if self.arrived:
                assert session._attachment.state == "closed"
                assert_nothing_is_on(self.model)
        if self.arrived:
            assert [line for line in said if INTERRUPTED in line] == said
            assert len(said) == 1

    def again(self) -> None:
        """The step as in-core."""
        self.model.zero_grad()
        torch.manual_seed(1)
        loss = self.step()
        loss.backward()  # type: ignore[no-untyped-call]
        assert equal([in_core(CASE, 1)[0]], [snapshot(self.model, loss)])


def assert_nothing_is_on(model: nn.Module) -> None:
    assert topmost_hooks() is None
    assert mode_count() == 0
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


@pytest.fixture
def short_collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def moments(run: Callable[[Watch], None]) -> list[Place]:
    """A share of the calls of our functions, from the first to the last."""
    for _ in range(2):  # what the first works out for good does not come again
        watch = Watch(None, KeyboardInterrupt)
        run(watch)
    every = places(watch)
    assert len(every) > 200
    return every[:: len(every) // MOMENTS]


HOW = Interrupted.leaves_the_block, Interrupted.goes_on_in_the_block


@pytest.mark.usefixtures("short_collections", "leaves_nothing")
@pytest.mark.parametrize("how", HOW)
def test_after_an_interrupt_amid_our_code_nothing_is_left_and_steps_are_plain(
    plan: Plan, how: Callable[[Interrupted, Watch], None]
) -> None:
    in_core(CASE, 1)
    arrived, files, threads = 0, open_files(), threading.active_count()
    for place in moments(lambda watch: how(Interrupted(plan), watch)):
        run, watch = Interrupted(plan), Watch(place, KeyboardInterrupt)
        how(run, watch)
        arrived += run.arrived
        assert_nothing_is_on(run.model)
        del run
        gc.collect()
        end_s = time.monotonic() + LAST_S
        while (open_files(), threading.active_count()) != (files, threads) and time.monotonic() < end_s:
            time.sleep(0.01)  # a thread whose stream has died ends by itself
        assert (open_files(), threading.active_count()) == (files, threads), place
    assert arrived > MOMENTS // 2
