"""A preset is a link by name; another name is one clear line."""

from __future__ import annotations

import pytest

from poochplan.errors import UsageError
from poochplan.formats.profile import PRESET_BYTES_PER_S, preset_link


@pytest.mark.parametrize("name", PRESET_BYTES_PER_S)
def test_a_preset_is_the_same_in_both_directions_and_full_duplex(name: str) -> None:
    link = preset_link(name)
    assert link.name == name
    assert link.outward == link.inward
    assert link.outward.bandwidth_bytes_per_s == PRESET_BYTES_PER_S[name]
    assert (link.outward.latency_s, link.duplex) == (1e-5, 1.0)
    assert (link.interference_out, link.interference_in, link.throttle_bytes_per_s) == (0.0, 0.0, None)


@pytest.mark.parametrize(
    ("name", "hint"), [("pcie6", "did you mean pcie"), ("", "pcie3, pcie4"), ("12GB/s", "nvlink-c2c")]
)
def test_an_unknown_name_lists_the_names(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint) as caught:
        preset_link(name)
    assert "\n" not in str(caught.value)
