"""A profile puts back what a step changes, whatever that is: all or nothing; what it could not put back is refused."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations

from poochplan.errors import StepError, UsageError
from poochplan.profiler.step.preserve import Kept, kept_contents, kept_generators, preserved, restored
from poochplan.torch_private.tensor_internals import mode_stack
from tests.runtime.nets import taken

BATCH = torch.arange(32.0).reshape(4, 8).sin()


class Net(nn.Module):
    """Two layers and running statistics; ``changes`` is called in each forward, as a user's own code."""

    def __init__(self, changes: Callable[[Net], object] = lambda net: None, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8) if first is None else first
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.changes = changes

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.changes(self)
        return self.last(self.norm(self.first(batch)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(BATCH).square().sum().backward()
    optimizer.step()


def content_of(tensor: torch.Tensor) -> tuple[object, ...]:
    is_strided = tensor.layout is torch.strided
    dense = tensor.detach().values() if tensor.is_nested else tensor.detach()
    dense = dense if dense.layout is torch.strided else dense.to_dense()
    dense = dense.dequantize() if dense.is_quantized else dense
    place = (tensor.stride(), tensor.untyped_storage().nbytes()) if is_strided else (tensor.layout,)
    return id(tensor), tensor.dtype, tensor.shape, *place, tensor.requires_grad, dense.clone().numpy().tobytes()


def _nested(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return content_of(value)
    if isinstance(value, dict):
        return id(value), [(id(k) if isinstance(k, torch.Tensor) else k, _nested(v)) for k, v in value.items()]
    return (id(value), [_nested(v) for v in value]) if isinstance(value, list) else value


def everything(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[object]:
    """Names, identities, geometry and content of all that a profile has to put back."""
    owned = (p for o in optimizers for group in o.param_groups for p in group["params"])
    parameters = dict.fromkeys([*model.parameters(), *owned])
    return [
        [
            (name, type(module), module.training, sorted(module._non_persistent_buffers_set))
            for name, module in model.named_modules()
        ],
        [(name, content_of(p)) for name, p in model.named_parameters(remove_duplicate=False)],
        [(name, content_of(b)) for name, b in model.named_buffers(remove_duplicate=False)],
        [None if p.grad is None else content_of(p.grad) for p in parameters],
        [content_of(p) for p in parameters],
        [_nested(x) for o in optimizers for x in (o.state, o.param_groups)],
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        str(np.random.get_state()[1].tolist()),
    ]


@contextlib.contextmanager
def unchanged(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Iterator[list[object]]:
    """Behind the block everything is as it was before."""
    before = everything(model, *optimizers)
    yield before
    assert everything(model, *optimizers) == before


def profile_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, mode: str = "run") -> None:
    roofline = "v100" if mode == "fake" else None
    taken(lambda: model(BATCH).square().sum(), model, optimizer, mode, roofline=roofline)


def _registers_buffers(net: Net) -> None:
    net.register_buffer("kept", torch.ones(3))
    net.register_buffer("unkept", torch.ones(3), persistent=False)


def _registers_a_parameter_and_a_module(net: Net) -> None:
    if not hasattr(net, "extra"):
        net.extra, net.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))


def _reparametrizes(net: Net) -> None:
    if not nn.utils.parametrize.is_parametrized(net.last):
        parametrizations.weight_norm(net.last)


def _sets_data(of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Net], object]:
    return lambda net: setattr(net.first.weight, "data", of(net.first.weight.detach()))


CHANGES: dict[str, Callable[[Net], object]] = {
    "replaces a parameter": lambda net: setattr(net.first, "weight", nn.Parameter(net.first.weight.detach() * 2)),
    "replaces data": _sets_data(lambda data: data * 2),
    "transposes data": _sets_data(torch.t),
    "replaces a buffer": lambda net: setattr(net.norm, "running_mean", torch.ones(8)),
    "registers buffers": _registers_buffers,
    "registers a parameter and a module": _registers_a_parameter_and_a_module,
    "removes a buffer": lambda net: net.norm.register_buffer("num_batches_tracked", None),
    "makes a buffer transient": lambda net: net.norm.register_buffer(
        "running_var", net.norm.running_var, persistent=False
    ),
    "reparametrizes": _reparametrizes,
    "ends training": lambda net: net.norm.eval(),
    "freezes": lambda net: net.first.bias.requires_grad_(False),
    "draws": lambda net: (random.random(), np.random.rand(), torch.rand(3)),
}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("change", CHANGES)
def test_what_forward_changes_is_back(change: str, momentum: float) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    train(model, optimizer)
    model.changes = CHANGES[change]
    with unchanged(model, optimizer) as before, preserved(model, optimizer):
        train(model, optimizer)
        assert everything(model, optimizer) != before


@pytest.mark.parametrize("change", ["registers buffers", "ends training", "draws"])
@pytest.mark.parametrize("mode", ["run", "swap-all", "fake"])
def test_a_whole_profile_leaves_everything_as_it_was(change: str, mode: str) -> None:
    model = Net(CHANGES[change])
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):  # without a state of the optimizer and gradients, and with them
        with unchanged(model, optimizer):
            profile_of(model, optimizer, mode=mode)
        train(model, optimizer)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_in_the_step_restores_everything_too(error: type[BaseException]) -> None:
    calls = 0

    def stops(net: Net) -> None:
        nonlocal calls
        calls += 1
        _registers_buffers(net)
        if calls == 3:
            raise error

    model = Net(stops)
    optimizer = torch.optim.Adam(model.parameters())
    with unchanged(model, optimizer), pytest.raises(error):
        profile_of(model, optimizer)
    assert calls == 3
    assert not mode_stack()


def test_a_compiled_model_is_back() -> None:
    model = torch.compile(Net(), backend="eager")
    optimizer = torch.optim.Adam(model.parameters())
    with unchanged(model, optimizer):
        profile_of(model, optimizer)


def test_a_generator_that_a_module_owns_is_back() -> None:
    model = Net(lambda net: torch.rand(3, generator=net.first.own))
    model.first.own = torch.Generator().manual_seed(3)
    state = model.first.own.get_state()
    profile_of(model)
    assert torch.equal(model.first.own.get_state(), state)


def _tied() -> nn.Module:
    model = Net()
    model.last.weight = model.first.weight
    return model


def _views_of_one_storage() -> nn.Module:
    model, flat = Net(), torch.randn(128)
    model.first.weight, model.last.weight = (nn.Parameter(flat[i : i + 64].view(8, 8)) for i in (0, 64))
    return model


def _with_buffer(tensor: torch.Tensor, change: Callable[[torch.Tensor], object]) -> nn.Module:
    model = Net(lambda net: change(net.odd))
    model.register_buffer("odd", tensor)
    return model


def _sparse() -> torch.Tensor:
    return torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied parameters": _tied,
    "parameters that share a storage": _views_of_one_storage,
    "expanded buffer": lambda: _with_buffer(torch.ones(1).expand(4), lambda t: t[:1].add_(1)),
    "complex buffer": lambda: _with_buffer(torch.ones(3, dtype=torch.complex64), lambda t: t.mul_(2j)),
    "empty buffer": lambda: _with_buffer(torch.empty(0), lambda t: t.resize_(4).fill_(1)),
    "resized buffer": lambda: _with_buffer(torch.ones(4), lambda t: t.untyped_storage().resize_(64)),
    "sparse buffer": lambda: _with_buffer(_sparse(), lambda t: t.add_(torch.ones(2, 2).to_sparse())),
    "compressed sparse buffer": lambda: _with_buffer(torch.eye(2).to_sparse_csr().mul(3), lambda t: t.values().add_(1)),
    "jagged buffer": lambda: _with_buffer(
        torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),
        lambda t: t.values().add_(1),
    ),
    "quantized buffer": lambda: _with_buffer(
        torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), lambda t: t.fill_(0.5)
    ),
    "bfloat16 buffer": lambda: _with_buffer(torch.ones(3, dtype=torch.bfloat16).view(torch.int16), lambda t: t.add_(1)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:.*quantiz.*:UserWarning")
def test_tensors_of_every_kind_are_back(name: str) -> None:
    model = MODELS[name]()
    optimizer = torch.optim.Adam(model.parameters())
    with unchanged(model, optimizer) as before, preserved(model, optimizer):
        train(model, optimizer)
        assert everything(model, optimizer) != before


def test_gradients_that_were_there_are_back_dense_and_sparse() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    tokens = torch.tensor([1, 2, 2])
    model(tokens).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    before = [g.to_dense().clone() for g in gradients]
    with preserved(model, None):
        for _ in range(2):
            model(tokens).sum().backward()
        model[1].weight.grad = None
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(g.to_dense(), b) for g, b in zip(gradients, before, strict=True))


def _lbfgs(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)
    plain = optimizer.step
    optimizer.step = lambda: plain(lambda: torch.tensor(1.0))  # type: ignore[method-assign]
    return optimizer


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW that can be captured": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "Adafactor": torch.optim.Adafactor,
    "L-BFGS, whose state is lists of tensors": _lbfgs,
}


@pytest.mark.parametrize("trained", [False, True], ids=["without state", "with state"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_and_groups_are_back_with_their_identity(name: str, trained: bool) -> None:
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    if trained:
        for _ in range(3):
            train(model, optimizer)
    with unchanged(model, optimizer) as before, preserved(model, optimizer):
        for _ in range(2):
            train(model, optimizer)
        optimizer.param_groups[0]["lr"] = 7.0
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        assert everything(model, optimizer) != before


def test_parameters_that_only_the_optimizer_has_are_back() -> None:
    model, scale = Net(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adam([*model.parameters(), scale])
    with unchanged(model, optimizer):
        taken(lambda: (model(BATCH).square() * scale).sum(), model, optimizer)
    assert scale.grad is None


class Refuses(dict[str, Any]):
    """A table that cannot be emptied once its owner says so."""

    refuses = False

    def clear(self) -> None:
        if self.refuses:
            raise ValueError("this table stays")
        super().clear()


def test_where_one_action_fails_the_others_are_done_and_the_error_names_it() -> None:
    model = Net()
    table = model.first.__dict__["_buffers"] = Refuses()
    optimizer = torch.optim.Adam(model.parameters())
    before = everything(model, optimizer)
    with pytest.raises(StepError, match=r"could not restore module first \(ValueError: this table stays\); build"):
        with preserved(model, optimizer):
            model.first.register_buffer("new", torch.ones(2))
            train(model, optimizer)
            table.refuses = True
    del table["new"]
    assert everything(model, optimizer) == before


class Ignores(dict[str, Any]):
    """A table that takes no update, and says nothing."""

    deaf = False

    def update(self, *args: Any, **kwargs: Any) -> None:
        if not self.deaf:
            super().update(*args, **kwargs)


@pytest.mark.parametrize("raises", [False, True])
def test_what_differs_although_nothing_raised_is_named_and_an_error_of_the_step_stays(raises: bool) -> None:
    model = Net()
    model.norm.__dict__["_buffers"] = Ignores(model.norm._buffers)
    with pytest.raises(StepError, match="could not restore module norm; build model and optimizer anew") as raised:
        with preserved(model, None):
            model.norm._buffers.deaf = True
            del model.norm._buffers["running_mean"]
            if raises:
                raise ValueError("the step's own")
    assert str(raised.value.__context__) == ("the step's own" if raises else "None")


def test_the_checksum_tells_every_single_bit_and_names_the_tensor() -> None:
    tensors = {"a": torch.randn(100), "b": torch.ones(3, dtype=torch.int8)}
    contents = kept_contents(tensors.items())
    for name, tensor in tensors.items():
        raw = tensor.view(torch.uint8)
        for index in range(raw.numel()):
            raw[index] ^= 1 << index % 8
            assert [part.name for part in contents if not part.is_back()] == [name]
            raw[index] ^= 1 << index % 8
    assert all(part.is_back() for part in contents)


def test_an_interrupt_while_restoring_waits_until_all_is_back() -> None:
    log: list[str] = []

    def interrupted_half_way() -> None:
        log.append("first")
        if len(log) == 1:
            raise KeyboardInterrupt

    first = Kept("first", interrupted_half_way, lambda: True)
    second = Kept("second", lambda: log.append("second"), lambda: True)
    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt), restored([first, second, *kept_generators()]):
        torch.rand(3)
    assert log == ["first", "first", "second"]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mode", ["run", "swap-all", "auto", "fake"])
@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: Net(lambda _: pytest.fail("a step ran"), torch.jit.script(nn.Linear(8, 8))), "first"),
        (lambda: Net(lambda _: pytest.fail("a step ran"), torch.jit.trace(nn.Linear(8, 8), BATCH)), "first"),
        (lambda: torch.jit.script(nn.Linear(8, 8)), "the model itself"),
    ],
    ids=["script", "trace", "itself"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_refused_before_the_first_step(make: Callable[[], nn.Module], where: str, mode: str) -> None:
    model = make()
    with pytest.raises(UsageError, match=f"expected modules in Python, found TorchScript .* in {where}"):
        profile_of(model, mode=mode)


def test_a_lazy_module_is_refused_and_stays_lazy() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(8))
    with pytest.raises(UsageError, match="found weight of 1 not yet initialised"):
        profile_of(model)
    assert torch.nn.parameter.is_lazy(model[1].weight)
    model(BATCH)
    profile_of(model)


def _of_another_mode(model: nn.Module, state: dict[str, object]) -> None:
    with FakeTensorMode():
        model.register_buffer("odd", torch.zeros(3))


@pytest.mark.parametrize(
    ("put", "name"),
    [
        (_of_another_mode, "odd"),
        (lambda _, state: state.update(odd=torch.zeros(3, device="meta")), "optimizer state of first.weight odd"),
        (lambda _, state: state.update(odd=(number for number in range(3))), "optimizer"),
    ],
    ids=["of another mode", "on meta", "uncopyable"],
)
def test_what_has_no_content_that_can_be_kept_is_refused_by_name(put: Callable[..., object], name: str) -> None:
    model = Net(lambda _: pytest.fail("a step ran"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    put(model, optimizer.state[model.first.weight])
    with pytest.raises(UsageError, match=f"^{name}: expected "):
        profile_of(model, optimizer)
