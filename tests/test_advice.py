"""What a profile advises follows from its facts alone, and the infeasible message says what is in the way."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from poochplan.errors import InfeasibleError
from poochplan.formats.profile import Op, Profile, StepFacts
from poochplan.planner.planning import plan, smallest_budget
from tests.planner.tiny_profiles import tiny_profile


def _profile(**facts: Any) -> Profile:
    return msgspec.structs.replace(tiny_profile(0), facts=StepFacts(**facts))


def _compiled(*layers: str) -> Profile:
    """Every forward op that bears a saved value is a compiled region; they take these layers in turn."""
    profile = _profile()
    saved = {handle.value for handle in profile.handles}
    count = 0

    def made(op: Op) -> Op:
        nonlocal count
        if not saved.intersection(op.outputs):
            return op
        count += 1
        return msgspec.structs.replace(op, name="compiled_region", layer=layers[count % len(layers)], opaque=True)

    return msgspec.structs.replace(profile, ops=tuple(made(op) for op in profile.ops))


PINNED = tuple(msgspec.structs.replace(value, pinned="the caller holds it") for value in tiny_profile(0).values)
PEAK_BYTES = tiny_profile(0).in_core_peak_bytes
ADVISED = {
    "100% of the saved bytes are inside the compiled module encoder": _compiled("encoder"),
    "100% of the saved bytes are inside one compiled module, the model itself": _compiled(""),
    "have poochplan.compile compile it, or compile its blocks instead$": _compiled("encoder"),
    "activation checkpointing is on (layer1 and 1 more ran forward again": _profile(checkpointed=("layer1", "layer2")),
    "switch it off": _profile(checkpointed=("layer1",)),
    "call model.train() first": _profile(modules=4, eval_modules=4),
    "gc.collect()": _profile(garbage_bytes=PEAK_BYTES // 19),
    "100% of the saved bytes (15.0 KiB) can be neither": msgspec.structs.replace(_profile(), values=PINNED),
    "for one reason: the caller holds it$": msgspec.structs.replace(_profile(), values=PINNED),
    "it is sparse, nested or of a subclass$": _profile(kept_bytes=PEAK_BYTES),
    "memory that 3 runs of compiled regions take and give back inside is not known": _profile(unmeasured_regions=3),
}
NOT_ADVISED = {
    "nothing unusual": _profile(modules=3),
    "no facts": msgspec.structs.replace(_profile(), facts=None),
    "compiled by poochplan": msgspec.structs.replace(_compiled(""), facts=StepFacts(graph_mode=True)),
    "a part in eval mode": _profile(modules=4, eval_modules=3),
    "less garbage than a twentieth of the peak": _profile(garbage_bytes=PEAK_BYTES // 21),
}


@pytest.mark.parametrize("said", ADVISED)
def test_a_fact_that_limits_plans_is_one_line_of_advice(said: str) -> None:
    (line,) = ADVISED[said].advice()
    assert said in f"{line}$"


@pytest.mark.parametrize("fact", NOT_ADVISED)
def test_there_is_no_advice_without_a_reason(fact: str) -> None:
    assert NOT_ADVISED[fact].advice() == ()


def test_compiled_blocks_that_share_what_is_saved_are_no_reason_for_advice() -> None:
    blocks = [f"blocks.{number}" for number in range(50)]
    profile = _compiled(*blocks)
    saved = {handle.value for handle in profile.handles}
    sizes = [sum(profile.values[out].size_bytes for out in op.outputs if out in saved) for op in profile.ops]
    assert max(sizes) < 0.5 * sum(sizes), "the profile saves most of its bytes in one op; choose another seed"
    assert profile.advice() == ()


def test_the_infeasible_message_says_what_keeps_the_smallest_budget_from_being_smaller() -> None:
    profile = msgspec.structs.replace(_compiled("encoder"), facts=StepFacts(checkpointed=("layer1",)))
    with pytest.raises(InfeasibleError) as caught:
        plan(profile, smallest_budget(profile) - 1)
    for line in profile.advice():
        assert f"; {line}" in str(caught.value)
    assert "compile its blocks instead" in str(caught.value)
    assert "activation checkpointing is on" in str(caught.value)


def test_the_infeasible_message_says_what_can_only_be_kept() -> None:
    profile = msgspec.structs.replace(_profile(), values=PINNED)
    with pytest.raises(InfeasibleError, match=r"can be neither swapped nor recomputed.*: the caller holds it"):
        plan(profile, smallest_budget(profile) - 1)
