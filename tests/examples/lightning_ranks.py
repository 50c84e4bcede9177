"""One process of several: Lightning's example of FSDP2 without poochplan, then with it; results go to FOLDER."""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
import warnings
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from poochplan.integrations.lightning import PlanCallback
from tests.examples.ranks import EXAMPLES
from tests.runtime.nets import LINK


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
    main = runpy.run_path(str(EXAMPLES / "lightning_fsdp.py"))["main"]
    module = main(*plans, watches, folder=str(folder))
    shards = [one.detach().to_local().numpy().tobytes() for one in module.parameters()]
    return {"losses": watches.losses, "parameters": hashlib.sha256(b"".join(shards)).hexdigest()}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    plain = run(folder / "plain")
    plans = PlanCallback(budget="80%", cache=folder / "cache", time_limit_s=1, quiet=True, link=LINK)
    facts: dict[str, Any] = {"plain": plain, "planned": run(folder / "planned", plans)}
    session = plans.session
    assert session is not None
    facts["plan"] = session.plan and hashlib.sha256(repr(session.plan).encode()).hexdigest()
    facts["followed"], facts["fallbacks"] = session.report().steps_followed, session.total.fallbacks
    (folder / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(facts))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
