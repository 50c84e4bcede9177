"""Tensors without memory of their own, or whose elements are not what lies there, in steps that follow a plan; and what
profile and session take for one value.

Each of the former is made and saved in the middle of a small network: zero tensors, conjugate and negative views,
sparse, opaque and wrapping ones, and those that ``torch.func`` hands out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import poochplan
from poochplan.formats.plan import Departure, PointActions
from poochplan.planner.planning import smallest_budget
from poochplan.profiler.pass_profiling import profile_pass
from poochplan.runtime.metering.census import census, storages_of
from poochplan.tensors.storages import has_storage, memory_of, plain_storage
from poochplan.torch_private.tensor_internals import mode_stack
from tests.runtime.nets import Case, Net, followed, of, taken
from tests.runtime.random_plans import random_plan
from tests.runtime.served import needs_compiler

Layer = Callable[[torch.Tensor], torch.Tensor]
WIDTH = 24


class Named(torch.Tensor):
    """A subclass that adds nothing."""


def conjugate(hidden: torch.Tensor) -> torch.Tensor:
    found = torch.complex(hidden, hidden.tanh())
    return (found.conj() * found.exp()).real


def compressed_rows(hidden: torch.Tensor) -> torch.Tensor:
    rows = hidden.detach().relu().to_sparse_csr()
    return torch.sparse.mm(rows, hidden.t()) @ hidden


def two_in_one(hidden: torch.Tensor) -> torch.Tensor:
    both = TwoTensor(hidden, hidden.tanh())
    scaled = both * both
    return hidden + scaled.a + scaled.b


def without_memory(hidden: torch.Tensor) -> torch.Tensor:
    shape = torch.nn.functional.pad(torch.empty_like(hidden, device="meta"), (1, 1)).shape
    return hidden * (shape[1] / WIDTH)


def noisy(hidden: torch.Tensor) -> torch.Tensor:
    """It saves a noise that its kernel has not drawn yet."""
    return nn.functional.rrelu(hidden, training=True) + nn.functional.rrelu_(hidden * 2, training=True)


def pseudo_inverse(hidden: torch.Tensor) -> torch.Tensor:
    """Its kernel conjugates inside, which under a mode had no effect."""
    square = torch.complex(hidden, hidden.flip(-1))[: hidden.shape[-1]]
    return torch.linalg.pinv(square).real.sum(1) + hidden


LAYERS: dict[str, Layer] = {
    "zero gradient": lambda hidden: hidden + hidden.sgn(),
    "zero tensor": lambda hidden: hidden + hidden * torch._efficientzerotensor(hidden.shape),
    "conjugate": conjugate,
    "negative": lambda hidden: torch.complex(hidden, hidden.tanh()).conj().imag * hidden,
    "coordinates": lambda hidden: torch.sparse.mm(hidden.relu().to_sparse(), hidden.t()) @ hidden,
    "compressed rows": compressed_rows,
    "opaque": lambda hidden: hidden.to_mkldnn().relu().to_dense() * hidden,
    "two in one": two_in_one,
    "subclass": lambda hidden: (hidden.as_subclass(Named) * hidden.tanh()).as_subclass(torch.Tensor),
    "without memory": without_memory,
    "mapped": lambda hidden: torch.vmap(lambda row: row.tanh() * row)(hidden),
    "functional": lambda hidden: torch.func.functionalize(lambda row: row.tanh().mul_(row))(hidden),
    "noisy": noisy,
}


@functools.cache
def case_of(layer: Layer) -> Case:
    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        return net.last(layer(net.first(batch).sigmoid()).tanh())  # type: ignore[no-any-return]

    return of(lambda: Net(body, first=nn.Linear(WIDTH, WIDTH), last=nn.Linear(WIDTH, 4)), 16, WIDTH)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of sparse layouts
@pytest.mark.parametrize("mode", ["run", "swap-all"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_step_with_them_is_profiled_and_its_gradients_under_plans_are_those_of_plain_steps(
    layer: Layer, mode: str
) -> None:
    case = case_of(layer)
    for weights in ((0, 1, 0), (0, 0, 1)):
        followed(case, random_plan(case.profile(mode), 0, weights), 3, meter="always")


def mapped_loss(model: nn.Module) -> torch.Tensor:
    rows = model(torch.linspace(-1, 1, 16 * WIDTH).view(16, WIDTH))
    return torch.vmap(lambda row: (row.tanh() * row.sum()).exp().sin())(rows).mean()


def derived_loss(model: nn.Module) -> torch.Tensor:
    rows = model(torch.linspace(-1, 1, 16 * WIDTH).view(16, WIDTH))
    value, change = torch.func.jvp(lambda rows: rows.sin() * rows.exp(), (rows,), (rows.detach().cos(),))
    return (value + change).mean()


compiled = torch.compile(lambda rows: (rows.tanh() * rows.exp()).sin().mean(), backend="aot_eager")


def compiled_loss(model: nn.Module) -> torch.Tensor:
    return compiled(model(torch.linspace(-1, 1, 16 * WIDTH).view(16, WIDTH)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("loss_of", [mapped_loss, derived_loss, compiled_loss])
def test_the_last_save_of_a_step_or_of_a_window_may_lie_inside_a_transform_or_a_compiled_function(
    loss_of: Callable[[nn.Module], torch.Tensor],
) -> None:
    case = Case(lambda: (nn.Linear(WIDTH, WIDTH), loss_of))
    (model, _), modes, in_backward = case.make(), mode_stack(), list[int]()
    next(model.parameters()).register_hook(lambda _: in_backward.append(len(mode_stack())))
    for decisions in ((0, 1, 0), (0, 0, 1)):
        plan = random_plan(case.profile(), 0, decisions)
        followed(case, plan, 3, meter="always")
        for index in range(len(plan.values)):
            actions = {(one.at, one.index): one for one in plan.schedule}
            here = actions.get(("save", index), PointActions(at="save", index=index))
            for record in ("off", "on"):
                actions["save", index] = msgspec.structs.replace(here, record=record)
                schedule = tuple(sorted(actions.values(), key=lambda one: (one.at, one.index)))
                windowed = msgspec.structs.replace(plan, schedule=schedule, record_from_start=record == "off")
                model.zero_grad(set_to_none=True)
                with poochplan.apply(windowed, model, quiet=True, arena="off"):
                    loss_of(model).backward()
                found = [parameter.grad for parameter in model.parameters()]
                assert mode_stack() == modes
                assert in_backward.pop() == len(modes)  # rule 11
                wanted = torch.autograd.grad(loss_of(model), tuple(model.parameters()))
                assert all(one is not None and one.equal(other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.cpu_device  # the other one's own mode has no effect of conjugation inside, as torch calls it
@pytest.mark.parametrize("weights", [(0, 1, 0), (0, 0, 1)])
def test_a_kernel_that_conjugates_inside_gives_the_same_where_it_is_recorded(weights: tuple[int, int, int]) -> None:
    case = case_of(pseudo_inverse)
    followed(case, random_plan(case.profile(), 0, weights), 3, meter="always")


@pytest.mark.parametrize("layer", [LAYERS[name] for name in ("zero gradient", "conjugate", "negative")])
def test_what_has_no_data_has_such_profiles_too(layer: Layer) -> None:
    fake, real = case_of(layer).profile("fake"), case_of(layer).profile()
    assert fake.in_core_live_peak_bytes == real.in_core_live_peak_bytes


def test_a_gradient_that_is_a_zero_tensor_outlives_a_profile() -> None:
    model = Net(lambda net, batch: net.weight.sgn() * batch, weight=nn.Parameter(torch.arange(-4.0, 4.0)))
    batch = torch.ones(3, 8)
    model(batch).sum().backward()
    assert model.weight.grad._is_zerotensor()
    taken(lambda: model(batch).sum(), model)
    assert model.weight.grad._is_zerotensor()


@needs_compiler
def test_a_pass_over_a_sparse_input_is_profiled() -> None:
    edges = (torch.rand(WIDTH, WIDTH) > 0.7).float().to_sparse()
    model = Net(lambda net, edges: torch.sparse.mm(edges, net.layer.weight), layer=nn.Linear(WIDTH, WIDTH))
    found = profile_pass(lambda: model(edges), model=model)
    assert found.static_bytes["input"] > 0


def without_any() -> dict[str, torch.Tensor]:
    """Tensors that promise memory and have none, or not as strided bytes of their own."""
    found = {
        "zero": torch._efficientzerotensor((3, 4)),
        "functional": torch._to_functional_tensor(torch.ones(3)),
        "coo": torch.eye(3).to_sparse(),
        "opaque": torch.ones(3, 3).to_mkldnn(),
        "meta": torch.ones(3, device="meta"),
        "none": torch.ones(0),
    }
    torch.vmap(lambda row: found.update(mapped=row) or row)(torch.ones(2, 3))  # type: ignore[func-returns-value]
    return found


@pytest.mark.parametrize("kind", without_any())
def test_a_tensor_without_memory_has_no_storage_to_read(kind: str) -> None:
    tensor = without_any()[kind]
    assert memory_of(tensor) is None or tensor.is_meta
    assert not has_storage(tensor, "cpu")
    assert plain_storage(tensor, "cpu") is None


def test_a_census_counts_only_what_has_memory() -> None:
    held = [torch._efficientzerotensor((4096,)), torch._to_functional_tensor(torch.ones(1)), torch.ones(4096)]
    assert [len(list(storages_of(one, "cpu"))) for one in held] == [0, 0, 1]
    assert all(storage.data_ptr() for storage in census("cpu").values())


# -- one value that is let go of and saved again, written meanwhile, or seen by a mode ---------------------------------


WIDE = 64


def watched(hidden: torch.Tensor) -> torch.Tensor:
    """Saved for a figure that nobody takes the gradient of, and again twice."""
    hidden.square().sum().item()
    return hidden.square() + hidden.sin()


def watched_by_parts(hidden: torch.Tensor) -> torch.Tensor:
    """The same by another part of it, each time let go of."""
    for part in hidden.chunk(4):
        part.square().sum().item()
    return hidden[1:].square().sum() + hidden.sin() + hidden.cos()


def watched_and_written(hidden: torch.Tensor) -> torch.Tensor:
    """What is saved again is another content of the same storage."""
    hidden.square().sum().item()
    hidden.mul_(0.5)
    return hidden.square() + hidden.sin()


AGAIN = [watched, watched_by_parts, watched_and_written]


def around(layer: Layer) -> Net:
    def body(net: Net, batch: torch.Tensor) -> torch.Tensor:
        return net.last(layer(net.first(batch).tanh() * 2)).square().mean()  # type: ignore[no-any-return]

    return Net(body, first=nn.Linear(WIDE, WIDE), last=nn.Linear(WIDE, WIDE))


def speech(net: Net, frames: torch.Tensor) -> torch.Tensor:
    """Its lengths are tensors, which autograd saves only where ``ctc_loss`` meets a dispatch mode."""
    labels = torch.randint(1, 6, (4, 5), generator=torch.Generator().manual_seed(1))
    lengths = torch.full((4,), len(frames)), torch.tensor([5, 4, 3, 2], dtype=torch.int32)
    found = net.last(net.first(frames).sigmoid().square()).log_softmax(-1)
    return nn.functional.ctc_loss(found, labels, *lengths, zero_infinity=True)


CASES = {layer.__name__: of(functools.partial(around, layer), 32, WIDE) for layer in AGAIN}
CASES["ctc_loss"] = of(lambda: Net(speech, first=nn.Linear(8, WIDE), last=nn.Linear(WIDE, 6)), 20, 4, 8)


@pytest.mark.parametrize("weights", [(0, 1, 0), (0, 0, 1), (1, 2, 2)], ids=["swap", "recompute", "all three"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_whose_profile_saw_it_follows_its_plan(name: str, weights: tuple[int, int, int]) -> None:
    followed(CASES[name], random_plan(CASES[name].profile(), 0, weights), 3, meter="always")


@needs_compiler
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("name", CASES)
def test_it_follows_what_was_solved_and_takes_no_more_than_was_predicted(name: str, share: float) -> None:
    profile = CASES[name].profile()
    smallest = smallest_budget(profile)
    budget = smallest + int(share * (profile.in_core_peak_bytes - smallest))
    plan = poochplan.plan(profile, budget, evaluations=50, arena="off")
    found = followed(CASES[name], plan, 3, meter="always").last_step
    assert found.peak_bytes <= plan.prediction.peak_bytes


@pytest.mark.parametrize("is_watched", [False, True], ids=["nobody", "a FLOP counter"])
@pytest.mark.parametrize("name", CASES)
def test_whether_somebody_looks_at_a_step_makes_no_difference_to_what_it_saves(name: str, is_watched: bool) -> None:
    counter = FlopCounterMode(display=False)

    def at(place: str) -> None:
        if is_watched and place == "opened":
            counter.__enter__()
        if is_watched and place == "closing":
            counter.__exit__(None, None, None)

    followed(CASES[name], random_plan(CASES[name].profile(), 0, (0, 1, 0)), 3, at, meter="never")


def test_what_is_let_go_of_between_two_saves_can_still_be_moved() -> None:
    planned = random_plan(CASES["watched"].profile(), 0, (0, 1, 0))
    (value,) = [index for index, one in enumerate(planned.values) if planned.handles.count(index) == 3]
    assert planned.values[value].decision == "swap"
    assert followed(CASES["watched"], planned).last_step.out_bytes >= planned.values[value].size_bytes


def pairs(net: Net, batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A loss for each letter: the square of one of several values of one shape."""
    names = sorted(set(net.order))
    values = dict(zip(names, [net.weight * batch for _ in names], strict=True))
    return tuple(values[name].square().sum() for name in net.order)


def left(planned: str, found: str, *, in_parts: bool = False) -> tuple[str, Departure]:
    """What is said where a step of one order is run under the plan of another, with one backward or one for each."""
    model, batch = Net(pairs, weight=nn.Parameter(torch.ones(8)), order=planned), torch.ones(8)
    profile = taken(lambda: sum(model(batch)), model)
    model.order = found
    with (
        pytest.warns(RuntimeWarning, match="diverged") as caught,
        poochplan.apply(random_plan(profile, 0, (1, 0, 0)), model) as session,
    ):
        losses = model(batch)
        for loss in losses if in_parts else [sum(losses)]:
            loss.backward(retain_graph=in_parts)
    (departure,) = session.report().total.departures
    return str(caught[0].message), departure


@pytest.mark.parametrize(
    ("planned", "found", "in_parts"),
    [("aab", "aba", False), ("aba", "aab", False), ("abab", "abba", False), ("abc", "aabc", False), ("ab", "ab", True)],
)
def test_a_message_tells_values_of_one_shape_apart(planned: str, found: str, in_parts: bool) -> None:
    message, departure = left(planned, found, in_parts=in_parts)
    one, _, other = message.partition("planned ")[2].partition("; ")[0].partition(", found ")
    assert one != other.partition(": ")[0]
    assert departure.planned != departure.found
