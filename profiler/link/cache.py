"""The measured link, kept per machine in a JSON file in the user's cache folder; what is wrong there is no error."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec
import torch

from poochplan.formats.files import cache_folder, encode_readable, read_cache, write_cache
from poochplan.formats.profile import Link
from poochplan.runtime.devices.spill import choose_spill_dir, file_system_type

from .measure import CURVE_SIZES_BYTES, measure_link

VERSION = 2
"""Of the way links are measured and fitted; files of another one are measured anew."""


class CachedLinks(msgspec.Struct, frozen=True, kw_only=True):
    """The file. Links by :func:`link_key`."""

    version: int
    links: dict[str, Link]


def cache_path() -> Path:
    """The file of links in the user's cache folder."""
    return cache_folder() / "links.json"


def link_key(where: torch.device, directory: str | Path | None, throttle_bytes_per_s: float | None) -> str:
    """What the link depends on: device, disk, throttle and torch; raises ``SpillError`` as the spill file would."""
    if where.type == "cuda":
        parts = [torch.cuda.get_device_name(where), "pinned"]
    else:
        folder = choose_spill_dir(directory)
        device = folder.stat().st_dev
        disk = f"{file_system_type(folder)} {os.major(device)}:{os.minor(device)}"
        parts = [platform.processor() or platform.machine(), platform.node(), disk]
    return ", ".join([*parts, f"throttle {throttle_bytes_per_s or 'none'}", f"torch {torch.__version__}"])


def cached_link(
    where: torch.device,
    directory: str | Path | None = None,
    throttle_bytes_per_s: float | None = None,
    *,
    refresh: bool = False,
) -> tuple[Link, bool]:
    """The link, and whether it comes from the cache. Measured and stored where it is not there, or on ``refresh``.

    Raises what :func:`measure_link` raises.
    """
    known = known_link(where, directory, throttle_bytes_per_s)
    if known is not None and not refresh:
        return known, True
    key = link_key(where, directory, throttle_bytes_per_s)
    link = measure_link(where, directory, throttle_bytes_per_s, CURVE_SIZES_BYTES)
    write_cache(cache_path(), encode_readable(CachedLinks(version=VERSION, links={**_load(), key: link})))
    return link, False


def known_link(
    where: torch.device, directory: str | Path | None = None, throttle_bytes_per_s: float | None = None
) -> Link | None:
    """The link, if it has been measured and stored; raises what :func:`link_key` raises."""
    return _load().get(link_key(where, directory, throttle_bytes_per_s))


def _load() -> dict[str, Link]:
    found = read_cache(cache_path(), CachedLinks)
    return found.links if found is not None and found.version == VERSION else {}
