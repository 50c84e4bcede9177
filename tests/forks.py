"""Processes that begin with torch imported: forks of one that has. The import takes longer than most tests run.

``[*forked(), "-W", "ignore", "-m", "module", ...]`` is to ``subprocess`` what ``[sys.executable, ...]`` is. Not for
what must be seen from the interpreter's start: which modules are imported, variables of allocators, seeds of hashes.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORTED = "torch", "poochplan.profiler.profiling", "poochplan.runtime.applying"


def forked() -> list[str]:
    """The beginning of a command, in place of the interpreter's path, which it is where there is no Linux."""
    if not hasattr(os, "pidfd_open"):
        return [sys.executable]
    return [sys.executable, "-I", "-S", str(ROOT / "tests" / "fork_client.py"), _server()[0]]


def told(stderr: str) -> list[str]:
    """The lines of a fork's stderr, without those by which nanobind, in Triton, ends it on some machines."""
    of_nanobind = "nanobind:", " - leaked", " - ... skipped", "See https://nanobind"
    return [line for line in stderr.splitlines() if not line.startswith(of_nanobind)]


@functools.cache
def _server() -> tuple[str, subprocess.Popen[bytes]]:
    """Its address, and the process. It ends with this one, which has the other end of its standard input."""
    address = str(Path(tempfile.mkdtemp(prefix="pooch-forks-")) / "socket")
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.forks", address]
    server = subprocess.Popen(command, env=variables, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    return address, server


def serve(address: str) -> None:
    """Answers clients until the standard input ends. Returns in each fork that is to run a client's arguments."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else each profile and census of a fork looks at all that was imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return begin(connection)
            connection.close()
    Path(address).unlink()
    Path(address).parent.rmdir()
    sys.exit()


def begin(connection: socket.socket) -> None:
    """Returns in the process that is to run the arguments, which have been set. This one waits for its end."""
    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    asked = b""
    while len(asked) < int.from_bytes(size, "little"):
        asked += connection.recv(1 << 16)
    process = os.fork()
    if process == 0:
        connection.close()
        os.setpgid(0, 0)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        told = json.loads(asked)
        os.chdir(told["cwd"])
        os.environ.clear()
        os.environ.update(told["environ"])
        sys.path[:0] = [told["cwd"], *filter(None, told["environ"].get("PYTHONPATH", "").split(os.pathsep))]
        sys.argv = told["argv"]
        return
    for stream in (0, 1, 2, *streams):
        os.close(stream)
    ended = os.pidfd_open(process)
    if ended not in select.select([connection, ended], [], [])[0]:  # the client is gone
        os.killpg(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    connection.sendall(code.to_bytes(4, "little", signed=True))
    os._exit(0)


def run() -> None:
    """Does what the interpreter does with ``sys.argv``."""
    while sys.argv[0] == "-W":
        warnings.simplefilter(sys.argv[1])  # type: ignore[arg-type]
        del sys.argv[:2]
    how, what, *arguments = sys.argv
    sys.argv = [how, *arguments]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(main))


if __name__ == "__main__":
    serve(sys.argv[1])
    run()
