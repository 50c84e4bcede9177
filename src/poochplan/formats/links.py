"""Links by name: what a transfer path of that kind carries, for plans made away from the machine. Imports no torch.

The rates are those of pinned copies in one direction, below the wire's nominal rate: PCIe 3, 4 and 5 x16 carry about
three quarters to nine tenths of their 15.8, 31.5 and 63 GB/s; NVLink 2 between POWER9 and V100 (3 bricks, 75 GB/s) and
NVLink-C2C of Grace Hopper (450 GB/s) likewise. A measured link is better than any of these.
"""

from __future__ import annotations

import difflib

from poochplan.errors import UsageError

from .profile_parts import Link, LinkDirection

PRESET_BYTES_PER_S = {
    "pcie3": 12e9,
    "pcie4": 25e9,
    "pcie5": 55e9,
    "nvlink2": 65e9,
    "nvlink-c2c": 380e9,
}
"""Bytes per second of each preset, in each direction."""
PRESET_LATENCY_S = 10e-6
"""Seconds before the first byte of a copy arrives: the launch and the trip."""


def preset_link(name: str) -> Link:
    """The link of that name: the same in both directions, full duplex, and no loss of compute beside copies.

    Raises ``UsageError`` with the list of names when there is none of that name.
    """
    bandwidth_bytes_per_s = PRESET_BYTES_PER_S.get(name)
    if bandwidth_bytes_per_s is None:
        close = difflib.get_close_matches(name, PRESET_BYTES_PER_S, n=1)
        remedy = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(f"link: expected one of {', '.join(PRESET_BYTES_PER_S)}, found {name!r}{remedy}")
    direction = LinkDirection(latency_s=PRESET_LATENCY_S, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    return Link(name=name, outward=direction, inward=direction)
