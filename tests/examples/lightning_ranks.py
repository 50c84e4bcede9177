"""One process of several: Lightning's example of FSDP2 without poochplan, then with it; results go to FOLDER."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from poochplan.integrations.lightning import PlanCallback
from tests.examples.ranks import QUICK, main_of, result_of, write


class Watches(Callback):
    """Notes each loss, and waits for the plan at these steps, to which all ranks come."""

    def __init__(self, plans: PlanCallback | None = None, steps: Container[int] = (14,)) -> None:
        self.plans, self.steps = plans, steps
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"].item())
        if trainer.global_step in self.steps and self.plans is not None and self.plans.session is not None:
            self.plans.session.wait_until_planned(120)


def run(folder: Path, *plans: PlanCallback) -> dict[str, Any]:
    watches = Watches(*plans)
    module = main_of("lightning_fsdp")(*plans, watches, folder=str(folder))
    return result_of(watches.losses, module)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    plain = run(folder / "plain")
    plans = PlanCallback(budget="80%", cache=folder / "cache", **QUICK)
    write(folder, plain, run(folder / "planned", plans), plans.session)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
