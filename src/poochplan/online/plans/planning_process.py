"""The process that plans beside a training loop: ``pooch plan``, at low priority, gone when its parent is.

    python -m poochplan.online.plans.planning_process PROFILE --budget BYTES -o PLAN ...

Arguments are those of ``pooch plan``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
LEAST_PRIORITY = 5


def ends_with_its_parent() -> None:
    """Has the system end this process when its parent has ended, however that came."""
    with contextlib.suppress(OSError, AttributeError):  # no Linux: the parent ends it where it can
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    ends_with_its_parent()
    with contextlib.suppress(OSError):
        os.nice(LEAST_PRIORITY)
    from poochplan.cli import main  # only now: its parent may end meanwhile

    sys.exit(main(["plan", *sys.argv[1:]]))
