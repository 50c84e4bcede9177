"""Each rule is needed: without it a test of this folder fails, the one that stands beside it here."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from poochplan.formats.plan import Decision, Plan
from poochplan.runtime.arena.library import library
from poochplan.runtime.attachment import Attachment
from poochplan.runtime.engine import saved_value
from poochplan.runtime.engine.engine import Engine
from poochplan.runtime.engine.host_tier import HostTier, Intervals
from poochplan.runtime.engine.saved_value import SavedValue
from poochplan.runtime.replays import replay, tape
from poochplan.runtime.step_policies.follow import Follow, IndexedPlan
from poochplan.tensors import operators, storages
from tests.runtime import (
    test_backward_without_modes,
    test_divergence,
    test_dtensors,
    test_replay_limits,
    test_safety,
    test_sources,
)
from tests.runtime.detours import profile_of
from tests.runtime.mutants import assert_needed, rewritten
from tests.runtime.nets import CASES, Case, Residual, followed, in_core
from tests.runtime.random_plans import random_plan
from tests.runtime.served import needs_compiler
from tests.runtime.tapes import PYTHON

pytestmark = [pytest.mark.cpu_device, pytest.mark.parametrize("tape", [PYTHON], indirect=True)]
SWAP, REPLAY = (0, 1, 0), (0, 0, 1)


def _drawing() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """A random number is drawn after the last that is replayed."""
    batch = torch.randn(4, 8, 16, 16)
    return Residual(), lambda model: model(batch).square().mean() + torch.rand(())


class Exact:
    """Two steps of a case under a plan: bitwise those in-core, no fallbacks, as many blocks as the first time.

    Profile, plan and reference are made once, before any rule is broken: a profile that is taken without the rule
    finds out (its replays are verified), and plans around it.
    """

    def __init__(self, name: str, weights: tuple[float, float, float]) -> None:
        self.case, self.weights = (CASES | {"drawing": Case(_drawing)})[name], weights
        self.live_blocks: list[int] = []

    @functools.cached_property
    def plan(self) -> Plan:
        return random_plan(self.case.profile(), 0, self.weights)

    def __call__(self) -> None:
        in_core(self.case, 2)
        blocks: dict[str, list[int]] = defaultdict(list)
        followed(self.case, self.plan, at=lambda place: blocks[place].append(library().live_blocks()))
        live_blocks = [behind - before for before, behind in zip(blocks["step"], blocks["forward"], strict=True)]
        self.live_blocks = self.live_blocks or live_blocks
        assert live_blocks == self.live_blocks


def _with_patch(test: Callable[..., None], *given: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test(*given, patch)


def _swapped_sources() -> None:
    test_sources.test_it_is_held_swapped_or_made_again_in_place_of_its_copy("bfloat16", Decision.SWAP)


RULES: dict[str, tuple[tuple[Any, str, str, str], Callable[[], None]]] = {
    "views of one storage are one value": (
        (Engine, "_pack", "not isinstance(known, SavedValue) or not known.stands_for(tensor)", "True"),
        Exact("attention", SWAP),
    ),
    "parameters are never touched": (
        (Engine, "_pack", "self.audit.passes(storage_identity(storage), self.tape.static)", "False"),
        Exact("residual", SWAP),
    ),
    "what is packed is detached": (
        (SavedValue, "of", "detached_alias(tensor)", "tensor"),
        test_safety.test_a_forward_without_backward_leaks_nothing,
    ),
    "a saved value that was written is an error": (
        (storages, "check_unwritten", "version_of(tensor) != version", "False"),
        lambda: test_safety.test_a_saved_value_written_in_place_raises_what_autograd_raises(SWAP),
    ),
    "what comes back lies as it was saved": ((storages.Geometry, "on", "self.offset", "0"), Exact("attention", SWAP)),
    "only the first unpack is a use point": (
        (Engine, "_unpack", "not handle.used", "True"),
        test_safety.test_a_second_backward_and_a_second_look_at_a_saved_tensor_are_no_use_points,
    ),
    "what backward saves is outside the plan": (
        (Engine, "_pack", "in_backward()", "False"),
        test_safety.test_what_backward_itself_saves_is_outside_the_plan,
    ),
    "a forward inside backward begins no step": (
        (Attachment, "_forward_begins", "if in_backward():", "if False:"),
        test_safety.test_a_model_checkpointed_as_a_whole_counts_each_step_once,
    ),
    "another shape is a divergence": (
        (IndexedPlan, "fits", "size_bytes == planned.size_bytes and tensor.shape == planned.shape", "True"),
        lambda: test_divergence.test_another_step_falls_back_with_one_warning_and_the_next_follows_the_plan_again(
            _divergence_plans(), "a smaller batch", 0
        ),
    ),
    "a place on the host belongs to its value until that is gone": (
        (HostTier, "_is_free", "occupant is not None and", "False and"),
        test_safety.test_steps_whose_backwards_wait_for_each_other_keep_their_values_apart,
    ),
    "a place behind the plan belongs to its value until that is gone": (
        (Intervals, "take", "[(behind, end)]", "[(start, end)]"),
        lambda: test_divergence.test_another_step_falls_back_with_one_warning_and_the_next_follows_the_plan_again(
            _divergence_plans(), "a larger batch", 0
        ),
    ),
    "running statistics are not updated twice": (
        (operators, "writes_of", "scratch = _statistics(facts, args)", "scratch = dict[int, torch.Tensor]()"),
        Exact("residual", REPLAY),
    ),
    "a random op replays from its recorded state": (
        (replay, "_call", "set_state_of(op.generator, op.state)", "None"),
        Exact("residual", REPLAY),
    ),
    "a replay leaves the generator as it was": (
        (replay, "_call", "set_state_of(op.generator, now)\n        except", "None\n        except"),
        Exact("drawing", REPLAY),
    ),
    "a replay is not cast": (
        (replay, "run_ops", "torch.autocast(device_type, enabled=False)", "torch.enable_grad()"),
        test_safety.test_backward_inside_autocast,
    ),
    "a replay runs in the grad mode of forward": (
        (replay, "run_ops", "with_gradients = op.grad_enabled", "with_gradients = False"),
        Exact("recurrent", REPLAY),
    ),
    "no mode looks on while autograd computes": (
        (Engine, "backward", "self.recorder.leave_stack()", "None"),
        test_backward_without_modes.test_a_backward_amid_forward_sees_no_mode_and_recording_goes_on_behind_it,
    ),
    "a source is held until the last recipe that starts from it is made": (
        (Follow, "at_save", "until >= index", "until > index"),
        _swapped_sources,
    ),
    "a source is held from the save point of its copy on": (
        (saved_value, "held_source", "planned.until >= 0", "False"),
        _swapped_sources,
    ),
    "a dtensor is saved as its local tensor": (
        (Engine, "_pack", "saved_part(whole)", "whole"),
        lambda: _with_patch(test_dtensors.test_what_is_saved_as_a_dtensor_is_moved_or_replayed, "swap"),
    ),
    "a saved dtensor that was written is an error": (
        (storages.Shell, "around", 'check_unwritten(self.probe, 0, "a saved tensor")', "None"),
        test_dtensors.test_a_saved_dtensor_that_is_written_in_place_raises_what_autograd_raises,
    ),
    "what was written where recording was off is another content": (
        (tape.StorageRecord, "meet", "version > self.version or (", "False and ("),
        lambda: test_replay_limits.test_what_is_written_where_recording_is_off_is_another_content(
            lambda whole: whole.view(-1)
        ),
    ),
}


@functools.cache
def _divergence_plans() -> dict[str, Any]:
    """Made once, before the runtime is rewritten: the profiler uses it too."""
    make, step = test_divergence.MODELS["images"]
    profile = profile_of(make, step)
    return {"images": [random_plan(profile, 1, SWAP)]}


@needs_compiler
@pytest.mark.parametrize("rule", RULES)
def test_without_it_its_test_fails(rule: str) -> None:
    where, test = RULES[rule]
    assert_needed(rewritten(*where), test)
