"""One process of several, as torchrun starts them: an example without a session, then with one.

What came of it goes to ``rankN.json`` in the FOLDER that is the first argument; the second is ``ddp``, ``fsdp`` or
``accelerate``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import runpy
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import poochplan
from tests.live_bytes import outside_meter
from tests.runtime.nets import LINK

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK: dict[str, Any] = {"time_limit_s": 1, "quiet": True, "link": LINK}


def main_of(name: str) -> Callable[..., Any]:
    main: Callable[..., Any] = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    return main


def result_of(losses: list[float], model: torch.nn.Module) -> dict[str, Any]:
    """Losses, and a digest of this rank's parameters or shards of them."""
    shards = [getattr(one, "_local_tensor", one).detach().numpy().tobytes() for one in model.parameters()]
    return {"losses": losses, "parameters": hashlib.sha256(b"".join(shards)).hexdigest()}


def write(folder: Path, plain: dict[str, Any], planned: dict[str, Any], session: Any, **more: Any) -> None:
    """Writes what came of both, and ends the process group."""
    facts = {
        "plain": plain,
        "planned": planned,
        "plan": session.plan and hashlib.sha256(repr(session.plan).encode()).hexdigest(),
        "fallbacks": session.total.fallbacks,
        "followed": session.report().steps_followed,
    }
    (folder / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(facts | more))
    torch.distributed.destroy_process_group()


def no_session(*_: Any, **__: Any) -> AbstractContextManager[Any]:
    return nullcontext(SimpleNamespace(wait_until_planned=lambda: None, plan=None))


def waiting(auto: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but all ranks wait for the plan behind the twelfth step of the optimizer."""

    def session_of(model: torch.nn.Module, optimizer: Any, **options: Any) -> Any:
        session, steps = auto(model, optimizer, **options), itertools.count(1)
        optimizer.optimizer.register_step_post_hook(
            lambda *_: session.wait_until_planned() if next(steps) == 12 else None
        )
        return session

    return session_of


def main(folder: Path, name: str) -> None:
    """The meter looks at what is dispatched: of a sharded model ``tests/online/test_ranks.py`` has another."""
    example = f"{name}_torchrun" if name != "accelerate" else "accelerate_loop"
    more: dict[str, Any] = {"epochs": 30} if name == "accelerate" else {}

    def run(**options: Any) -> tuple[Any, Any, Any, int]:
        train = main_of(example)
        with outside_meter() if name != "fsdp" else nullcontext(SimpleNamespace(peak=0)) as meter:
            losses, model, session = train(**options, **more)
        return result_of(losses, model), model, session, meter.peak

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    auto, poochplan.auto = poochplan.auto, no_session
    plain, _, _, plain_bytes = run()
    poochplan.auto = waiting(auto) if name == "accelerate" else auto
    budget_bytes = int(plain_bytes * 0.7)
    options = {"budget": budget_bytes or "80%", "before_plan": "swap", "cache": folder / "cache", **QUICK}
    planned, model, session, peak_bytes = run(**options)
    bucket_bytes = sum(parameter.nbytes for parameter in model.parameters())
    profile = session.profile
    buckets = profile and any(one.size_bytes == bucket_bytes and one.born < 0 for one in profile.values)
    sizes = {"plain_bytes": plain_bytes, "budget_bytes": budget_bytes, "peak_bytes": peak_bytes}
    write(folder, plain, planned, session, counts_buckets=buckets, **sizes)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
