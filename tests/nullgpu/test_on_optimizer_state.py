"""State that is away lies in pinned memory, and the GPU has its bytes only in the optimizer's part of the step."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Plan, StateChunk
from poochplan.runtime.session import Session
from poochplan.tensors.optimizers import is_away
from tests.online.caches import empty_cache
from tests.runtime.nets import Case, our_warnings, taken

WHERE = torch.device("cuda", 0)
WIDTH, LAYERS, KEPT = 512, 8, 2
MOMENT_BYTES = 4 * WIDTH * WIDTH
STREAMED_BYTES = 2 * (LAYERS - 1) * MOMENT_BYTES


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def _layers() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    rows = torch.randn(16, WIDTH).to(WHERE)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(WHERE)
    return model, lambda model: model(rows).square().mean()


CASE = Case(_layers, _adam)


@pytest.fixture(autouse=True, scope="module")
def _own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with empty_cache(tmp_path_factory.mktemp("user")):
        yield


@pytest.fixture(scope="module")
def plan() -> Plan:
    """One layer a chunk, of which one is kept."""
    model, step, optimizer = CASE.fresh()
    found = poochplan.plan(taken(step, model, optimizer), "100%", time_limit_s=1)
    state = tuple(
        StateChunk(optimizer=0, first=2 * number, count=2, size_bytes=2 * MOMENT_BYTES, streamed=number != KEPT)
        for number in range(LAYERS)
    )
    return msgspec.structs.replace(found, state=state, budget_bytes=1 << 40)


class Loop:
    def __init__(self) -> None:
        self.model, self.loss_of, self.optimizer = CASE.fresh()
        self.step()
        gc.collect()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self) -> None:
        self.loss_of().backward()  # type: ignore[no-untyped-call]

    @property
    def moments(self) -> list[torch.Tensor]:
        return [one for state in self.optimizer.state.values() for one in state.values() if one.ndim == 2]

    def away(self, session: Session) -> list[torch.Tensor]:
        return [one for one in self.moments if is_away(one)]


def allocated() -> int:
    return torch.cuda.memory_allocated(WHERE)


def test_between_steps_the_streamed_bytes_are_in_pinned_memory_alone(plan: Plan) -> None:
    loop = Loop()
    before = allocated()
    with poochplan.apply(plan, loop.model, loop.optimizer, quiet=True) as session:
        for _ in range(3):
            loop.step()
            assert allocated() <= before - STREAMED_BYTES
            there = loop.away(session)
            assert len(there) == 2 * (LAYERS - 1)
            assert all(one.device.type == "cpu" and one.is_pinned() for one in there)
        assert session.report().total.fallbacks == 0
    assert {one.device for one in loop.moments} == {WHERE}
    assert abs(allocated() - before) < MOMENT_BYTES
    loop.step()


def test_in_the_optimizers_part_there_are_three_chunks(plan: Plan) -> None:
    loop = Loop()
    with poochplan.apply(plan, loop.model, loop.optimizer, quiet=True):
        loop.step()
        loop.backward()
        before = allocated()
        torch.cuda.reset_peak_memory_stats(WHERE)
        loop.optimizer.step()
        more = torch.cuda.max_memory_allocated(WHERE) - before
    own_of_a_chunk = 2 * MOMENT_BYTES
    assert 3 * 2 * MOMENT_BYTES <= more <= 3 * 2 * MOMENT_BYTES + own_of_a_chunk


def test_what_is_copied_there_and_back_is_what_was_there(plan: Plan) -> None:
    """No kernel computes here, so that a session without steps is what can be compared."""
    loop = Loop()
    for number, one in enumerate(loop.moments):
        one.copy_(torch.full((WIDTH, WIDTH), number + 0.5))
    with poochplan.apply(plan, loop.model, loop.optimizer, quiet=True) as session:
        loop.loss_of()
        assert len(loop.away(session)) == 2 * (LAYERS - 1)
        held = copy.deepcopy(loop.optimizer.state_dict())
    for number, (one, state) in enumerate(
        zip(loop.moments, (x for s in held["state"].values() for x in s.values() if x.ndim == 2), strict=True)
    ):
        assert torch.equal(one.cpu(), torch.full((WIDTH, WIDTH), number + 0.5))
        assert torch.equal(state.cpu(), one.cpu())


def test_it_is_saved_and_loaded_while_it_is_away(plan: Plan) -> None:
    loop, sizes = Loop(), []

    def saved() -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(loop.optimizer.state_dict(), file)
        sizes.append(len(file.getvalue()))
        file.seek(0)
        found: dict[str, Any] = torch.load(file)
        return found

    saved()
    with poochplan.apply(plan, loop.model, loop.optimizer, quiet=True) as session:
        for _ in range(2):
            loop.step()
            loop.optimizer.load_state_dict(saved())
            assert {one.device for one in loop.moments} == {WHERE}
            loop.step()
            assert len(loop.away(session)) == 2 * (LAYERS - 1)
    assert max(sizes) <= 1.01 * sizes[0]


def test_what_a_state_dict_holds_is_changed_by_no_later_step(plan: Plan) -> None:
    loop = Loop()
    with poochplan.apply(plan, loop.model, loop.optimizer, quiet=True) as session:
        loop.step()
        held = [x for s in loop.optimizer.state_dict()["state"].values() for x in s.values() if x.ndim == 2]
        there = {one.data_ptr() for one in loop.away(session)}
        assert len(there) == 2 * (LAYERS - 1)
        assert there.isdisjoint(one.cpu().data_ptr() for one in held)
        assert loop.optimizer.state[loop.optimizer.param_groups[0]["params"][-2]].keys() >= {"exp_avg", "exp_avg_sq"}


def test_a_view_that_is_held_from_a_time_when_it_was_away_is_told_of(plan: Plan) -> None:
    loop = Loop()
    with our_warnings() as said, poochplan.apply(plan, loop.model, loop.optimizer, quiet=True):
        loop.step()
        held = loop.moments[0].detach()
        loop.step()
        assert held.data_ptr() == loop.moments[0].data_ptr()
    assert {one.device for one in loop.moments} == {WHERE}
    assert ["stays as it is now" in line for line in said] == [True]


def test_parameters_that_move_to_a_kept_chunk_are_stepped_there(plan: Plan) -> None:
    loop = Loop()
    with poochplan.apply(plan, loop.model, loop.optimizer, quiet=True) as session:
        loop.step()
        loop.optimizer.param_groups[0]["params"].reverse()
        loop.step()
        assert len(loop.away(session)) == 2 * (LAYERS - 1)
        with session.away():
            loop.step()
        loop.step()
        assert len(loop.away(session)) == 2 * (LAYERS - 1)


def test_a_loop_whose_steps_are_closures_is_streamed_from_its_first_step_on(plan: Plan) -> None:
    """As Lightning's: the first forward under the plan is amid a step of the optimizer."""
    loop, counts = Loop(), list[int]()

    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loop.loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with poochplan.apply(plan, loop.model, loop.optimizer, quiet=True) as session:
        for _ in range(3):
            loop.optimizer.step(closure)  # type: ignore[arg-type]
            counts.append(len(loop.away(session)))
    assert counts == [2 * (LAYERS - 1)] * 3


def test_a_step_that_is_compiled_is_streamed(plan: Plan) -> None:
    loop = Loop()
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), 0.1, momentum=0.9)
    loop.step()
    step = torch.compile(loop.optimizer.step, backend="eager")
    with poochplan.apply(plan, loop.model, loop.optimizer, quiet=True) as session:
        for _ in range(3):
            loop.backward()
            step()
            loop.optimizer.zero_grad()
            assert len(loop.away(session)) == LAYERS - 1


def test_where_the_host_has_no_memory_for_it_state_stays_and_one_line_says_so(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    from poochplan.runtime.devices.pinned import PinnedTier

    def refuses(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    loop = Loop()
    monkeypatch.setattr(PinnedTier, "reserve", refuses)
    with our_warnings() as said, poochplan.apply(plan, loop.model, loop.optimizer, quiet=True) as session:
        loop.step()
        assert loop.away(session) == []
    assert any("optimizer state" in line for line in said)
