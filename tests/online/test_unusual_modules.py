"""Modules and tensors at which a look warns or raises: TorchScript, parameters replaced for a call, modules that answer
no questions, parts that forbid hooks. Their loops train under ``auto`` as without, and profiles of them end in words.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import poochplan
from poochplan.errors import PoochError, UsageError
from tests.runtime.nets import Net
from tests.runtime.served import needs_compiler

pytestmark = [pytest.mark.cpu_device, pytest.mark.usefixtures("one_thread", "_warnings_are_errors")]

STEPS = 8
WIDTH = 20


@pytest.fixture
def _warnings_are_errors() -> Iterator[None]:
    """Torch's of the user's code would be the user's; ours would end the loop."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", "`torch.jit", FutureWarning)  # from Python 3.14 on
        warnings.filterwarnings("ignore", "poochplan: no plan", RuntimeWarning)
        yield


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.narrow(torch.nn.functional.silu(self.wide(rows)))


def around(inner: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), inner, nn.Tanh(), nn.Linear(WIDTH, 4))


def loaded(module: Any) -> Any:
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


def pair_of_scripts() -> nn.Module:
    return nn.Sequential(torch.jit.script(Mixer()), nn.Sigmoid(), torch.jit.script(Mixer()))


SCRIPTED: dict[str, Callable[[], nn.Module]] = {
    "script": lambda: around(torch.jit.script(Mixer())),
    "trace": lambda: around(torch.jit.trace(Mixer(), torch.randn(3, WIDTH))),
    "load": lambda: around(loaded(torch.jit.script(Mixer()))),
    "two scripts": lambda: around(pair_of_scripts()),
    "frozen": lambda: around(torch.jit.freeze(torch.jit.script(Mixer()).eval())),
    "traced as a whole": lambda: torch.jit.trace(around(Mixer()), torch.randn(3, WIDTH)),
}


def halved(net: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    fast = {name: one * 0.5 for name, one in net.named_parameters()}
    return functional_call(net, fast, (rows,))


def inner_step(net: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    names, weights = zip(*net.named_parameters(), strict=True)
    gradients = torch.autograd.grad(net(rows).pow(2).mean(), weights, create_graph=True)
    fast = {name: one - 0.1 * gradient for name, one, gradient in zip(names, weights, gradients, strict=True)}
    return functional_call(net, fast, (rows,))


def one_replaced(net: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return functional_call(net, {"0.weight": net[0].weight.tanh()}, (rows,))  # type: ignore[index]


def retained(net: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    fast = {name: one.exp() - 1 for name, one in net.named_parameters()}
    for one in fast.values():
        one.retain_grad()
    return functional_call(net, fast, (rows,))


REPLACED = {one.__name__: one for one in (halved, inner_step, one_replaced, retained)}


class Strict(nn.Module):
    """Its author answers no questions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise RuntimeError(f"{name} is no option of this layer") from error

    def extra_repr(self) -> str:
        raise ValueError("not fitted yet")

    @property
    def scale(self) -> float:
        raise ValueError("not fitted yet")

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.inner(rows))


class Forbidding(nn.Module):
    """Forbids saved-tensors hooks in some of its parts."""

    def __init__(self, forbids: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.forbids = forbids

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for name, part in zip("abc", self.parts, strict=True):
            is_free = name not in self.forbids
            with contextlib.nullcontext() if is_free else torch.autograd.graph.disable_saved_tensors_hooks("raw"):
                rows = torch.tanh(part(rows))
        return rows


@torch.autograd.graph.disable_saved_tensors_hooks("this function keeps raw pointers")
def decorated(rows: torch.Tensor) -> torch.Tensor:
    return rows.sigmoid() * rows


FORBIDDING: dict[str, Callable[[], nn.Module]] = {
    "first part": lambda: Forbidding("a"),
    "last part": lambda: Forbidding("c"),
    "two parts": lambda: Forbidding("ac"),
    "every part": lambda: Forbidding("abc"),
    "decorated": lambda: Net(lambda net, rows: decorated(net.a(rows)), a=nn.Linear(WIDTH, WIDTH)),
}


def trained(make: Callable[[], nn.Module], cache: Path | None = None) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(4)
    found = []
    with contextlib.nullcontext() if cache is None else poochplan.auto(model, optimizer, budget="70%", cache=cache):
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(64, WIDTH)).pow(2).mean()
            loss.backward()
            found += [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
            optimizer.step()
    return [*found, *(one.detach() for one in model.parameters())]


def trains_alike(make: Callable[[], nn.Module], cache: Path) -> None:
    trained(make)  # TorchScript computes otherwise once it has run some steps
    plain = trained(make)
    assert all(map(torch.equal, trained(make, cache), plain))


@needs_compiler
@pytest.mark.parametrize("kind", SCRIPTED)
def test_a_loop_with_a_part_in_torchscript_trains(kind: str, tmp_path: Path) -> None:
    trains_alike(SCRIPTED[kind], tmp_path)


@pytest.mark.parametrize("mode", ["run", "fake"])
@pytest.mark.parametrize("kind", ["script", "traced as a whole"])
def test_a_profile_of_torchscript_ends_in_words(kind: str, mode: Any) -> None:
    model = SCRIPTED[kind]()
    with pytest.raises(UsageError, match="expected modules in Python, found TorchScript"):
        poochplan.profile(lambda: model(torch.randn(64, WIDTH)).sum(), model=model, mode=mode)


def test_a_model_that_is_torchscript_as_a_whole_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected one that takes hooks.*torch.nn.Sequential\(model\)"):
        trained(lambda: torch.jit.script(around(Mixer())), tmp_path)
    plain = trained(lambda: around(Mixer()))  # nothing is left behind
    assert all(map(torch.equal, trained(lambda: around(Mixer()), tmp_path), plain))


@pytest.mark.parametrize("kind", REPLACED)
def test_a_loop_that_replaces_parameters_for_a_call_trains_without_a_warning(kind: str, tmp_path: Path) -> None:
    trains_alike(lambda: Net(lambda net, rows: REPLACED[kind](net.inner, rows), inner=around(Mixer())), tmp_path)


def test_a_module_that_answers_no_questions_trains_and_is_profiled(tmp_path: Path) -> None:
    trains_alike(lambda: around(Strict()), tmp_path)
    model = around(Strict())
    assert poochplan.profile(lambda: model(torch.randn(64, WIDTH)).sum(), model=model, mode="fake").handles


@pytest.mark.parametrize("kind", FORBIDDING)
def test_a_forward_that_forbids_hooks_in_a_part_trains(kind: str, tmp_path: Path) -> None:
    trains_alike(FORBIDDING[kind], tmp_path)


@pytest.mark.parametrize("mode", ["run", "fake"])
@pytest.mark.parametrize("kind", FORBIDDING)
def test_a_forward_that_forbids_hooks_in_a_part_is_profiled_or_refused_in_words(kind: str, mode: Any) -> None:
    model = FORBIDDING[kind]()
    rows = torch.randn(64, WIDTH)
    with contextlib.suppress(PoochError):
        assert poochplan.profile(lambda: model(rows).sum(), model=model, mode=mode).ops
    with pytest.raises(RuntimeError, match="hooks"), torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
        torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one).__enter__()
