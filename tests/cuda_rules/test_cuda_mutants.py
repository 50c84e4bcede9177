"""No wait and no release of the CUDA device can go: on the stand-in, without any single one something fails."""

from __future__ import annotations

import pytest

from poochplan.runtime.devices import accelerator, cuda, pinned, transfers
from poochplan.runtime.devices.accelerator import AcceleratorDevice, QueueStream
from poochplan.runtime.devices.pinned import PinnedTier
from tests.cuda_rules.scenarios import complaints
from tests.runtime.mutants import CUDA_WAITS, GIVE_BACK, Mutant, mutants_of, rewritten

MUTANTS = [
    *mutants_of(accelerator, cuda, pinned, transfers, calls=(*CUDA_WAITS, *GIVE_BACK)),
    rewritten(PinnedTier, "reserve", "for missing", "self.trim(())\n    for missing"),
    rewritten(PinnedTier, "reserve", "for missing", "self._pieces.clear()\n    for missing"),
    rewritten(PinnedTier, "idle", "if not any(", "if any("),
    rewritten(transfers, "copy_out", "device.outward.record()", "device.inward.record()"),
    rewritten(transfers, "copy_out", "device.compute.record()", "device.inward.record()"),
    rewritten(transfers, "copy_in", "device.inward.record()", "device.outward.record()"),
    rewritten(transfers, "copy_in", "device.compute.record()", "device.outward.record()"),
    rewritten(AcceleratorDevice, "use", "home.record()", "now.record()"),
    rewritten(AcceleratorDevice, "copy_out", "self.outward)", "self.inward)"),
    rewritten(AcceleratorDevice, "copy_in", "self.inward)", "self.outward)"),
    rewritten(QueueStream, "record", "return QueuedEvent(", "self.spare.append(event)\n    return QueuedEvent("),
]
"""Also with pages and slab given back early, or forgotten, for a larger plan; with the wrong ones given back; with
events of the wrong stream, and copies on it; and with events that are used again too early.
"""


def test_nothing_is_wrong_with_the_device_as_it_is() -> None:
    assert list(complaints()) == []


def test_its_waits_and_releases_are_found() -> None:
    labels = [mutant.label for mutant in MUTANTS]
    for call in (*CUDA_WAITS[1:], *GIVE_BACK):
        assert any(f"no {call}" in label for label in labels), call
    assert any("nothing let go" in label for label in labels)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.label)
def test_without_it_something_fails(mutant: Mutant) -> None:
    with mutant.in_place():
        assert next(complaints(), None) is not None
