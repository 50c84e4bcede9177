"""Loops whose optimizers step in chunks, and the same loops without a session: each step leaves the same bits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

import poochplan
from poochplan.formats.plan import Plan, StateChunk
from poochplan.runtime.session import Session
from poochplan.tensors.optimizers import is_away, parameters_of
from poochplan.torch_private.tensor_internals import tensors_in
from tests.runtime.nets import as_bytes, taken

SIDE = 128
"""A square of this many float32 numbers is the smallest state that moves."""
STEPS = 4
Make = Callable[[Any], torch.optim.Optimizer]


class Layers(nn.Module):
    """Layers with a large weight and a small bias each, and a buffer."""

    def __init__(self, count: int = 5, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE, **options) for _ in range(count))
        self.norm = nn.BatchNorm1d(SIDE, **options)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows).tanh()
        return self.norm(rows).square().mean()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


class Training:
    """A loop from the same start. State: what it has seen, and its session while there is one."""

    def __init__(self, make: Make = adam, model: Callable[[], nn.Module] = Layers) -> None:
        torch.manual_seed(0)
        self.model = model()
        self.optimizer = make(self.model.parameters())
        self.session: Session | None = None
        self.seen: list[bytes] = []

    def rows(self) -> torch.Tensor:
        return torch.randn(4, SIDE, dtype=next(self.model.parameters()).dtype)

    def loss(self) -> torch.Tensor:
        found: torch.Tensor = self.model(self.rows())
        return found

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.see(loss)

    def steps(self, count: int = STEPS) -> None:
        for _ in range(count):
            self.step()

    def see(self, *tensors: torch.Tensor) -> None:
        """Notes these, the model, its gradients, and all state."""
        self.seen += map(as_bytes, tensors)
        self.seen += [as_bytes(one) for one in (*self.model.parameters(), *self.model.buffers())]
        self.seen += [as_bytes(one.grad) for one in self.model.parameters() if one.grad is not None]
        self.seen += contents(self.optimizer)

    def away(self) -> list[torch.Tensor]:
        return away(self.session, self.optimizer)

    def is_streamed(self) -> bool:
        """Whether some of its state is away; true without a session, where nothing can be."""
        return self.session is None or bool(self.away())

    def moments(self, number: int = 0) -> dict[str, torch.Tensor]:
        """The state of its parameter of that number."""
        found: dict[str, torch.Tensor] = self.optimizer.state[parameters_of(self.optimizer)[number]]
        return found


def contents(optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Of all its state, in the order of the parameters, with layouts and numbers that are no tensors."""
    found = []
    for parameter in parameters_of(optimizer):
        for name, one in optimizer.state.get(parameter, {}).items():
            if isinstance(one, torch.Tensor):
                assert one.device == parameter.device or one.ndim == 0
                found += [name.encode(), str((one.shape, one.stride(), one.dtype)).encode(), as_bytes(one)]
            else:
                found.append(repr((name, one)).encode())
    return found


def away(session: Session | None, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Its state that is in the host tier now."""
    if session is None:
        return []
    return [one for one in tensors_in(list(optimizer.state.values())) if is_away(one)]


@functools.cache
def _profiled(model: Callable[[], nn.Module], dtype: torch.dtype) -> Plan:
    torch.manual_seed(0)
    made = model()
    rows = torch.randn(4, SIDE, dtype=dtype)
    profile = taken(lambda: made(rows), made, torch.optim.SGD(made.parameters(), 0.1))
    return poochplan.plan(profile, "100%", time_limit_s=1)


def chunks(count: int, each: int = 2, *, kept: Sequence[int] = (1,), optimizer: int = 0) -> tuple[StateChunk, ...]:
    """So many parameters in chunks of that size, streamed but for those of these numbers."""
    return tuple(
        StateChunk(
            optimizer=optimizer,
            first=first,
            count=min(each, count - first),
            size_bytes=1 << 16,
            streamed=number not in kept,
        )
        for number, first in enumerate(range(0, count, each))
    )


def planned(model: Callable[[], nn.Module] = Layers, state: tuple[StateChunk, ...] | None = None) -> Plan:
    """A plan that keeps all activations and streams these chunks; by default most of one optimizer's."""
    dtype = next(model().parameters()).dtype
    count = len(list(model().parameters()))
    state = chunks(count) if state is None else state
    return msgspec.structs.replace(_profiled(model, dtype), state=state, budget_bytes=1 << 40)


@contextlib.contextmanager
def streaming(training: Training, plan: Plan | None = None, **options: Any) -> Iterator[Session]:
    """A session of the training."""
    plan = planned(type(training.model)) if plan is None else plan
    with poochplan.apply(plan, training.model, training.optimizer, quiet=True, **options) as session:
        training.session = session
        yield session
    training.session = None


def either_way(
    use: Callable[[Training], object],
    make: Make = adam,
    model: Callable[[], nn.Module] = Layers,
    state: tuple[StateChunk, ...] | None = None,
    begin: Callable[[Training], object] = lambda _: None,
    behind: Callable[[Training], object] = lambda training: training.steps(2),
    **options: Any,
) -> Training:
    """``use`` sees the same in a session as without one, and so does what comes ``behind`` it. ``begin`` is before it.
    Returns the training that was in the session.
    """
    found = []
    for plan in (None, planned(model, state)):
        training = Training(make, model)
        begin(training)
        with contextlib.nullcontext() if plan is None else streaming(training, plan, **options):
            use(training)
        training.see()
        behind(training)
        found.append(training)
    plain, streamed = found
    assert len(plain.seen) == len(streamed.seen)
    wrong = [number for number, pair in enumerate(zip(plain.seen, streamed.seen, strict=True)) if pair[0] != pair[1]]
    assert not wrong
    return streamed


def grouped(parameters: Any, **second: Any) -> list[Mapping[str, Any]]:
    """Two groups, of which the second has other settings."""
    every = list(parameters)
    return [{"params": every[:5]}, {"params": every[5:], **second}]
