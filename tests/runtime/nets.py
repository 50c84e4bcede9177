"""Small networks that between them need every kind of replay, and the two ways of running their steps."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import poochplan
from poochplan.formats.plan import Plan
from poochplan.formats.profile import Link, LinkDirection, Profile
from poochplan.profiler.trials import machine_facts
from poochplan.runtime.metering.allocated import aside
from poochplan.runtime.metering.census import leave_out
from poochplan.runtime.run_report import Report
from poochplan.runtime.session import Session


class Residual(nn.Module):
    """Convolutions, batch norm, in-place ReLU, dropout, skips: in-place chains, statistics, random ops."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Dropout(0.2)
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            images = images + block(images)
        return self.head(images.mean((2, 3)))


class Attention(nn.Module):
    """Embedding, layer norm, attention, chunked views of one storage, GELU, tied weights."""

    def __init__(self, width: int = 32, vocabulary: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(width, vocabulary, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for _ in range(2):
            query, key, value = self.qkv(self.norm(hidden)).chunk(3, dim=-1)
            attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            hidden = hidden + self.drop(nn.functional.gelu(attended))
        return self.out(hidden)


class Recurrent(nn.Module):
    """An LSTM and a GRU: fused ops with several outputs."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.lstm(series)[0])[0])


class Net(nn.Module):
    """Its forward is ``body``; ``parts`` are its modules, parameters and settings by their names."""

    def __init__(self, body: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.body = body
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@dataclass
class Case:
    """A model with its step; ``fresh()`` makes the same one again.

    Its profile and its in-core steps are the same whenever they are asked for, and made once.
    """

    make: Callable[[], tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]]
    optimizer: Callable[[Any], torch.optim.Optimizer] = _adam
    _profiles: dict[tuple[str, str | None], Profile] = field(init=False, repr=False, default_factory=dict)
    _in_core: dict[int, list[list[torch.Tensor]]] = field(init=False, repr=False, default_factory=dict)

    def fresh(self) -> tuple[nn.Module, Callable[[], torch.Tensor], torch.optim.Optimizer]:
        torch.manual_seed(0)
        model, loss_of = self.make()
        return model, lambda: loss_of(model), self.optimizer(model.parameters())

    def profile(self, mode: str = "run", roofline: str | None = None) -> Profile:
        """The profile of this mode, taken the first time it is asked for."""
        if (mode, roofline) not in self._profiles:
            self._profiles[mode, roofline] = self.new_profile(mode=mode, roofline=roofline)
        return self._profiles[mode, roofline]

    def new_profile(self, **options: Any) -> Profile:
        """A profile taken now."""
        model, step, optimizer = self.fresh()
        return taken(step, model, optimizer, **options)


def taken(
    step: Callable[[], torch.Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    mode: str = "run",
    **options: Any,
) -> Profile:
    """A profile of one timed step, where steps are timed."""
    options = {"iterations": None if mode == "fake" else 1, "link": LINK} | options
    return poochplan.profile(step, model=model, optimizer=optimizer, mode=mode, **options)  # type: ignore[call-overload, no-any-return]


def without_costs() -> None:
    """Profiles of this process measure no costs of the runtime: that takes seconds, where none are asked for."""
    machine_facts.cached_cost = lambda where: None  # type: ignore[assignment]


class Gated(nn.Module):
    """``hidden`` is used before its gate in backward: a gate that is replayed early may let it go."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(64, 64), nn.Parameter(torch.ones(64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        return hidden.sigmoid().sum() + (hidden * self.scale).sum()


def of(build: Callable[[], nn.Module], *shape: int, **options: Any) -> Case:
    """The mean square of what a model gives for random numbers of that shape."""

    def make() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        model, batch = build(), torch.randn(shape)
        return model, lambda model: model(batch).square().mean()

    return Case(make, **options)


def gated(where: str | torch.device = "cpu") -> Case:
    """The sum of what a gated network gives."""

    def make() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
        batch = torch.randn(32, 64).to(where)
        return Gated().to(where), lambda model: model(batch)

    return Case(make)


def _residual(precision: torch.dtype = torch.float32) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    images, labels = torch.randn(4, 8, 16, 16), torch.randint(0, 5, (4,))

    def loss_of(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision is torch.bfloat16):
            return nn.functional.cross_entropy(model(images), labels)

    return Residual(), loss_of


def _attention() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    tokens = torch.randint(0, 50, (3, 24))
    return Attention(), lambda model: nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _channels_last() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    images = torch.randn(4, 8, 16, 16).to(memory_format=torch.channels_last)
    model = Residual().to(memory_format=torch.channels_last)
    return model, lambda model: model(images).square().mean()


CASES = {
    "residual": Case(_residual),
    "attention": Case(_attention),
    "recurrent": of(Recurrent, 3, 6, 16),
    "autocast": Case(functools.partial(_residual, torch.bfloat16)),
    "channels_last": Case(_channels_last),
}


TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
"""The minor version of torch that runs here."""
DIRECTION = LinkDirection(latency_s=1e-5, bandwidth_bytes_per_s=1e9)
LINK = Link(name="spill", outward=DIRECTION, inward=DIRECTION)


def in_core(case: Case, steps: int) -> list[list[torch.Tensor]]:
    """What :func:`snapshot` says after each step in-core; worked out the first time it is asked for."""
    if steps not in case._in_core:
        case._in_core[steps] = train(case, steps)[0]
    return case._in_core[steps]


class Loop:
    """State: a model of a case in training, and what :func:`snapshot` said after each step.

    ``at`` is told each place that a step comes by, and ``session`` is set by whoever opens one.
    """

    def __init__(
        self,
        case: Case,
        optimizer: type[torch.optim.Optimizer] | None = None,
        at: Callable[[str], object] = lambda place: None,
        **options: float,
    ) -> None:
        self.model, self.loss_of, self.optimizer = case.fresh()
        if optimizer is not None:
            self.optimizer = optimizer(self.model.parameters(), **options)  # type: ignore[call-arg]
        self.at = at
        self.seen: list[list[torch.Tensor]] = []
        self.session: Session | None = None
        torch.manual_seed(1)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        self.at("step")
        loss = self.loss_of()
        self.at("forward")
        loss.backward()
        self.at("backward")
        self.seen.append(snapshot(self.model, loss))
        self.optimizer.step()
        self.at("updated")
        return loss.detach()


def train(
    case: Case, steps: int, plan: Plan | None = None, at: Callable[[str], object] = lambda place: None, **options: Any
) -> tuple[list[list[torch.Tensor]], Report | None]:
    """What :func:`snapshot` says after each step, in-core or under a plan, from the same start."""
    loop = Loop(case, at=at)
    at("before")
    with contextlib.nullcontext() if plan is None else poochplan.apply(plan, loop.model, **options) as session:
        at("opened")
        for _ in range(steps):
            _loss = loop.step()  # lives until the next one, as in a user's loop
        at("closing")
    at("after")
    return loop.seen, session and session.report()


def followed(
    case: Case,
    plan: Plan,
    steps: int = 2,
    at: Callable[[str], object] = lambda place: None,
    wanted: list[list[torch.Tensor]] | None = None,
    **options: Any,
) -> Report:
    """The report of steps that followed a plan to the end, each bitwise as in-core, or as ``wanted``."""
    seen, report = train(case, steps, plan, at, **options)
    assert equal(in_core(case, steps) if wanted is None else wanted, seen)
    assert report.total.fallbacks == 0, report.total.fallback_reasons
    return report


@contextlib.contextmanager
def our_warnings() -> Iterator[list[str]]:
    """A list that has, behind the block, what this package has warned of in it."""
    told = list[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
    told += [text for text in (str(one.message) for one in caught) if "poochplan" in text]


Use = Callable[[nn.Module, Callable[[], torch.Tensor], "Session | None"], Sequence[torch.Tensor] | None]


def either_way(case: Case, plan: Plan, use: Use, *, is_followed: bool = True, **options: Any) -> Report:
    """``use(model, step, session)`` gives the same, and leaves the same gradients, in-core and under the plan."""
    found = []
    for given in (None, plan):
        model, step, _ = case.fresh()
        torch.manual_seed(3)
        with contextlib.nullcontext() if given is None else poochplan.apply(given, model, **options) as session:
            results = use(model, step, session) or ()
        found.append([*results, *gradients(model)])
    assert equal(found[:1], found[1:])
    report: Report = session.report()
    assert not is_followed or report.total.fallbacks == 0, report.total.fallback_reasons
    return report


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Copies of those there are."""
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def metered_peaks(case: Case, plan: Plan) -> list[int]:
    """Most live bytes of the first step and of the second, under a plan. The audit takes nothing beside them."""
    model, step, optimizer = case.fresh()
    peaks = []
    with poochplan.apply(plan, model, on_audit="off") as session:
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            loss = step()
            loss.backward()
            optimizer.step()
            peaks.append(session.report().last_step.peak_bytes)
    return peaks


def snapshot(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """Copies of the loss, every gradient, buffer and parameter, of the model's own tensors, and of the states of the
    generators. A session's meter does not see them.
    """
    with _disable_current_modes(), aside():
        found = [p.grad for p in model.parameters() if p.grad is not None]
        held = vars(model).values()
        tensors = [loss, *found, *model.buffers(), *model.parameters(), *(x for x in held if torch.is_tensor(x))]
        dense = (x.detach().to_dense() if x.layout is not torch.strided else x.detach().clone() for x in tensors)
        own = (thing.get_state() for thing in held if isinstance(thing, torch.Generator))
        copies = [*dense, torch.get_rng_state(), *own]
        leave_out(copies)
        return copies


def as_bytes(tensor: torch.Tensor) -> bytes:
    """As they lie: a NaN's payload and the sign of a zero are among them."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def equal(left: list[list[torch.Tensor]], right: list[list[torch.Tensor]]) -> bool:
    """Bitwise."""
    return len(left) == len(right) and all(
        len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(left, right, strict=True)
    )
