"""A replay runs under the switches of torch that its ops were recorded under, and leaves those of now as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from poochplan.torch_private.switches import SwitchesAsRecorded, state_now
from tests.runtime.nets import Case, followed, of
from tests.runtime.random_plans import random_plan

pytestmark = [pytest.mark.cpu_device, pytest.mark.usefixtures("one_thread")]

Block = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def _set(name: str, value: Any, before: Any) -> Iterator[None]:
    owner, _, attribute = name.rpartition(".")
    setattr(eval(owner), attribute, value)
    yield
    setattr(eval(owner), attribute, before)


@contextlib.contextmanager
def _calling(put: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    put(value)
    yield
    put(before)


def _without_onednn() -> Any:
    return torch.backends.mkldnn.flags(enabled=False)


def _two_threads() -> Any:
    return _calling(torch.set_num_threads, 2, 1)


def _rounded_products() -> Any:
    return _calling(torch.set_float32_matmul_precision, "medium", "highest")


def _deterministic() -> Any:
    return _calling(torch.use_deterministic_algorithms, True, False)


class Parts(nn.Module):
    """Convolutions, products, a cumulative sum: under a block that is entered inside forward alone."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.products, self.block = nn.Linear(8, 8), block

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with self.block():
            for conv in self.convs:
                images = torch.tanh(conv(images))
                images = images * torch.sigmoid(self.products(images.transpose(1, 3))).transpose(1, 3)
        return images.cumsum(1).sin()


BLOCKS: dict[str, Block] = {
    "no oneDNN": _without_onednn,
    "threads": _two_threads,
    "matmul precision": _rounded_products,
    "deterministic": _deterministic,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_in_forward_that_begins_after_the_profile(name: str) -> None:
    blocks = [contextlib.nullcontext]
    case: Case = of(lambda: Parts(lambda: blocks[0]()), 4, 8, 40, 40)
    plan = random_plan(case.profile(), 0, (0, 0, 1))
    blocks[0] = BLOCKS[name]
    report = followed(case, plan)
    assert report.total.replayed_values > 0


def test_onednn_matters_here() -> None:
    """Else the tests above would show nothing."""
    images, kernel = torch.randn(4, 8, 40, 40), torch.randn(8, 8, 3, 3)
    found = torch.nn.functional.conv2d(images, kernel)
    with _without_onednn():
        assert not torch.equal(found, torch.nn.functional.conv2d(images, kernel))


@pytest.mark.parametrize(
    ("block", "read"),
    [
        (_without_onednn, lambda: torch.backends.mkldnn.enabled),
        (_two_threads, torch.get_num_threads),
        (_rounded_products, torch.get_float32_matmul_precision),
        (_deterministic, torch.are_deterministic_algorithms_enabled),
        (lambda: _calling(torch.set_default_dtype, torch.float64, torch.float32), torch.get_default_dtype),
        (
            lambda: _set("torch.backends.mkldnn.conv.fp32_precision", "bf16", "none"),
            lambda: torch.backends.mkldnn.conv.fp32_precision,
        ),
    ],
)
def test_a_switch_is_as_it_was_recorded_and_then_as_before(block: Block, read: Callable[[], object]) -> None:
    before = read()
    with block():
        inside, recorded = read(), state_now("cpu")
    plain = state_now("cpu")
    assert inside != before
    assert recorded is not plain
    with SwitchesAsRecorded() as switches:
        for state, wanted in ((plain, before), (recorded, inside), (plain, before), (recorded, inside)):
            switches.turn(state)
            assert read() == wanted
    assert read() == before
    assert state_now("cpu") is plain


def test_switches_come_back_after_an_error() -> None:
    with _without_onednn():
        recorded = state_now("cpu")
    with pytest.raises(KeyError), SwitchesAsRecorded() as switches:
        switches.turn(recorded)
        raise KeyError
    assert torch.backends.mkldnn.enabled


def test_a_gpu_has_switches_of_its_own() -> None:
    plain = state_now("cuda")
    with torch.backends.cudnn.flags(enabled=False):
        off, off_of_cpu = state_now("cuda"), state_now("cpu")
    assert off != plain
    assert off_of_cpu is state_now("cpu")
