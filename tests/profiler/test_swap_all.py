"""A profile of a step that swaps everything is that of the in-core step, but for its seconds."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from poochplan.formats.profile import Kind, Profile
from poochplan.planner.simulator.problem import Problem
from poochplan.profiler import profiling
from poochplan.profiler.assembly.assemble import SWAPPED
from poochplan.profiler.trials.compare import DIFFERS, parts_of
from poochplan.torch_private.tensor_internals import mode_count
from poochplan.workload import load_workload
from tests.processes import python
from tests.runtime.nets import CASES, Net, taken
from tests.runtime.served import arenas_mapped, needs_compiler

CONFIGS = Path(__file__).parents[2] / "configs"


def without_seconds(profile: Profile) -> list[object]:
    """All that a profile says of the step but its durations."""
    ops = [msgspec.structs.replace(op, duration_s=0.0, spread_s=0.0) for op in profile.ops]
    return [
        profile.ops_fingerprint, ops, profile.values, profile.handles, profile.points, profile.in_core_peak_bytes,
        profile.in_core_peak_layer, profile.static_bytes, profile.inputs, profile.model,
    ]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ops_lifetimes_and_verdicts_are_those_of_the_in_core_step(name: str) -> None:
    real, swapping = CASES[name].profile(), CASES[name].profile(mode="swap-all")
    assert without_seconds(swapping) == without_seconds(real)
    assert swapping.mode == "swap-all"
    assert SWAPPED in swapping.notes


def test_so_are_those_of_a_ready_workload() -> None:
    small, profiles = {"batch_size": "4", "sequence_length": "12", "width": "16", "vocabulary": "20"}, []
    for mode in ("run", "swap-all"):
        torch.manual_seed(0)
        found = load_workload(str(CONFIGS / "seq2seq.toml"), small).workload
        profiles.append(taken(found.step, found.model, found.optimizer, mode))
    assert without_seconds(profiles[1]) == without_seconds(profiles[0])


class Unseen(torch.autograd.Function):
    """Draws from numpy, past the dispatcher: its replay gives other bits."""

    @staticmethod
    def forward(ctx: object, batch: torch.Tensor) -> torch.Tensor:
        out = batch.clone()
        out.numpy()[...] += np.random.default_rng().random(out.shape, dtype=np.float32)
        return out

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def test_replays_that_give_other_bits_are_found_while_swapping() -> None:
    """Of the saved values every second one is its neighbour's heir."""
    noisy = [Net(lambda net, hidden: torch.tanh(Unseen.apply(torch.sin(hidden)))) for _ in range(3)]
    model, batch = nn.Sequential(*(layer for one in noisy for layer in (nn.Linear(32, 32), one))), torch.randn(16, 32)
    found = [taken(lambda: model(batch).square().mean(), model, mode=mode) for mode in ("run", "swap-all")]
    marked = [[value.name for value in profile.values if value.unreplayable == DIFFERS] for profile in found]
    assert marked[0]
    assert marked[1] == marked[0]


@pytest.mark.parametrize("mode", ["run", "swap-all"])
def test_the_workspace_of_an_lstm_is_never_recomputed_and_what_else_the_layer_returns_is(mode: str) -> None:
    profile = CASES["recurrent"].profile(mode)
    values = [value for value in profile.values if "mkldnn_rnn" in value.name and value.kind is Kind.ACTIVATION]
    reasons = {value.dtype: value.unreplayable for value in values}
    assert reasons == {"uint8": "aten.mkldnn_rnn_layer.default leaves some of its bytes unwritten", "float32": ""}


@needs_compiler
@pytest.mark.parametrize("mode", ["run", "swap-all"])
def test_a_step_that_does_not_fit_is_not_timed_op_by_op_beside_an_arena(mode: str) -> None:
    before, seen = arenas_mapped(), set[tuple[bool, bool]]()
    model, step, optimizer = CASES["attention"].fresh()

    def watched() -> torch.Tensor:
        seen.add((mode_count() > 0, arenas_mapped() > before))
        return step()

    taken(watched, model, optimizer, mode)
    under_no_mode, op_by_op = (False, True), (True, True)
    assert under_no_mode in seen
    assert (op_by_op in seen) == (mode == "run")


@pytest.mark.parametrize(("free_bytes", "mode"), [(1 << 40, "run"), (1 << 10, "swap-all")])
def test_auto_measures_in_core_where_that_fits_and_says_which_and_why(
    free_bytes: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "available_bytes", lambda: free_bytes)
    said: list[str] = []
    profile = CASES["residual"].new_profile(mode="auto", progress=said.append)
    assert profile.mode == mode
    why = next(note for note in profile.notes if note.startswith("mode auto chose"))
    assert why.startswith(f"mode auto chose {mode}: in-core the step ")
    assert why in said
    assert any("swapping" in line for line in said) == (mode == "swap-all")
    assert (SWAPPED in profile.notes) == (mode == "swap-all")
    assert without_seconds(profile) == without_seconds(CASES["residual"].profile())


def test_verification_in_parts_replays_no_chain_of_values() -> None:
    skips = (Net(lambda net, x: x + nn.functional.gelu(net.inside(x)), inside=nn.Linear(8, 8)) for _ in range(12))
    model = nn.Sequential(*skips)
    batch = torch.randn(4, 8)
    profile = taken(lambda: model(batch).square().mean(), model)
    replays = Problem.of(profile).replay.replays
    part_of = parts_of(profile, 2)

    def brought_back(value: int) -> set[int]:
        replay = replays[value]
        sources = replay.inputs if replay is not None else ()
        return {value}.union(*(brought_back(source) for source in sources if part_of[source] == part_of[value]))

    assert set(part_of) == {0, 1}
    assert max(len(brought_back(value)) for value in range(len(replays))) <= 2


OUT_OF_CORE = """
    import json, os, resource, torch
    import numpy.ma  # which a median loads when it is first asked for: with the limit on, there may be no room
    import poochplan
    from poochplan.planner.simulator.evaluator import library
    from tests.runtime.nets import LINK, Net, without_costs
    without_costs()
    library(None)  # built before the limit: a thread that builds it has address space of its own
    torch.manual_seed(0)
    gelu, linear = torch.nn.functional.gelu, torch.nn.Linear
    skips = [Net(lambda net, x: x + gelu(net.inside(x)), inside=linear(128, 128)) for _ in range(30)]
    model = torch.nn.Sequential(*skips)
    batch = torch.randn(8192, 128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lambda: model(batch).square().mean()
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (205 << 20), resource.RLIM_INFINITY))
    if os.fork() == 0:
        try:
            step().backward()
        except RuntimeError as error:
            print(str(error).splitlines()[0], flush=True)
        os._exit(0)
    os.wait()
    profile = poochplan.profile(step, model=model, optimizer=optimizer, mode="auto", iterations=1, link=LINK)
    result = {"mode": profile.mode, "in_core_peak_bytes": profile.in_core_peak_bytes}
    plan = poochplan.plan(profile, budget="30%", evaluations=100)
    with poochplan.apply(plan, model) as session:
        for _ in range(2):
            optimizer.zero_grad()
            step().backward()
            optimizer.step()
    report = session.report()
    result |= {"fallbacks": report.total.fallbacks, "peak_bytes": report.last_step.peak_bytes}
    result |= {"budget_bytes": plan.budget_bytes}
    print(json.dumps(result))
"""


def test_a_step_that_does_not_fit_is_profiled_planned_and_run_within_one_limit() -> None:
    # Each thread's own malloc arena would take 64 MiB of addresses. A solver may say its name in between.
    in_core, *_, planned = python(OUT_OF_CORE, is_fresh=True, MALLOC_ARENA_MAX="1").splitlines()
    assert "can't allocate memory" in in_core
    result = json.loads(planned)
    assert result["mode"] == "swap-all"
    assert result["in_core_peak_bytes"] > 240 << 20
    assert result["fallbacks"] == 0
    assert result["peak_bytes"] <= result["budget_bytes"]
