"""Ranks with what torchrun gives them: ``python -m tests.forked_ranks COUNT MODULE ARGUMENT ...``.

They are forked from one process that has imported the module, since importing torch takes longer than most tests train.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import socket
import sys


def fork_ranks(count: int, module: str, arguments: list[str]) -> None:
    """Runs the module as ``__main__`` on each rank. The first rank that fails ends the others and this process."""
    importlib.import_module(module)
    del sys.modules[module]
    gc.collect()
    gc.freeze()  # else each profile and census of a rank looks at all that was imported
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    processes = set[int]()
    for rank in range(count):
        process = os.fork()
        if not process:
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            os.environ.update({name: str(one) for name, one in (places | {"MASTER_PORT": port}).items()})
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            sys.argv = [module, *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            return
        processes.add(process)
    while processes:
        process, status = os.wait()
        processes.discard(process)
        if status:
            for other in processes:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"process {process} ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    fork_ranks(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
