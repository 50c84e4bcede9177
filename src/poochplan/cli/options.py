"""Options: how verbs declare them, those that several verbs have, and the machine, budget and gap that they give."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from poochplan.errors import BudgetExceededError, GapError, InfeasibleError, UsageError
from poochplan.formats.profile import Profile
from poochplan.planner.arena.reserved import budget_bytes_of
from poochplan.planner.planning import smallest_budget
from poochplan.units import format_bytes, memory_and_margin, parse_rate

DEFAULT_MARGIN = "512MiB"
MARGIN_NEEDS_MEMORY = "--margin: expected --device-memory beside it, found none; name the memory, or leave --margin out"

_SHARED = """
<workload>
WORKLOAD: name of a shipped config (unet3d), TOML file, package.module:function, file.py:function or model.onnx
<of workload>
--set NAME=VALUE... @settings: a parameter of the workload; repeatable
--loss LOSS...: loss of an ONNX model: mse, cross-entropy or file.py:function; the same as --set loss=LOSS
--seed N >=0 =0: seed of all generators (default: {})
<spill dir>
--spill-dir DIR: folder of the spill file, on the CPU (default: $POOCH_SPILL_DIR, else /var/tmp or another on a disk)
<profile>
PROFILE: file that pooch profile wrote
<solver>
--solver NAME: a PuLP solver (default: HiGHS, or CBC without it)
<time limit>
--time-limit S =20: seconds of each search (default: {})
<evaluations>
| --evaluations N: simulations of each search instead of seconds, which makes the plan repeatable
<gaps>
--gap GAP =0.005: stop when the step is within this share of its proven lower bound (default: {}, which is 0.5%)
--max-gap SHARE: exit code 4 if a step is not proven within this share, such as 1%; the plan is written all the same
  (default: any gap is success)
<arena>
--arena auto|on|off =auto: whether the budget covers one arena for the step and everything outside it, instead of the
  peak alone (default: auto, which is on for a CPU profile that was taken with the compiled allocator)
<on>
--on allocated|reserved: what budgets cover, and shares are of: bytes in use, or all that torch's allocator takes from
  the GPU, as nvidia-smi shows beside the context (default: reserved for a profile measured on a GPU, else allocated)
<machine>
[another machine: plan for a machine that was not measured; the times of such a plan are estimates]
--link LINK: pcie3, pcie4, pcie5, nvlink1, nvlink2, nvlink-c2c, measured, a rate such as 12GB/s, or two, out,in
--device-memory SIZE: memory of the device, such as 16GiB
--margin SIZE: part of --device-memory left for the CUDA context and fragmentation (default: 512MiB)
--compute-scale X: factor on the time of every op: 0.5 is a device twice as fast
[]
"""
SHARED = dict(re.findall(r"^<(.+)>\n((?:[^<].*\n)+)", _SHARED, re.MULTILINE))
"""Options that several verbs have, by name."""


def add_options(parser: argparse.ArgumentParser, text: str) -> dict[str, str]:
    """Adds the options in ``text``; returns those that name a file to write, with the ending that its name must have.

    Each begins a line, and its help, behind a colon, may go on in indented lines: ``-o, --output >FILE.png: picture``.
    A word in capitals is its value: ``N`` a whole number, ``S``, ``X`` and ``GAP`` numbers above 0, ``RATE`` and
    ``SHARE`` what they say, ``NAMES`` and ``SIZES`` lists with commas, others text. Without one it is a switch, and
    ``auto|on`` are choices. ``>`` before the value: a file to write; behind it ``...``: repeatable, ``?``: optional,
    ``!``: required. Further words are the smallest number (``>=0``; else 1), the default (``=2``, for which ``{}``
    stands in the help) and the attribute (``@steps``). ``|`` before an option excludes the one before it.
    ``[title: description]`` begins a group, and ``[]`` ends it. ``<name>`` stands for options of ``SHARED``.
    """
    place: argparse._ActionsContainer = parser
    group, outputs = place, dict[str, str]()
    text = re.sub(r"<(.+)>", lambda name: SHARED[name[1]].strip(), text.strip())
    lines = [" ".join(one.split()) for one in re.split(r"\n(?=\S)", text)]
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        head, _, said = line.partition(": ")
        if line.startswith("["):
            group = parser.add_argument_group(head[1:], said[:-1]) if said else parser
            continue
        if not line.startswith("|"):
            place = group.add_mutually_exclusive_group() if after.startswith("|") else group
        outputs |= _add_option(place, head.strip("| ").replace(",", "").split(), said)
    return outputs


def _add_option(place: argparse._ActionsContainer, words: list[str], said: str) -> dict[str, str]:
    names = [word for word in words if word.startswith("-")]
    marks = {word[0]: word[1:] for word in words if word[0] in "=@"}
    least = next((int(word[2:]) for word in words if word.startswith(">=")), 1)
    written = next((word for word in words if word[0] not in "-=@" and not word.startswith(">=")), "")
    value = written.strip(">.?!")
    given: dict[str, Any] = {"help": said.replace("{}", marks.get("=", "")).replace("%", "%%")}
    given |= {"default": marks["="]} if "=" in marks else {}
    if not value:
        given["action"] = "store_true"
    elif "|" in value:
        given["choices"] = value.split("|")
    else:
        name = names[-1] if names else value
        kinds: dict[str, Any] = {"RATE": partial(parse_rate, what=name), "SHARE": partial(parse_share, what=name)}
        kinds |= dict.fromkeys(("NAMES", "SIZES"), partial(listed, what=name))
        kinds |= {"N": number(int, least), "S": number(float), "X": number(float), "GAP": number(float)}
        given |= {"metavar": value, "type": kinds.get(value, str)}
    if written.endswith("!"):
        given["required"] = True
    if not names:
        names = [marks.pop("@", value.lower())]
        given |= {"nargs": {"?": "?", ".": "+"}[written[-1]]} if written[-1] in "?." else {}
    elif written.endswith("..."):
        given["action"] = "append"
    given |= {"dest": marks["@"]} if "@" in marks else {}
    made = place.add_argument(*names, **given)
    return {made.dest: "".join(value.partition(".")[1:])} if written.startswith(">") else {}


def memory_budget(options: argparse.Namespace) -> int | None:
    """Bytes of ``--device-memory`` minus the margin; None without that option.

    Raises ``UsageError`` if a size is invalid, or the margin leaves no byte.
    """
    if options.device_memory is None:
        if options.margin is not None:
            raise UsageError(MARGIN_NEEDS_MEMORY)
        return None
    given = options.device_memory, options.margin or DEFAULT_MARGIN
    memory_bytes, margin_bytes = memory_and_margin(*given, ("--device-memory", "--margin"))
    return memory_bytes - margin_bytes


def parse_budget_within(text: str, profile: Profile, options: argparse.Namespace, what: str = "--budget") -> int:
    """Bytes of a budget. Raises ``UsageError`` if it is invalid, or exceeds :func:`memory_budget`."""
    budget_bytes = budget_bytes_of(profile, text, options.on)
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


def gap_problem(options: argparse.Namespace, gaps: Sequence[float | None], written: str) -> GapError | None:
    """The error if a plan's gap is above ``--max-gap``. A gap is None if no bound is proven."""
    most = options.max_gap
    missed = [gap for gap in gaps if most is not None and gap is not None and gap > most]
    if not missed:
        return None
    return GapError(
        f"--max-gap: expected steps within {most:.2%} of their proven bounds, found {max(missed):.2%} (in "
        f"{len(missed)} of {len(gaps)}); {written}; raise --time-limit, or --max-gap"
    )


def over_budget(budget_bytes: int, peak_bytes: int, remedy: str) -> BudgetExceededError:
    """The error for a step above its budget."""
    return BudgetExceededError(
        f"over the budget: expected at most {budget_bytes} bytes ({format_bytes(budget_bytes)}), found a step of "
        f"{peak_bytes} bytes ({format_bytes(peak_bytes)}){remedy}",
        peak_bytes=peak_bytes,
    )


def listed(text: str, what: str) -> list[str]:
    """The parts between commas; raises ``UsageError`` if one is empty."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UsageError(f"{what}: expected names or sizes with commas between them, found {text!r}")
    return parts


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


def parse_overrides(options: argparse.Namespace) -> dict[str, str]:
    """Parameters of ``--set name=value`` and ``--loss``, as text; the workload loader gives them their types.

    Raises ``UsageError`` if an entry is not ``name=value``, or a name is repeated.
    """
    overrides: dict[str, str] = {}
    for setting in (*(options.settings or ()), *(f"loss={loss}" for loss in options.loss or ())):
        name, equals, value = setting.partition("=")
        if not equals or not name.strip().isidentifier():
            raise UsageError(f"--set: expected name=value, such as batch_size=64, found {setting!r}")
        if name.strip() in overrides:
            raise UsageError(f"--set: {name.strip()!r} is given twice; give it once")
        overrides[name.strip()] = value.strip()
    return overrides


def number(kind: type[int] | type[float], least: int = 0) -> Callable[[str], float]:
    """An argparse type: a whole number of at least ``least``, or a finite number above 0."""

    def parse(text: str) -> float:
        expected = f"a whole number of at least {least}" if kind is int else "a number above 0"
        try:
            value = kind(text)
        except ValueError:
            value = -1
        if not (least <= value if kind is int else 0 < value < float("inf")):
            raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")
        return value

    return parse
