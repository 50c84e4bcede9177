"""Steps and models that a profile cannot be taken of are one clear line; what it cannot account for is named."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import grad  # as users import it

import poochplan
from poochplan.errors import SpillError, StepError, UsageError
from poochplan.formats.profile import Profile
from poochplan.profiler import profiling
from poochplan.profiler.link import measure_link
from tests.runtime.nets import CASES, LINK, Net, Residual

MODES = ["run", "swap-all", "auto", "fake"]
in_every_mode = pytest.mark.parametrize("mode", MODES)
Step = Callable[[], torch.Tensor]


def taken(
    step: Step, model: nn.Module, mode: str = "run", optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> Profile:
    own: dict[str, Any] = {"roofline": "v100"} if mode == "fake" else {"iterations": 1}
    options = {"mode": mode, "link": LINK} | own | options
    return poochplan.profile(step, model=model, optimizer=optimizer, **options)


def refusal(step: Step, model: nn.Module, mode: str, kind: type[Exception] = StepError) -> str:
    """The one line that the profile ends with; everything is as it was before."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(kind) as error:
        taken(step, model, mode)
    assert "\n" not in str(error.value)
    assert "; " in str(error.value)
    after = list(model.parameters())
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True) if x.device.type != "meta")
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert torch.autograd._engine_run_backward.__name__ == "_engine_run_backward"  # type: ignore[attr-defined]
    return str(error.value)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def bias() -> nn.Module:
    """Saves nothing: no hook sees its backward."""
    return Net(lambda net, batch: batch + net.bias, bias=nn.Parameter(torch.zeros(16)))


# -- more than forward ---------------------------------------------------------------------------------------------


def _backward(loss: torch.Tensor, model: nn.Module) -> torch.Tensor:
    loss.backward()
    return loss


def _optimizer(loss: torch.Tensor, model: nn.Module) -> torch.Tensor:
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss


@in_every_mode
@pytest.mark.parametrize("make", [network, bias])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        (_backward, "found that it calls backward; return the loss instead"),
        (
            lambda loss, model: loss + grad(loss, list(model.parameters()), retain_graph=True)[0].sum(),
            "found that it calls torch.autograd.grad or torch.func; return the loss instead",
        ),
        (
            lambda loss, _: loss + torch.func.grad(lambda weight: weight.square().sum())(torch.ones(3)).sum(),
            "found that it calls torch.autograd.grad or torch.func; return the loss instead",
        ),
        (
            lambda loss, model: loss + grad(loss, list(model.parameters()), create_graph=True)[0].square().sum(),
            "as in a gradient penalty) out of the profiled step",
        ),
        (_optimizer, "found that it steps the optimizer; return the loss, and pass the optimizer"),
    ],
    ids=["backward", "gradients", "torch.func", "gradient penalty", "optimizer"],
)
def test_a_step_that_does_more_than_forward_is_told_so(
    make: Callable[[], nn.Module], what: Callable[[torch.Tensor, nn.Module], torch.Tensor], message: str, mode: str
) -> None:
    model, batch = make(), torch.randn(8, 16)
    assert message in refusal(lambda: what(model(batch).mean(), model), model, mode)


def test_another_model_s_optimizer_may_step() -> None:
    model, other, batch = network(), network(), torch.randn(8, 16)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def step() -> torch.Tensor:
        optimizer.step()
        return model(batch).mean()

    assert taken(step, model).notes == ()


# -- nothing to train ----------------------------------------------------------------------------------------------


@in_every_mode
@pytest.mark.parametrize("model", [network().requires_grad_(False), nn.Tanh()], ids=["frozen", "no parameters"])
def test_a_model_without_trainable_parameters_is_told_so(model: nn.Module, mode: str) -> None:
    batch = torch.randn(8, 16, requires_grad=True)
    assert "found none; there is nothing to train" in refusal(lambda: model(batch).mean(), model, mode)


@in_every_mode
@pytest.mark.parametrize(
    ("loss_of", "said"),
    [
        (lambda given: None, "expected the scalar loss, a tensor, found NoneType"),
        (lambda given: given, "expected a scalar loss, found shape [8, 4]"),
        (lambda given: given.mean().detach(), "expected a loss that requires gradients"),
        (lambda given: given.mean().view(1).to_sparse(), "expected a scalar loss, found a sparse_coo tensor; reduce"),
        (lambda given: given.mean().to("meta"), "expected a loss on cpu, where the model is, found one on meta"),
        (
            lambda given: torch.randn(8, 16, requires_grad=True).square().mean(),
            "expected a loss that depends on the model's parameters, found one that gives none of them",
        ),
    ],
    ids=["none", "no scalar", "without gradients", "sparse", "on another device", "of no parameter"],
)
def test_what_is_no_loss_of_the_model_is_told_so(loss_of: Callable[[torch.Tensor], Any], said: str, mode: str) -> None:
    model, batch = network(), torch.randn(8, 16)
    assert said in refusal(lambda: loss_of(model(batch)), model, mode)


def test_a_nested_loss_is_told_so() -> None:
    model = network()
    said = refusal(lambda: torch.nested.as_nested_tensor([model(torch.ones(8, 16)).mean().view(1)]), model, "run")
    assert "expected a scalar loss, found a nested tensor; reduce" in said


def test_hooks_that_use_gradients_up_in_backward_are_no_untrained_model() -> None:
    model, batch = network(), torch.randn(8, 16)

    def used_up(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(used_up)
    assert taken(lambda: model(batch).mean(), model).notes == ()


@pytest.mark.parametrize("mode", MODES[:3])
def test_a_loss_that_is_nan_is_profiled_like_any_other(mode: str) -> None:
    model, batch = network(), torch.randn(8, 16)
    plain = taken(lambda: model(batch).mean() * 1.0, model, mode, torch.optim.Adam(model.parameters()))
    other = taken(lambda: model(batch).mean() * float("nan"), model, mode, torch.optim.Adam(model.parameters()))
    assert other.ops_fingerprint == plain.ops_fingerprint
    assert [value.unreplayable for value in other.values] == [value.unreplayable for value in plain.values]


# -- shapes that data decides --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES[:3])
def test_a_boolean_mask_is_profiled_where_there_is_data(mode: str) -> None:
    model, batch = network(), torch.randn(8, 16)
    profile = taken(lambda: model[2](model[:2](batch)[batch[:, 0] > 0]).square().mean(), model, mode)
    assert any(op.name.startswith("aten.index") for op in profile.ops)
    assert not any("differ" in note for note in profile.notes)


def test_a_boolean_mask_in_mode_fake_is_one_clear_line() -> None:
    model, batch = network(), torch.randn(8, 16)

    def step() -> torch.Tensor:
        hidden = model(batch)
        return hidden[hidden > 0].mean()

    assert "aten.nonzero.default, which needs a tensor's content" in refusal(step, model, "fake")


@pytest.mark.parametrize("mode", ["swap-all", "fake"])
def test_shapes_that_differ_from_step_to_step_are_noted(mode: str) -> None:
    model, rows = network(), iter(range(2, 100))
    profile = taken(lambda: model(torch.randn(next(rows), 16)).mean(), model, mode)
    assert any(note.startswith("steps differ in shapes, first at op 0: aten.randn") for note in profile.notes)


# -- two devices ---------------------------------------------------------------------------------------------------


@in_every_mode
@pytest.mark.parametrize(
    ("move", "said"),
    [
        (lambda model: model[0].to("meta"), "expected every parameter on cpu, found 0.weight on meta; "),
        (lambda model: model[2].to("meta"), "expected every parameter on cpu, found 2.weight on meta; "),
        (
            lambda model: model.register_buffer("scale", torch.ones(4, device="meta")),
            "expected every buffer on cpu, found scale on meta; ",
        ),
    ],
    ids=["first layer", "last layer", "buffer"],
)
def test_what_of_the_model_is_on_another_device_is_named_with_both(
    move: Callable[[nn.Module], object], said: str, mode: str
) -> None:
    model, batch = network(), torch.randn(8, 16)
    move(model)
    assert refusal(lambda: model(batch).mean(), model, mode, UsageError).startswith(f"model: {said}")


@in_every_mode
def test_an_input_on_another_device_is_told_so(mode: str) -> None:
    model, batch = network(), torch.randn(8, 16, device="meta")
    said = "expected the model's inputs on cpu, where its parameters are, found input 0 on meta"
    assert said in refusal(lambda: model(batch).mean().to("cpu"), model, mode)


def test_an_input_that_the_model_brings_to_its_device_is_fine() -> None:
    model = Net(lambda net, batch: net.inner(torch.ones_like(batch, device="cpu")), inner=nn.Linear(16, 4))
    assert taken(lambda: model(torch.randn(8, 16, device="meta")).mean(), model).notes == ()


# -- eval mode -----------------------------------------------------------------------------------------------------


@in_every_mode
def test_a_model_in_eval_mode_is_warned_about_and_noted(mode: str) -> None:
    model, batch = Residual().eval(), torch.randn(4, 8, 8, 8)
    with pytest.warns(
        UserWarning, match=r"eval mode: no dropout, no batch statistics; call model\.train\(\)"
    ) as caught:
        profile = taken(lambda: model(batch).mean(), model, mode)
    assert [warning.filename for warning in caught] == [__file__]
    assert "the model was in eval mode: no dropout, no batch statistics" in profile.notes
    assert not model.training


@pytest.mark.filterwarnings("error")
@in_every_mode
def test_a_frozen_batch_norm_is_noted_by_name_and_no_warning(mode: str) -> None:
    model, batch = Residual(), torch.randn(4, 8, 8, 8)
    for block in model.blocks[1:]:
        block[1].eval()  # type: ignore[index]
    profile = taken(lambda: model(batch).mean(), model, mode)
    assert (
        "modules in eval mode: 2, first blocks.1.1 (BatchNorm2d): no dropout, no batch statistics there"
        in profile.notes
    )


@pytest.mark.filterwarnings("error")
@in_every_mode
def test_a_step_that_turns_training_on_itself_is_not_warned_about(mode: str) -> None:
    model, batch = Residual().eval(), torch.randn(4, 8, 8, 8)
    profile = taken(lambda: model.train()(batch).mean(), model, mode)
    assert not any("eval mode" in note for note in profile.notes)
    assert not model.training


# -- a disk that is full -------------------------------------------------------------------------------------------


def full_after(writes: int, patch: pytest.MonkeyPatch) -> None:
    write, count = os.pwrite, 0

    def pwrite(*arguments: Any) -> int:
        nonlocal count
        count += 1
        if count > writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    patch.setattr(os, "pwrite", pwrite)


@pytest.mark.parametrize("writes", [0, 5])
def test_a_disk_without_room_for_the_link_test_is_one_clear_line(writes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    full_after(writes, monkeypatch)
    with pytest.raises(SpillError, match=r"^link test: expected .*No space left on device\); free space, or name"):
        measure_link(torch.device("cpu"))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mode", ["swap-all", "auto"])
@pytest.mark.parametrize("writes", [0, 3, 40])
def test_a_disk_that_fills_up_ends_a_swapping_profile_with_one_line(
    writes: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by keeping what cannot be written: the step does not fit so."""
    model, step, optimizer = CASES["residual"].fresh()
    monkeypatch.setattr(profiling, "available_bytes", lambda: 0)  # for auto
    full_after(writes, monkeypatch)
    with pytest.raises(SpillError) as error:
        taken(step, model, mode, optimizer)
    assert re.search(r"could not be written .*No space left on device.*; free space, or name another", str(error.value))
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


# -- arguments -----------------------------------------------------------------------------------------------------


def test_iterations_are_refused_where_no_step_is_timed() -> None:
    model, batch = network(), torch.randn(8, 16)
    for mode in ("fake", "auto"):
        with pytest.raises(UsageError, match='iterations: mode "fake" times no steps and takes none, found 7'):
            taken(lambda: model(batch).mean(), model, mode, iterations=7, roofline="v100")


def test_a_roofline_has_mode_auto_choose_fake() -> None:
    model, batch = network(), torch.randn(8, 16)
    profile = poochplan.profile(lambda: model(batch).mean(), model=model, mode="auto", roofline="h200")
    assert (profile.mode, profile.device.name) == ("fake", "h200 (roofline)")
    assert profile.notes[0] == "mode auto chose fake, because a roofline was given"


@pytest.mark.parametrize("mode", ["run", "swap-all"])
def test_a_wrong_step_is_refused_before_the_link_is_measured(mode: str) -> None:
    model, said = nn.Linear(8, 8), list[str]()

    def taken(step: Callable[[], torch.Tensor], **where: Path) -> object:
        said.clear()
        return poochplan.profile(step, model=model, iterations=1, mode=mode, progress=said.append, **where)  # type: ignore[arg-type]

    with pytest.raises(StepError):
        taken(lambda: model(torch.ones(4, 8)))
    assert "measuring the link" not in said
    with pytest.raises(SpillError, match="expected a folder, found none"):
        taken(lambda: model(torch.ones(4, 8)).sum(), spill_dir=Path("/nowhere"))
    assert said == []
    taken(lambda: model(torch.ones(4, 8)).sum())
    assert "measuring the link" in said
