"""Passes from an arena are the passes they were, and nothing that lives is overwritten."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import poochplan
from poochplan.errors import UsageError
from poochplan.runtime.arena import library
from tests.runtime.inference.passes import (
    KINDS,
    LARGE_BYTES,
    SETTLED,
    Skips,
    alike,
    is_served_whole,
    leaves,
    plain,
    served,
)
from tests.runtime.nets import CASES
from tests.runtime.served import arenas_mapped, needs_compiler, plan_of

pytestmark = [pytest.mark.cpu_device, needs_compiler]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_eight_passes_have_the_bits_of_plain_ones_and_the_fourth_is_served_whole(name: str, guard: type) -> None:
    model, batch = KINDS[name].fresh()
    expected = plain(model, batch)
    with poochplan.arena(model) as arena, guard():
        for number in range(1, 9):
            assert alike(leaves(model(batch)), expected)
            found = arena.report()
            if number > SETTLED:
                assert is_served_whole(arena), found
                assert found.served_bytes >= LARGE_BYTES
                assert 0 < found.live_bytes <= found.layout_bytes <= found.size_bytes < found.separate_bytes
                assert found.served_bytes <= found.separate_bytes < found.served_bytes + 512 * found.served
        assert (found.passes, found.served_passes) == (8, 6)


def test_what_a_hook_keeps_is_never_overwritten_is_said_to_be_unserved_and_soon_lies_outside() -> None:
    model, batch = KINDS["convolutions"].fresh()
    kept: list[torch.Tensor] = []
    with served(model, batch) as arena:
        with model[1].register_forward_hook(lambda _, __, output: kept.append(output)):
            contents = []
            for shift in range(8):
                model(batch + shift)
                contents.append(kept[-1].clone())
                if shift == 1:
                    found = arena.report()
            assert is_served_whole(arena)
        assert all(torch.equal(one, content) for one, content in zip(kept, contents, strict=True))
    assert found.taken > 0
    assert {one.why for one in found.unserved} == {"taken"}
    assert {one.layer for one in found.unserved} <= {"0", "1", "2"}
    assert found.unserved[0].size_bytes >= LARGE_BYTES
    assert "taken" in str(found)


def test_training_between_passes_is_not_served_and_passes_see_the_new_weights() -> None:
    seen: list[list[torch.Tensor]] = []
    for is_served in (False, True):
        model, batch = KINDS["skips"].fresh()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        arena = poochplan.arena(model) if is_served else None
        torch.manual_seed(1)
        seen.append([])
        for _ in range(SETTLED + 3):
            model.train()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                seen[-1] += [loss.detach(), model(batch)]
        if arena is not None:
            assert is_served_whole(arena)
            assert arena.report().passes == SETTLED + 3
            arena.close()
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_inputs_of_two_shapes_have_a_layout_each_in_one_arena() -> None:
    model, batch = KINDS["convolutions"].fresh()
    small, large = batch[:2], batch
    before = arenas_mapped()
    with served(model, small, large) as arena:
        for _ in range(3):
            for one in (small, large):
                assert alike(leaves(model(one)), plain(model, one))
                assert is_served_whole(arena)
        found = arena.report()
        assert (found.layouts, found.layout_bytes) == (2, found.size_bytes)
        model(small)
        assert 0 < arena.report().layout_bytes < found.size_bytes == arena.report().size_bytes
        assert arenas_mapped() == before + 1


def test_of_many_shapes_eight_are_laid_out_and_all_give_their_bits() -> None:
    model, batch = KINDS["skips"].fresh()
    sizes = range(100, 112)
    with served(model, *(batch[:size] for size in sizes)) as arena:
        assert arena.report().layouts == 8
        for size in sizes:
            assert alike(leaves(model(batch[:size])), plain(model, batch[:size]))
        assert arena.report().layouts == 8


def test_a_pass_on_another_thread_meanwhile_is_ordinary_and_both_are_right() -> None:
    model, batch = KINDS["skips"].fresh()
    expected = plain(model, batch)
    other: list[torch.Tensor] = []

    def call() -> None:
        with torch.no_grad():
            other.append(model(batch))

    def meanwhile(*_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

    with served(model, batch) as arena:
        served_passes = arena.report().served_passes
        with model.get_submodule("blocks.1").register_forward_hook(meanwhile):
            assert alike(leaves(model(batch)), expected)
        assert alike(leaves(other[0]), expected)
        assert is_served_whole(arena)
        assert arena.report().served_passes == served_passes + 1


def test_passes_of_four_threads_have_the_bits_of_plain_ones() -> None:
    model, batch = KINDS["recurrent"].fresh()
    expected = [plain(model, batch + shift) for shift in range(4)]

    def call(shift: int) -> bool:
        with torch.no_grad():
            return all(alike(leaves(model(batch + shift)), expected[shift]) for _ in range(12))

    with served(model, batch) as arena, ThreadPoolExecutor(4) as threads:
        assert all(threads.map(call, range(4)))
        assert arena.report().served_passes > SETTLED


class _Stop(Exception):
    """Raised in the middle of a pass."""


@pytest.mark.parametrize("settled", range(SETTLED + 1))
@pytest.mark.parametrize("kind", [_Stop, KeyboardInterrupt])
def test_passes_go_on_behind_one_that_raises(kind: type[BaseException], settled: int) -> None:
    """``settled``: the passes before; what raises may be ordinary, written down or served."""
    model, batch = KINDS["skips"].fresh()
    expected = plain(model, batch)

    def stop(*_: object) -> None:
        raise kind

    with poochplan.arena(model) as arena, torch.no_grad():
        for _ in range(settled):
            model(batch)
        with model.get_submodule("blocks.2").register_forward_hook(stop), pytest.raises(kind):
            model(batch)
        for _ in range(SETTLED + 1):
            mine = torch.full((128, 256), 7.0)
            assert alike(leaves(model(batch)), expected)
            assert bool((mine == 7).all())
        assert is_served_whole(arena)


def test_a_branch_that_is_left_out_costs_its_own_blocks_alone() -> None:
    model, batch = KINDS["skips"].fresh()
    assert isinstance(model, Skips)
    with served(model, batch) as arena:
        model(batch)
        whole = arena.report().served
        model.skipped = {1, 2}
        assert alike(leaves(model(batch)), plain(model, batch))
        found = arena.report()
        assert found.unplanned == 0
        assert whole // 3 < found.served < whole
        model.skipped = set()
        assert alike(leaves(model(batch)), plain(model, batch))


def test_a_model_that_calls_itself_has_one_pass() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(256, 256)

        def forward(self, x: torch.Tensor, times: int = 3) -> torch.Tensor:
            x = self.layer(x).relu()
            return x if times == 1 else self(x, times - 1)

    importlib.import_module("torch._dynamo")  # with it, something hides hooks from the compiler
    model, batch = Twice().eval(), torch.randn(128, 256)
    expected = plain(model, batch)
    with served(model, batch) as arena:
        assert alike(leaves(model(batch)), expected)
        assert (arena.report().passes, is_served_whole(arena)) == (SETTLED + 1, True)


def test_the_arena_of_a_part_serves_nothing_within_a_pass_of_the_whole() -> None:
    model, batch = KINDS["skips"].fresh()
    part = model.get_submodule("blocks.0")
    with poochplan.arena(part) as inner, served(model, batch) as outer:
        model(batch)
        assert is_served_whole(outer)
        assert inner.report().served_passes == 0


def test_a_closed_arena_serves_nothing_has_the_memory_of_live_tensors_alone_and_leaves_no_hook() -> None:
    gc.collect()
    mapped = arenas_mapped()
    model, batch = KINDS["convolutions"].fresh()
    kept: list[torch.Tensor] = []
    with served(model, batch) as arena:
        with model[1].register_forward_hook(lambda _, __, output: kept.append(output)):
            model(batch)
        content = kept[0].clone()
    arena.close()
    assert arenas_mapped() == mapped + 1
    assert torch.equal(kept.pop(), content)
    assert arenas_mapped() == mapped
    before = arena.report()
    assert alike(plain(model, batch), plain(model, batch))
    assert arena.report() == before
    assert before.served > 0
    assert not any(len(one._forward_pre_hooks) + len(one._forward_hooks) for one in model.modules())


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_is_served_and_not_compiled_again(in_place: bool) -> None:
    model, batch = KINDS["convolutions"].fresh()
    expected = plain(model, batch)
    if in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    with torch.no_grad():
        model(batch)
    with served(model, batch) as arena, torch._dynamo.config.patch(error_on_recompile=True):
        assert alike(leaves(model(batch)), expected)
        assert is_served_whole(arena)


def test_copies_and_pickles_of_the_model_have_no_part_in_its_arena() -> None:
    model, batch = KINDS["recurrent"].fresh()
    with served(model, batch) as arena:
        before = arena.report()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert alike(leaves(other(batch)), plain(other, batch))
        assert arena.report() == before


def test_an_arena_within_a_session_is_refused_in_one_line() -> None:
    model, loss_of, _ = CASES["attention"].fresh()
    with poochplan.apply(plan_of("attention"), model):
        with pytest.raises(UsageError, match=r"^arena\(\): expected no open session on this thread"):
            poochplan.arena(nn.Linear(2, 2))
        loss_of().backward()


def test_passes_within_a_session_are_ordinary() -> None:
    model, loss_of, _ = CASES["attention"].fresh()
    with poochplan.arena(model) as arena:
        with poochplan.apply(plan_of("attention"), model), torch.no_grad():
            for _ in range(SETTLED + 1):
                loss_of()
        assert (arena.report().passes, arena.report().layouts) == (SETTLED + 1, 0)
        with torch.no_grad():
            for _ in range(SETTLED + 1):
                loss_of()
        assert arena.report().layouts == 1


def test_without_a_compiler_one_line_says_so_and_passes_are_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(library, "_failure", "expected a C++ compiler, found none; install g++")
    model, batch = KINDS["skips"].fresh()
    with pytest.warns(RuntimeWarning, match=r"^poochplan: arena\(\) .* are ordinary: .*install g\+\+$") as told:
        arena = poochplan.arena(model)
    assert (len(told), told[0].filename) == (1, __file__)
    with arena, torch.no_grad():
        assert alike(leaves(model(batch)), plain(model, batch))
    assert "install g++" in arena.report().reason
    assert "install g++" in str(arena.report())


def test_a_model_elsewhere_is_told_of_in_one_line() -> None:
    with pytest.warns(RuntimeWarning, match=r"ordinary: a model on meta"):
        poochplan.arena(nn.Linear(2, 2, device="meta")).close()


def test_a_layer_that_has_other_kernels_with_hooks_is_refused() -> None:
    with pytest.raises(UsageError, match=r"found torch\.nn\.TransformerEncoderLayer, which then leaves its fast path"):
        poochplan.arena(nn.TransformerEncoderLayer(8, 2))
