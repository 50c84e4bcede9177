"""One process of several: an example of accelerate's FSDP plugin without poochplan, then with it; results go to FOLDER.

accelerate uses its plugin only on GPUs. Here it is told that the processes of the CPU are some: all else, such as the
units that it shards and the parameters that it gives the optimizer, is its own.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import DistributedType

import poochplan
from poochplan.integrations.hf import PlanCallback
from poochplan.torch_private.sharding import sharded_units
from tests.examples.ranks import QUICK, main_of, no_session, result_of, waiting, write
from tests.examples.trainer_ranks import Waits, losses_of

OPTIONS: dict[str, Any] = {"budget": "80%", **QUICK}


def takes_processes_for_gpus() -> None:
    """accelerate does so from now on."""
    made = accelerate.PartialState.__init__

    def make(state: accelerate.PartialState, *args: Any, **options: Any) -> None:
        made(state, True, **{name: one for name, one in options.items() if name not in ("cpu", "timeout")})
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU

    accelerate.PartialState.__init__ = make


def loop(folder: Path, *, is_planned: bool) -> tuple[dict[str, Any], Any]:
    auto = poochplan.auto
    poochplan.auto = waiting(auto) if is_planned else no_session
    losses, model, session = main_of("accelerate_fsdp")(**OPTIONS, cache=folder / "cache")
    poochplan.auto = auto
    return facts_of(losses, model), session


def trainer(folder: Path, *, is_planned: bool) -> tuple[dict[str, Any], Any]:
    plans = [PlanCallback(**OPTIONS, cache=folder / "cache")] if is_planned else []
    done = main_of("trainer_fsdp")(*plans, *map(Waits, plans), folder=str(folder / f"planned-{is_planned}"))
    return facts_of(losses_of(done), done.model), plans[0].session if plans else None


def facts_of(losses: list[float], model: torch.nn.Module) -> dict[str, Any]:
    return result_of(losses, model) | {"units": len(list(sharded_units(model)))}


def main(folder: Path, name: str) -> None:
    torch.set_num_threads(1)
    takes_processes_for_gpus()
    run = {"accelerate_fsdp": loop, "trainer_fsdp": trainer}[name]
    plain, _ = run(folder, is_planned=False)
    planned, session = run(folder, is_planned=True)
    write(folder, plain, planned, session, moved=session.total.out_bytes + session.total.replayed_values)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2])
