"""Never a wrong gradient, whatever the user's training loop does around the model, and between pack and unpack."""

from __future__ import annotations

import contextlib
import gc
import queue
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import poochplan
from poochplan.errors import UsageError
from poochplan.formats.plan import Plan
from poochplan.runtime.run_report import SessionStatus
from poochplan.runtime.session import Session
from tests.forks import forked
from tests.runtime.autograd_steps import together
from tests.runtime.data_parallel import Shared
from tests.runtime.nets import CASES, Case, Net, Use, either_way, equal, followed, gradients, of, taken
from tests.runtime.random_plans import random_plan

CASE = CASES["residual"]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return random_plan(CASE.profile(), 1, (1, 2, 2))


def test_a_plan_for_another_machine_warns_and_is_still_exact(plan: Plan) -> None:
    elsewhere = msgspec.structs.replace(plan, estimate=True, assumed=("link pcie3, instead of spill",))
    with pytest.warns(RuntimeWarning, match="for another machine .link pcie3, instead of spill.: its memory holds"):
        followed(CASE, elsewhere)


Step = Callable[[], torch.Tensor]


def several_forwards_before_one_backward(model: nn.Module, step: Step, session: Session | None) -> None:
    (step() + step() + step()).backward()


def gradient_accumulation(model: nn.Module, step: Step, session: Session | None) -> None:
    for _ in range(3):
        step().backward()


def an_exception_between_forward_and_backward_then_another_step(
    model: nn.Module, step: Step, session: Session | None
) -> None:
    with pytest.raises(KeyError):
        loss = step()
        raise KeyError(loss.item())
    del loss
    step().backward()


def part_of_the_graph_alone(model: nn.Module, step: Step, session: Session | None) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(step(), [model.head.weight])


def evaluation_inside_the_session(model: nn.Module, step: Step, session: Session | None) -> None:
    loss = step()
    with torch.no_grad():
        step()
    loss.backward()


def other_data_of_parameters_before_backward(model: nn.Module, step: Step, session: Session | None) -> None:
    loss = step()
    before = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    loss.backward()
    for parameter, data in zip(model.parameters(), before, strict=True):
        parameter.data = data


def weights_that_are_rounded_in_forward_alone(model: nn.Module, step: Step, session: Session | None) -> None:
    def becomes(layer: nn.Module, data: torch.Tensor) -> None:
        layer.weight.data = data

    for layer in (layer for layer in model.modules() if isinstance(layer, nn.Conv2d)):
        whole = layer.weight.data
        layer.register_forward_pre_hook(lambda layer, _, whole=whole: becomes(layer, whole.round(decimals=1)))
        layer.register_forward_hook(lambda layer, *_, whole=whole: becomes(layer, whole))
    step().backward()


USES: list[Use] = [
    weights_that_are_rounded_in_forward_alone,
    other_data_of_parameters_before_backward,
    several_forwards_before_one_backward,
    gradient_accumulation,
    an_exception_between_forward_and_backward_then_another_step,
    part_of_the_graph_alone,
    evaluation_inside_the_session,
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("use", USES)
def test_whatever_a_loop_does_it_does_what_it_does_in_core(plan: Plan, use: Use) -> None:
    either_way(CASE, plan, use, is_followed=False)


def test_a_frozen_weight_is_itself_in_backward_with_its_attributes(plan: Plan) -> None:
    model, _, _ = CASE.fresh()
    weight = model.head.weight.requires_grad_(requires_grad=False)
    with poochplan.apply(plan, model):
        product = weight * torch.ones(1, requires_grad=True)
        assert product.grad_fn is not None
        assert product.grad_fn._saved_self is weight


def test_backward_after_the_session(plan: Plan) -> None:
    model, step, _ = CASE.fresh()
    step().backward()
    reference = gradients(model)
    model, step, _ = CASE.fresh()
    with poochplan.apply(plan, model):
        loss = step()
    loss.backward()
    assert equal([reference], [gradients(model)])


@pytest.mark.parametrize("weights", [(1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["keep", "swap", "replay"])
def test_a_saved_value_written_in_place_raises_what_autograd_raises(weights: tuple[float, float, float]) -> None:
    written: list[torch.Tensor] = []

    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        hidden = net.first(batch).sigmoid()
        written[:] = [hidden.detach()]
        return net.second(hidden)  # type: ignore[no-any-return]

    batch = torch.randn(4, 8)
    model = Net(body, first=nn.Linear(8, 8), second=nn.Linear(8, 8))
    profile = taken(lambda: model(batch).sum(), model)
    # The profile sees the alias in ``written`` and pins the value; a plan that did not know must not go wrong either.
    free = msgspec.structs.replace(
        profile, values=tuple(msgspec.structs.replace(value, pinned="") for value in profile.values)
    )
    with poochplan.apply(random_plan(free, 0, weights), model):
        loss = model(batch).sum()
        written[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class WrittenInBackward(torch.autograd.Function):
    """Its backward computes in the memory of what it saved."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return rows.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        shares = ctx.saved_tensors[0].sigmoid_()
        return gradient * shares * (1 - shares)  # type: ignore[no-any-return]


def _written_in_backward() -> Net:
    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        for first, second in zip(net.first, net.second, strict=True):
            rows = first(batch)
            grown = (rows * 0.5).exp()  # saves its result alone; its backward comes behind the other one's
            batch = second(grown + WrittenInBackward.apply(rows))
        return batch.square().mean()

    return Net(body, **{name: nn.ModuleList(nn.Linear(8, 8) for _ in range(3)) for name in ("first", "second")})


@pytest.mark.parametrize("weights", [(1, 0, 2), (0, 1, 2), (0, 0, 1)], ids=["keep", "swap", "replay"])
def test_a_backward_that_writes_what_it_has_saved_spoils_no_replay(weights: tuple[float, float, float]) -> None:
    case = of(_written_in_backward, 16, 8)
    profile = case.profile()
    for seed in range(4):
        followed(case, random_plan(profile, seed, weights))


def test_options_that_do_not_exist_are_refused(plan: Plan) -> None:
    model, _, _ = CASE.fresh()
    with pytest.raises(UsageError, match="on_divergence"):
        poochplan.apply(plan, model, on_divergence="ignore")  # type: ignore[arg-type]


def test_a_second_session_on_a_thread_is_refused_and_the_first_goes_on(plan: Plan) -> None:
    model, step, _ = CASE.fresh()
    other, _, _ = CASE.fresh()
    with poochplan.apply(plan, model) as session:
        step().backward()
        for second in (model, other):
            with pytest.raises(UsageError, match="expected no open session on this thread, found one for Residual"):
                poochplan.apply(plan, second).__enter__()
        with pytest.raises(UsageError, match=r"profile\(\): expected no open session on this thread"):
            taken(step, model)
        step().backward()
        assert session.report().total.steps == 2
        assert session.report().last_step.fallbacks == 0
        with session.away(), poochplan.apply(plan, other) as inner:
            assert inner.report().total.steps == 0
    with poochplan.apply(plan, model):  # and after its end another one is welcome
        step().backward()


def test_a_second_session_for_a_model_is_refused_on_another_thread_too(plan: Plan) -> None:
    model, _, _ = CASE.fresh()
    other, other_step, _ = CASE.fresh()
    raised: list[str] = []

    def second() -> None:
        with poochplan.apply(plan, other) as session:
            other_step().backward()
        assert session.report().total.steps == 1
        try:
            poochplan.apply(plan, model).__enter__()
        except UsageError as error:
            raised.append(str(error))

    with poochplan.apply(plan, model):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert raised == [
        "apply(): expected no open session for this Residual, found one on another thread; "
        "wait until its with block has ended"
    ]


def test_steps_taken_away_from_the_session_are_plain_ones_and_the_next_follows_the_plan(plan: Plan) -> None:
    def use(model: nn.Module, step: Step, session: Session | None) -> list[torch.Tensor]:
        found = []
        for away in (None, session, None, session):
            model.zero_grad(set_to_none=True)
            with contextlib.nullcontext() if away is None else away.away():
                step().backward()
            found += gradients(model)
        return found

    report = either_way(CASE, plan, use)
    assert report.total.steps == 2


def test_nobody_steps_away_from_a_session_that_is_closed(plan: Plan) -> None:
    with poochplan.apply(plan, CASE.fresh()[0]) as session:
        pass
    with pytest.raises(UsageError, match="expected an open session, found a closed one"), session.away():
        pass


WEIGHTS = [(1, 2, 2), (0, 1, 0), (0, 0, 1)]


def _shared() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    tokens = torch.randint(0, 20, (4, 12))
    return Shared(), lambda model: nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("weights", WEIGHTS)
def test_modules_called_twice_and_tied_weights_follow_their_plan(weights: tuple[float, float, float]) -> None:
    case = Case(_shared)
    followed(case, random_plan(case.profile(), 0, weights))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_an_optimizer_in_the_hooks_of_backward(weights: tuple[float, float, float]) -> None:
    """The gradients never live together. The weight a step changes was read before it in the same backward."""

    def use(model: nn.Module, step: Callable[[], torch.Tensor], session: Session | None) -> list[torch.Tensor]:
        optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

        def update(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        seen = []
        for _ in range(3):
            loss = step()
            loss.backward()  # type: ignore[no-untyped-call]
            seen += [loss.detach().clone(), *(p.detach().clone() for p in model.parameters())]
        return seen

    case = of(lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), 16, 8)
    either_way(case, random_plan(case.profile(), 0, weights), use, is_followed=False)


def test_another_thread_that_trains_another_model_is_left_alone() -> None:
    case = Case(_shared)

    def elsewhere() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        weight = torch.randn(8, 8, generator=generator, requires_grad=True)
        batch = torch.randn(4, 8, generator=generator)
        for _ in range(20):
            (batch @ weight).tanh().square().sum().backward()
        return [weight.grad]

    results: queue.SimpleQueue[list[torch.Tensor]] = queue.SimpleQueue()
    wanted = elsewhere()
    thread = threading.Thread(target=lambda: results.put(elsewhere()))
    places: list[str] = []

    def at(place: str) -> None:
        if place == "forward" and place not in places:
            thread.start()
        places.append(place)
        if place == "closing":
            thread.join()

    followed(case, random_plan(case.profile(), 0, (0, 1, 1)), at=at)
    assert equal([wanted], [results.get()])


def test_the_same_model_run_by_another_thread_is_kept_in_core_there() -> None:
    """Hooks are the thread's that opened the session: what another saves is not the plan's."""

    def use(model: nn.Module, step: Callable[[], torch.Tensor], session: Session | None) -> None:
        together(lambda: step().backward())  # type: ignore[no-untyped-call]
        assert session is None or session.report().total.out_bytes == 0

    case = Case(_shared)
    with pytest.warns(RuntimeWarning, match="was called 1 times on another thread than the session's"):
        report = either_way(case, random_plan(case.profile(), 0, (0, 1, 1)), use)
    assert report.status is SessionStatus.NO_STEPS


@pytest.mark.cpu_device
def test_data_parallel_training_in_two_processes(tmp_path: Path) -> None:
    """The plan is made for the model without its wrapper; each process follows it."""
    plan_file = tmp_path / "plan.json"
    random_plan(Case(_shared).profile(), 1, (1, 2, 2)).save(plan_file)
    command = [*forked(), "-m", "tests.runtime.data_parallel"]
    running = [
        subprocess.Popen([*command, str(rank), str(tmp_path), str(plan_file)], cwd=Path(__file__).parents[2])
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for alone, planned in ranks:
        assert equal(alone, planned)
    gradients = [planned[0][1] for _, planned in ranks]
    assert torch.equal(*gradients)  # they really are reduced over both


@pytest.mark.parametrize("weights", [(0, 1, 0), (0, 0, 1)])
def test_functional_call_with_other_weights_gives_their_gradients(weights: tuple[float, float, float]) -> None:
    def use(model: nn.Module, step: Callable[[], torch.Tensor], session: Session | None) -> list[torch.Tensor]:
        images, labels = torch.randn(4, 8, 16, 16), torch.randint(0, 5, (4,))
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        other = {name: (tensor.detach() * 1).requires_grad_(tensor.requires_grad) for name, tensor in own.items()}
        for _ in range(2):
            out = torch.func.functional_call(model, other, (images,))
            nn.functional.cross_entropy(out, labels).backward()
        return [part for tensor in other.values() for part in (tensor.detach(), tensor.grad) if part is not None]

    case = CASES["residual"]
    report = either_way(case, random_plan(case.profile(), 0, weights), use)
    assert report.total.out_bytes + report.total.replayed_values > 0


def test_a_forward_without_backward_leaks_nothing() -> None:
    """Autograd's nodes are freed by reference counts alone: what is packed must not hold the graph alive."""
    case = Case(_shared)
    model, step, _ = case.fresh()
    plan = random_plan(case.profile(), 0, (1, 0, 0))
    gc.collect()
    gc.disable()
    try:
        with poochplan.apply(plan, model) as session:
            for _ in range(3):
                step()
            assert not session._engine.cursor.holds_values
    finally:
        gc.enable()


def the_shared_follows(weights: tuple[float, float, float], use: Use) -> None:
    case = Case(_shared)
    either_way(case, random_plan(case.profile(), 0, weights), use)


def test_a_second_backward_and_a_second_look_at_a_saved_tensor_are_no_use_points() -> None:
    def use(model: nn.Module, step: Callable[[], torch.Tensor], session: Session | None) -> None:
        loss = step()
        for _ in range(2):
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)
        del loss
        step().backward()  # type: ignore[no-untyped-call]

    the_shared_follows((0, 1, 1), use)


def test_what_backward_itself_saves_is_outside_the_plan() -> None:
    def use(model: nn.Module, step: Callable[[], torch.Tensor], session: Session | None) -> None:
        weights = [p for p in model.parameters() if p.ndim > 1]
        sums = [g.sum() for g in torch.autograd.grad(step(), weights, create_graph=True)]
        torch.stack(sums).sum().backward()  # type: ignore[no-untyped-call] # neither saves anything

    the_shared_follows((0, 1, 1), use)


def test_backward_inside_autocast() -> None:
    """A replay must not be cast, whatever is on around it."""

    def use(model: nn.Module, step: Callable[[], torch.Tensor], session: Session | None) -> None:
        loss = step()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()  # type: ignore[no-untyped-call]

    the_shared_follows((0, 0, 1), use)


def test_a_model_checkpointed_as_a_whole_counts_each_step_once() -> None:
    """Backward calls the model again; that begins no step."""

    def whole() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        tokens = torch.randint(0, 20, (4, 12))
        return Shared(), lambda model: checkpoint(model, tokens, use_reentrant=False).square().sum()

    case = Case(whole)
    assert followed(case, random_plan(case.profile(), 0, (0, 1, 0))).total.steps == 2


def test_steps_whose_backwards_wait_for_each_other_keep_their_values_apart() -> None:
    def use(model: nn.Module, step: Callable[[], torch.Tensor], session: Session | None) -> None:
        losses = []
        for _ in range(2):
            if session is not None:
                session.step()
            losses.append(step())
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]

    the_shared_follows((0, 1, 0), use)
