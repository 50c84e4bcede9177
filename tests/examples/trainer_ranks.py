"""One process of several: the Trainer's example without poochplan, then with it; what came of it goes to FOLDER."""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from poochplan.integrations.hf import PlanCallback
from tests.examples.ranks import EXAMPLES
from tests.online.census import outside_meter
from tests.runtime.nets import LINK


class Waits(TrainerCallback):
    """For the plan, at a step that all ranks come to."""

    def __init__(self, plans: PlanCallback) -> None:
        self.plans = plans

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 14 and self.plans.session is not None:
            self.plans.session.wait_until_planned(120)


def run(folder: Path, *callbacks: TrainerCallback) -> tuple[dict[str, Any], int]:
    main = runpy.run_path(str(EXAMPLES / "hf_trainer.py"))["main"]
    with outside_meter() as meter:
        trainer = main(*callbacks, folder=str(folder))
    digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in trainer.model.parameters())).hexdigest()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {"losses": losses, "parameters": digest}, meter.peak


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    plain, plain_bytes = run(folder / "plain")
    budget_bytes = int(plain_bytes * 0.6)
    plans = PlanCallback(
        budget=budget_bytes, cache=folder / "cache", time_limit_s=1, quiet=True, link=LINK, before_plan="swap"
    )
    planned, peak_bytes = run(folder / "planned", plans, Waits(plans))
    assert plans.session is not None
    facts = {
        "plain": plain,
        "planned": planned,
        "budget_bytes": budget_bytes,
        "peak_bytes": peak_bytes,
        "followed": plans.session.report().steps_followed,
        "metered_bytes": plans.session.total.peak_bytes,
    }
    (folder / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(facts))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
