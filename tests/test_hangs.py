"""What hangs ends, by its name and with the stacks of all threads; the other tests are run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests import hangs
from tests.hangs import pytest_configure

hangs.BETWEEN_TESTS_S, hangs.WITHOUT_A_RESULT_S = {between}, {without}
"""
TESTS = """
import pytest, re, threading

def spins():
    re.match(r"(a+)+$", "a" * 60 + "b")  # in C, with the interpreter's lock

def waits():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

@pytest.mark.parametrize("number", range(20))
def test_one(number):
    {3: spins, 5: waits}.get(number, int)()  # one worker's: two would write their stacks into each other's
"""
DIES = """
import os, time

def test_dies():
    if os.fork() == 0:
        time.sleep(9)
        os._exit(0)
    os._exit(0)
"""
ENDS_NEVER = "\ndef pytest_sessionfinish():\n    threading.Event().wait()\n\nimport threading\n"
XDIST = "--numprocesses=2", "--dist=worksteal"


def run(folder: Path, tests: str, conftest: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The suite's own settings, with seconds in place of minutes."""
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_some.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={folder}"]
    command += ["-p", "no:cacheprovider", *options, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


def test_each_test_that_hangs_is_one_failure_and_the_others_are_run(tmp_path: Path) -> None:
    conftest = CONFTEST.format(between=250, without=250)
    done = run(tmp_path, TESTS, conftest, *XDIST, "-o", "faulthandler_timeout=3")
    assert "2 failed, 18 passed" in done.stdout
    for number, name in ((3, "spins"), (5, "waits")):
        assert f"crashed while running 'test_some.py::test_one[{number}]'" in done.stdout
        assert f"in {name}" in done.stderr
    assert "in _thread_receiver" in done.stderr


def test_a_worker_that_died_while_its_child_keeps_its_pipes_is_not_waited_for(tmp_path: Path) -> None:
    done = run(tmp_path, DIES, CONFTEST.format(between=250, without=5), *XDIST)
    assert done.returncode == 1
    assert "in loop_once" in done.stderr  # of the controller


def test_a_process_that_hangs_between_tests_is_not_waited_for(tmp_path: Path) -> None:
    conftest = CONFTEST.format(between=2, without=250) + ENDS_NEVER
    done = run(tmp_path, "def test_well(): pass\n", conftest, "-p", "no:xdist")
    assert done.returncode == 1
    assert "in pytest_sessionfinish" in done.stderr
