"""Packing an arena for a training process, in a process of its own: numba, with all that it loads, stays out of the
training's memory (some 100 MiB that no budget would know of). Where it is loaded already, packing runs right here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

MOST_LOOKS = 400_000_000
"""Looks that a second search for places may take while the training waits: a second or two, three times at most. In six
plans of three networks they were enough for the arena that was planned, and a quarter of them for 0.5% more."""
_LONGEST_S = 120.0
Blocks = Sequence[tuple[int, int, int]]


def packed(blocks: Blocks, room_bytes: int) -> tuple[Sequence[int], int]:
    """Offsets of blocks (time of taking, of giving back, bytes) in one arena, and its bytes. It is searched for as long
    as a plan's is; where that is larger than ``room_bytes``, for an arena of those, with ``MOST_LOOKS``.
    """
    if "numba" not in sys.modules and sys.executable:
        try:
            return packed_apart(blocks, room_bytes)
        except (OSError, subprocess.SubprocessError, ValueError):
            pass  # there can be no other process: here it costs memory, and works
    return packed_here(blocks, room_bytes)


def packed_here(blocks: Blocks, room_bytes: int) -> tuple[Sequence[int], int]:
    """As :func:`packed`, in this process."""
    from poochplan.planner.arena.packing import Block, pack
    from poochplan.planner.arena.step_layout import LOOKS_PER_BLOCK

    every = [Block(*block) for block in blocks]
    found = pack(every, LOOKS_PER_BLOCK * len(every))
    if found.arena_bytes > room_bytes >= found.lower_bound_bytes:
        found = pack(every, MOST_LOOKS, enough_bytes=room_bytes)
    return found.offsets, found.arena_bytes


def packed_apart(blocks: Blocks, room_bytes: int) -> tuple[Sequence[int], int]:
    """As :func:`packed`, in another process; raises where there can be none or it fails."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-m", "poochplan.packing_apart"],
        input=json.dumps([[list(map(int, block)) for block in blocks], int(room_bytes)]),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=_LONGEST_S,
    )
    offsets, arena_bytes = json.loads(done.stdout.splitlines()[-1] if done.stdout else "")
    return list(map(int, offsets)), int(arena_bytes)


def _main() -> None:
    blocks, room_bytes = json.load(sys.stdin)
    offsets, arena_bytes = packed_here([tuple(block) for block in blocks], room_bytes)
    print(json.dumps([list(map(int, offsets)), int(arena_bytes)]))


if __name__ == "__main__":
    _main()
