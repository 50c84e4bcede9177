"""One process of several: the Trainer's example without poochplan, then with it; what came of it goes to FOLDER."""

from __future__ import annotations

import sys
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from poochplan.integrations.hf import PlanCallback
from tests.examples.ranks import QUICK, main_of, result_of, write
from tests.live_bytes import outside_meter


def losses_of(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


class Waits(TrainerCallback):
    """For the plan, at these steps, to which all ranks come."""

    def __init__(self, plans: PlanCallback, steps: Container[int] = (14,)) -> None:
        self.plans, self.steps = plans, steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in self.steps and self.plans.session is not None:
            self.plans.session.wait_until_planned(120)


def run(folder: Path, *callbacks: TrainerCallback) -> tuple[dict[str, Any], int]:
    train = main_of("hf_trainer")
    with outside_meter() as meter:
        trainer = train(*callbacks, folder=str(folder))
    return result_of(losses_of(trainer), trainer.model), meter.peak


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    plain, plain_bytes = run(folder / "plain")
    budget_bytes = int(plain_bytes * 0.6)
    plans = PlanCallback(budget=budget_bytes, cache=folder / "cache", before_plan="swap", **QUICK)
    planned, peak_bytes = run(folder / "planned", plans, Waits(plans))
    assert plans.session is not None
    sizes = {"budget_bytes": budget_bytes, "peak_bytes": peak_bytes, "metered_bytes": plans.session.total.peak_bytes}
    write(folder, plain, planned, plans.session, **sizes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
