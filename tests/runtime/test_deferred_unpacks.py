"""Compiled backwards ask for each saved tensor where they first need it, and gradients are those of stock code."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch._functorch.config as functorch_settings
import torch._inductor.config as settings
from torch import nn
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.utils.checkpoint import checkpoint

import poochplan
from poochplan.compiling.rounds import bits_of_a_step
from poochplan.formats.profile import Phase, Profile
from poochplan.formats.queries import COMPILED_REGION
from poochplan.planner.planning import smallest_budget
from poochplan.runtime.compiled import inductor
from poochplan.runtime.compiled.deferred_unpack import waiting
from poochplan.runtime.compiled.inductor import GraphBackend, compiled_deferring, why_no_graph_mode, why_none_deferred
from poochplan.runtime.compiled.partitioner import AnchoringPass, anchor, without_anchoring
from poochplan.runtime.compiled.points import DEFERRED_UNPACK, told_of_points
from poochplan.runtime.compiled_hooks import hooks_for
from tests.runtime.compiled_nets import followed, fresh, loss_of, profiled, train
from tests.runtime.nets import equal, taken
from tests.runtime.random_plans import random_plan
from tests.runtime.served import needs_compiler, needs_inductor

pytestmark = needs_compiler
cpu_device = pytest.mark.cpu_device
SWAP, KEEP, MIXED = (0, 1, 0), (1, 0, 0), (1, 1, 2)


class Stock(NamedTuple):
    """Of code without deferred unpacks: what steps give, and the profile."""

    steps: list[list[torch.Tensor]]
    profile: Profile


def backward_parts(profile: Profile) -> list[int]:
    """The numbers of the ops that are parts of compiled backwards."""
    ops = enumerate(profile.ops)
    return [number for number, op in ops if op.name == COMPILED_REGION and op.phase is Phase.BACKWARD]


@pytest.fixture(scope="module")
def stock() -> Stock:
    torch._dynamo.reset()
    model, batch = fresh()
    steps = train(model, batch)
    return Stock(steps, profiled(model, batch))


@pytest.fixture(scope="module")
def profile(stock: Stock) -> Iterator[Profile]:
    """Of code with deferred unpacks, which tests share from here on."""
    torch._dynamo.reset()
    yield profiled(*fresh())
    torch._dynamo.reset()


@needs_inductor
@cpu_device
def test_what_was_compiled_before_is_one_op_as_ever_and_its_steps_are_followed(stock: Stock) -> None:
    assert len(backward_parts(stock.profile)) == 3
    torch._dynamo.reset()
    model, batch = fresh()
    train(model, batch, 1)
    followed(random_plan(stock.profile, 0, SWAP), model, batch, stock.steps)


@needs_inductor
@cpu_device
def test_uses_lie_between_the_parts_of_a_backward(stock: Stock, profile: Profile) -> None:
    parts = backward_parts(profile)
    uses = {point.op for point in profile.points}
    assert len(parts) > 3 * 3
    assert len(uses.intersection(parts)) > len(parts) // 2
    assert profile.in_core_peak_bytes <= stock.profile.in_core_peak_bytes
    assert smallest_budget(profile) < smallest_budget(stock.profile)


@needs_inductor
@pytest.mark.parametrize("weights", [SWAP, KEEP, MIXED], ids=["swap", "keep", "mixed"])
def test_gradients_are_those_of_stock_code(stock: Stock, profile: Profile, weights: tuple[float, float, float]) -> None:
    model, batch = fresh()
    for seed in range(2):
        followed(random_plan(profile, seed, weights), model, batch, stock.steps)
    assert waiting() == 0


@needs_inductor
@cpu_device
def test_the_budget_holds_down_to_the_smallest_and_the_prediction_with_it(stock: Stock, profile: Profile) -> None:
    model, batch = fresh()
    smallest = smallest_budget(profile)
    for share in (0.0, 0.3):
        budget = int(smallest + share * (profile.in_core_peak_bytes - smallest))
        plan = poochplan.plan(profile, budget, evaluations=100, arena="off")
        with poochplan.apply(plan, model, meter="always", arena="off") as session:
            planned = train(model, batch)
            peak = session.report().last_step.peak_bytes
        assert equal(planned, stock.steps)
        assert 0.95 * plan.prediction.peak_bytes <= peak <= plan.prediction.peak_bytes <= budget


@needs_inductor
@cpu_device
def test_a_step_is_served_from_an_arena(stock: Stock, profile: Profile) -> None:
    model, batch = fresh()
    plan = poochplan.plan(profile, smallest_budget(profile, arena="on"), evaluations=100, arena="on")
    with poochplan.apply(plan, model, arena="on") as session:
        planned = train(model, batch, 5)
        arena = session.report().arena
    assert equal(planned[:3], stock.steps)
    assert arena is not None
    assert session.report().total.fallbacks == 0


@needs_inductor
@cpu_device
@pytest.mark.parametrize("how", ["reentrant", "without reentry"])
def test_a_compiled_block_in_a_checkpoint_gives_the_same_gradients(stock: Stock, profile: Profile, how: str) -> None:
    model, batch = fresh(how)
    reference = train(model, batch)
    followed(random_plan(profiled(model, batch), 1, SWAP), model, batch, reference)
    assert waiting() == 0


class SavesItsInputFirst(nn.Module):
    """What a compiled backward needs first is no parameter: it is deferred."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.block = SquaredGelu()
        self.block.compile()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.before(batch).tanh())
        return self.after(checkpoint(self.block, hidden * 2, hidden.cos(), use_reentrant=False).tanh())


class SquaredGelu(nn.Module):
    def forward(self, batch: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(batch) * batch * other.sin()


@needs_inductor
@cpu_device
def test_the_input_of_a_checkpoint_around_a_compiled_block_is_none_of_its_saved_tensors(stock: Stock) -> None:
    def network() -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        return SavesItsInputFirst(), torch.randn(128, 32)

    reference = train(*network())
    torch._dynamo.reset()
    model, batch = network()
    followed(random_plan(profiled(model, batch), 1, SWAP), model, batch, reference)
    assert waiting() == 0


@needs_inductor
@cpu_device
def test_an_error_in_a_backward_leaves_nothing_waiting_and_the_next_step_is_right(
    stock: Stock, profile: Profile
) -> None:
    model, batch = fresh()
    left = 4

    @contextlib.contextmanager
    def fails() -> Iterator[None]:
        nonlocal left
        left -= 1
        if not left:
            raise KeyError("in the middle")
        yield

    with poochplan.apply(random_plan(profile, 0, SWAP), model):
        with told_of_points(fails, "cpu"), pytest.raises(KeyError, match="in the middle"):
            train(model, batch, 1)
        gc.collect()
        assert waiting() == 0
        assert equal(train(model, batch), stock.steps)


@needs_inductor
@cpu_device
@pytest.mark.parametrize("is_in_16_bits", [False, True])
def test_two_backwards_of_one_graph_and_none_in_parts_in_16_bits(is_in_16_bits: bool) -> None:
    def twice(loss: torch.Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    def steps(model: torch.nn.Module, batch: torch.Tensor) -> list[list[torch.Tensor]]:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_in_16_bits):
            return train(model, batch, 2, twice)

    torch._dynamo.reset()
    with functorch_settings.patch(donated_buffer=False):
        reference = steps(*fresh())
    torch._dynamo.reset()
    model, batch = fresh()
    with functorch_settings.patch(donated_buffer=False), compiled_deferring("cpu"):
        assert equal(steps(model, batch), reference)  # compiled here: what goes back twice is compiled for that

    def once() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_in_16_bits):
            return loss_of(model, batch)

    profile = taken(once, model)
    assert (len(backward_parts(profile)) == 3) == is_in_16_bits
    with poochplan.apply(random_plan(profile, 0, SWAP), model) as session:
        assert equal(steps(model, batch), reference)
    assert session.report().total.fallbacks == 0
    torch._dynamo.reset()


# -- when ------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Its embeddings' gradient is a product, added to what the tokens give: the compiler makes one op of the two."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.bias = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Parameter(torch.zeros(64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.layer(self.words(tokens)))
        return nn.functional.linear(hidden, self.words.weight, self.bias).log_softmax(-1)


@needs_inductor
@cpu_device
def test_the_compiler_makes_one_op_of_two_where_it_does_so_in_stock_code() -> None:
    def gradients(is_deferred: bool) -> tuple[list[torch.Tensor], str]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, tokens = Tied(), torch.randint(64, (16, 32))
        model.compile(dynamic=False)
        with compiled_deferring("cpu") if is_deferred else contextlib.nullcontext(), fresh_cache():
            _, codes = run_and_get_code(lambda: model(tokens).square().mean().backward())
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], codes[-1]

    (stock, stock_code), (ours, code) = gradients(False), gradients(True)
    assert "poochplan.deferred_unpack" in code
    assert code.count("extern_kernels.addmm(buf") == stock_code.count("extern_kernels.addmm(buf") == 1
    assert equal([stock], [ours])


def test_what_the_compiler_s_patterns_leave_unread_is_unpacked_no_more() -> None:
    graph = torch.fx.Graph()
    saved, given = graph.placeholder("saved"), graph.placeholder("tangents_1")
    for one in (saved, given):
        one.meta["val"] = torch.empty(4)
    graph.call_function(DEFERRED_UNPACK, (saved, given)).meta["val"] = saved.meta["val"]
    graph.output((given,))
    anchor(graph)
    assert not graph.find_nodes(op="call_function", target=DEFERRED_UNPACK)


@cpu_device
def test_the_settings_are_there_while_they_are_needed_and_no_longer() -> None:
    own = object()
    with settings.patch(post_grad_custom_post_pass=own):
        with compiled_deferring("cpu"):
            inside = settings.custom_partitioner_fn, settings.post_grad_custom_post_pass
            with compiled_deferring("cpu"):
                assert (settings.custom_partitioner_fn, settings.post_grad_custom_post_pass) == inside
            assert (settings.custom_partitioner_fn, settings.post_grad_custom_post_pass) == inside
        assert settings.post_grad_custom_post_pass is own
    assert inside[0] is not None
    assert without_anchoring(inside[1]) in (own, (own,))
    assert settings.custom_partitioner_fn is None


@cpu_device
def test_code_behind_a_pass_that_the_caches_cannot_know_is_in_none() -> None:
    assert AnchoringPass().uuid()
    assert AnchoringPass(AnchoringPass()).uuid() != AnchoringPass().uuid()
    assert not AnchoringPass(lambda graph: None).uuid()


@cpu_device
def test_settings_of_ours_that_somebody_has_put_back_are_nobody_s() -> None:
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(contextlib.ExitStack())
        ours.enter_context(compiled_deferring("cpu"))
        stack.enter_context(settings.patch(custom_partitioner_fn=None, post_grad_custom_post_pass=None))
        ours.close()
    try:
        assert settings.custom_partitioner_fn is not None
        assert why_none_deferred("cpu") == ""
        with compiled_deferring("cpu"):
            assert without_anchoring(settings.post_grad_custom_post_pass) is None
        assert settings.custom_partitioner_fn is None
        assert settings.post_grad_custom_post_pass is None
    finally:
        settings.custom_partitioner_fn = settings.post_grad_custom_post_pass = None


@cpu_device
def test_nothing_is_done_for_a_model_without_compiled_modules() -> None:
    plain = hooks_for(torch.nn.Linear(4, 4))

    def hook(_: Any) -> torch.Tensor:
        raise AssertionError

    assert plain.deferring((hook, hook), lambda _: None, "cpu") == plain.plainly((hook, hook)) == (hook, hook)
    assert plain.why_none_deferred("cpu") == ""
    with plain.compiled_deferring("cpu"):
        assert settings.custom_partitioner_fn is None


@cpu_device
def test_a_partitioner_of_the_user_s_stays_and_a_reason_is_given() -> None:
    own = object()
    with settings.patch(custom_partitioner_fn=own), compiled_deferring("cpu"):
        assert settings.custom_partitioner_fn is own
        assert "custom_partitioner_fn is set already" in why_none_deferred("cpu")


@cpu_device
def test_another_torch_gets_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "lacking_in_compiler", lambda: "torch._inductor.config.splitter")
    reason = f"need torch._inductor.config.splitter, and torch {torch.__version__} has none"
    assert why_none_deferred("cpu") == f"deferred unpacks in a compiled backward {reason}"
    assert why_no_graph_mode("cpu").startswith("expected torch._inductor.config.splitter in torch, found ")


# -- in 16 bits ------------------------------------------------------------------------------------------------------


class In16Bits(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.gate, self.last = (nn.Linear(32, 32) for _ in range(3))
        self.scale, self.weight = nn.Parameter(torch.randn(4, 8, 32)), nn.Parameter(torch.randn(32))
        self.body = body

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.body(self, batch)


Body = Callable[[In16Bits, torch.Tensor], torch.Tensor]


def scaled_before_its_product(net: In16Bits, batch: torch.Tensor) -> torch.Tensor:
    """Something reads a tensor before the product that has it in memory, through a view that is saved."""
    hidden = nn.functional.gelu(net.first(batch))
    scaled = hidden * 1.7
    return net.last(hidden) + scaled  # type: ignore[no-any-return]


def gated_before_its_product(net: In16Bits, batch: torch.Tensor) -> torch.Tensor:
    """The same of a gradient in backward, beside what is deferred."""
    gate = net.gate(batch).tanh()
    return (net.last(batch) + gate * net.scale).sigmoid() * net.weight  # type: ignore[no-any-return]


def both(net: In16Bits, batch: torch.Tensor) -> torch.Tensor:
    """The two together: the compiler fuses otherwise where there are deferred unpacks, wherever they are anchored."""
    batch = net.first(batch) + net.gate(batch).tanh() * net.scale
    batch = nn.functional.gelu(batch.sigmoid() * net.weight)
    scaled = batch * 1.7
    return net.last(batch) + scaled  # type: ignore[no-any-return]


@functools.cache
def bits_of(body: Body, how: str) -> dict[str, str]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = In16Bits(body).bfloat16(), torch.randn(4, 8, 32, dtype=torch.bfloat16)
    options: dict[str, Any] = {"backend": GraphBackend()} if how == "graph mode" else {}
    model.compile(dynamic=False, **options)
    with compiled_deferring("cpu") if how == "deferred unpacks" else contextlib.nullcontext(), fresh_cache():
        return bits_of_a_step(lambda: model(batch).float().square().mean(), model, None)


HOW = [(scaled_before_its_product, "graph mode"), (gated_before_its_product, "graph mode"), (both, "deferred unpacks")]


@needs_inductor
@cpu_device
@pytest.mark.parametrize(("body", "how"), HOW)
def test_in_16_bits_a_point_rounds_nothing_that_stock_inductor_does_not_round_there(body: Body, how: str) -> None:
    assert bits_of(body, how) == bits_of(body, "stock")
