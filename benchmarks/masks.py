"""What the bits of dropout masks are worth: plans with and without them, at the same budget.

    python -m benchmarks.masks --networks bert-large-a100 --kept 0.1 -o benchmarks/results/masks.json
    python -m benchmarks.masks --one-byte --on-cuda

The masks of the instances are floating-point numbers, as on the CPU, and may be drawn again. With ``--one-byte`` they
are as those of a GPU: one byte per element, made by an op that needs its input, so none is drawn again. Narrowing and
widening a mask then move 2.25 bytes per element, as the kernels do where CuPy is installed. With ``--on-cuda`` too
they move the 5.25 bytes of the ops of torch that do it without CuPy. Both take these ops' memory, as plans for a GPU
count it. The budget is that of the instance as it is.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from benchmarks.facts import parser_of, taken
from benchmarks.plans import budget_of, stored
from poochplan import Profile, plan
from poochplan.formats import narrow
from poochplan.formats.forms import BITS, form_of
from poochplan.formats.queries import writers_by_value
from poochplan.planner.simulator.problem import build_problem
from poochplan.planner.simulator.schedule import keep_all
from poochplan.planner.simulator.simulate import simulated
from poochplan.planner.whatif import for_machine


def one_byte(profile: Profile) -> Profile:
    """The step with one byte for each element of a mask."""
    values, ops, writers = list(profile.values), list(profile.ops), writers_by_value(profile)
    masks = {mask for mask in narrow.masks_of(profile).values() if form_of(profile, mask) == BITS}
    for mask in masks:
        share = 1 / narrow.ELEMENT_BYTES[values[mask].dtype]
        size_bytes = int(values[mask].size_bytes * share)
        facts = {"size_bytes": size_bytes, "dtype": narrow.BOOL, "unreplayable": "its op needs an input"}
        values[mask] = replace(values[mask], **facts)
        for op in writers[mask]:
            ops[op] = replace(ops[op], duration_s=ops[op].duration_s * share)
    made = replace(profile, values=tuple(values), ops=tuple(ops))
    problem = build_problem(made)
    return replace(made, in_core_peak_bytes=simulated(problem, "keep all", keep_all(problem)).peak_bytes)


def row_of(
    name: str, link: str, kept: float, time_limit_s: float, *, is_one_byte: bool, is_on_cuda: bool
) -> dict[str, Any]:
    """Overheads and gaps of both plans of an instance, and the bytes of the bits that one of them holds."""
    profile = for_machine(stored(name), link=link)
    budget_bytes = budget_of(profile, kept)
    row: dict[str, Any] = {"instance": name, "link": link, "kept": kept, "one_byte": is_one_byte, "cuda": is_on_cuda}
    profile = one_byte(profile) if is_one_byte else profile
    if is_one_byte or is_on_cuda:
        profile = replace(profile, device=replace(profile.device, kind="cuda", bits_kernel=not is_on_cuda))
    for what, without in (("without", ("narrow",)), ("with", ())):
        found = plan(profile, budget_bytes, time_limit_s=time_limit_s, gap=0.001, without=without)
        held = {decision: sum(sizes) for decision, sizes in found.sources(bits=True).items() if sizes}
        row[what] = {"overhead": found.prediction.overhead, "gap": found.solve.gap, "bits": held}
    return row


def main() -> None:
    parser = parser_of(
        __doc__,
        networks=(["bert-large-a100"], "names of instances"),
        link="pcie4",
        kept=(0.1, "share of the movable bytes that the budget keeps"),
        time_limit=20.0,
        one_byte=False,
        on_cuda=(False, "narrowing is that on CUDA without CuPy"),
    )
    asked = parser.parse_args()
    given = asked.link, asked.kept, asked.time_limit
    how = {"is_one_byte": asked.one_byte, "is_on_cuda": asked.on_cuda}
    taken(asked, asked.networks, lambda name: row_of(name, *given, **how), str)


if __name__ == "__main__":
    main()
