"""One folder of the compiler's caches serves every plan, and none gets the code of another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import poochplan
from poochplan.formats.plan import Plan
from tests.compiling.small_nets import SLOW_LINK, Products, products
from tests.processes import python
from tests.runtime.served import needs_compiler

SCRIPT = """
    import hashlib, json, sys, torch, poochplan
    from torch._dynamo.utils import counters
    from tests.compiling.small_nets import products
    torch.set_num_threads(int(sys.argv[2]))

    def trained(step, model, optimizer):
        digests = []
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            loss = step()
            loss.backward()
            found = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
            digests += [hashlib.sha256(one.numpy().tobytes()).hexdigest() for one in found]
            optimizer.step()
        return digests

    def hits():
        found = counters["aot_autograd"], counters["inductor"]
        said = ("autograd_cache_hit", "autograd_cache_miss"), ("fxgraph_cache_hit", "fxgraph_cache_miss")
        counts = {name: counter[name] for counter, names in zip(found, said) for name in names if counter[name]}
        counters.clear()
        return counts

    model, step, optimizer = products()
    model.compile(dynamic=False)
    stock = {"digests": trained(step, model, optimizer), "caches": hits()}
    model, step, optimizer = products()
    with poochplan.compile(model, plan=poochplan.Plan.load(sys.argv[1])) as session:
        planned = {"digests": trained(step, model, optimizer), "fallbacks": session.report().total.fallbacks}
    planned["caches"] = hits()
    saved = []

    def pack(tensor):
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(torch.randn(1024, 64))
    with torch.autograd.profiler.profile() as ran:
        result.sum().backward()
    planned["compiled again"] = hits()
    planned["saved"] = sorted({width for rows, width in saved if rows == 1024})
    planned["products"] = sum(event.name in ("aten::mm", "aten::addmm") for event in ran.function_events)
    print(json.dumps({"stock": stock, "planned": planned}))
"""
"""Run with a plan's file and a number of threads: what steps give, what comes from caches, what the code saves."""
MAKES = dict(zip(("mm", "mm_1", "mm_2"), Products.widths[1:-1], strict=True))
"""The width of what each node makes that backward needs."""
PRODUCTS = 7
"""Of a backward that recomputes none: of four layers each gives two gradients, but the batch has none."""
pytestmark = [needs_compiler, pytest.mark.cpu_device]


def in_a_new_process(plan: Path, caches: Path) -> dict[str, Any]:
    """What two steps gave, with stock Inductor and with the plan; and what the plan's code saves and runs."""
    said = python(SCRIPT, plan, torch.get_num_threads(), TORCHINDUCTOR_CACHE_DIR=str(caches))
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def plans() -> Iterator[list[Plan]]:
    """Which recompute different things."""
    torch._dynamo.reset()
    found = []
    for budget in ("75%", "85%"):
        model, step, optimizer = products()
        options = {"link": SLOW_LINK, "iterations": 1, "time_limit_s": 1}
        found.append(poochplan.compile(model, step, optimizer=optimizer, budget=budget, **options).plan)  # type: ignore[arg-type]
    yield found
    torch._dynamo.reset()


def test_two_plans_share_the_caches_and_each_runs_its_own_code_in_every_process(
    plans: list[Plan], tmp_path: Path
) -> None:
    files = [plan.save(tmp_path / f"{place}.json") for place, plan in enumerate(plans)]
    recomputed = [{one.rpartition("/")[2] for one in plan.replays} for plan in plans]
    assert all(recomputed)
    assert recomputed[0] != recomputed[1]
    order = (0, 1, 0)
    found = [in_a_new_process(files[place], tmp_path / "caches") for place in order]
    bits = found[0]["stock"]["digests"]
    assert len(set(bits)) == len(bits) == 2 * len(Products.widths)
    for one, place in zip(found, order, strict=True):
        assert one["stock"]["digests"] == one["planned"]["digests"] == bits
        assert one["planned"]["fallbacks"] == 0
        kept = {width for name, width in MAKES.items() if name not in recomputed[place]}
        assert one["planned"]["saved"] == sorted({Products.widths[0]} | kept)
        assert one["planned"]["products"] == PRODUCTS + len(recomputed[place])
        assert one["planned"]["compiled again"] == {}
    missed, hit = [{f"autograd_cache_{end}": 1, f"fxgraph_cache_{end}": 2} for end in ("miss", "hit")]
    assert [one["stock"]["caches"] for one in found] == [missed, hit, hit]
    assert [one["planned"]["caches"] for one in found] == [missed, missed, hit]


def test_a_step_of_another_shape_is_compiled_anew_and_told_and_has_the_bits_of_stock(plans: list[Plan]) -> None:
    torch._dynamo.reset()
    small = torch.randn(512, Products.widths[0])

    def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        model(small).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    stock, _, _ = products()
    stock.compile(dynamic=False)
    expected = gradients(stock)
    model, step, _ = products()
    with poochplan.compile(model, plan=plans[0]) as session:
        step().backward()
        assert session.report().compiled_graphs == 1
        with pytest.warns(RuntimeWarning, match="another batch size, input 0 is"):
            found = gradients(model)
        assert all(map(torch.equal, found, expected))
        gradients(model)
        report = session.report()
    assert report.compiled_graphs == 2
    assert report.total.fallbacks == 2
    assert "compiled graphs" in str(report)
