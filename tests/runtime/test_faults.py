"""Disks that fail, threads that die, signals at the worst moment: an error or a fallback, nothing left behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from nets import CASES, equal, snapshot, train
from random_plans import random_plan
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, Dataset

import poochplan
from poochplan.errors import SpillError
from poochplan.planner.schema import Plan
from poochplan.runtime.cpu import CpuDevice
from poochplan.runtime.entry import Handle
from poochplan.runtime.transfers import Copy, copy_out, raise_held_back

pytestmark = pytest.mark.cpu_device

CASE = CASES["residual"]
HANGS_AFTER_S = 120
PWRITE, PREADV = os.pwrite, os.preadv


@pytest.fixture(autouse=True)
def _ends_when_it_hangs() -> Iterator[None]:
    """What hangs ends the whole run, with the stack of every thread."""
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """Also where pytest runs in the background of a script, which makes its processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """All three decisions."""
    return random_plan(CASE.profile(), 1)


@pytest.fixture(scope="module")
def swaps() -> Plan:
    """Every value that may be is swapped."""
    return random_plan(CASE.profile(), 0, (0, 1, 0))


@pytest.fixture
def leaves_nothing(plan: Plan) -> Iterator[None]:
    """No thread, file, handle, copy, hook or mode is there that was not before the test, and a new session works."""
    threads, files = set(threading.enumerate()), open_files()
    yield
    gc.collect()
    assert set(threading.enumerate()) <= threads
    assert open_files() == files
    assert not [thing for thing in gc.get_objects() if type(thing) in (Handle, Copy)]
    assert _get_current_dispatch_mode_stack() == []
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # type: ignore[attr-defined]
    raise_held_back()
    assert equal(train(CASE, 1)[0], train(CASE, 1, plan)[0])


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def quietly(run: Callable[[], object]) -> list[str]:
    """Runs it; the warnings it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught if "poochplan" in str(warning.message)]


# -- the disk -------------------------------------------------------------------------------------------------


class FullAfter:
    """``os.pwrite`` on a disk that takes ``writes`` writes and is full from then on."""

    def __init__(self, writes: int) -> None:
        self.left = writes
        self.asked = 0

    def __call__(self, descriptor: int, data: bytes, at: int) -> int:
        self.asked += 1
        if self.asked > self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return PWRITE(descriptor, data, at)


@pytest.mark.usefixtures("leaves_nothing")
def test_a_disk_that_is_full_from_any_write_on_changes_no_bit(swaps: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, _ = train(CASE, 2)
    roomy = FullAfter(1 << 40)
    monkeypatch.setattr(os, "pwrite", roomy)
    train(CASE, 2, swaps)
    assert roomy.asked > 20  # one to write ahead, the others are values
    for writes in range(0, roomy.asked, 3):
        monkeypatch.setattr(os, "pwrite", FullAfter(writes))
        seen: list[object] = []
        said = quietly(lambda seen=seen: seen.extend(train(CASE, 2, swaps)))  # type: ignore[misc]
        assert equal(reference, seen[0]), writes  # type: ignore[arg-type]
        assert len([line for line in said if "No space left on device" in line]) == (2 if writes == 0 else 1)


@pytest.mark.usefixtures("leaves_nothing")
def test_a_limit_of_the_kernel_on_the_file_is_a_fallback_with_its_reason(swaps: Plan) -> None:
    reference, _ = train(CASE, 2)
    planned_bytes = max(value.host_offset + value.size_bytes for value in swaps.values)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    seen: list[object] = []
    resource.setrlimit(resource.RLIMIT_FSIZE, (planned_bytes // 2, before[1]))
    try:
        said = quietly(lambda: seen.extend(train(CASE, 2, swaps)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert equal(reference, seen[0])  # type: ignore[arg-type]
    assert ["cannot hold the planned" in line for line in said] == [True, False]
    assert "cannot be written (File too large)" in said[1]


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("broken", ["error", "no bytes"])
@pytest.mark.parametrize("after_reads", [0, 5])
def test_a_read_that_fails_is_one_clear_error_and_the_next_step_is_right(
    swaps: Plan, monkeypatch: pytest.MonkeyPatch, broken: str, after_reads: int
) -> None:
    reads = 0

    def fails(descriptor: int, buffers: list[memoryview], at: int) -> int:
        nonlocal reads
        reads += 1
        if reads <= after_reads:
            return PREADV(descriptor, buffers, at)
        if broken == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return 0

    expected = one_step_in_core(skipped=1)
    model, step, _ = CASE.fresh()
    torch.manual_seed(1)
    with poochplan.apply(swaps, model) as session:
        monkeypatch.setattr(os, "preadv", fails)
        with pytest.raises(SpillError, match=r"not be read back .*(Input/output error|ended early).*check the disk"):
            step().backward()
        monkeypatch.setattr(os, "preadv", PREADV)
        assert equal([expected], [one_step(model, step)])
        assert session.report().last_step.fallbacks == 0


def one_step(model: torch.nn.Module, step: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = step()
    loss.backward()
    return snapshot(model, loss)


def one_step_in_core(*, skipped: int) -> list[torch.Tensor]:
    """A step after ``skipped`` ones that only ran forward as far as buffers and generators are concerned."""
    model, step, _ = CASE.fresh()
    torch.manual_seed(1)
    for _ in range(skipped):
        step()
    return one_step(model, step)


# -- the threads ----------------------------------------------------------------------------------------------


def kill(thread: threading.Thread) -> None:
    """Has ``SystemExit`` raised in the thread as soon as it runs Python."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("direction", ["outward", "inward"])
def test_a_copying_thread_that_is_killed_between_steps_gives_an_error_or_keeps_values(
    swaps: Plan, direction: str
) -> None:
    expected = one_step_in_core(skipped=1)
    model, step, _ = CASE.fresh()
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        with poochplan.apply(swaps, model) as session:
            step().backward()
            device = session._device
            assert isinstance(device, CpuDevice)
            kill(getattr(device, direction).thread)
            if direction == "outward":
                assert equal([expected], [one_step(model, step)])
                reasons = session.report().last_step.fallback_reasons
                assert any("the thread that copies has" in reason for reason in reasons)
            else:
                with pytest.raises(SpillError, match="the thread that copies has"):
                    one_step(model, step)


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("name", ["pwrite", "preadv"])
def test_a_copying_thread_that_is_killed_in_a_copy_gives_an_error_or_keeps_the_value(
    swaps: Plan, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    original = getattr(os, name)

    def killed_inside(descriptor: int, data: object, at: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            monkeypatch.setattr(os, name, original)
            kill(threading.current_thread())
        return original(descriptor, data, at)

    reference, _ = train(CASE, 2)
    monkeypatch.setattr(os, name, killed_inside)
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(train(CASE, 2, swaps)[0])
        except SpillError as error:
            outcome.append(str(error))

    quietly(run)
    if name == "pwrite":
        assert equal(reference, outcome[0])  # type: ignore[arg-type]
    else:
        assert "could not be read back" in str(outcome[0])


@pytest.mark.usefixtures("leaves_nothing")
def test_a_copy_that_the_garbage_collector_ends_on_the_copying_thread_does_not_wait_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, collected = threading.Event(), threading.Event()

    def collecting(descriptor: int, data: bytes, at: int) -> int:
        go.wait()
        gc.collect()
        collected.set()
        return PWRITE(descriptor, data, at)

    device = CpuDevice(tmp_path)
    monkeypatch.setattr(os, "pwrite", collecting)
    first, second = (copy_out(device, device.allocate(1000), at) for at in (0, 4096))
    cycle: list[object] = [second]
    cycle.append(cycle)
    del cycle, second
    go.set()
    first.wait()
    assert collected.is_set()
    device.close()


# -- signals --------------------------------------------------------------------------------------------------


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
def test_an_interrupt_in_forward_arrives(plan: Plan) -> None:
    model, step, _ = CASE.fresh()
    model.blocks[1].register_forward_hook(lambda *_: interrupt())  # type: ignore[index,union-attr]
    with pytest.raises(KeyboardInterrupt), poochplan.apply(plan, model):
        step()


@pytest.mark.usefixtures("leaves_nothing")
def test_an_interrupt_in_backward_arrives(plan: Plan) -> None:
    model, step, _ = CASE.fresh()
    model.blocks[1].register_full_backward_hook(lambda *_: interrupt())  # type: ignore[index,union-attr]
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
            assert not session.engine.holds_values
            if then == "another step":
                step()
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "raise_held_back"
    assert ("pack" if then == "another step" else "__exit__") in frames


@pytest.mark.usefixtures("leaves_nothing")
def test_interrupts_at_any_moment_leave_nothing_and_spoil_no_later_step(plan: Plan) -> None:
    interrupted = interrupts_at_random(plan, times=12, seed=0)
    assert interrupted >= 3


def interrupts_at_random(plan: Plan, times: int, seed: int) -> int:
    """Sessions that a timer interrupts somewhere, each followed by a right step; how many it hit."""
    chance, hits = random.Random(seed), 0
    reference, _ = train(CASE, 1)
    start_s = time.perf_counter()
    train(CASE, 1, plan)
    step_s = time.perf_counter() - start_s
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(times):
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.02, 1.0) * step_s)
                train(CASE, 1, plan)
            except KeyboardInterrupt:
                hits += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            with_plan, report = train(CASE, 1, plan)
            assert equal(reference, with_plan)
            assert report is not None
            assert report.total.fallbacks == 0
    finally:
        signal.signal(signal.SIGALRM, before)
    return hits


# -- the user's own errors, processes and exits ---------------------------------------------------------------


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_in_the_model_the_next_steps_of_the_session_are_right(plan: Plan, where: str) -> None:
    class Breaks(Exception):
        pass

    def breaks(*_: object) -> None:
        raise Breaks

    def steps(model: torch.nn.Module, step: Callable[[], torch.Tensor]) -> list[list[torch.Tensor]]:
        torch.manual_seed(1)
        block = model.blocks[1]  # type: ignore[index,union-attr]
        register = block.register_forward_hook if where == "forward" else block.register_full_backward_hook
        hook = register(breaks)
        with pytest.raises(Breaks):
            step().backward()
        hook.remove()
        return [one_step(model, step) for _ in range(2)]

    expected = steps(*CASE.fresh()[:2])
    model, step, _ = CASE.fresh()
    with poochplan.apply(plan, model) as session:
        assert equal(expected, steps(model, step))
        assert session.report().total.fallbacks == 0


class Numbers(Dataset[int]):
    """Has the garbage collector run in the worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


@pytest.mark.usefixtures("leaves_nothing")
def test_worker_processes_forked_within_a_step_neither_disturb_it_nor_hang(swaps: Plan) -> None:
    expected = one_step_in_core(skipped=0)
    model, step, _ = CASE.fresh()
    torch.manual_seed(1)
    with poochplan.apply(swaps, model):
        loss = step()
        state = torch.get_rng_state()
        loader = DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork")
        assert sorted(int(batch) for batch in loader) == [0, 1, 2, 3]
        torch.set_rng_state(state)
        loss.backward()
        assert equal([expected], [snapshot(model, loss)])
    del loader


@pytest.mark.usefixtures("leaves_nothing")
def test_a_forked_process_can_give_up_a_copy_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def slow(descriptor: int, data: bytes, at: int) -> int:
        go.wait()
        return PWRITE(descriptor, data, at)

    device = CpuDevice(tmp_path)
    monkeypatch.setattr(os, "pwrite", slow)
    copy = copy_out(device, device.allocate(1000), 0)
    child = os.fork()
    if child == 0:
        del copy
        device.close()
        os._exit(7)
    go.set()
    copy.wait()
    assert copy.error is None
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    device.close()


ENDS_INSIDE = """
import sys
sys.path[:0] = {paths!r}
import torch
from nets import CASES
import poochplan
torch.set_num_threads(1)
model, step, _ = CASES["residual"].fresh()
session = poochplan.apply(poochplan.Plan.load({plan!r}), model)
session.__enter__()
session._device.outward._throttle_bytes_per_s = 3e5
loss = step()
print("reached the end")
"""


def test_a_process_that_ends_inside_a_session_with_copies_under_way_ends(swaps: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    swaps.save(path)
    here = Path(__file__).parent
    script = ENDS_INSIDE.format(paths=[str(here), str(here.parent)], plan=str(path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "reached the end\n")
    assert done.stderr == ""
