"""What torch's own CUDA code does: cuBLAS holds memory, autograd has its thread, blocks in use have rests beside."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import poochplan
from poochplan.formats.occupancy import static_bytes
from poochplan.formats.profile import Kind
from poochplan.online.before_plan import cached_bytes, free_bytes
from poochplan.profiler.assembly.assemble import versions_here
from poochplan.runtime.metering.holders import held_beside
from poochplan.sessions import generators
from tests.cuda_rules.machine import WHERE, Machine, on_stand_in, workspace_bytes
from tests.runtime.nets import Case
from tests.runtime.random_plans import random_plan

MIB = 1 << 20


def _layers(where: torch.device = WHERE, width: int = 64) -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))).to(where)
    return model, torch.randn(256, width).to(where)


def _made() -> tuple[nn.Module, object]:
    model, rows = _layers()
    return model, lambda model: model(rows).square().mean()


CASE = Case(_made)  # type: ignore[arg-type]


def test_memory_of_cublas_is_a_kind_of_its_own_and_no_input(gpu: Machine) -> None:
    profile = CASE.new_profile()
    held_bytes = 2 * workspace_bytes()  # of the thread of forward, and of backward's
    assert [one.size_bytes for one in profile.values if one.kind is Kind.LIBRARY] == [held_bytes]
    assert static_bytes(profile)["library"] == held_bytes
    assert static_bytes(profile)["input"] < 256 * 64 * 4 + MIB // 16


def test_a_users_tensor_as_large_as_what_cublas_holds_is_named(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2")
    profile = CASE.new_profile()
    plan = random_plan(profile, 0, (1, 0, 0))
    model, step, _ = CASE.fresh()
    beside = torch.empty(2 * workspace_bytes() - MIB, dtype=torch.uint8, device=WHERE)
    with poochplan.apply(plan, model) as session:
        step().backward()
        found = held_beside(session._engine, session._engine.segment, plan)
    assert ("variable beside", beside.nbytes) in [(one.name.partition(" of ")[0], one.size_bytes) for one in found]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_model_is_called_on_no_thread_of_the_users(gpu: Machine, reentrant: bool) -> None:
    model, rows = _layers()
    rows.requires_grad_()

    def turn() -> list[torch.Tensor]:
        model.zero_grad()
        checkpoint(model, rows, use_reentrant=reentrant).square().mean().backward()  # type: ignore[union-attr]
        return [one.grad.clone() for one in model.parameters() if one.grad is not None]

    wanted = turn()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plan = random_plan(CASE.new_profile(), 0, (1, 0, 0))
        with poochplan.apply(plan, model):
            seen = [turn() for _ in range(2)]
    assert not [str(one.message) for one in said if "another thread" in str(one.message)]
    for one in seen:
        assert all(torch.equal(*pair) for pair in zip(wanted, one, strict=True))


def test_a_version_of_cudnn_that_torch_refuses_ends_no_profile(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> int:
        raise RuntimeError("cuDNN version incompatibility: PyTorch was compiled against another\nmore")

    monkeypatch.setattr(torch.backends.cudnn, "version", refuses)
    assert versions_here("cuda")["cudnn"] == "cuDNN version incompatibility: PyTorch was compiled against another"
    assert CASE.new_profile().versions["cudnn"].startswith("cuDNN version incompatibility")


def test_the_generators_of_a_check_are_those_of_the_models_own_gpu() -> None:
    with on_stand_in(index=1) as machine:
        model, _ = _layers(machine.where)
        before = generators(model)
        assert before.keys() == {"cpu", "cuda:1"}
        machine.generator.manual_seed(7)
        assert not torch.equal(generators(model)["cuda:1"], before["cuda:1"])
        assert machine.violations == []


def test_verifying_replays_waits_for_the_device_some_times_for_a_value_not_for_each_piece(gpu: Machine) -> None:
    def reads(rows: int) -> int:
        def made() -> tuple[nn.Module, object]:
            model, _ = _layers()
            batch = torch.randn(rows, 64).to(WHERE)
            return model, lambda model: model(batch).square().mean()

        before = gpu.reads
        Case(made).new_profile()  # type: ignore[arg-type]
        return gpu.reads - before

    small, large = reads(512), reads(16 * 512)  # values of 128 KiB and of 2 MiB
    assert large < 1.2 * small


def test_rests_beside_blocks_in_use_are_not_free(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    block = torch.empty(20 * MIB, dtype=torch.uint8, device=WHERE)
    del block
    gc.collect()
    free_before = free_bytes(WHERE)
    within = torch.empty(11 * MIB, dtype=torch.uint8, device=WHERE)  # of the cached block, whose rest is split off
    assert gpu.memory.reserved_bytes - gpu.memory.allocated_bytes == 9 * MIB
    assert cached_bytes(WHERE) == 0
    assert free_bytes(WHERE) == free_before - 20 * MIB
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert cached_bytes(WHERE) == 9 * MIB
    del within
