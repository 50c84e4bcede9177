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
from tests.online.census import outside_meter
from tests.runtime.nets import LINK

EXAMPLES = Path(__file__).parents[2] / "examples"


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


def run(example: dict[str, Any], *, is_metered: bool, **options: Any) -> tuple[dict[str, Any], Any]:
    """The meter looks at what is dispatched: of a sharded model ``tests/online/test_ranks.py`` has another."""
    with outside_meter() if is_metered else nullcontext(SimpleNamespace(peak=0)) as meter:
        losses, model, session = example["main"](**options)
    whole = [getattr(one, "_local_tensor", one).detach() for one in model.parameters()]
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in whole)).hexdigest()
    return {"losses": losses, "parameters": digest, "peak_bytes": meter.peak}, (model, session)


def main(folder: Path, name: str) -> None:
    example = str(EXAMPLES / (f"{name}_torchrun.py" if name != "accelerate" else "accelerate_loop.py"))
    is_metered = name != "fsdp"
    more: dict[str, Any] = {"epochs": 30} if name == "accelerate" else {}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    auto, poochplan.auto = poochplan.auto, no_session
    plain, _ = run(runpy.run_path(example), is_metered=is_metered, **more)
    poochplan.auto = waiting(auto) if name == "accelerate" else auto
    budget_bytes = int(plain["peak_bytes"] * 0.7)
    planned, (model, session) = run(
        runpy.run_path(example),
        is_metered=is_metered,
        budget=budget_bytes or "80%",
        before_plan="swap",
        cache=folder / "cache",
        time_limit_s=1,
        quiet=True,
        link=LINK,
        **more,
    )
    bucket_bytes = sum(parameter.nbytes for parameter in model.parameters())
    profile = session.profile
    facts = {
        "plain": plain,
        "planned": planned,
        "budget_bytes": budget_bytes,
        "plan": session.plan and hashlib.sha256(repr(session.plan).encode()).hexdigest(),
        "steps": session.total.steps,
        "fallbacks": session.total.fallbacks,
        "followed": session.report().steps_followed,
        "counts_buckets": profile and any(v.size_bytes == bucket_bytes and v.born < 0 for v in profile.values),
    }
    (folder / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(facts))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
