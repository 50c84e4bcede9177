"""Small networks for a GPU, or for the stand-in. ``POOCH_GPU_TESTS_DEVICE=cpu`` has them run on the CPU."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import poochplan
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.planner.planning import smallest_budget
from poochplan.runtime.session import Session
from tests.runtime.nets import Case, Recurrent, Residual, equal, metered_peaks, snapshot, train

WHERE = torch.device(os.environ.get("POOCH_GPU_TESTS_DEVICE", "cuda"))
ON_A_GPU = torch.cuda.is_available()
"""And not on the stand-in: asked before that is there."""
ON_NULL_GPU = ON_A_GPU and torch.cuda.get_device_name() == "null GPU"
"""That of ``tests/nullgpu``, on which no kernel computes anything."""
ABOUT_CUDA = [pytest.mark.gpu, pytest.mark.skipif(WHERE.type != "cuda", reason="about CUDA alone")]
"""Marks of a file's tests."""
Made = tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]
Training = tuple[nn.Module, Callable[[], torch.Tensor], torch.optim.Optimizer]
"""As :meth:`Case.fresh` gives it."""
PLANNED_BY = 16
"""Behind this turn planning is waited for."""


class Heads(nn.Module):
    """Layers of attention with dropout in the kernel, by one back end."""

    def __init__(
        self, backend: SDPBackend, dtype: torch.dtype, dropout: float, layers: int = 2, heads: int = 2, width: int = 64
    ) -> None:
        super().__init__()
        self.backend, self.dtype, self.heads, self.dropout, self.layers = backend, dtype, heads, dropout, layers
        self.norm = nn.LayerNorm(heads * width)
        self.qkv = nn.Linear(heads * width, 3 * heads * width)
        self.out = nn.Linear(heads * width, heads * width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        for _ in range(self.layers):
            query, key, value = (
                part.view(batch, length, self.heads, -1).transpose(1, 2).to(self.dtype)
                for part in self.qkv(self.norm(hidden)).chunk(3, dim=-1)
            )
            with sdpa_kernel([self.backend]):
                attended = nn.functional.scaled_dot_product_attention(
                    query, key, value, dropout_p=self.dropout, is_causal=True
                )
            joined = attended.to(hidden.dtype).transpose(1, 2).reshape(batch, length, width)
            hidden = hidden + nn.functional.gelu(self.out(joined))
        return hidden


class Words(nn.Module):
    """An embedding with a padding token, whose weight is the output's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64, padding_idx=0)
        self.mix = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.mix(self.embed(tokens)) @ self.embed.weight.t()


class Checkpointed(Residual):
    """The residual network, its blocks checkpointed by the user."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            images = images + checkpoint(block, images, use_reentrant=False)
        return self.head(images.mean((2, 3)))


class TwoStreams(Residual):
    """The residual network, every other block on a stream of its own.

    ``records``: each stream's memory is recorded for the other. The allocator then holds it until the other stream has
    come there, so what a step takes depends on time. Without that the waits alone make it safe.
    """

    records = True

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            aside = number % 2 and images.is_cuda
            images = images + (self._aside(block, images) if aside else block(images))
        return self.head(images.mean((2, 3)))

    def _aside(self, block: nn.Module, images: torch.Tensor) -> torch.Tensor:
        main, side = torch.cuda.current_stream(images.device), _side_stream(images.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            out = block(images)
        main.wait_stream(side)
        if self.records:
            images.record_stream(side)
            out.record_stream(main)
        return out


class TwoStreamsThatWait(TwoStreams):
    records = False


_SIDE: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(where: torch.device) -> torch.cuda.Stream:
    if where not in _SIDE:
        _SIDE[where] = torch.cuda.Stream(where)
    return _SIDE[where]


def _images(
    model: nn.Module, cast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
) -> Made:
    images, labels = torch.randn(4, 8, 32, 32).to(WHERE), torch.randint(0, 5, (4,)).to(WHERE)

    def loss_of(model: nn.Module) -> torch.Tensor:
        with cast():
            return nn.functional.cross_entropy(model(images), labels)

    return model.to(WHERE), loss_of


def _channels_last() -> Made:
    model, _ = _images(Residual())
    images = torch.randn(4, 8, 32, 32).to(WHERE, memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last), lambda model: model(images).square().mean()


def _recurrent() -> Made:
    series = torch.randn(3, 20, 16).to(WHERE)
    return Recurrent().to(WHERE), lambda model: model(series).square().mean()


def _words() -> Made:
    tokens = torch.randint(0, 50, (4, 32)).to(WHERE)
    return Words().to(WHERE), lambda model: nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _large() -> Made:
    """Values of more than a MiB and of no round size: the large pool's. A GPU's segments have 20 MiB."""
    rows = torch.randn(32001 if ON_A_GPU else 2001, 257).to(WHERE)
    widths = (257, 300, 257, 300, 257)
    layers = [nn.Sequential(nn.Linear(*pair), nn.GELU()) for pair in itertools.pairwise(widths)]
    return nn.Sequential(*layers).to(WHERE), lambda model: model(rows).square().mean()


def _heads(backend: SDPBackend, dtype: torch.dtype, dropout: float, layers: int = 2) -> Case:
    def make() -> Made:
        hidden = torch.randn(2, 60, 128).to(WHERE)  # no multiple of 32, to which the efficient kernel pads
        return Heads(backend, dtype, dropout, layers).to(WHERE), lambda model: model(hidden).square().mean()

    return Case(make)


CASES = {
    "residual": Case(lambda: _images(Residual())),
    "autocast": Case(lambda: _images(Residual(), lambda: torch.autocast(WHERE.type, torch.bfloat16))),
    "channels_last": Case(_channels_last),
    "recurrent": Case(_recurrent),
    "embedding": Case(_words),
    "large": Case(_large),
    "checkpointed": Case(lambda: _images(Checkpointed())),
    "two_streams": Case(lambda: _images(TwoStreams(depth=4))),
    "two_streams_wait": Case(lambda: _images(TwoStreamsThatWait(depth=4))),
    "sdpa_math": _heads(SDPBackend.MATH, torch.float32, 0.1),
    "sdpa_efficient": _heads(SDPBackend.EFFICIENT_ATTENTION, torch.float32, 0.1),
    "sdpa_flash": _heads(SDPBackend.FLASH_ATTENTION, torch.bfloat16, 0.1),
    "sdpa_cudnn": _heads(SDPBackend.CUDNN_ATTENTION, torch.bfloat16, 0.1),
    "sdpa_flash_without_dropout": _heads(SDPBackend.FLASH_ATTENTION, torch.bfloat16, 0.0, 6),
    "sdpa_efficient_without_dropout": _heads(SDPBackend.EFFICIENT_ATTENTION, torch.float32, 0.0, 6),
}
BY_DAY = ("residual", "autocast", "embedding", "checkpointed", "two_streams", "sdpa_flash")
"""What the stand-in runs each time; a GPU, and ``make test-all``, run all."""
OF_KNOWN_PEAK = tuple(name for name in CASES if name != "two_streams")
"""What their steps take does not depend on time."""
OF_FLOWS = tuple(
    name for name in OF_KNOWN_PEAK if ON_A_GPU or name in {*BY_DAY, "two_streams_wait", "recurrent", "large"}
)
"""Those of the flows: on the stand-in one for each mechanism. That any decisions are exact is claimed of all."""
ON_CUDA_ALONE = {name for name in CASES if name.startswith("sdpa_") and name != "sdpa_math"}


def each(names: Iterable[str], by_day: Collection[str]) -> list[Any]:
    """The names; ``make test`` leaves all but those ``by_day`` to ``make test-all``."""
    return [name if name in by_day else pytest.param(name, marks=pytest.mark.rest) for name in names]


def case_of(name: str) -> Case:
    """The case of that name; skips the test where its kernel is not to be had."""
    if WHERE.type != "cuda" and name in ON_CUDA_ALONE:
        pytest.skip("this back end is CUDA's")
    if name in ON_CUDA_ALONE:
        try:
            CASES[name].fresh()[1]()
        except RuntimeError as error:
            if not any(one in str(error) for one in ("No available kernel", "CUDNN_STATUS_NOT_INITIALIZED")):
                raise
            pytest.skip("this back end refuses such inputs on this device")
    return CASES[name]


def reference(case: Case, steps: int) -> list[list[torch.Tensor]]:
    """What steps in-core give; skips the test where that is not the same twice."""
    once, again = train(case, steps)[0], train(case, steps)[0]
    if not equal(once, again):
        pytest.skip("two runs in-core differ: this back end has no deterministic backward")
    return once


def planned(profile: Profile) -> Plan:
    """A plan halfway between the least memory and that of the in-core step."""
    smallest = smallest_budget(profile, without=["state"])  # which that policy never moves
    return poochplan.plan(profile, (smallest + profile.in_core_peak_bytes) // 2, policy="greedy")


def takes_what_is_predicted(case: Case, profile: Profile) -> None:
    """Steps under a plan take no more than it says; nothing else lies on the device."""
    plan = planned(profile)
    assert max(metered_peaks(case, plan)) <= plan.prediction.peak_bytes


def in_host_memory(seen: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Copies that take no memory of the device's."""
    return [[one.cpu() for one in step] for step in seen]


NOT_COMPARED: list[str] = []
"""The tests of this run whose bits nobody has compared."""


def same_bits(wanted: list[list[torch.Tensor]], seen: list[list[torch.Tensor]]) -> bool:
    """Whether copies in host memory are equal. There are no bits to compare on the null GPU."""
    if ON_NULL_GPU:
        NOT_COMPARED.append(os.environ["PYTEST_CURRENT_TEST"])
        return len(wanted) == len(seen)
    return equal(wanted, seen)


def turns_until_planned(session: Session, training: Training, count: int) -> list[list[torch.Tensor]]:
    """Turns of a loop, which waits for its plan behind the :data:`PLANNED_BY`-th; what each gave. Those that followed
    a plan took no more than it says.
    """
    (model, step, optimizer), seen = training, []
    for number in range(count):
        optimizer.zero_grad(set_to_none=True)
        loss = step()
        loss.backward()
        seen += in_host_memory([snapshot(model, loss)])
        optimizer.step()
        if number == PLANNED_BY:
            session.wait_until_planned(240)
    report, predictions = session.report(), [plan.prediction for plan in session.plans.values()]
    assert report.steps_followed > 0
    assert report.total.peak_bytes is not None
    assert report.total.peak_bytes <= max(max(one.peak_bytes, one.first_step_peak_bytes) for one in predictions)
    return seen
