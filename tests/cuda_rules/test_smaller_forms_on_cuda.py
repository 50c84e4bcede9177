"""On CUDA too a plan holds smaller forms: sources of copies, bits of masks, and indices and casts in fewer bytes. The
bits and bytes are those of the plan, and the host waits for nothing. Kernels or ops of torch narrow and widen bits; one
op of torch makes the other forms.

The kernels run as C++ on the processor here (``kernels.py``). So this is about when, where and with what they are
launched; ``tests/runtime/test_bits_kernel.py`` is about what they compute.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats import narrow
from poochplan.formats.plan import Decision
from poochplan.formats.sources import sources_of
from poochplan.runtime.replays import bits, fewer_bytes
from poochplan.runtime.replays.bits import kernels_on
from poochplan.tensors.storages import on_whole
from tests.cuda_rules.machine import WHERE, Machine, on_stand_in
from tests.cuda_rules.streams import Stream
from tests.planner.checker import check
from tests.planner.form_profiles import on_cuda
from tests.planner.test_masks import dropout
from tests.runtime.narrow_nets import NAMES, casts_on, forms_on, masks_on
from tests.runtime.nets import as_bytes, followed, metered_peaks, taken, train
from tests.runtime.random_plans import held, planned, problem_of, with_slow_copies
from tests.runtime.served import needs_compiler

COUNTS = {"float32": 6, "bfloat16": 6, "bools, float32": 9, "bools, bfloat16": 9}
"""Every mask: kernels widen its bits in less time than it is drawn again in."""
CASES, CASTS, FORMS = masks_on(WHERE), casts_on(WHERE), forms_on(WHERE)
SCALES = (torch.ops.aten.div_.Scalar, 0.7), (torch.ops.aten.mul_.Scalar, -3)
BY_OPS = "bfloat16", "bools, float32"
"""The cases in which ops of torch narrow and widen, though the profile counts on the kernels."""
T = TypeVar("T")


@pytest.fixture
def _by_ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.callspec.params["name"] in BY_OPS:
        monkeypatch.setattr(bits, "kernels_on", lambda where: None)


def is_as_wanted(gpu: Machine, name: str) -> bool:
    """Whether kernels were launched where they are there, beside the two launches that try them."""
    launched = sum(count for kernel, count in gpu.counts.items() if kernel.startswith(("narrow_", "widen_")))
    return (launched > 2) is (name not in BY_OPS)


@needs_compiler
@pytest.mark.usefixtures("_by_ops")
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("decision", Decision)
def test_bits_are_held_or_swapped_in_place_of_a_mask_or_it_is_drawn_again(
    gpu: Machine, name: str, decision: Decision
) -> None:
    case = CASES[name]
    plan, found = planned(case, held(problem_of(case), decision))
    assert sum(value.name.endswith(" as bits") for value in plan.values) == COUNTS[name]
    assert followed(case, plan, 3, wanted=train(case, 3)[0]).last_step.replayed_values >= COUNTS[name]
    assert metered_peaks(case, plan)[1] <= found.simulation.peak_bytes
    assert check(case.profile(), plan).peak_bytes == found.simulation.peak_bytes
    assert decision is Decision.RECOMPUTE or is_as_wanted(gpu, name)


@needs_compiler
@pytest.mark.usefixtures("_by_ops")
@pytest.mark.parametrize("name", ["bools, float32", "bools, bfloat16"])
def test_plans_hold_the_bits_of_dropouts_masks_within_the_budget(gpu: Machine, name: str) -> None:
    case, found = CASES[name], []
    profile = with_slow_copies(case.profile())
    assert profile.device.bits_kernel
    smallest = poochplan.smallest_budget(profile)
    budget_bytes = smallest + (profile.in_core_peak_bytes - smallest) // 8
    plan = poochplan.plan(profile, budget_bytes, evaluations=300, gap=0.0)
    assert any(value.bits and value.until >= 0 for value in plan.values)
    without = poochplan.plan(profile, budget_bytes, evaluations=300, without=["narrow"])
    assert not any(value.bits for value in without.values)
    gc.collect()
    before_bytes = gpu.memory.now["requested_bytes"]
    assert max(metered_peaks(case, plan)) <= plan.prediction.peak_bytes <= budget_bytes
    gc.collect()
    assert gpu.memory.now["requested_bytes"] == before_bytes  # no table is left
    for given in (None, plan):
        seen = train(case, 2, given, meter="never")[0]  # the meter would see what is kept of each step
        found.append([as_bytes(one.cpu()) for step in seen for one in step])
    assert found[0] == found[1]
    assert is_as_wanted(gpu, name)


def without_waits(gpu: Machine, run: Callable[[], T]) -> tuple[T, int]:
    """What it gives, while the host waits for nothing, and the most bytes that it takes at once."""
    waits = list[Stream]()
    before_bytes = gpu.memory.now["requested_bytes"]
    gpu.memory.begin_peaks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "synchronise", waits.append)
        found = run()
    assert waits == []
    return found, gpu.memory.peaks["requested_bytes"] - before_bytes


@needs_compiler
@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize("dtype", bits._INTEGERS)
@pytest.mark.parametrize("count", [1, 7, 8, 9, 1023, 1024, 1025, 5000])
def test_narrowing_gives_numpys_bits_and_widening_the_very_patterns_at_the_bytes_planned(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, count: int, by_kernels: bool
) -> None:
    for module in (bits, narrow):
        monkeypatch.setattr(module, "DEVICE_PART", 1024)
    drawn, scales = torch.rand(count) < 0.6, () if dtype is torch.bool else SCALES
    mask = drawn.to(WHERE).to(dtype)
    for scale, factor in scales:
        scale(mask, factor)
    patterns, name = bits.on_device(WHERE, dtype, scales), str(dtype).removeprefix("torch.")
    assert patterns.kernels is not None
    if not by_kernels:
        patterns = patterns._replace(kernels=None)
    profile = on_cuda(dropout())
    (masked,) = narrow.masks_of(profile).values()
    values = [msgspec.structs.replace(one, dtype=name, size_bytes=mask.nbytes) for one in profile.values]
    foreseen = narrow._workspace_bytes(msgspec.structs.replace(profile, values=tuple(values)), masked)
    made, narrowing_bytes = without_waits(gpu, lambda: bits.narrow(mask.untyped_storage(), dtype, patterns))
    assert made is not None
    packed = on_whole(made, torch.uint8)
    back, widening_bytes = without_waits(gpu, lambda: bits.widen(packed, count, dtype, patterns))
    assert packed.tolist() == np.packbits(drawn.numpy(), bitorder="little").tolist()
    integer = bits._INTEGERS[dtype][0]
    assert torch.equal(back.view(integer), mask.view(integer))
    inside_bytes = widening_bytes - profile.rounded_bytes(mask.nbytes)
    if by_kernels:
        assert (narrowing_bytes, inside_bytes) == (profile.rounded_bytes(packed.nbytes), 0)
    assert by_kernels or narrowing_bytes == foreseen[0]
    assert narrowing_bytes <= foreseen[0]
    assert inside_bytes <= foreseen[1]


@needs_compiler
def test_a_kernel_runs_on_the_current_stream_of_the_gpu_that_has_the_mask() -> None:
    with on_stand_in(index=1) as gpu:
        side, patterns = torch.cuda.Stream(gpu.where), bits.on_device(gpu.where, torch.bool, ())
        mask = (torch.rand(5000) < 0.6).to(gpu.where)
        side.wait_stream(torch.cuda.current_stream(gpu.where))
        with torch.cuda.stream(side):
            made = bits.narrow(mask.untyped_storage(), torch.bool, patterns)
            assert made is not None
            back = bits.widen(on_whole(made, torch.uint8), 5000, torch.bool, patterns)
        for tensor, kernel in ((on_whole(made, torch.uint8), "narrow_1"), (back, "widen_1")):
            block = gpu.memory.block_at(tensor.data_ptr())
            assert block is not None
            assert block.accesses.written is not None
            assert block.accesses.written[1] == f"{kernel} on stream {side.cuda_stream}"
        assert gpu.violations == []


@needs_compiler
def test_buffers_that_begin_elsewhere_are_left_to_ops_of_torch(gpu: Machine) -> None:
    kernels, before = kernels_on(WHERE), dict(gpu.counts)
    assert kernels is not None
    assert {name: gpu.counts[name] for name in ("narrow_1", "widen_1")} == {"narrow_1": 1, "widen_1": 1}
    mask, packed, table = (torch.zeros(2048, dtype=torch.uint8, device=WHERE) for _ in range(3))
    assert not kernels.narrow(mask[1:], packed, table)
    assert not kernels.narrow(mask, packed[8:], table)
    assert not kernels.widen(packed[8:], mask, table)
    assert dict(gpu.counts) == before | {"narrow_1": 1, "widen_1": 1}


@needs_compiler
@pytest.mark.parametrize(
    ("what", "reason"), [("fails", "RuntimeError: no NVRTC"), ("does nothing", "they gave other bits")]
)
def test_a_cupy_without_kernels_is_told_once_and_the_profile_knows(
    what: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __init__(self, *, code: str) -> None:
            if what == "fails":
                raise RuntimeError("no NVRTC\nand more")

        def get_function(self, name: str) -> object:
            return lambda *given, stream: None

    with on_stand_in(cupy=False):
        assert kernels_on(WHERE) is None
        assert not CASES["bools, float32"].new_profile().device.bits_kernel
    with on_stand_in():
        monkeypatch.setattr(sys.modules["cupy"], "RawModule", Broken)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            linear = nn.Linear(8, 8, device=WHERE)
            taken(lambda: linear(torch.ones(4, 8, device=WHERE)).sum(), linear)  # no mask: none is compiled
        with pytest.warns(RuntimeWarning, match=f"CuPy stand-in has no kernels for the bits of masks here .{reason}"):
            assert not CASES["bools, float32"].new_profile().device.bits_kernel
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert bits.on_device(WHERE, torch.bool, ()).kernels is None


@pytest.mark.parametrize("decision", Decision)
@pytest.mark.parametrize("name", CASTS)
def test_a_source_is_held_swapped_or_replayed_in_place_of_its_copy(gpu: Machine, name: str, decision: Decision) -> None:
    case = CASTS[name]
    assert len(sources_of(case.profile())) >= 4
    plan, found = planned(case, held(problem_of(case), decision))
    followed(case, plan, 3, wanted=train(case, 3)[0])
    assert metered_peaks(case, plan)[1] <= found.simulation.peak_bytes


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("decision", [Decision.KEEP, Decision.SWAP])
def test_what_is_held_in_fewer_bytes_comes_back_as_it_was(gpu: Machine, name: str, decision: Decision) -> None:
    case = FORMS[name]
    assert len(narrow.masks_of(case.profile())) == len(NAMES[name])
    plan, found = planned(case, held(problem_of(case), decision))
    assert [value.dtype for value in plan.values if value.bits] == NAMES[name]
    assert followed(case, plan, 3, wanted=train(case, 3)[0]).last_step.replayed_values >= len(NAMES[name])
    assert metered_peaks(case, plan)[1] <= found.simulation.peak_bytes
    assert check(case.profile(), plan).peak_bytes == found.simulation.peak_bytes


@pytest.mark.parametrize("form", fewer_bytes.DTYPES)
@pytest.mark.parametrize("count", [1, 1023, 70000])
def test_fewer_bytes_are_made_without_memory_besides_and_without_waits(gpu: Machine, form: str, count: int) -> None:
    patterns = torch.arange(count).to(torch.int16)
    most = {"uint8": 1 << 8, "uint16": 1 << 16, "int32": 1 << 31}.get(form, 1)
    whole = (torch.arange(count) * 46337 % most).to(WHERE)
    if form == "bfloat16":
        whole = patterns.view(torch.bfloat16).to(WHERE).float()
    made, narrowing_bytes = without_waits(gpu, lambda: fewer_bytes.narrow(whole.untyped_storage(), form))
    assert made is not None
    assert narrowing_bytes <= -(-made.nbytes() // 512) * 512
    back, widening_bytes = without_waits(gpu, lambda: fewer_bytes.widen(on_whole(made, torch.uint8), count, form))
    assert widening_bytes <= -(-whole.nbytes // 512) * 512
    integer = torch.int32 if form == "bfloat16" else torch.int64
    assert torch.equal(back.view(integer), whole.view(integer))
