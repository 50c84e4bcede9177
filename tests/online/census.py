"""The outside meter of a whole loop: what is there as it begins, and all that the dispatcher makes from then on."""

from __future__ import annotations

import gc
import warnings

import torch

from tests.live_bytes import LiveBytes


def outside_meter() -> LiveBytes:
    """To be entered around the loop and its session. It shares no code with the package, and sees what that moves."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated objects that are merely looked at
        before = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    return LiveBytes(*(one for one in before if one.layout is torch.strided and one.device.type == "cpu"))
