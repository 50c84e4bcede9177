"""Two ways to train one 3D U-Net, for ``benchmarks/full_volume.py`` and ``notebooks/full_volume.ipynb``.

*whole*: a step sees one whole volume, and a plan says what becomes of its activations. *patches*: a step sees several
small cubes of several volumes, in plain PyTorch, and what a volume is made of comes from a window that slides over it.
Network, loss, optimizer, cases, seeds and seconds are the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.volume_cases import CLASSES, Case, Labels
from poochplan.workloads.common import require

Method = Literal["patches", "whole"]
METHODS: tuple[Method, ...] = ("patches", "whole")
NO_METER = SimpleNamespace(peak=0, restart=lambda: None)
"""In place of ``tests/allocated_bytes.py``, where nobody asks for bytes."""
HALVED = 16
"""Sides are multiples of this: four levels halve them."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What both ways share, and how large a patch is."""

    features: tuple[int, ...] = (8, 8, 16, 32, 64, 8)
    """Channels of the five levels and of the last layer: MONAI's ``BasicUNet``."""
    patch: tuple[int, int, int] = (32, 32, 32)
    patches: int = 3
    """In one step."""
    overlap: float = 0.25
    """Share of a patch that neighbouring windows have in common."""
    learning_rate: float = 1e-2
    """At the begin; it falls along a cosine to nothing as the seconds run out."""


class Training:
    """Network, loss and optimizer of one way, from one seed; each :meth:`step` draws its own cases."""

    def __init__(self, method: Method, setting: Setting, cases: Sequence[Case], seed: int) -> None:
        self.method, self.setting, self.cases = method, setting, cases
        torch.manual_seed(seed)
        self.drawn = np.random.default_rng(seed)
        self.model: torch.nn.Module = require("monai.networks.nets").BasicUNet(
            spatial_dims=3, in_channels=1, out_channels=len(CLASSES), features=setting.features
        )
        self.loss = require("monai.losses").DiceCELoss(to_onehot_y=True, softmax=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=setting.learning_rate)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and labels, ``[n, 1, x, y, z]``: of one whole volume, or of patches."""
        if self.method == "whole":
            return _batch([self.cases[int(self.drawn.integers(len(self.cases)))]])
        return _batch([self._patch() for _ in range(self.setting.patches)])

    def _patch(self) -> Case:
        """Of any case, at any place; every second one with a voxel of the brain in its middle."""
        case = self.cases[int(self.drawn.integers(len(self.cases)))]
        shape, patch = np.array(case.labels.shape), np.array(self.setting.patch)
        low = self.drawn.integers(shape - patch + 1)
        if self.drawn.integers(2):
            brain = np.flatnonzero(case.labels)
            middle = np.array(np.unravel_index(self.drawn.choice(brain), case.labels.shape))
            low = (middle - patch // 2).clip(0, shape - patch)
        box = tuple(slice(int(start), int(start + side)) for start, side in zip(low, patch, strict=True))
        return Case(name=case.name, image=case.image[box], labels=case.labels[box])

    def forward(self) -> torch.Tensor:
        images, labels = self.batch()
        loss: torch.Tensor = self.loss(self.model(images), labels)
        return loss

    def step(self, spent: float = 0.0) -> float:
        """One step of training, when this share of its seconds is spent; its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.setting.learning_rate * (0.01 + 0.99 * (1 + math.cos(math.pi * min(spent, 1.0))) / 2)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def predicted(self, case: Case) -> Labels:
        """The class of each voxel: the network sees the volume whole, or windows of it, padded by reflection."""
        image = torch.from_numpy(case.image)[None, None].clone()
        padded, inside = padded_to(image, HALVED)
        self.model.eval()
        try:
            scores = self.model(padded) if self.method == "whole" else self._by_window(padded)
        finally:
            self.model.train()
        x, y, z = inside
        return scores[0, :, x, y, z].argmax(dim=0).numpy().astype(np.uint8)

    def _by_window(self, image: torch.Tensor) -> torch.Tensor:
        infer = require("monai.inferers").sliding_window_inference
        scores: torch.Tensor = infer(
            image, self.setting.patch, 1, self.model, overlap=self.setting.overlap, mode="gaussian"
        )
        return scores


def _batch(cases: Sequence[Case]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors of their own memory, so that a meter of torch's bytes sees them."""
    images = torch.stack([torch.from_numpy(np.ascontiguousarray(case.image)) for case in cases])
    labels = torch.stack([torch.from_numpy(case.labels.astype(np.int64)) for case in cases])
    return images[:, None], labels[:, None]


def padded_to(image: torch.Tensor, multiple: int) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """``[1, 1, x, y, z]`` with sides that are multiples, padded by reflection, and where the given image lies in it."""
    shape = image.shape[2:]
    more = [-side % multiple for side in shape]
    before = [extra // 2 for extra in more]
    pads = [side for low, extra in zip(before, more, strict=True) for side in (low, extra - low)]
    ends_first = [pads[index + end] for index in (4, 2, 0) for end in (0, 1)]
    padded = torch.nn.functional.pad(image, ends_first, mode="reflect") if any(more) else image
    return padded, tuple(slice(low, low + side) for low, side in zip(before, shape, strict=True))


def dice(found: Labels, labels: Labels) -> list[float]:
    """Of each class but the first: twice what both say over what either says; 1 where neither says it at all."""
    scores = []
    for label in range(1, len(CLASSES)):
        ours, theirs = found == label, labels == label
        both, either = int((ours & theirs).sum()), int(ours.sum() + theirs.sum())
        scores.append(2 * both / either if either else 1.0)
    return scores


@dataclass
class Course:
    seconds: float = 0.0
    """By the clock, of its steps; looks at held-out cases are left out."""
    wall_s: float = 0.0
    """The same on the wall."""
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    looks: list[dict[str, Any]] = field(default_factory=list)
    """At the held-out cases: seconds of training, steps, and the mean Dice of each class."""
    peak_bytes: int = 0
    """Most allocated bytes while it trained."""
    looking_peak_bytes: int = 0
    """Most allocated bytes while held-out cases were looked at."""


def train(
    training: Training,
    held_out: Sequence[Case],
    *,
    budget_s: float,
    looks: int,
    meter: Any = NO_METER,
    arena_bytes: Callable[[], int] = lambda: 0,
    clock: Callable[[], float] = time.process_time,
) -> Course:
    """Trains until ``budget_s`` seconds of steps are spent, with so many evenly spaced looks at held-out cases.

    Seconds are those of CPU, of all threads of the process: on a core of its own what the wall's clock says, and else
    not those in which others had the core.
    ``arena_bytes`` are those that the meter does not see; they count whole, in every step that ends with an arena.
    """
    course = Course()
    for number in range(1, looks + 1):
        while course.seconds < budget_s * number / looks:
            meter.restart()
            begin_s, begin_wall_s = clock(), time.perf_counter()
            course.losses.append(training.step(course.seconds / budget_s))
            course.step_s.append(clock() - begin_s)
            course.wall_s += time.perf_counter() - begin_wall_s
            course.seconds += course.step_s[-1]
            course.peak_bytes = max(course.peak_bytes, meter.peak + arena_bytes())
        meter.restart()
        scores = [dice(training.predicted(case), case.labels) for case in held_out]
        course.looking_peak_bytes = max(course.looking_peak_bytes, meter.peak + arena_bytes())
        means = np.mean(scores, axis=0).round(5).tolist() if scores else []
        course.looks.append({"seconds": round(course.seconds, 2), "steps": len(course.losses), "dice": means})
    return course


def seconds_to(looks: Sequence[dict[str, Any]], score: float) -> float | None:
    """Seconds of training at the first look whose mean Dice over the classes is at least ``score``."""
    return next((float(look["seconds"]) for look in looks if np.mean(look["dice"]) >= score), None)
