"""Steps that are bound by launching: what plans promise beside what their steps take, on the null GPU (tests/nullgpu).

    NULLGPU_BY_PROCESSOR=1 NULLGPU_SECONDS=18 NULLGPU_LINK_GBPS=450 NULLGPU_COPIED_BYTES=65536 \
        PYTHONPATH=src OMP_NUM_THREADS=1 .venv-torch-2.14.1/bin/python -m tests.nullgpu \
        python -m benchmarks.launch_bound -o benchmarks/results/launch-bound.json

GPT-2 of 12 layers under autocast, small enough that its ops are those of a GPU that is never full; ``NULLGPU_SECONDS``
says how much longer they take than on an H100, and the link is as much faster, for its copies are slowed too. Time
passes while this process computes or waits for the GPU, so other processes do not count; they do disturb the caches.
Plans of the planner at budgets, and decisions at random. Planned steps and those in-core take turns; the quickest of
each counts, on the wall and of the launching threads.

    NULLGPU_BY_PROCESSOR=1 NULLGPU_COPIED_BYTES=65536 PYTHONPATH=src OMP_NUM_THREADS=1 .venv-torch-2.14.1/bin/python \
        -m tests.nullgpu python -m benchmarks.launch_bound --nets resnet50 gpt2-bf16 llama unet3d -o ...

Networks of a real size, at the null GPU's own rates and with budgets on allocated bytes: at 60%, with the smallest
budget, and with the peak of ``torch.utils.checkpoint`` around each block, whose steps take turns with the planned ones.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from statistics import median
from typing import Any, NamedTuple

import torch
from msgspec.structs import asdict, replace

import poochplan
from benchmarks.facts import Row, facts_of_run, parser_of, table_head, table_row, write_results
from benchmarks.gpu_nets import NETS, Net
from benchmarks.gpu_suite import checkpointed
from benchmarks.pairs import in_pairs, ratio_of_pairs
from poochplan.formats.plan import Decision, Plan
from poochplan.formats.profile import Profile
from poochplan.planner.planning import smallest_budget
from poochplan.planner.writing import with_decisions
from poochplan.workload import Workload
from poochplan.workloads.text import gpt2
from tests.runtime.random_plans import random_plan

WHERE = torch.device("cuda", 0)
BUDGETS = ("100%", "80%", "60%", "smallest")
RANDOM = {"a tenth recomputed": (8, 0, 1), "mixed": (1, 2, 2), "all recomputed": (0, 0, 1)}
"""Decisions by what they are drawn from: keep, swap, recompute."""
WARM_STEPS = 3
FASTER = 0.4
"""Of the seconds of a launching thread here, the share that a processor beside such a GPU takes."""


class Seconds(NamedTuple):
    """On the wall, and of the processor in forward and in backward."""

    step_s: float
    forward_s: float
    backward_s: float


def network() -> Workload:
    torch.manual_seed(0)
    sizes = {"batch_size": 4, "sequence_length": 256, "layers": 12, "width": 256, "heads": 4, "vocabulary": 2048}
    made = gpt2(device=str(WHERE), **sizes)  # type: ignore[arg-type]

    def step() -> torch.Tensor:
        with torch.autocast(WHERE.type, torch.bfloat16):
            return made.step()

    return Workload(made.model, step, made.optimizer)


def one_step(workload: Workload) -> Seconds:
    assert workload.optimizer is not None
    workload.optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize(WHERE)
    start_s, begin_s = time.perf_counter(), time.process_time()
    loss = workload.step()
    middle_s = time.process_time()
    loss.backward()  # type: ignore[no-untyped-call]
    end_s = time.process_time()
    workload.optimizer.step()
    torch.cuda.synchronize(WHERE)
    return Seconds(time.perf_counter() - start_s, middle_s - begin_s, end_s - middle_s)


def plans(profile: Profile, plan_s: float) -> dict[str, Plan]:
    made = {}
    for name in BUDGETS:
        budget = smallest_budget(profile) if name == "smallest" else name
        made[name] = poochplan.plan(profile, budget, time_limit_s=plan_s, threads=1)
    free = {value.name for value in made["100%"].values if not value.why}
    for name, weights in RANDOM.items():
        drawn = {value.name: value.decision for value in random_plan(profile, 0, weights).values}
        wish = {one: wanted for one, wanted in drawn.items() if one in free and wanted is not Decision.KEEP}
        made[name] = with_decisions(profile, made["100%"], wish)
    return made


def llama(where: torch.device, tiny: bool) -> Net:
    """A stack of eight of Llama's blocks, of the width of one of 1 billion parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = {"hidden_size": 64, "intermediate_size": 128} if tiny else {"hidden_size": 2048, "intermediate_size": 8192}
    heads = {"num_attention_heads": 2 if tiny else 32, "num_key_value_heads": 2 if tiny else 8}
    config = LlamaConfig(vocab_size=32000, num_hidden_layers=8, use_cache=False, **width, **heads)
    model = LlamaForCausalLM(config).to(where, torch.bfloat16).train()
    tokens = torch.randint(32000, (4, 64 if tiny else 2048), device=where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    workload = Workload(model, lambda: model(input_ids=tokens, labels=tokens).loss, optimizer)
    return Net(workload, list(model.model.layers), "transformers")


OF_A_SIZE = {**NETS, "llama": llama}


def under(workload: Workload, plan: Plan, steps: int, blocks: list[torch.nn.Module] | None = None) -> Row:
    """Of planned steps, in turns with those in-core; or with checkpointed ``blocks``, in ``beside_checkpointing``."""
    options = {"on_over_budget": "warn", "meter": "never", "on_audit": "off", "quiet": True}
    with poochplan.apply(plan, workload.model, **options) as session:  # type: ignore[arg-type]

        def plain() -> Seconds:
            with session.away():
                return one_step(workload)

        def planned() -> Seconds:
            return one_step(workload)

        for _ in range(WARM_STEPS):
            plain(), planned()
        pairs = in_pairs(plain, planned, steps)
        beside = {"beside_checkpointing": _beside(workload, session, blocks, steps)} if blocks else {}
        fallbacks = session.report().total.fallbacks
    (in_core, least), ratios = (
        (Seconds(*map(min, zip(*one, strict=True))) for one in zip(*pairs, strict=True)),
        [two.step_s / one.step_s for one, two in pairs],
    )
    return {
        "decisions": dict(Counter(str(value.decision) for value in plan.values)),
        "promised": plan.prediction.overhead,
        "promised_step_s": plan.prediction.step_s,
        "found": least.step_s / in_core.step_s - 1,
        "found_median": median(ratios) - 1,
        "in_core": in_core._asdict(),
        "planned": least._asdict(),
        "fallbacks": fallbacks,
        **beside,
    }


def _beside(workload: Workload, session: poochplan.Session, blocks: list[torch.nn.Module], steps: int) -> Row:
    """Planned steps, as ratios to checkpointed ones."""

    def others() -> Seconds:
        with session.away(), checkpointed(blocks):
            return one_step(workload)

    others()
    pairs = in_pairs(others, lambda: one_step(workload), steps)
    return ratio_of_pairs([(one.step_s, two.step_s) for one, two in pairs])


def _on_faster_threads(profile: Profile) -> Profile:
    """The profile on a GPU whose launching threads take ``FASTER`` of the seconds."""
    cost = profile.runtime
    assert cost is not None
    seconds = {name: FASTER * value for name, value in asdict(cost).items() if isinstance(value, float)}
    phases = {phase: FASTER * value for phase, value in cost.phase_launch_s.items()}
    return replace(profile, runtime=replace(cost, **seconds, phase_launch_s=phases))


def of_a_size(name: str, steps: int, iterations: int, **limits: Any) -> dict[str, Row]:
    """A network of a real size, at three budgets; one is the peak of checkpointing each block."""
    torch.manual_seed(0)
    net = OF_A_SIZE[name](WHERE, False)
    workload = net.workload
    profile = poochplan.profile(
        workload.step, model=workload.model, optimizer=workload.optimizer, iterations=iterations
    )
    with checkpointed(net.blocks):
        one_step(workload)
        torch.cuda.reset_peak_memory_stats(WHERE)
        one_step(workload)
        peak_bytes = torch.cuda.max_memory_allocated(WHERE)
    budgets = {"60%": "60%", "the smallest": smallest_budget(profile), "as checkpointing": peak_bytes}
    found = {}
    for label, budget in budgets.items():
        try:
            made = poochplan.plan(profile, budget, threads=1, on="allocated", **limits)
        except poochplan.InfeasibleError as error:  # the host's memory is smaller than its
            print(f"{name}, {label}: {error}")
            continue
        blocks = net.blocks if label == "as checkpointing" else None
        row = found[f"{name}, {label}"] = under(workload, made, steps, blocks)
        if blocks:
            there = poochplan.plan(_on_faster_threads(profile), budget, threads=1, on="allocated", **limits)
            row["promised_on_faster_threads"] = there.prediction.overhead, there.bound_overhead
        more = (row.get(one, "") for one in ("beside_checkpointing", "promised_on_faster_threads"))
        print(line(f"{name}, {label}", row), *more, flush=True)
    return found


def line(name: str, row: Row) -> str:
    def processor(way: str) -> str:
        return " / ".join(f"{1e3 * row[way][part]:.1f}" for part in ("forward_s", "backward_s"))

    steps = (row["promised_step_s"], row["planned"]["step_s"], row["in_core"]["step_s"])
    overheads = (f"{row[what]:+.1%}" for what in ("promised", "found", "found_median"))
    milliseconds = (f"{1e3 * seconds:.1f}" for seconds in steps)
    return table_row(name, *overheads, *milliseconds, processor("in_core"), processor("planned"))


def main(words: list[str] | None = None) -> int:
    parser = parser_of(__doc__, "python -m benchmarks.launch_bound", steps=10, iterations=5, plan_s=2.0)
    parser.add_argument("--host-budget", help="of their plans: pinned memory is the host's, here too")
    parser.add_argument("--nets", nargs="+", choices=OF_A_SIZE, default=[], help="networks of a real size")
    arguments = parser.parse_args(words)
    warnings.simplefilter("ignore")
    columns = ("plan", "promised", "found", "median", "promised ms", "found ms", "in-core ms")
    print(table_head(*columns, "processor in-core", "planned"))
    if arguments.nets:
        rows = dict[str, Row]()
        for name in arguments.nets:
            limits = {"time_limit_s": arguments.plan_s, "host_budget": arguments.host_budget}
            rows |= of_a_size(name, arguments.steps, arguments.iterations, **limits)
            write_results(arguments.output, facts_of_run(arguments) | {"rows": rows})
        return 0
    workload = network()
    profile = poochplan.profile(
        workload.step, model=workload.model, optimizer=workload.optimizer, iterations=arguments.iterations
    )
    cost, found = profile.runtime, dict[str, Row]()
    print(cost, f"in-core {1e3 * profile.times.step_s:.1f} ms, {len(profile.ops)} ops")
    for name, plan in plans(profile, arguments.plan_s).items():
        found[name] = under(workload, plan, arguments.steps)
        print(line(name, found[name]), flush=True)
        write_results(arguments.output, facts_of_run(arguments) | {"costs": repr(cost), "rows": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
