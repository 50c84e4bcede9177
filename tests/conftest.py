from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["POOCH_RAISES"] = "1"  # before the first import: a fault of ours is raised, and not only told

import pytest
import torch

from poochplan.errors import NativeError, SpillError
from poochplan.profiler import profiling
from poochplan.runtime.devices.cpu import choose_spill_dir
from poochplan.runtime.replays import compiled_tape
from tests import hangs
from tests.depth import DAY, DEEP, EVERYTHING, LONGEST, MARKED, PART, is_in_part, is_looked_at, not_today
from tests.memory import watch_memory


def pytest_configure(config: pytest.Config) -> None:
    hangs.pytest_configure(config)
    watch_memory(config)


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _collections_look_at_what_is_new() -> None:
    """Each profile collects garbage (it must), which takes longer than a small step where all of torch is looked at."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder of the test on a disk, to spill to: pytest's own may be in memory.

    It is then in the one that ``POOCH_SPILL_DIR`` names, else in one that the package finds.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = choose_spill_dir(tmp_path)
        except SpillError:
            try:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pooch-", dir=choose_spill_dir())))
            except SpillError as error:
                pytest.skip(f"{error}")
        yield folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Ops of one thread, within the module: results are not to depend on the compute threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _the_link_is_measured_once() -> Iterator[None]:
    """Each profile that measures the link gets what the first one in this process found with the same arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "measure_link", functools.cache(profiling.measure_link))
        yield


@pytest.fixture(autouse=True, scope="session")
def _the_tape_is_built_here_or_never() -> Iterator[None]:
    """Where there can be a compiled tape it serves from the first test on; sessions begin no build beside a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_tape, "build_beside", lambda: None)
        with contextlib.suppress(NativeError):
            compiled_tape.TAPE.build()
        yield


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not EVERYTHING:
        terminalreporter.write_line(f"POOCH_DAY={DAY}: a third of the cases of many tests, mutants of what has changed")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Notebooks of the rest run on less: their kernels begin with ``kernel_start.py``. What tests import is not looked
    at for garbage: it takes a quarter of the time of importing it. Autograd starts before a test's own fake tensors
    pretend that there are GPUs: else it has a thread for each, and forked workers cannot compute gradients.
    """
    gc.disable()
    torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    if PART == "rest" and not DEEP:
        folder = tempfile.TemporaryDirectory(prefix="pooch-ipython-")
        session.config.add_cleanup(folder.cleanup)
        started = Path(folder.name) / "profile_default" / "startup"
        started.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("kernel_start.py"), started)
        os.environ["IPYTHONDIR"] = folder.name


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if collection_path.suffix != ".py" or is_looked_at(collection_path) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lost = [item for item in items if item.get_closest_marker("rest") and MARKED not in item.path.parents]
    if lost:
        raise pytest.UsageError(f"{lost[0].nodeid}: only files in {MARKED} are looked at for the marker rest")
    left_out = {item for item in items if not is_in_part(item) or (item.get_closest_marker("deep") and not DEEP)}
    left_out |= not_today([item for item in items if item not in left_out])
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = sorted((item for item in items if item not in left_out), key=lambda item: item.path not in LONGEST)


def pytest_collection_finish() -> None:
    gc.enable()
