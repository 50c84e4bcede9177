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


def test_a_step_with_nothing_unusual_gets_no_advice() -> None:
    assert _profile(modules=3).advice() == ()
    assert msgspec.structs.replace(_profile(), facts=None).advice() == ()


def test_a_compiled_module_that_holds_most_of_what_is_saved_is_named() -> None:
    (line,) = _compiled("encoder").advice()
    assert "of the saved bytes are inside the compiled module encoder" in line
    assert line.endswith("have poochplan.compile compile it, or compile its blocks instead")
    (line,) = _compiled("").advice()
    assert "inside one compiled module, the model itself" in line


def test_a_model_that_poochplan_has_compiled_is_not_told_to_be_compiled_otherwise() -> None:
    profile = msgspec.structs.replace(_compiled(""), facts=StepFacts(graph_mode=True))
    assert profile.advice() == ()


def test_compiled_blocks_that_share_what_is_saved_are_no_reason_for_advice() -> None:
    blocks = [f"blocks.{number}" for number in range(50)]
    profile = _compiled(*blocks)
    saved = {handle.value for handle in profile.handles}
    sizes = [sum(profile.values[out].size_bytes for out in op.outputs if out in saved) for op in profile.ops]
    if max(sizes) < 0.5 * sum(sizes):
        assert profile.advice() == ()
    else:
        pytest.fail("the profile saves most of its bytes in one op; choose another seed")


def test_checkpointing_is_named_with_its_first_layer() -> None:
    (line,) = _profile(checkpointed=("layer1", "layer2")).advice()
    assert line.startswith("activation checkpointing is on (layer1 and 1 more ran forward again in backward)")
    assert "switch it off" in line


def test_only_a_model_wholly_in_eval_mode_is_told() -> None:
    assert _profile(modules=4, eval_modules=3).advice() == ()
    (line,) = _profile(modules=4, eval_modules=4).advice()
    assert "call model.train() first" in line


def test_garbage_is_told_from_a_twentieth_of_the_peak_on() -> None:
    peak_bytes = tiny_profile(0).in_core_peak_bytes
    assert _profile(garbage_bytes=peak_bytes // 21).advice() == ()
    (line,) = _profile(garbage_bytes=peak_bytes // 19).advice()
    assert "gc.collect()" in line


def test_a_large_share_that_no_plan_can_move_is_told_with_its_main_reason() -> None:
    profile = _profile()
    pinned = tuple(msgspec.structs.replace(value, pinned="the caller holds it") for value in profile.values)
    (line,) = msgspec.structs.replace(profile, values=pinned).advice()
    assert line.startswith("100% of the saved bytes")
    assert line.endswith("the caller holds it")
    (line,) = _profile(kept_bytes=profile.in_core_peak_bytes).advice()
    assert line.endswith("it is sparse, nested or of a subclass")


def test_temporaries_that_are_unknown_are_told() -> None:
    (line,) = _profile(unmeasured_regions=3).advice()
    assert line.startswith("memory that 3 runs of compiled regions take and give back inside is not known")


def test_the_infeasible_message_says_what_keeps_the_smallest_budget_from_being_smaller() -> None:
    profile = msgspec.structs.replace(_compiled("encoder"), facts=StepFacts(checkpointed=("layer1",)))
    with pytest.raises(InfeasibleError) as caught:
        plan(profile, smallest_budget(profile) - 1)
    for line in profile.advice():
        assert f"; {line}" in str(caught.value)
    assert "compile its blocks instead" in str(caught.value)
    assert "activation checkpointing is on" in str(caught.value)
