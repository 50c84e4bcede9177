"""Links by name: what a transfer path of that kind carries, for plans made away from the machine. Imports no torch.

The rates are those of pinned copies in one direction, below the wire's nominal rate: PCIe 3, 4 and 5 x16 carry about
three quarters to nine tenths of their 15.8, 31.5 and 63 GB/s; NVLink 1 between POWER8 and P100 (2 bricks, 40 GB/s),
NVLink 2 between POWER9 and V100 (3 bricks, 75 GB/s) and NVLink-C2C of Grace Hopper (450 GB/s) likewise. A measured
link is better than any of these.
"""

from __future__ import annotations

import difflib
from enum import StrEnum

from poochplan.errors import UsageError

from .profile_parts import Link, LinkDirection


class LinkPreset(StrEnum):
    """The links that have a name."""

    PCIE3 = "pcie3"
    PCIE4 = "pcie4"
    PCIE5 = "pcie5"
    NVLINK1 = "nvlink1"
    NVLINK2 = "nvlink2"
    NVLINK_C2C = "nvlink-c2c"


PRESET_BYTES_PER_S = {
    LinkPreset.PCIE3: 12e9,
    LinkPreset.PCIE4: 25e9,
    LinkPreset.PCIE5: 55e9,
    LinkPreset.NVLINK1: 33e9,
    LinkPreset.NVLINK2: 65e9,
    LinkPreset.NVLINK_C2C: 380e9,
}
"""Bytes per second of each preset, in each direction."""
PRESET_LATENCY_S = 10e-6
"""Seconds before the first byte of a copy arrives: the launch and the trip."""


def preset_link(name: str) -> Link:
    """The link of that name: the same in both directions, full duplex, and no loss of compute beside copies.

    Raises ``UsageError`` with the list of names when there is none of that name.
    """
    if name not in tuple(LinkPreset):
        close = difflib.get_close_matches(name, LinkPreset, n=1)
        remedy = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(f"link: expected one of {', '.join(LinkPreset)}, found {name!r}{remedy}")
    direction = LinkDirection(latency_s=PRESET_LATENCY_S, bandwidth_bytes_per_s=PRESET_BYTES_PER_S[LinkPreset(name)])
    return Link(name=name, outward=direction, inward=direction)
