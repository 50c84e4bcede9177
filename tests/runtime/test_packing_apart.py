"""Packing for a running training loads nothing into its process, and gives what packing there would give."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from poochplan import packing_apart
from poochplan.packing_apart import packed, packed_apart, packed_here

BLOCKS = [(start, start + 1 + start % 7, 512 * (1 + start * 37 % 11)) for start in range(60)]
ROOM_BYTES = 1 << 20
pytestmark = pytest.mark.cpu_device


def test_another_process_gives_the_places_that_this_one_gives() -> None:
    assert packed_apart(BLOCKS, ROOM_BYTES) == (list(packed_here(BLOCKS, ROOM_BYTES)[0]), packed_here(BLOCKS, 0)[1])


def test_packing_leaves_no_compiler_in_a_process_that_had_none() -> None:
    script = """
        import sys
        from poochplan.packing_apart import packed
        offsets, arena_bytes = packed([(0, 2, 512), (1, 3, 512), (2, 4, 512)], 1024)
        assert arena_bytes == 1024 and offsets[0] != offsets[1] != offsets[2]
        assert not {"numba", "torch"} & set(sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("executable", ["", "/no/such/python"])
def test_where_there_can_be_no_other_process_it_packs_here(monkeypatch: pytest.MonkeyPatch, executable: str) -> None:
    expected = packed_here(BLOCKS, ROOM_BYTES)
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.setattr(packing_apart.sys, "executable", executable)
    assert packed(BLOCKS, ROOM_BYTES) == expected
