"""Options that several verbs have: the workload, the machine to plan for, and the time of a search."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from poochplan.errors import GapError, InfeasibleError, UsageError
from poochplan.formats.profile import Profile
from poochplan.planner.planning import smallest_budget
from poochplan.planner.whatif import for_machine
from poochplan.units import format_bytes, parse_budget, parse_bytes

TIME_LIMIT_S = 20.0
DEFAULT_MARGIN = "512MiB"
MARGIN_NEEDS_MEMORY = "--margin: expected --device-memory beside it, found none; name the memory, or leave --margin out"


def add_workload(parser: argparse.ArgumentParser) -> None:
    """``WORKLOAD``, for verbs that build one."""
    forms = "name of a shipped config (unet3d), TOML file, package.module:function, file.py:function or model.onnx"
    parser.add_argument("workload", metavar="WORKLOAD", help=forms)


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """``--set``, ``--loss`` and ``--seed``, for verbs that build a workload."""
    parser.add_argument(
        "--set", dest="settings", action="append", metavar="NAME=VALUE", help="a parameter of the workload; repeatable"
    )
    parser.add_argument(
        "--loss",
        dest="settings",
        action="append",
        type="loss={}".format,
        metavar="LOSS",
        help="loss of an ONNX model: mse, cross-entropy or file.py:function; the same as --set loss=LOSS",
    )
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="seed of all generators (default: 0)")


def add_spill_dir(parser: argparse.ArgumentParser) -> None:
    """``--spill-dir``."""
    default = "(default: $POOCH_SPILL_DIR, else /var/tmp or another on a disk)"
    parser.add_argument("--spill-dir", metavar="DIR", help=f"folder of the spill file, on the CPU {default}")


def add_arena_argument(parser: argparse.ArgumentParser) -> None:
    """``--arena``, for verbs that plan."""
    parser.add_argument(
        "--arena",
        choices=("auto", "on", "off"),
        default="auto",
        help="whether the budget covers one arena for the step and everything outside it, instead of the peak alone "
        "(default: auto, which is on for a CPU profile that was taken with the compiled allocator)",
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
        help=f"part of --device-memory left for the CUDA context and fragmentation (default: {DEFAULT_MARGIN})",
    )
    group.add_argument(
        "--compute-scale",
        type=positive,
        metavar="X",
        help="factor on the time of every op: 0.5 is a device twice as fast",
    )


def profile_for(profile: Profile, options: argparse.Namespace) -> Profile:
    """The profile on the machine of the options; raises the errors of ``for_machine``."""
    return for_machine(
        profile, link=options.link, device_memory=options.device_memory, compute_scale=options.compute_scale
    )


def memory_budget(options: argparse.Namespace) -> int | None:
    """Bytes of ``--device-memory`` minus the margin; None without that option.

    Raises ``UsageError`` if a size is invalid, or the margin leaves no byte.
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
    """Bytes of a budget. Raises ``UsageError`` if it is invalid, or exceeds :func:`memory_budget`."""
    budget_bytes = parse_budget(text, profile.in_core_peak_bytes)
    most_bytes = memory_budget(options)
    if most_bytes is not None and budget_bytes > most_bytes:
        raise UsageError(
            f"{what}: expected at most {most_bytes} bytes ({format_bytes(most_bytes)}), what --device-memory leaves "
            f"beside the margin, found {budget_bytes} bytes ({format_bytes(budget_bytes)}); name a smaller budget"
        )
    return budget_bytes


def smallest_within_memory(profile: Profile, options: argparse.Namespace) -> int:
    """Bytes of the smallest budget with a plan, including its arena if ``--arena`` requests one.

    Raises ``InfeasibleError`` if it exceeds :func:`memory_budget`.
    """
    smallest, most = smallest_budget(profile, arena=options.arena), memory_budget(options)
    if most is not None and most < smallest:
        raise InfeasibleError(
            f"no plan fits the {format_bytes(most)} that --device-memory leaves beside the margin: expected at "
            f"least {smallest} bytes ({format_bytes(smallest)}); name more memory, or make the batch smaller",
            smallest_budget_bytes=smallest,
        )
    return smallest


def require_budget(options: argparse.Namespace) -> None:
    """Raises ``UsageError`` if the options give no budget. It is called before any file is read."""
    if memory_budget(options) is None and options.budget is None and not options.min:
        raise UsageError("expected --budget, --min or --device-memory, found none of them; see `pooch plan --help`")


def chosen_budget(profile: Profile, options: argparse.Namespace) -> int:
    """Bytes of ``--budget``, of the smallest budget with a plan, or of :func:`memory_budget`."""
    if options.min:
        return smallest_within_memory(profile, options)
    if options.budget is not None:
        return parse_budget_within(options.budget, profile, options)
    budget_bytes = memory_budget(options)
    assert budget_bytes is not None
    return budget_bytes


def add_search_arguments(parser: argparse.ArgumentParser, *, is_counted: bool = True) -> None:
    """``--time-limit``, ``--gap`` and ``--max-gap``, and with ``is_counted`` also ``--evaluations``."""
    end = parser.add_mutually_exclusive_group()
    end.add_argument(
        "--time-limit", type=positive, default=TIME_LIMIT_S, metavar="S", help="seconds of each search (default: 20)"
    )
    if is_counted:
        end.add_argument(
            "--evaluations",
            type=at_least(1),
            metavar="N",
            help="simulations of each search instead of seconds, which makes the plan repeatable",
        )
    parser.add_argument(
        "--gap",
        type=positive,
        default=0.005,
        help="stop when the step is within this share of its proven lower bound (default: 0.005, which is 0.5%%)",
    )
    parser.add_argument(
        "--max-gap",
        metavar="SHARE",
        help="exit code 4 if a step is not proven within this share, such as 1%%; the plan is written all the same "
        "(default: any gap is success)",
    )


def most_gap(options: argparse.Namespace) -> float | None:
    """``--max-gap`` as a number; raises ``UsageError`` if it is no share."""
    return None if options.max_gap is None else parse_share(options.max_gap, "--max-gap")


def gap_problem(gaps: Sequence[float | None], most: float | None, written: str) -> GapError | None:
    """The error if a plan's gap is above ``most``. A gap is None if no bound is proven."""
    missed = [gap for gap in gaps if most is not None and gap is not None and gap > most]
    if not missed:
        return None
    return GapError(
        f"--max-gap: expected steps within {most:.2%} of their proven bounds, found {max(missed):.2%} (in "
        f"{len(missed)} of {len(gaps)}); {written}; raise --time-limit, or --max-gap"
    )


def parse_share(text: str, what: str) -> float:
    """``0.3`` for ``"30%"`` or ``"0.3"``; raises ``UsageError`` for other texts, such as ``"30"``."""
    is_percent = text.strip().endswith("%")
    try:
        share = float(text.strip().removesuffix("%")) / (100 if is_percent else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf") or (share >= 10 and not is_percent):
        raise UsageError(f"{what}: expected a share such as 30% or 0.3, found {text!r}")
    return share


def parse_overrides(settings: list[str] | None) -> dict[str, str]:
    """Parameters of ``--set name=value``, as text; the workload loader gives them their types.

    Raises ``UsageError`` if an entry is not ``name=value``, or a name is repeated.
    """
    overrides: dict[str, str] = {}
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        if not equals or not name.strip().isidentifier():
            raise UsageError(f"--set: expected name=value, such as batch_size=64, found {setting!r}")
        if name.strip() in overrides:
            raise UsageError(f"--set: {name.strip()!r} is given twice; give it once")
        overrides[name.strip()] = value.strip()
    return overrides


def at_least(minimum: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least ``minimum``."""

    def whole_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {minimum}, found {text!r}")
        return value

    return whole_number


def positive(text: str) -> float:
    """An argparse type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return value
