"""The command line ``pooch``. Each verb is a class. ``main`` turns every error into one line and an exit code.

Exit codes: 0 ok, 1 error (for ``pooch diff``: the files differ), 2 usage, 3 infeasible (the message names the smallest
feasible budget), 4 the written plan's gap is above --max-gap or Ctrl-C ended its search, 5 a run exceeded its budget, 6
its steps diverged from their plan, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import textwrap
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from poochplan.errors import PoochError, UsageError, is_out_of_memory

from .. import __version__
from ..workload import asked_text
from .base import Verb, rank_and_count
from .options import add_options

VERBS = {
    "profile": "measure a training step: ops, saved values, memory, and the link to the host tier",
    "plan": "decide which saved values to keep, swap and recompute under a memory budget",
    "sweep": "plan for a range of budgets with every policy: memory against overhead, as a table, CSV and picture",
    "run": "train for some steps under a plan, measure them, and check the gradients",
    "fit": "find the largest batch, depth or length that trains in a given memory, and what it costs",
    "link": "measure the link between device and host tier",
    "show": "describe a profile, a plan or a run: model, machine, peaks, times, decisions by layer, notes",
    "diff": "list the differences of two plans, two profiles, or a plan and a run of it",
    "simulate": "show the step that a plan predicts: time, memory, and the causes of the overhead",
    "doctor": "check the machine, the software and a workload: what is fine, what to change, what to install",
}
"""By name: what the verb does."""
_MODULES = {"inspection": ("show", "diff", "simulate"), "machine": ("link", "doctor"), "plan": ("plan", "sweep")}
"""Modules of several verbs; others have the name of their verb. Each is loaded where the verb is asked for."""
_EXAMPLES = """\
examples:
  pooch profile unet3d -o profile.json
  pooch plan profile.json --budget 60% -o plan.json
  pooch sweep profile.json -o sweep.csv --png sweep.png
  pooch run unet3d --plan plan.json --check
  pooch show plan.json
"""
_WORDS = """\
words:
  in-core    training with everything kept in memory
  host tier  the place of swapped values: a file on a disk (CPU), pinned memory (CUDA)
  link       the copies between memory and host tier, in both directions
  roofline   seconds of an op computed from a device's peak FLOP/s and bytes/s, instead of measured

shipped networks: resnet50, gpt2, bert, unet3d, seq2seq, seq2seq_steps, char_rnn, demo, tiny
"""


HELP_WIDTH = 100
MORE_ROOM = "make the batch smaller by --set; a profile may swap meanwhile (--mode swap-all) or take none (--mode fake)"


class _Parser(argparse.ArgumentParser):
    """Raises usage errors instead of ending the process, so that they are printed like other errors."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of ``pooch``, with a sub-parser for each verb. With ``only``, only that verb gets its arguments."""
    parser = _Parser(
        prog="pooch",
        description="Train a network that does not fit: profile its step, plan what to keep, swap or recompute, run.",
        epilog=f"{_EXAMPLES}\n{_WORDS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pooch {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for name, summary in VERBS.items():
        sub = verbs.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if only not in (None, name):
            continue
        module = next((module for module, names in _MODULES.items() if name in names), name)
        importlib.import_module(f".{module}", __name__)
        verb = next(one for one in Verb.__subclasses__() if one.name == name)
        description, options, examples = verb.help.strip().split("\n\n")
        sub.description = textwrap.fill(" ".join(description.split()), HELP_WIDTH)
        sub.epilog = "examples:\n" + textwrap.indent(examples, "  ")
        outputs = add_options(sub, options)
        sub.add_argument("--json", action="store_true", help="data as JSON on stdout, everything else on stderr")
        sub.add_argument("--force", action="store_true", help=verb.force_help)
        sub.add_argument("-v", "--verbose", action="store_true", help="show tracebacks and the details of warnings")
        sub.set_defaults(verb=verb, outputs=outputs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``pooch`` and returns its exit code. Only this function turns errors into text."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verbose = "-v" in arguments or "--verbose" in arguments
    with warnings.catch_warnings():
        if not verbose:
            warnings.showwarning = _show_warning
        if rank_and_count()[0] > 0:
            warnings.simplefilter("ignore")
        try:
            asked = next((one for one in arguments if not one.startswith("-")), "")
            options = build_parser(asked).parse_args(arguments)
            options.arguments = arguments
            verb: Verb = options.verb(options)
            return verb.execute()
        except SystemExit as ended:  # --help and --version
            return int(ended.code or 0)
        except PoochError as error:
            _explain(" ".join(str(error).split()), verbose)
            return error.exit_code
        except KeyboardInterrupt:
            _explain("interrupted", verbose)
            return 130
        except BrokenPipeError:
            # The reader closed the pipe: no second error at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except Exception as error:
            if is_out_of_memory(error):
                _explain(f"the step ran out of memory: expected {asked_text(error)}, found less; {MORE_ROOM}", verbose)
                return 1
            text = " ".join(str(error).split()) or "no message"
            hint = "" if verbose else "; run again with -v for the traceback"
            _explain(f"{type(error).__name__}: {text}{hint}", verbose)
            return 1


def _explain(line: str, verbose: bool) -> None:
    if verbose:
        traceback.print_exc(file=sys.stderr)
    rank, count = rank_and_count()
    whose = f"rank {rank}: " if count > 1 else ""
    print(f"pooch: error: {whose}{line}", file=sys.stderr)


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """One line for a warning, without the source line that Python adds."""
    kind = "" if category is UserWarning else f" ({category.__name__})"
    print(f"pooch: warning: {' '.join(str(message).split())}{kind}", file=sys.stderr)
