"""FSDP2: sessions around loops of sharded models are bitwise what the loops are alone, and their memory is known."""

from __future__ import annotations

import gc
import re
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard

import poochplan
from poochplan.errors import UsageError
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Profile
from poochplan.formats.queries import in_flight_bytes
from poochplan.online.planning_process import PlanRequest, plan_in, with_room
from poochplan.online.ranks import ALIKE_STEPS, Buckets, RankMessage, Ranks
from poochplan.planner.planning import plan
from poochplan.profiler.live.step_kinds import Key
from poochplan.runtime.arena.step_arena import KnownStep
from poochplan.runtime.engine import own_tensors
from poochplan.runtime.replays.recipes import Closure, _in_place
from poochplan.runtime.replays.replay import NotReplayable, StorageRecord
from poochplan.tensors.signatures import model_tensors
from poochplan.torch_private.sharding import gathered_weights, is_sharded, told_of_resizes
from tests.planner.random_profiles import resnet_like
from tests.planner.test_gathered import gathered, whole
from tests.runtime.besides import plain_step
from tests.runtime.nets import LINK, Net


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Profile]:
    """A model of one rank, and the profile of its loop."""
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)])
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"quiet": True, "link": LINK, "time_limit_s": 0.5, "cache": tmp_path_factory.mktemp("c")}
    with poochplan.auto(model, optimizer, budget="90%", **options) as session:
        for _ in range(14):
            plain_step(model, optimizer, torch.randn(256, 64))
        session.wait_until_planned()
        return model, session.profile


def test_each_gathered_weight_has_a_stretch_in_forward_and_one_in_backward(trained: Any) -> None:
    _, profile = trained
    stretches: dict[int, list[Any]] = {}
    for value in profile.values:
        if value.stretch_of >= 0:
            stretches.setdefault(value.stretch_of, []).append(value)
    assert len(stretches) == 8  # weight and bias of each block
    for forward, backward in stretches.values():
        assert forward.size_bytes == backward.size_bytes
        assert forward.freed < backward.born_tick <= backward.freed
    saved = {handle.value for handle in profile.handles}
    assert saved.isdisjoint(number for number, value in enumerate(profile.values) if value.stretch_of >= 0)


def test_a_sharded_model_is_told_as_between_steps_in_the_midst_of_one(trained: Any) -> None:
    model, _ = trained
    before = model_tensors(model)
    seen = []
    handle = model[0][0].register_forward_pre_hook(lambda *_: seen.append(model_tensors(model)))
    model(torch.randn(2, 64)).sum().backward()
    handle.remove()
    assert seen == [before]


def test_storages_of_gathered_weights_are_known_without_their_memory(trained: Any) -> None:
    model, _ = trained
    weights, missing = gathered_weights(model)
    assert missing == []
    assert len(weights) == 8
    assert {one.untyped_storage().nbytes() for one in weights} == {0}
    assert not is_sharded(torch.nn.Linear(2, 2))
    fresh = fully_shard(torch.nn.Linear(2, 2))
    weights, missing = gathered_weights(fresh)
    assert (weights, len(missing)) == ([], 2)


def partly() -> torch.nn.Module:
    """Half of it is never called."""
    used, unused = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(2))
    return Net(lambda its, x: its.used(its.used(its.used(x))), used=used, unused=unused)


def test_a_unit_that_no_forward_calls_is_not_looked_for_at_each_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, looked = partly(), []
    for one in (model.used, model.unused, model):
        fully_shard(one)
    monkeypatch.setattr(own_tensors, "gathered_weights", lambda one: looked.append(1) or gathered_weights(one))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with poochplan.auto(model, optimizer, budget="90%", quiet=True, link=LINK, cache=tmp_path) as session:
        for _ in range(3):
            looked.clear()
            plain_step(model, optimizer, torch.randn(4, 8))
        assert session._engine.segment.saves > 3
    assert len(looked) == 1, "when the step began"


def test_a_replay_that_finds_a_weight_without_memory_raises() -> None:
    storage = torch.UntypedStorage(0)
    record = StorageRecord(weakref.ref(storage), 0)
    with pytest.raises(NotReplayable, match="a sharded weight that it needs is not gathered"):
        _in_place((record, 0), Closure(), from_copies=True)


def test_resizes_are_told_in_the_block_alone() -> None:
    storage, told = torch.UntypedStorage(8), list[tuple[int, int]]()
    with told_of_resizes(lambda one, before_bytes: told.append((before_bytes, one.nbytes()))):
        storage.resize_(0)
        storage.resize_(16)
    storage.resize_(4)
    assert told == [(8, 0), (0, 16)]


def test_profile_refuses_a_sharded_model_in_one_line(trained: Any) -> None:
    model, _ = trained
    with pytest.raises(UsageError, match=r"^model: expected one that FSDP2 does not shard, found .*; use poochplan"):
        poochplan.profile(lambda: model(torch.randn(2, 64)).sum(), model=model)


def test_room_for_collectives_is_left_free_and_not_predicted(tmp_path: Path) -> None:
    profile = gathered(whole())
    room_bytes, budget_bytes = in_flight_bytes(profile), int(0.9 * profile.in_core_peak_bytes)
    profile.save(tmp_path / "profile.json")
    request = PlanRequest(2.0, "off", None, budget_bytes=budget_bytes, room_bytes=room_bytes, is_complete=True)
    (tmp_path / "request.json").write_bytes(msgspec.json.encode(request))
    plan_in(tmp_path)
    made = Plan.load(tmp_path / "plan.json")
    assert made.budget_bytes == budget_bytes
    assert made.prediction.peak_bytes <= budget_bytes - room_bytes
    assert made.prediction.in_core_peak_bytes == profile.in_core_peak_bytes
    assert any(f"{room_bytes} bytes" in note for note in made.notes)


def test_an_arena_leaves_that_room_free_too() -> None:
    made = plan(resnet_like(3), "80%", policy="greedy")
    roomy = with_room(made, 1 << 20)
    assert KnownStep(roomy).room_bytes == KnownStep(made).room_bytes > 0
    assert roomy.budget_bytes == made.budget_bytes + (1 << 20)


def test_ranks_talk_behind_each_step_until_all_is_settled_then_behind_one_in_fifty() -> None:
    ranks = Ranks()
    assert all(ranks.are_due() for _ in range(20))
    assert ranks.share(RankMessage([], [], is_all=True, is_settled=True)) is not None
    assert sum(ranks.are_due() for _ in range(100)) == 2
    ranks.share(RankMessage([], [], is_all=False))
    assert ranks.are_due()


def test_ranks_of_a_join_may_be_uneven_unless_it_ends_them_together() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    ranks = Ranks([model])
    assert not ranks.are_uneven()
    with Join([model], throw_on_early_termination=True):
        assert not ranks.are_uneven()
    with Join([model]):
        assert ranks.are_uneven()


def test_a_model_of_a_join_is_freed_after_its_session() -> None:
    def train() -> weakref.ref[torch.Tensor]:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with poochplan.auto(model, optimizer, budget="90%", quiet=True, link=LINK), Join([model]):
            for _ in range(2):
                plain_step(model, optimizer, torch.randn(16, 8))
        return weakref.ref(model.module[0].weight)

    weight = train()
    gc.collect()
    assert weight() is None


def test_ranks_talk_in_host_memory_whatever_the_default_device_is() -> None:
    ranks = Ranks()
    with torch.device("meta"):
        assert ranks.share(RankMessage([], [], is_all=True)) is not None
        assert ranks.least(3) == 3
        ranks.end_steps()


def test_a_plan_that_did_not_arrive_alike_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda bounds, *_: bounds.add_(1))  # another rank's digest
    with pytest.raises(UsageError, match="plan: expected the same one on all ranks, found that they differ"):
        ranks.share(RankMessage([], [], is_all=True))


def kinds(*lengths: int, count: int = ALIKE_STEPS, switches: str = "autocast=off") -> Counter[Key]:
    return Counter({Key(0, 0, (f"0 float32[{length}]",), False, switches): count for length in lengths})


@pytest.mark.parametrize(
    ("others", "found"),
    [
        (kinds(9), "with 0 float32[8] as on rank 0, found 0 float32[9] on rank 1; give all ranks"),
        (kinds(8, switches="autocast=bfloat16"), "with autocast=off as on rank 0, found autocast=bfloat16 on rank 1"),
        (kinds(8), ""),
        (kinds(7), ""),
        (kinds(7, 9), ""),
        (kinds(9, count=1), ""),
    ],
)
def test_a_rank_that_could_follow_no_plan_of_rank_0s_is_an_error_unless_its_inputs_vary(
    others: Counter[Key], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks()
    monkeypatch.setattr(ranks, "gathered", lambda mine: [mine, others])  # as if there were another rank
    with pytest.raises(UsageError, match=re.escape(found)) if found else nullcontext():
        ranks.check_alike(kinds(8))


def test_a_data_parallel_model_is_ready_once_its_buckets_are_those_of_later_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, seen, buckets = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2)), [], Buckets()
    for number in (1, 2, 3):
        seen.append(buckets.are_final([model.module], number))
        model(torch.ones(1, 2)).sum().backward()
    assert seen == [False, False, True]
    assert Buckets().are_final([torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))], 51)
    monkeypatch.setattr("poochplan.online.ranks.wrapper_of", None)  # no step looks for it from then on
    assert buckets.are_final([model.module], 4)
