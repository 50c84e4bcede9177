"""A training with all that happens in long ones; as it is, or under ``poochplan.auto`` in two processes.

    python -m tests.end_to_end.long_loop plain FOLDER
    python -m tests.end_to_end.long_loop first FOLDER BUDGET    # until its checkpoint
    python -m tests.end_to_end.long_loop second FOLDER BUDGET   # goes on from it

Each prints a line of JSON: of every turn, a digest of all bits that are trained, and most bytes that torch had of the C
library by a meter from outside, with what the kernel holds of the arena on top.
"""

from __future__ import annotations

from tests.allocated_bytes import allocated_bytes

METER = allocated_bytes()  # before anything is allocated

import contextlib  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import weakref  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # noqa: E402

import poochplan  # noqa: E402
from benchmarks.hooked import digest  # noqa: E402
from poochplan.runtime.arena.arena import Arena  # noqa: E402
from tests.runtime.arena.steps import resident_bytes  # noqa: E402
from tests.runtime.nets import LINK  # noqa: E402

TURNS, CHECKPOINT_AT = 44, 22
SMALLER_FROM = 26
"""From this turn on batches are smaller, as where images grow."""
BROKEN_INPUT_AT, BROKEN_BACKWARD_AT = (17, 40), (19, 42)
WAITS = {"first": (10, 15), "second": (32, 36)}
"""Turns before which planning is waited for."""
EVALUATED_EVERY, ODD_EVERY = 5, 6
BATCH, SMALLER_BATCH, ODD_BATCH = 24, 14, 9
MICRO_BATCHES = 2


class OutsideMeter:
    """Most bytes of a turn, with what the kernel holds of the arena. State: of the turn so far.

    A turn is cut in parts wherever an arena begins, ends or changes; it counts in each with the larger of its sizes at
    both ends, since it only grows in between.
    """

    def __init__(self) -> None:
        self._most_bytes = self._before_bytes = 0
        self._arenas: weakref.WeakSet[Arena] = weakref.WeakSet()
        for name in ("begin", "end", "lay_out"):
            setattr(Arena, name, self._cutting(getattr(Arena, name)))

    def _cutting(self, method: Callable[..., None]) -> Callable[..., None]:
        def call(arena: Arena, *args: Any, **keywords: Any) -> None:
            self._arenas.add(arena)
            self.cut()
            method(arena, *args, **keywords)
            self.cut()

        return call

    def begins(self) -> None:
        METER.restart()
        self._most_bytes, self._before_bytes = 0, self._resident_bytes()

    def cut(self) -> None:
        behind_bytes = self._resident_bytes()
        self._most_bytes = max(self._most_bytes, METER.peak + max(self._before_bytes, behind_bytes))
        self._before_bytes = behind_bytes
        METER.restart()

    def most(self) -> int:
        self.cut()
        return self._most_bytes

    def _resident_bytes(self) -> int:
        return sum(resident_bytes(arena) or 0 for arena in self._arenas)


class BrokenSample(Exception):
    """What a data set throws in the middle of an epoch."""


class Network(nn.Module):
    """Convolutions with batch normalisation, attention, dropout."""

    def __init__(self) -> None:
        super().__init__()
        stages = [
            nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())
            for i, o in [(3, 12), (12, 12), (12, 12), (12, 32)]
        ]
        self.stem = nn.Sequential(*stages, nn.MaxPool2d(4), nn.Dropout2d(0.1))
        self.mixer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 10)
        self.breaks_in_forward = False

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.stem(images)
        if self.breaks_in_forward:
            raise BrokenSample
        return self.head(self.mixer(features.flatten(2).transpose(1, 2)).mean(1))


class Loop:
    """What is made before it, and what one turn does. It knows nothing of poochplan."""

    def __init__(self) -> None:
        self.model = Network()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-2, TURNS)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.data = torch.Generator()
        self.data.manual_seed(7)
        self.losses: list[float] = []

    def turn(self, number: int) -> None:
        self.optimizer.zero_grad()
        try:
            for part in range(MICRO_BATCHES):
                self._micro_batch(number, is_last=part == MICRO_BATCHES - 1)
        except BrokenSample:
            self.model.breaks_in_forward = False
            return  # the batch is left out
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.average.update_parameters(self.model)
        if number % EVALUATED_EVERY == 0:
            self._evaluate()

    def _micro_batch(self, number: int, *, is_last: bool) -> None:
        rows = SMALLER_BATCH if number >= SMALLER_FROM else BATCH
        images, labels = self._batch(ODD_BATCH if number % ODD_EVERY == 0 and is_last else rows)
        self.model.breaks_in_forward = is_last and number in BROKEN_INPUT_AT
        logits = self.model(images)
        if is_last and number in BROKEN_BACKWARD_AT:
            logits.register_hook(_break)
        loss = nn.functional.cross_entropy(logits, labels, label_smoothing=0.1) / MICRO_BATCHES
        loss.backward()  # type: ignore[no-untyped-call]
        self.losses.append(loss.item())

    def _batch(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(10, (rows,), generator=self.data)
        return torch.randn(rows, 3, 32, 32, generator=self.data), labels

    def _evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            images, labels = self._batch(BATCH)
            self.losses.append((self.model(images).argmax(-1) == labels).float().mean().item())
        self.model.train()

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "average": self.average}
        states = {name: part.state_dict() for name, part in parts.items()}
        return states | {"data": self.data.get_state(), "generator": torch.get_rng_state()}

    def goes_on_from(self, file: Path) -> None:
        state = torch.load(file)
        for name in ("model", "optimizer", "schedule", "average"):
            getattr(self, name).load_state_dict(state[name])
        self.data.set_state(state["data"])
        torch.set_rng_state(state["generator"])

    def digest(self) -> str:
        optimizer = [one for state in self.optimizer.state.values() for one in state.values()]
        kept = nn.ParameterList([nn.Parameter(one.detach(), requires_grad=False) for one in optimizer])
        parts = [digest(model, torch.tensor(self.losses)) for model in (self.model, self.average, kept)]
        return "-".join(parts)


def _break(_: torch.Tensor) -> None:
    raise BrokenSample


def run(mode: str, folder: Path, budget_bytes: int | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loop, checkpoint = Loop(), folder / "checkpoint.pt"
    meter = OutsideMeter()
    first, last = {"plain": (0, TURNS), "first": (0, CHECKPOINT_AT), "second": (CHECKPOINT_AT, TURNS)}[mode]
    if mode == "second":
        loop.goes_on_from(checkpoint)
    found: dict[str, Any] = {"digests": [], "peaks": [], "served": [], "followed": []}
    options: dict[str, Any] = {"cache": folder / "cache", "time_limit_s": 1.0, "link": LINK, "arena": "on"}
    options["before_plan"] = "swap"  # within the budget from the first turn on
    with contextlib.ExitStack() as stack:
        session = None
        if budget_bytes is not None:
            auto = poochplan.auto(loop.model, loop.optimizer, budget=budget_bytes, **options)
            session = stack.enter_context(auto)
        for number in range(first, last):
            if session is not None and number in WAITS[mode]:
                session.wait_until_planned(120)
            meter.begins()
            loop.turn(number)
            found["peaks"].append(meter.most())
            found["served"].append(session.total.served_bytes if session is not None else 0)
            found["followed"].append(session is not None and session.plan is not None)
            found["digests"].append(loop.digest())
            loop.losses.clear()
        if session is not None:
            found |= {"fallbacks": session.total.fallbacks, "plans": len(session.plans)}
    if mode == "first":
        torch.save(loop.state(), checkpoint)
    return found


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)))
