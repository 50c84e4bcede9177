"""On an accelerator that torch does not know of, everything is as on others, through ``torch.accelerator`` alone."""

from __future__ import annotations

import contextlib
import errno
import functools
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import nn

import poochplan
from poochplan.cli import main
from poochplan.errors import UsageError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Link, LinkDirection, Memory, Profile
from poochplan.runtime.devices.accelerator import AcceleratorDevice, ComputeStream
from poochplan.runtime.devices.opening import open_device, usable_device
from poochplan.runtime.devices.pinned import Part, PinnedTier
from poochplan.runtime.devices.transfers import Transfers
from poochplan.runtime.replays.compiled_tape import TAPE
from poochplan.runtime.replays.tape import Tape
from poochplan.runtime.run_report import Report
from poochplan.tracing import traced_step
from poochplan.workload import Workload
from tests.runtime.random_plans import random_plan

WHERE = "late:0"
WEIGHTS = {"keep": (1, 0, 0), "swap": (0, 1, 0), "recompute": (0, 0, 1), "mixed": (1, 2, 2)}
STEPS, MOST_STEPS = 3, 2000
DIRECTION = LinkDirection(latency_s=1e-5, bandwidth_bytes_per_s=1e10)
LINK = Link(name="pinned", outward=DIRECTION, inward=DIRECTION)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        parts = ((nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 32)) for _ in "ab")
        self.blocks = nn.ModuleList(nn.Sequential(*part) for part in parts)
        self.norm, self.head = nn.BatchNorm1d(32), nn.Linear(32, 20)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden.flatten(0, 1)))


class Loop:
    """A training loop that begins at the same place each time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net().to(WHERE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.words = torch.randint(0, 20, (8, 64)).to(WHERE)

    def loss(self) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(self.words), self.words.flatten())

    def step(self) -> list[torch.Tensor]:
        """The loss, the gradients and the buffers."""
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        seen = [loss.detach(), *(one.grad for one in self.model.parameters() if one.grad is not None)]
        found = [one.cpu() for one in (*seen, *self.model.buffers())]
        self.optimizer.step()
        return found


@functools.cache
def profile() -> Profile:
    loop = Loop()
    return poochplan.profile(loop.loss, model=loop.model, optimizer=loop.optimizer, iterations=1, warmup=1, link=LINK)


@functools.cache
def in_core() -> list[list[torch.Tensor]]:
    loop = Loop()
    return [loop.step() for _ in range(STEPS)]


def planned(plan: Plan) -> tuple[list[list[torch.Tensor]], Report]:
    loop = Loop()
    with poochplan.apply(plan, loop.model) as session:
        seen = [loop.step() for _ in range(STEPS)]
    return seen, session.report()


def equal(left: list[list[torch.Tensor]], right: list[list[torch.Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_a_profile_says_what_the_device_is_and_counts_what_its_allocator_gives_out() -> None:
    found = profile()
    assert (found.device.kind, found.device.memory_bytes, found.memory) == ("late", 4 << 30, Memory.ALLOCATED)
    assert found.in_core_peak_bytes > 0
    assert any(op.random for op in found.ops)


@pytest.fixture(params=("python", "compiled"))
def copied_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What queues copies. The compiled code, which CUDA has, serves other accelerators as well."""
    made: str = request.param
    if made == "compiled":
        if not TAPE.is_built():
            pytest.skip(f"without a compiled tape: {TAPE.why_unavailable()}")
        module = cast(Any, TAPE.module())
        monkeypatch.setattr(Tape, "copies", lambda self, device: module.Copies(device, device.parts, 0))
    return made


@pytest.mark.parametrize("kind", WEIGHTS)
def test_any_decisions_give_the_bits_of_in_core_training(kind: str, copied_by: str) -> None:
    for seed in range(2):
        seen, report = planned(random_plan(profile(), seed, WEIGHTS[kind]))
        assert equal(in_core(), seen)
        assert report.total.fallbacks == 0, report.total.fallback_reasons
        assert (report.last_step.out_bytes > 0) is (kind in ("swap", "mixed"))


def test_the_planners_plan_keeps_its_budget() -> None:
    plan = poochplan.plan(profile(), int(1.02 * poochplan.smallest_budget(profile())), time_limit_s=2, evaluations=200)
    seen, report = planned(plan)
    assert equal(in_core(), seen)
    assert report.total.peak_bytes is not None
    assert report.total.peak_bytes <= plan.budget_bytes


def test_a_copy_to_the_host_comes_after_what_was_queued_before_it(copied_by: str) -> None:
    source = torch.arange(4096, dtype=torch.uint8).pin_memory()
    with contextlib.closing(open_device(torch.device(WHERE))) as device:
        assert isinstance(device, AcceleratorDevice)
        device.reserve_host(source.nbytes)
        transfers = Transfers(device, Tape("late").copies(device))
        filled = torch.zeros(4096, dtype=torch.uint8, device=WHERE)
        filled.copy_(source, non_blocking=True)  # the device runs it as late as it can
        transfers.out(filled.untyped_storage(), 0)
        device.outward.stream.synchronize()
        assert torch.equal(device.parts(0, 4096)[0].memory.tensor[:4096], source)
        storage, copy = transfers.back(4096, 0)
        copy.wait()
        assert torch.equal(torch.empty(0, dtype=torch.uint8, device=WHERE).set_(storage).cpu(), source)


def test_copies_for_which_the_host_has_no_memory_leave_their_values_on_the_device(
    copied_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parts(self: PinnedTier, offset: int, size_bytes: int) -> list[Part]:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(PinnedTier, "parts", parts)
    with pytest.warns(RuntimeWarning, match="no memory"):
        seen, report = planned(random_plan(profile(), 0, WEIGHTS["swap"]))
    assert equal(in_core(), seen)
    assert report.total.in_bytes == 0


def test_the_device_shows_a_wait_for_a_copy_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = random_plan(profile(), 0, WEIGHTS["swap"])
    monkeypatch.setattr(ComputeStream, "wait", lambda self, event: 0.0)
    assert not equal(in_core(), planned(plan)[0])


def test_auto_plans_and_trains_bitwise_as_in_core() -> None:
    loop = Loop()
    with poochplan.auto(loop.model, loop.optimizer, budget="90%", link=LINK, time_limit_s=1) as session:
        seen = [loop.step()]
        while session.plan is None and len(seen) < MOST_STEPS:
            seen.append(loop.step())
        seen += [loop.step() for _ in range(STEPS)]
    other = Loop()
    assert equal([other.step() for _ in seen], seen)
    assert session.plan is not None
    assert session.plan.device == "late"


def test_the_peaks_that_the_user_reads_are_those_without_a_session() -> None:
    loop = Loop()
    torch.empty(32 << 20, dtype=torch.uint8, device=WHERE)
    highest = torch.accelerator.max_memory_allocated()
    with poochplan.apply(random_plan(profile(), 0), loop.model):
        loop.step()
        loop.step()
    assert torch.accelerator.max_memory_allocated() == highest
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() < highest


def test_where_pinning_is_refused_values_lie_in_ordinary_memory() -> None:
    torch.ops.late.limit_pinned(0)
    try:
        with pytest.warns(RuntimeWarning, match="host memory could not be pinned"):
            seen, _ = planned(random_plan(profile(), 0, WEIGHTS["swap"]))
    finally:
        torch.ops.late.limit_pinned(1 << 40)
    assert equal(in_core(), seen)


def test_a_planned_step_is_measured_copy_by_copy() -> None:
    loop = Loop()
    plan = random_plan(profile(), 0, WEIGHTS["swap"])
    trace = traced_step(lambda: Workload(loop.model, loop.loss, loop.optimizer), plan)
    names = [bar.what for bar in trace.bars]
    assert names.count("swap out") == names.count("swap in") > 0


def test_the_generic_device_is_opened_for_it() -> None:
    device = open_device(usable_device("late"))
    assert type(device) is AcceleratorDevice
    assert (device.kind, device.where, device.host_tier) == ("late", torch.device(WHERE), "pinned")
    device.close()


@pytest.mark.parametrize("name", ["late:1", "cuda", "xpu", "no such"])
def test_a_device_that_is_not_there_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(UsageError, match="device: expected") as error:
        usable_device(name)
    assert "\n" not in str(error.value)


def test_an_allocator_without_statistics_is_refused_in_one_line() -> None:
    torch.ops.late.keep_statistics(False)
    try:
        with pytest.raises(UsageError, match="keeps no statistics"):
            usable_device("late")
    finally:
        torch.ops.late.keep_statistics(True)


def test_what_is_of_cuda_alone_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop, plan = Loop(), random_plan(profile(), 0)
    with pytest.raises(UsageError, match="whose allocator takes a limit, found one on late"):
        poochplan.apply(plan, loop.model, cap_bytes=1 << 30)
    with pytest.raises(UsageError, match="on: expected"):
        poochplan.plan(profile(), "80%", on="reserved")
    file = str(plan.save(tmp_path / "plan.json"))
    for words, said in {
        ("doctor", "--gpu", "--device", "late"): "--gpu: expected cuda or cuda:N as --device, found late",
        (
            "run",
            "tiny",
            "--plan",
            file,
            "--cap",
        ): "--cap: expected a plan for cuda, whose allocator takes a limit",
        ("link", "--device", "late:1"): "device: expected late:0, found 'late:1'; name that",
    }.items():
        assert main(words) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_a_plan_for_a_device_that_is_not_there_is_read_and_refused_when_it_is_used(tmp_path: Path) -> None:
    file = msgspec.structs.replace(random_plan(profile(), 0), device="elsewhere").save(tmp_path / "plan.json")
    plan = Plan.load(file)
    with pytest.raises(UsageError, match=r"device: expected .* found 'elsewhere'"):
        poochplan.apply(plan, Loop().model)
