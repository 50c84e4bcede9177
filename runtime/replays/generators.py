"""States of random generators, as replays keep them: in Python's memory, since no budget has room for them.

A state of the CPU's generator is 5056 bytes, and each random op on the tape has one.
"""

from __future__ import annotations

import ctypes

import torch

from poochplan.runtime.metering.allocated import aside


def state_of(generator: torch.Generator) -> bytearray:
    """The generator's state, a copy."""
    with aside():
        state = generator.get_state()
        return bytearray(ctypes.string_at(state.data_ptr(), state.nbytes))  # no op, which modes would look at


def set_state_of(generator: torch.Generator, state: bytearray) -> None:
    """Puts the generator in the state; takes nothing of the device's memory."""
    generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
