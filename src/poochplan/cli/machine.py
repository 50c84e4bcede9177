"""The machine that ``pooch plan`` and ``pooch sweep`` plan for, where it is not the one that was measured."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from poochplan.errors import InfeasibleError, UsageError
from poochplan.units import format_bytes, parse_budget, parse_bytes

from .base import positive

if TYPE_CHECKING:
    from poochplan.formats.profile import Profile

DEFAULT_MARGIN = "512MiB"
MARGIN_NEEDS_MEMORY = "--margin: expected --device-memory beside it, found none; name the memory, or leave --margin out"


def add_arena_argument(parser: argparse.ArgumentParser) -> None:
    """``--arena``, of what plans."""
    parser.add_argument(
        "--arena",
        choices=("auto", "on", "off"),
        default="auto",
        help="whether the budget is on one arena for the step together with what lies outside it, and not on the peak "
        "alone (default: auto, which is on for a CPU profile that was taken with the compiled allocator)",
    )


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """``--link``, ``--device-memory``, ``--margin`` and ``--compute-scale``."""
    group = parser.add_argument_group(
        "another machine", "plan for a machine that was not measured; the times of such a plan are estimates"
    )
    group.add_argument(
        "--link",
        metavar="LINK",
        help="pcie3, pcie4, pcie5, nvlink1, nvlink2, nvlink-c2c, measured, a rate such as 12GB/s, or two, out,in",
    )
    group.add_argument("--device-memory", metavar="SIZE", help="memory of the device, such as 16GiB")
    group.add_argument(
        "--margin",
        metavar="SIZE",
        help=f"part of --device-memory left to the CUDA context and to fragmentation (default: {DEFAULT_MARGIN})",
    )
    group.add_argument(
        "--compute-scale",
        type=positive,
        metavar="X",
        help="factor on the time of every op: 0.5 is a device twice as fast",
    )


def profile_for(profile: Profile, options: argparse.Namespace) -> Profile:
    """The profile on the machine that the options name; raises what ``for_machine`` raises."""
    from poochplan.planner.whatif import for_machine

    return for_machine(
        profile, link=options.link, device_memory=options.device_memory, compute_scale=options.compute_scale
    )


def memory_budget(options: argparse.Namespace) -> int | None:
    """Bytes that ``--device-memory`` leaves beside the margin; None when it is not given.

    Raises
    ------
    UsageError
        A size cannot be read, or the margin leaves nothing.
    """
    if options.device_memory is None:
        if options.margin is not None:
            raise UsageError(MARGIN_NEEDS_MEMORY)
        return None
    memory_bytes = parse_bytes(options.device_memory, "--device-memory")
    margin = options.margin or DEFAULT_MARGIN
    margin_bytes = 0 if margin.strip() == "0" else parse_bytes(margin, "--margin")
    if margin_bytes >= memory_bytes:
        raise UsageError(
            f"--device-memory: expected more than the margin of {format_bytes(margin_bytes)}, found "
            f"{format_bytes(memory_bytes)}; name more memory, or a smaller --margin"
        )
    return memory_bytes - margin_bytes


def parse_budget_within(text: str, profile: Profile, options: argparse.Namespace, what: str = "--budget") -> int:
    """Bytes of a budget; raises ``UsageError`` when it cannot be read, or is more than ``--device-memory`` leaves."""
    budget_bytes = parse_budget(text, profile.in_core_peak_bytes)
    most_bytes = memory_budget(options)
    if most_bytes is not None and budget_bytes > most_bytes:
        raise UsageError(
            f"{what}: expected at most {most_bytes} bytes ({format_bytes(most_bytes)}), what --device-memory leaves "
            f"beside the margin, found {budget_bytes} bytes ({format_bytes(budget_bytes)}); name a smaller budget"
        )
    return budget_bytes


def smallest_within_memory(profile: Profile, options: argparse.Namespace) -> int:
    """Bytes of the smallest budget with a plan, and its arena where ``--arena`` asks for one.

    Raises ``InfeasibleError`` where ``--device-memory`` leaves less.
    """
    from poochplan.planner.planning import smallest_budget

    smallest, most = smallest_budget(profile, arena=options.arena), memory_budget(options)
    if most is not None and most < smallest:
        raise InfeasibleError(
            f"no plan fits the {format_bytes(most)} that --device-memory leaves beside the margin: expected at "
            f"least {smallest} bytes ({format_bytes(smallest)}); name more memory, or make the batch smaller",
            smallest_budget_bytes=smallest,
        )
    return smallest


def require_budget(options: argparse.Namespace) -> None:
    """Raises ``UsageError`` when the options name no budget, or a memory that leaves none; before any file is read."""
    if memory_budget(options) is None and options.budget is None and not options.min:
        raise UsageError("expected --budget, --min or --device-memory, found none of them; see `pooch plan --help`")


def chosen_budget(profile: Profile, options: argparse.Namespace) -> int:
    """Bytes of ``--budget``, of the smallest with a plan, or what ``--device-memory`` leaves."""
    if options.min:
        return smallest_within_memory(profile, options)
    if options.budget is not None:
        return parse_budget_within(options.budget, profile, options)
    budget_bytes = memory_budget(options)
    assert budget_bytes is not None
    return budget_bytes
