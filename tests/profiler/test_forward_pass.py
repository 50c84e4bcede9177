"""A forward pass alone, profiled: what it takes by the allocator, and a layout in which no two blocks share bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from poochplan.errors import AllocatorError, InputFileError, StepError, UsageError
from poochplan.formats.pass_profile import PassProfile
from poochplan.formats.plan import OUTSIDE
from poochplan.formats.profile import Profile
from poochplan.profiler import pass_profiling
from poochplan.profiler.pass_profiling import profile_pass
from tests.runtime.inference.passes import KINDS
from tests.runtime.served import needs_compiler


@functools.cache
def profiled(name: str) -> PassProfile:
    model, batch = KINDS[name].fresh()
    return profile_pass(lambda: model(batch), model=model, workload=name, iterations=1, warmup=1)


@needs_compiler
@pytest.mark.parametrize("name", KINDS)
def test_blocks_that_live_at_once_share_no_byte_of_the_arena(name: str) -> None:
    found = profiled(name)
    inside = [block for block in found.blocks if block.offset != OUTSIDE]
    assert len(inside) > 8
    for number, one in enumerate(inside):
        assert one.offset + one.size_bytes <= found.arena_bytes
        for other in inside[:number]:
            apart = one.offset + one.size_bytes <= other.offset or other.offset + other.size_bytes <= one.offset
            assert apart or one.end <= other.start or other.end <= one.start


@needs_compiler
@pytest.mark.parametrize("name", KINDS)
def test_the_figures_are_in_their_order_and_blocks_add_up(name: str) -> None:
    found = profiled(name)
    assert 0 < found.arena_live_bytes <= found.arena_bytes < found.separate_bytes <= found.total_bytes
    assert found.live_peak_bytes <= found.allocated_peak_bytes <= found.caching_bytes
    assert found.allocated_peak_bytes <= found.arena_bytes + found.outside_bytes
    assert found.total_bytes == sum(-(-block.size_bytes // 512) * 512 for block in found.blocks)
    assert (found.calls, found.notes, found.pass_s > 0) == (1, (), True)


@needs_compiler
def test_a_pass_by_hand_has_the_blocks_that_it_takes() -> None:
    model = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Sigmoid()), nn.Tanh())
    batch = torch.randn(64, 1024)
    found = profile_pass(lambda: model(batch), model=model, iterations=1, warmup=0)
    size_bytes = 64 * 1024 * 4
    assert [block.size_bytes for block in found.blocks] == [size_bytes] * 3
    assert [block.layer for block in found.blocks] == ["0", "0", "1"]
    assert [block.offset != OUTSIDE for block in found.blocks] == [True, True, False]
    assert found.live_peak_bytes == found.allocated_peak_bytes == 2 * size_bytes
    assert (found.arena_bytes, found.outside_bytes) == (2 * size_bytes, size_bytes)
    assert (found.separate_bytes, found.total_bytes) == (2 * size_bytes, 3 * size_bytes)
    assert found.static_bytes == {"parameter": 0, "buffer": 0, "input": size_bytes}
    assert found.inputs == ("0 float32[64, 1024]",)


@needs_compiler
def test_what_an_op_takes_inside_is_allocated_and_not_live() -> None:
    found = profiled("convolutions")
    assert found.live_peak_bytes < found.allocated_peak_bytes


@needs_compiler
def test_modules_are_in_train_mode_again_and_no_hook_is_left() -> None:
    model, batch = KINDS["skips"].fresh()
    model.train()
    model.get_submodule("blocks.1").eval()
    before = [module.training for module in model.modules()]
    profile_pass(lambda: model(batch), model=model, iterations=1)
    assert [module.training for module in model.modules()] == before
    assert not any(len(one._forward_pre_hooks) + len(one._forward_hooks) for one in model.modules())


@needs_compiler
def test_of_a_step_that_calls_the_model_twice_the_first_call_is_profiled_and_a_note_says_so() -> None:
    model, batch = KINDS["skips"].fresh()
    found = profile_pass(lambda: (model(batch[:32]), model(batch)), model=model, iterations=1)
    assert found.calls == 2
    assert found.notes == ("a step calls the model 2 times; this is the first of them",)
    assert found.inputs == ("0 float32[32, 64]",)


@needs_compiler
def test_it_is_read_as_it_was_written_and_is_no_profile_of_a_step(tmp_path: Path) -> None:
    found = profiled("recurrent")
    path = found.save(tmp_path / "pass.json")
    assert PassProfile.load(path) == found
    with pytest.raises(InputFileError, match=r"found a forward pass alone, of which nothing has to be moved"):
        Profile.load(path)


@pytest.mark.parametrize(
    ("build", "error", "line"),
    [
        (lambda: nn.Linear(2, 2, device="meta"), UsageError, "expected a model on the CPU, found it on meta"),
        pytest.param(KINDS["skips"].build, StepError, "expected a call of the model, found none", marks=needs_compiler),
    ],
)
def test_what_cannot_be_profiled_is_refused_in_one_line(
    build: Callable[[], nn.Module], error: type[Exception], line: str
) -> None:
    with pytest.raises(error, match=line):
        profile_pass(lambda: None, model=build(), iterations=1)


def test_without_a_compiler_one_line_says_so_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AllocatorError("expected a C++ compiler, found none; install g++")

    monkeypatch.setattr(pass_profiling, "library", fail)
    with pytest.raises(AllocatorError, match="install g"):
        profile_pass(lambda: pytest.fail("a step ran"), model=nn.Linear(2, 2))
