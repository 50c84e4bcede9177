"""Compiled forwards hand out what they save, and gradients are those of stock Inductor: with hooks and replays too."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache, run_and_get_code

import poochplan
from poochplan.runtime.compiled.deferred_unpack import waiting
from poochplan.runtime.compiled.inductor import GraphBackend
from poochplan.runtime.compiled.partitioner import Replays
from tests.runtime.compiled_nets import Noting, profiled, same, step
from tests.runtime.nets import equal, gradients
from tests.runtime.random_plans import random_plan
from tests.runtime.served import needs_inductor

pytestmark = [needs_inductor, pytest.mark.cpu_device]


class Two(nn.Module):
    """Two graphs, the second of which reads what the first gives and saves. Has a dropout, convolutions that lie
    channels last, statistics, and writes into what looks like memory that nobody needs any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.conv, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.2)
        self.to(memory_format=torch.channels_last)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch).exp()
        shift = hidden.sin().sum()
        other = hidden.index_put((torch.arange(0, 32, 2),), torch.zeros(64))  # in place, were ``hidden`` not saved
        hidden = (self.last(other).sigmoid() + shift.tanh()).sigmoid()
        torch._dynamo.graph_break()
        image = self.drop(hidden).unflatten(1, (4, 4, 4)).contiguous(memory_format=torch.channels_last)
        return self.norm(self.conv(image)).relu().tanh()  # type: ignore[no-any-return]


Steps = list[list[torch.Tensor]]


def fresh(replays: Replays | None = None, noting: Noting | None = None) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, batch = Two(), torch.randn(32, 64)
    backend = GraphBackend(replays)
    backend.partitioner = noting or backend.partitioner
    model.compile(backend=backend, dynamic=False)
    return model, batch


def steps(model: nn.Module, batch: torch.Tensor) -> Steps:
    return [step(model, batch, seed) for seed in range(2)]


@pytest.fixture(scope="module")
def stock() -> Iterator[Steps]:
    """Of Inductor by itself."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = Two(), torch.randn(32, 64)
    model.compile(dynamic=False)
    with fresh_cache():  # what is found in a cache is not noted
        yield steps(model, batch)
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def noted(stock: Steps) -> Noting:
    """Of code with points, which is compiled here."""
    torch._dynamo.reset()
    noting = Noting()
    model, batch = fresh(noting=noting)
    _, codes = run_and_get_code(lambda: steps(model, batch))
    noting.codes = codes  # type: ignore[attr-defined]
    return noting


def forwards(noted: Noting) -> list[str]:
    """The generated code of graphs that hand something out, from the first line that runs."""
    codes: list[str] = noted.codes  # type: ignore[attr-defined]
    bodies = (code[code.index("def call(") : code.index("def benchmark")] for code in codes)
    return [body for body in bodies if "poochplan.save" in body]


def test_without_a_session_the_gradients_are_those_of_stock_inductor(stock: Steps, noted: Noting) -> None:
    model, batch = fresh()
    assert equal(steps(model, batch), stock)
    gc.collect()
    assert waiting() == 0


def test_what_a_save_point_gives_is_read_by_nothing_and_what_it_was_given_is_not_reused(noted: Noting) -> None:
    assert len(forwards(noted)) == 2
    for body in forwards(noted):
        assert "# reuse" not in body
        placeholders = set(re.findall(r"(\w+) = torch\.ops\.poochplan\.save", body))
        placeholders |= {
            new for new, old in re.findall(r"^ *(\w+) = (\w+)$", body, re.MULTILINE) if old in placeholders
        }
        for line in body.splitlines():
            if line.strip().startswith("#") or not placeholders.intersection(re.findall(r"\w+", line)):
                continue
            harmless = r" *(assert_\w+\(|del |return |(\w+) = (\w+)$|\w+ = torch\.ops\.poochplan\.save)"
            assert re.match(harmless, line), line
            given = re.match(r".*poochplan\.save\.default\((.*), \w+\)", line)
            assert given is None or not placeholders.intersection(re.findall(r"\w+", given.group(1))), line


@pytest.mark.parametrize("which", [pytest.param("half", marks=pytest.mark.deep), "all"])
def test_with_replays_and_plans_the_gradients_are_those_of_stock_inductor(
    stock: Steps, noted: Noting, which: str
) -> None:
    replays = {key: names if which == "all" else names[::2] for key, names in noted.replayable().items()}
    assert any(replays.values())
    torch._dynamo.reset()
    model, batch = fresh(replays)
    assert equal(steps(model, batch), stock)
    profile = profiled(model, batch)
    for seed, weights in enumerate([(0, 1, 0), (1, 1, 0)]):
        model, batch = fresh(replays)
        with poochplan.apply(random_plan(profile, seed, weights), model) as session:
            assert equal(steps(model, batch), stock)
        assert session.report().total.fallbacks == 0
    gc.collect()
    assert waiting() == 0


# -- hooks, and no hooks ---------------------------------------------------------------------------------------------


class Handed(nn.Module):
    """Gives what it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).exp()  # type: ignore[no-any-return]


def fresh_handed(replays: Replays | None = None, **options: bool) -> tuple[Handed, torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = Handed(), torch.randn(64, 32)
    model.compile(backend=GraphBackend(replays), **options)
    return model, batch


@pytest.fixture(scope="module")
def handed() -> Iterator[tuple[nn.Module, torch.Tensor]]:
    yield fresh_handed(dynamic=False)
    torch._dynamo.reset()


Pair = tuple[nn.Module, torch.Tensor]


def test_hooks_of_others_get_tensors(handed: Pair) -> None:
    model, batch = handed
    reference = step(model, batch)
    seen = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.device.type)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert same(step(model, batch), reference)
    assert set(seen) == {"cpu"}
    with torch.autograd.graph.save_on_cpu():
        assert same(step(model, batch), reference)


def test_what_is_written_behind_the_forward_is_an_error_as_it_is_without_points() -> None:
    model, batch = fresh_handed(dynamic=False)
    for _ in range(2):  # where it has just been compiled too
        result = model(batch)
        result.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()
    torch._dynamo.reset()


def test_a_graph_goes_back_twice_and_one_that_never_does_leaves_nothing(handed: Pair) -> None:
    model, batch = handed
    gc.collect()
    before = waiting()
    model.zero_grad(set_to_none=True)
    loss = model(batch).square().mean()
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    assert same(gradients(model), [2 * gradient for gradient in once])
    unused = model(batch)
    assert waiting() == before + 1
    del loss, unused
    gc.collect()
    assert waiting() == before


def test_other_batch_sizes_are_compiled_for_any_and_a_call_without_gradients_saves_nothing() -> None:
    model, batch = fresh_handed()
    gc.collect()
    before = waiting()
    plain = Handed()
    plain.load_state_dict(model.state_dict())
    for count in (64, 48, 80, 1):
        for own, other in zip(
            step(model, batch[:1].expand(count, -1)), step(plain, batch[:1].expand(count, -1)), strict=True
        ):
            torch.testing.assert_close(own, other)
    with torch.no_grad():
        torch.testing.assert_close(model(batch), plain(batch))
    gc.collect()
    assert waiting() == before


# -- caches ----------------------------------------------------------------------------------------------------------


def test_one_plan_never_gets_the_code_of_another(stock: Steps) -> None:
    """In one cache."""
    noting = Noting()
    saved: list[int] = []
    for names in ([], ["exp"], [], ["exp"]):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, batch = Handed(), torch.randn(64, 32)
        backend = GraphBackend(dict.fromkeys(noting.why, names))
        if not noting.why:
            backend.partitioner = noting
        model.compile(backend=backend, dynamic=False)
        step(model, batch)
        gc.collect()
        before, unused = waiting(), model(batch)
        saved.append(waiting() - before)
        del unused
    assert saved == [1, 0, 1, 0]
