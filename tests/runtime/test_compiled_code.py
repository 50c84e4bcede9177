"""What is read off generated code, and off the allocator's events while it runs."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks

from poochplan.runtime.compiled.deferred_unpack import deferred_arguments
from poochplan.runtime.metering.device_peak import CpuMeter, most_behind


def test_compiled_code_tells_the_most_that_was_live_at_once_above_its_begin() -> None:
    meter = CpuMeter()
    meter.begin()
    first = torch.ones(1024)
    second = first.neg()
    del first, second
    torch.ones(256)
    assert meter.end() == 2 * 4096
    assert meter.end() is None


def test_what_is_set_aside_does_not_count() -> None:
    meter = CpuMeter()
    meter.begin()
    with meter.set_aside():
        copy = torch.ones(100_000).clone()
    torch.ones(128)
    assert meter.end() == 512
    del copy


def test_a_storage_from_before_that_dies_in_the_code_makes_room() -> None:
    meter = CpuMeter()
    before = torch.ones(1024)
    watch = weakref.ref(before.untyped_storage(), lambda _: meter.freed(4096))
    meter.begin()
    del before
    after = torch.ones(2048)
    assert meter.end() == 4096
    del watch, after


def test_a_storage_whose_death_is_told_twice_makes_room_once() -> None:
    alloc, free = ("memory_alloc", "", 4096), ("memory_alloc", "", -4096)
    mark = [("push", "poochplan.freed:4096", 0), ("pop", "", 0)]
    large = ("memory_alloc", "", 8192)
    assert most_behind([alloc, alloc, *mark, free, large])[0] == 4096 + 8192
    assert most_behind([alloc, alloc, free, *mark, large])[0] == 4096 + 8192
    assert most_behind([alloc, alloc, free, free, large])[0] == 8192
    assert most_behind([alloc, alloc, *mark, *mark, large])[0] == 8192


def test_a_marked_storage_makes_room_for_its_own_bytes_where_torch_reports_those_of_an_earlier_one() -> None:
    op = [("push", "aten::sin", 0), ("pop", "", 0)]
    mark, stale = [("push", "poochplan.freed:4096", 0), ("pop", "", 0)], ("memory_alloc", "", -8192)
    new = ("memory_alloc", "", 16384)
    assert most_behind([*mark, stale, new])[0] == 16384 - 4096
    assert most_behind([*mark, *op, stale, new])[0] == 16384 - 4096 - 8192  # another one, behind an op


def test_a_meter_that_was_never_ended_is_forgotten() -> None:
    meter = CpuMeter()
    meter.begin()
    torch.ones(100_000)
    meter.begin()
    torch.ones(128)
    assert meter.end() == 512


@pytest.mark.parametrize("behind", ["an optimizer's step", "a module's call"])
def test_a_meter_that_ends_in_backward_is_not_brought_back_by_autograd(behind: str) -> None:
    """Else the log grows from there on, and no other profiler can begin."""
    meter, parameter = CpuMeter(), torch.nn.Parameter(torch.ones(4))
    optimizer, module = torch.optim.SGD([parameter]), torch.nn.Identity()
    meter.begin()
    hidden = parameter * 2

    def ends(_: torch.Tensor) -> None:
        assert meter.end() is None
        module(hidden)  # still in backward

    hidden.register_hook(ends)
    hidden.exp().sum().backward()
    if behind == "an optimizer's step":
        optimizer.step()
    else:
        module(parameter)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        module(parameter * 3)
    assert any(event.name == "aten::mul" for event in profiler.events())
    assert not _global_forward_pre_hooks
    assert not _global_optimizer_pre_hooks


def test_compiled_code_under_another_profiler_is_unknown_and_leaves_that_one_alone() -> None:
    meter = CpuMeter()
    with torch.profiler.profile() as profiler:
        meter.begin()
        torch.ones(128)
        assert meter.end() is None
    assert any(event.name == "aten::ones" for event in profiler.events())


CODE = """
class Runner:
    def call(self, args):
        primals_1, mul, s0, tangents_1 = args
        args.clear()
        # mul in a comment
        assert_size_stride(mul, (4, 4), (4, 1), 'input')
        buf0 = torch.ops.poochplan.deferred_unpack.default(mul, tangents_1)
        buf1 = buf0
        cpp_fused_0(tangents_1, buf1, primals_1)
        del mul
        return (buf1, )

def get_args():
    return [primals_1, mul, s0, tangents_1]
"""


def test_an_argument_that_is_only_checked_handed_to_the_op_and_dropped_is_deferred() -> None:
    assert deferred_arguments(CODE) == {1}


@pytest.mark.parametrize(
    "line",
    [
        "cpp_fused_1(mul)",
        "buf2 = mul; del mul  # reuse",
        "buf2 = torch.ops.poochplan.deferred_unpack.default(mul, None)",
        "buf2 = torch.ops.poochplan.deferred_unpack.default(tangents_1, mul)",
        "extern_kernels.mm(reinterpret_tensor(mul, (4, 4), (1, 4), 0), buf1, out=buf2)",
    ],
)
def test_an_argument_that_anything_else_reads_does_not(line: str) -> None:
    assert deferred_arguments(CODE.replace("        del mul\n", f"        {line}\n")) == frozenset()


@pytest.mark.parametrize(
    "code",
    ["", CODE.replace("def call(self, args)", "def run(args)"), CODE.replace(" = args\n", " = other\n"), CODE + CODE],
    ids=["none", "no call", "no arguments", "two calls"],
)
def test_code_of_another_kind_lets_nothing_be_deferred(code: str) -> None:
    assert deferred_arguments(code) == frozenset()
