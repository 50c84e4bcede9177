"""The spill file, disks that fail, threads that die, processes that fork: an error or a fallback, and nothing left."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import resource
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import poochplan
from poochplan.errors import SpillError
from poochplan.formats.plan import Plan
from poochplan.runtime.devices.cpu import SMALL_BYTES, CpuDevice, SpillFile, choose_spill_dir, file_system_type
from poochplan.runtime.devices.transfers import copy_in, copy_out
from poochplan.runtime.run_report import FallbackKind
from poochplan.runtime.session import Session
from tests.forks import forked, told
from tests.runtime.faults import CASE, _ctrl_c_is_heard, leaves_nothing, plan, swaps
from tests.runtime.nets import CASES, either_way, equal, followed, in_core, our_warnings, snapshot, train
from tests.runtime.random_plans import random_plan
from tests.runtime.served import needs_compiler

pytestmark = [pytest.mark.cpu_device, pytest.mark.usefixtures("one_thread")]

PWRITE, PREADV = os.pwrite, os.preadv


def trained(plan: Plan) -> tuple[list[list[torch.Tensor]], list[str]]:
    """Two steps under the plan, and the warnings they gave."""
    with our_warnings() as said:
        seen, report = train(CASE, 2, plan)
    assert not said or report.total.fallbacks > 0
    return seen, said


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
    reference = in_core(CASE, 2)
    roomy = FullAfter(1 << 40)
    monkeypatch.setattr(os, "pwrite", roomy)
    train(CASE, 2, swaps)
    assert roomy.asked > 20  # one to write ahead, the others are values
    for writes in range(0, roomy.asked, 3):
        monkeypatch.setattr(os, "pwrite", FullAfter(writes))
        seen, said = trained(swaps)
        assert equal(reference, seen), writes
        assert len([line for line in said if "No space left on device" in line]) == (2 if writes == 0 else 1)


@pytest.mark.usefixtures("leaves_nothing")
def test_a_limit_of_the_kernel_on_the_file_is_a_fallback_with_its_reason(swaps: Plan) -> None:
    reference = in_core(CASE, 2)
    planned_bytes = max(value.host_offset + value.size_bytes for value in swaps.values)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (planned_bytes // 2, before[1]))
    try:
        seen, said = trained(swaps)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert equal(reference, seen)
    assert ["there is no room for" in line for line in said] == [True, False]
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

    expected = second_step_in_core()
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


def second_step_in_core() -> list[torch.Tensor]:
    """A step after one that only ran forward as far as buffers and generators are concerned."""
    model, step, _ = CASE.fresh()
    torch.manual_seed(1)
    step()
    return one_step(model, step)


# -- the threads ----------------------------------------------------------------------------------------------


def kill(thread: threading.Thread) -> None:
    """Has ``SystemExit`` raised in the thread as soon as it runs Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


@pytest.mark.usefixtures("leaves_nothing", "copied_by_threads")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("direction", ["outward", "inward"])
def test_a_copying_thread_that_is_killed_between_steps_gives_an_error_or_keeps_values(
    swaps: Plan, direction: str
) -> None:
    expected = second_step_in_core()
    model, step, _ = CASE.fresh()
    torch.manual_seed(1)
    with poochplan.apply(swaps, model) as session:
        step().backward()
        device = session._device
        kill(getattr(device, direction).thread)
        if direction == "outward":
            assert equal([expected], [one_step(model, step)])
            reasons = session.report().last_step.fallback_reasons
            assert any("the thread that copies has" in reason for reason in reasons)
            assert set(session.report().last_step.fallback_kinds) == {FallbackKind.HOST_TIER}
        else:
            with pytest.raises(SpillError, match="the thread that copies has"):
                one_step(model, step)


@pytest.mark.usefixtures("leaves_nothing", "copied_by_threads")
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

    reference = in_core(CASE, 2)
    monkeypatch.setattr(os, name, killed_inside)
    if name == "pwrite":
        assert equal(reference, trained(swaps)[0])
    else:
        with pytest.raises(SpillError, match="could not be read back"):
            trained(swaps)


# -- the user's own errors, processes and exits ---------------------------------------------------------------


class Breaks(Exception):
    pass


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("where", ["register_forward_hook", "register_full_backward_hook"])
def test_after_an_exception_in_the_model_the_next_steps_of_the_session_are_right(plan: Plan, where: str) -> None:
    def breaks(*_: object) -> None:
        raise Breaks

    def use(model: torch.nn.Module, step: Callable[[], torch.Tensor], _: Session | None) -> list[torch.Tensor]:
        with getattr(model.blocks[1], where)(breaks), pytest.raises(Breaks):  # type: ignore[index,union-attr]
            step().backward()  # type: ignore[no-untyped-call]
        return [*one_step(model, step), *one_step(model, step)]

    either_way(CASE, plan, use)


class Gradients(Dataset[float]):
    """Are computed in the worker, which has the garbage collector run."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        gc.collect()
        inputs = torch.full((512, 64), 0.1 * index).requires_grad_()
        (gradient,) = torch.autograd.grad((inputs.exp() * inputs).sum(), inputs)
        return gradient[0, 0].item()


@pytest.mark.usefixtures("leaves_nothing")
def test_worker_processes_forked_within_a_step_compute_gradients_and_neither_disturb_it_nor_hang(swaps: Plan) -> None:
    expected = [Gradients()[index] for index in range(4)]

    def use(model: torch.nn.Module, step: Callable[[], torch.Tensor], _: Session | None) -> list[torch.Tensor]:
        loss = step()
        with torch.random.fork_rng(devices=[]):
            loader = DataLoader(Gradients(), num_workers=2, multiprocessing_context="fork")
            assert [batch.item() for batch in loader] == expected
        loss.backward()  # type: ignore[no-untyped-call]
        return snapshot(model, loss)

    either_way(CASE, swaps, use)


@pytest.mark.usefixtures("leaves_nothing")
def test_a_forked_process_can_give_up_a_copy_under_way(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def slow(descriptor: int, data: bytes, at: int) -> int:
        assert go.wait(60)
        return PWRITE(descriptor, data, at)

    device = CpuDevice(on_disk)
    monkeypatch.setattr(os, "pwrite", slow)
    copy = copy_out(device, device.allocate(2 * SMALL_BYTES), 0)
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
import torch
from tests.runtime.nets import CASES
import poochplan
torch.set_num_threads(1)
model, step, _ = CASES["residual"].fresh()
session = poochplan.apply(poochplan.Plan.load({plan!r}), model)
session.__enter__()
session._device.outward._throttle_bytes_per_s = 3e5
loss = step()
print("reached the end")
"""


@needs_compiler
def test_a_process_that_ends_inside_a_session_with_copies_under_way_ends(swaps: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    swaps.save(path)
    command, root = [*forked(), "-c", ENDS_INSIDE.format(plan=str(path))], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, told(done.stderr)) == (0, "reached the end\n", [])


def test_the_spill_file_is_private_has_no_name_and_is_written_once_ahead(on_disk: Path) -> None:
    file = SpillFile(on_disk)
    status = os.fstat(file.descriptor)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert list(on_disk.iterdir()) == []
    file.write_ahead(20 << 20)
    status = os.fstat(file.descriptor)
    assert status.st_size == 20 << 20
    assert status.st_blocks * 512 >= 20 << 20  # allocated, not a hole
    file.close()
    file.close()


def test_a_directory_in_memory_is_refused() -> None:
    shared_memory = Path("/dev/shm")
    if not shared_memory.is_dir() or file_system_type(shared_memory) != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    with pytest.raises(SpillError, match=r"is a tmpfs: spilling to memory saves none; name a folder on a disk"):
        choose_spill_dir(shared_memory)


def test_the_directory_can_be_named_by_the_environment_and_has_to_exist(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POOCH_SPILL_DIR", str(on_disk))
    assert choose_spill_dir() == on_disk
    with pytest.raises(SpillError, match="expected a folder, found none"):
        choose_spill_dir(on_disk / "nowhere")


def test_a_small_copy_has_ended_when_the_call_returns_unless_others_are_before_it(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, device = threading.Event(), CpuDevice(on_disk)

    def slow(descriptor: int, data: bytes, at: int) -> int:
        assert threading.current_thread() is threading.main_thread() or go.wait(60)
        return PWRITE(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", slow)
    small, large = device.allocate(SMALL_BYTES), device.allocate(SMALL_BYTES + 1)
    assert copy_out(device, small, 0).done()
    copies = [copy_out(device, one, index << 20) for index, one in enumerate((large, small))]
    assert not any(copy.done() for copy in copies)
    go.set()
    device.synchronize()
    assert all(copy.done() and copy.error is None for copy in copies)
    assert copy_out(device, small, 0).done()
    device.close()


def test_an_interrupt_in_a_small_copy_arrives_and_the_stream_goes_on(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(descriptor: int, data: bytes, at: int) -> int:
        raise KeyboardInterrupt

    device = CpuDevice(on_disk)
    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        copy_out(device, device.allocate(SMALL_BYTES), 0)
    monkeypatch.undo()
    copy = copy_out(device, device.allocate(SMALL_BYTES), 0)
    assert copy.done()
    assert copy.error is None
    device.close()


def test_a_throttle_holds_copies_to_its_rate(on_disk: Path) -> None:
    device = CpuDevice(on_disk, throttle_bytes_per_s=50e6)
    storage = torch.ones(5_000_000, dtype=torch.uint8).untyped_storage()
    start_s = time.perf_counter()
    copy_out(device, storage, 0).wait()
    assert time.perf_counter() - start_s >= 0.099
    device.close()


def test_short_writes_and_reads_are_completed(swaps: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: PWRITE(fd, data[: max(1, len(data) // 3)], at))
    monkeypatch.setattr(os, "preadv", lambda fd, data, at: PREADV(fd, [data[0][: max(1, len(data[0]) // 3)]], at))
    followed(CASE, swaps)


def test_a_closed_session_cannot_be_entered_again(swaps: Plan) -> None:
    session = poochplan.apply(swaps, CASE.fresh()[0])
    with session:
        pass
    with pytest.raises(poochplan.PoochError, match="this session is closed"), session:
        pass
