"""A profile without memory is that of the real step, but for its seconds; and it leaves everything as it was."""

from __future__ import annotations

import bisect
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import poochplan
from poochplan.errors import StepError, UsageError
from poochplan.formats.profile import PointKind, Profile
from poochplan.profiler.fake.fake import building, workspace_bytes
from tests.processes import python
from tests.runtime.nets import CASES, LINK, of, taken, train


def _conv() -> nn.Module:
    first = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)
    second = nn.Conv2d(8, 16, 3, groups=2), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(16, 10))


class LSTM(nn.LSTM):
    """Gives its series alone."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(batch)[0]  # type: ignore[no-any-return]


NETS = CASES | {
    "conv": of(_conv, 4, 3, 16, 16),
    "transformer": of(lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True), 4, 16, 32),
    "lstm": of(lambda: LSTM(24, 32, num_layers=2, dropout=0.1, bidirectional=True, batch_first=True), 4, 16, 24),
}


def fake_profile(name: str, **options: object) -> Profile:
    model, step, optimizer = NETS[name].fresh()
    return poochplan.profile(step, model=model, optimizer=optimizer, mode="fake", roofline="v100", **options)  # type: ignore[arg-type]


def clock(profile: Profile) -> list[object]:
    """What the runtime's clock sees: each point, and whose it is."""
    order: dict[int, int] = {}
    return [
        (
            point.kind,
            order.setdefault(profile.handles[point.handle].value, len(order)),
            profile.handles[point.handle].layer,
            profile.handles[point.handle].dtype,
            profile.handles[point.handle].shape,
        )
        for point in profile.points
    ]


def lives(profile: Profile) -> list[object]:
    """Each saved value in the order of saving: what it is, and its ticks as numbers of points passed."""

    def passed(tick: int) -> int:
        return bisect.bisect_right(profile.point_ticks, tick)

    saved = list(dict.fromkeys(profile.handles[p.handle].value for p in profile.points if p.kind is PointKind.SAVE))
    values = [profile.values[number] for number in saved]
    births = sorted(value.born for value in values)
    return [
        (
            value.kind, value.layer, value.size_bytes, value.dtype, value.shape, births.index(value.born),
            passed(value.forward_death), passed(value.freed), value.pinned, value.unreplayable,
        )
        for value in values
    ]  # fmt: skip


@pytest.mark.parametrize("name", NETS)
def test_points_sizes_and_lifetimes_are_those_of_the_real_step(name: str) -> None:
    real, fake = NETS[name].profile(), fake_profile(name)
    assert clock(fake) == clock(real)
    assert lives(fake) == lives(real)
    assert fake.static_bytes == real.static_bytes
    assert fake.model == real.model
    assert abs(fake.in_core_peak_bytes / real.in_core_live_peak_bytes - 1) <= 0.02


def test_a_plan_with_a_roofline_s_times_is_refused_unless_forced() -> None:
    plan = poochplan.plan(fake_profile("residual"), budget="100%", evaluations=100)
    assert plan.roofline == "v100"
    with pytest.raises(
        UsageError, match=r"found times computed from the rates of v100 \(its roofline\); profile here"
    ) as raised:
        train(NETS["residual"], 1, plan)
    assert "\n" not in str(raised.value)
    train(NETS["residual"], 1, plan, force=True)
    here = poochplan.plan(NETS["residual"].profile(mode="fake"), budget="100%", evaluations=100)
    assert (here.roofline, here.estimate) == ("", True)
    train(NETS["residual"], 1, here)


def test_a_step_that_no_machine_holds_is_profiled_without_memory() -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with building():
        model = nn.Sequential(*[nn.Linear(20_000, 20_000) for _ in range(25)])
        batch = torch.randn(600_000, 20_000)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    profile = poochplan.profile(
        lambda: model(batch).square().mean(), model=model, optimizer=optimizer, mode="fake", roofline="h200"
    )
    assert profile.static_bytes["parameter"] >= 25 * 20_000 * 20_000 * 4
    assert profile.in_core_peak_bytes > 10**12
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib < 500_000, f"{grown_kib} KiB for a step of {profile.in_core_peak_bytes} bytes"


def test_a_model_may_be_moved_and_converted_while_it_is_built() -> None:
    with building():
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        model[2].weight = model[0].weight
        model.to("cpu").half().to(torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model[2].weight is model[0].weight
    assert isinstance(model[0].weight, FakeTensor)


def test_the_profile_says_that_nothing_was_run() -> None:
    profile = fake_profile("conv")
    assert profile.mode == "fake"
    assert profile.device.name == "v100 (roofline)"
    assert profile.device.memory_bytes == 16 << 30
    assert profile.link.name == "pcie3"
    assert fake_profile("conv", link=LINK).link == LINK, "another may be named"
    assert profile.times.iterations == 0
    assert profile.times.step_s == pytest.approx(sum(op.duration_s for op in profile.ops))
    assert any("no replay was verified" in note for note in profile.notes)


@pytest.mark.parametrize("shape", [(16, 4, 32, 32), (7, 3, 5, 9), (5, 2, 64, 16), (10, 16, 512, 512), (3, 5, 130, 256)])
def test_the_workspace_of_an_lstm_is_what_onednn_takes(shape: tuple[int, int, int, int]) -> None:
    length, batch, features, hidden = shape
    gates = 4 * hidden
    *_, workspace = torch.ops.aten.mkldnn_rnn_layer(
        torch.randn(length, batch, features), torch.randn(gates, features), torch.randn(gates, hidden),
        torch.randn(gates), torch.randn(gates), torch.randn(batch, hidden), torch.randn(batch, hidden),
        False, [], 2, hidden, 1, True, False, False, True,
    )  # fmt: skip
    assert workspace_bytes(length, batch, features, hidden) == workspace.numel()


# -- what cannot be profiled without memory is one clear line --------------------------------------------------------


def _refusal(
    model: nn.Module, step: Callable[[], torch.Tensor], kind: type[Exception] = StepError, **options: str
) -> str:
    with pytest.raises(kind) as error:
        poochplan.profile(step, model=model, **({"mode": "fake", "roofline": "v100"} | options))  # type: ignore[call-overload]
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_step_that_looks_into_a_tensor_is_told_so() -> None:
    model, batch = nn.Linear(64, 64), torch.randn(8, 64)

    def step() -> torch.Tensor:
        out = model(batch)
        return out.sum() * (2.0 if float(out.detach().max()) > 0 else 1.0)

    assert "aten._local_scalar_dense.default, which needs a tensor's content" in _refusal(model, step)
    assert not any(isinstance(parameter, FakeTensor) for parameter in model.parameters())


def test_an_operator_without_a_shape_function_is_named() -> None:
    library = torch.library.Library("poochplan_tests", "FRAGMENT")
    library.define("shapeless(Tensor x) -> Tensor")
    library.impl("shapeless", lambda x: x.clone(), "CPU")
    model = nn.Linear(4, 4)
    said = _refusal(model, lambda: model(torch.ops.poochplan_tests.shapeless(model(torch.randn(2, 4)))).sum())
    assert "poochplan_tests.shapeless.default, which has no shape function" in said


@torch.library.custom_op("poochplan_tests::doubled", mutates_args=())
def doubled(rows: torch.Tensor) -> torch.Tensor:
    return rows * 2


doubled.register_autograd(lambda ctx, gradient: gradient * 2)


class ByNumPy(torch.autograd.Function):
    """Leaves torch in backward alone."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.from_numpy(gradient.numpy() * 2)


class Own(Exception):
    pass


def _raises(error: Exception) -> torch.Tensor:
    raise error


@pytest.mark.parametrize(
    ("part", "found"),
    [
        (lambda rows: rows * rows.mean().item(), "_local_scalar_dense"),
        (lambda rows: rows if rows.sum() > 0 else rows * 2, "_local_scalar_dense"),
        (lambda rows: rows + torch.from_numpy(rows.detach().numpy()), "raises RuntimeError: .numpy() is not supported"),
        (ByNumPy.apply, "raises RuntimeError: .numpy() is not supported"),
        (doubled, "no fake impl registered for"),
        (lambda rows: rows * len(bytes(rows.detach().untyped_storage())), "raises NotImplementedError: Not available"),
        (lambda rows: rows @ torch.ones(3, 3), "raises RuntimeError: a and b must have same reduction dim"),
        (lambda rows: _raises(ValueError("of the user's")), "raises ValueError: of the user's; "),
    ],
)
def test_whatever_fails_without_data_is_one_line(part: Callable[[torch.Tensor], torch.Tensor], found: str) -> None:
    model, batch = nn.Linear(8, 8), torch.randn(4, 8)
    said = _refusal(model, lambda: part(model(batch)).square().mean())
    assert said.startswith("step(): expected ")
    assert found in said
    assert "mode run" in said
    assert not any(isinstance(parameter, FakeTensor) for parameter in model.parameters())


@pytest.mark.parametrize("error", [Own("mine"), MemoryError("full")])
def test_an_error_of_the_user_s_own_class_passes_through_a_step_without_memory(error: Exception) -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(type(error), match=str(error)):
        poochplan.profile(lambda: _raises(error), model=model, mode="fake", roofline="v100")


FORKS = """
import os, torch, poochplan
from tests.runtime.nets import CASES
CASES["residual"].profile(mode="fake", roofline="v100")

def gradient():
    torch.ones(4, requires_grad=True).sum().backward()

gradient()
child = os.fork()
if child == 0:
    gradient()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_worker_that_is_forked_afterwards_computes_gradients() -> None:
    """Also if this torch was built for GPUs and none is here."""
    assert python(FORKS) == "7\n"


def test_fake_tensors_of_another_mode_are_refused() -> None:
    with FakeTensorMode():
        model = nn.Linear(4, 4)
    assert "found weight of another fake-tensor mode" in _refusal(model, lambda: model(torch.ones(2, 4)).sum())


def test_what_another_compiler_has_compiled_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].compile(backend="eager")
    said = _refusal(model, lambda: model(torch.ones(2, 4)).sum())
    assert "expected compiled callables to be Inductor's in mode fake, found none of its graphs in 0" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roofline": "v1000"}, "expected v100, a100, h100, h200, p100, titan-x, cpu-core or FLOPS,BYTES"),
        ({"roofline": "50e12"}, "found '50e12'"),
        ({"roofline": "50e12,-1"}, "found '50e12,-1'"),
        ({"roofline": "nan,1e12"}, "found 'nan,1e12'"),
        ({"mode": "run"}, 'mode "run" measures durations and takes none'),
        ({"mode": "dry"}, "expected one of run, swap-all, auto, fake, found 'dry'"),
    ],
)
def test_a_wrong_mode_or_roofline_is_one_clear_line(options: dict[str, str], message: str) -> None:
    model = nn.Linear(4, 4)
    assert message in _refusal(model, lambda: model(torch.ones(2, 4)).sum(), UsageError, **options)


def test_a_weight_outside_the_model_is_saved_alike_with_data_and_without() -> None:
    model, weight, batch = nn.Linear(8, 8), nn.Parameter(torch.ones(512, 8)), torch.randn(512, 8)

    def step() -> torch.Tensor:
        return (model(batch).tanh() * weight).square().mean()

    assert taken(step, model).handles == taken(step, model, mode="fake").handles
