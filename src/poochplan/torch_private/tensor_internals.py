"""Private names of torch's tensors, autograd, modules and devices, and the purpose of each."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any

import torch
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedFakeTensorException as UnsupportedFakeTensorException
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

__all__ = ["pytree", "without_modes"]  # re-exported under other names

# --- Re-exported as they are -------------------------------------------------------------------------------------
# TorchDispatchMode   sees every op with its arguments below autograd: recording, metering and profiling.
# without_modes       a block in which no dispatch mode sees an op: copies, checks and replays are not part of the step.
# pytree              tensors in containers, in arguments and results of ops and in a model's inputs.
# OpOverload          the class of ordinary ops; others (higher-order operators) are opaque.
# FakeTensor(Mode)    tensors without memory: for mode "fake", and to recognise the compiler's own.
# *Exception          raised under them by a step that needs a tensor's content, or by an op without a meta kernel.
# FunctionalTensor    tensors that the compiler traces with: a backward over these is not part of the step.

mode_stack: Callable[[], list[Any]] = torch.utils._python_dispatch._get_current_dispatch_mode_stack
"""The dispatch modes of this thread: ours may be below others' when it is switched off."""

push_mode: Callable[[TorchDispatchMode], None] = torch._C._push_on_torch_dispatch_stack
pop_mode: Callable[[], TorchDispatchMode] = functools.partial(torch._C._pop_torch_dispatch_stack, None)
"""Put a mode on top of the stack, and take it off."""

mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Number of dispatch modes of this thread, nearly always 0."""

FAKE_LOG = "torch._subclasses.fake_tensor"
"""The logger that prints the frames of an error that is raised anyway."""


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in containers of containers."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


private_device_type: Callable[[], str] = torch._C._get_privateuse1_backend_name
"""The type of device that another library has added to torch. ``Tensor.data`` of such a tensor takes none of the host's
memory, as that of torch's own types does.
"""


# --- Tensors and storages: read for each op, so these are C functions ----------------------------------------------

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""The number of in-place writes to a tensor and its views: it shows whether a value has changed."""

storage_identity: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""The address of a storage's implementation: one number for all tensors on it, while it lives."""


def holders_of(storage: torch.UntypedStorage) -> int:
    """The number of tensors, and of whatever else in C++, that hold the storage; its Python object is one of them."""
    return torch._C._storage_Use_Count(storage_identity(storage))


schema_of: Callable[[Any], torch.FunctionSchema] = attrgetter("_schema")
"""An op's schema: the arguments that it writes, and whether its results are views."""

schema_named: Callable[[str, str], torch.FunctionSchema] = torch._C._get_schema
"""The schema of an op that Python has no object for, by its name and overload."""


def take_dispatch_key(name: str) -> bool:
    """Has operators like ``torch.cond`` ignore a dispatch key, also those to come, as they ignore torch's own keys for
    modes. False, and nothing is changed, if torch or another library has registered something for that key.
    """
    key: Any = torch._C._parse_dispatch_key(name)
    if torch._C._dispatch_has_backend_fallback(key) or torch._C._dispatch_get_registrations_for_dispatch_key(name):
        return False
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)
    for op in torch._ops._higher_order_ops.values():
        op.fallthrough(key)
    return True


def without_dispatch_key(name: str) -> contextlib.AbstractContextManager[object]:
    """A block whose ops do not reach what is registered for a dispatch key."""
    key: Any = torch._C._parse_dispatch_key(name)
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key))


COO_PARTS = ("_indices", "_values")
"""The methods for a sparse tensor's parts that also work if it is not coalesced, unlike the public ones."""


def is_composite(name: str) -> bool:
    """Whether the op with a profiler's name (``aten::linear``) is made of others, which modes see instead."""
    space, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, space, None), base, None)
    overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ()
    names = [name if overload == "default" else f"{name}.{overload}" for overload in overloads]
    names = [one for one in names if torch._C._dispatch_has_kernel(one)]  # not those for TorchScript's numbers
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(names) and all(has_kernel(x, "CompositeImplicitAutograd") and not has_kernel(x, "CPU") for x in names)


def topmost_mode(count: int) -> TorchDispatchMode:
    """The mode that sees an op first, of ``count`` modes."""
    return torch._C._get_dispatch_stack_at(count - 1)


def unseen_by_modes() -> contextlib.AbstractContextManager[object]:
    """:data:`without_modes`, which is slow, only if there is a mode."""
    return without_modes() if mode_count() else _NOTHING


_NOTHING = contextlib.nullcontext()


def packet_of(func: Any) -> Any:
    """The op without its overload, the key of torch's table of floating point operations; None if it has none."""
    return getattr(func, "_overloadpacket", None)


WIDENING: tuple[Any, ...] = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
"""A cast or a clone may make a larger tensor of the one that it reads (``formats/sources.py``)."""

cudnn_takes_ctc_loss: Any = torch.ops.aten._use_cudnn_ctc_loss.Tensor
"""Whether cuDNN computes that CTC loss; torch calls it if the tensors are on a GPU."""

without_torch_function: Callable[[], contextlib.AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""A block in which reading the storage of a subclass's tensor runs no code of that class."""

dispatch_keys: Callable[[torch.Tensor], Any] = torch._C._dispatch_keys
"""The tensor's dispatch keys, as a number by ``raw_repr()``: equal ones differ only in dtype, shape and memory."""


def is_zero(tensor: torch.Tensor) -> bool:
    """Whether it is a zero tensor: an immutable gradient of zeros without memory."""
    return tensor._is_zerotensor()


def wraps_another(tensor: torch.Tensor) -> bool:
    """Whether it is of class ``Tensor`` but has another one's memory, like those of ``torch.func`` within a call."""
    return torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def covers_itself_once(tensor: torch.Tensor) -> bool:
    """Whether no two elements of the tensor share memory. False if torch cannot determine it quickly."""
    return bool(torch._debug_has_internal_overlap(tensor) == 0)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie next to each other, in any order, and no two share memory."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    sizes, strides = tensor.shape, tensor.stride()
    if not all(type(one) is int for one in (*sizes, *strides)):  # symbols: torch's function, which loads its algebra
        return torch._prims_common.is_non_overlapping_and_dense_or_false(tensor)
    if tensor.numel() < 2:
        return True
    next_one = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes, strict=True) if size != 1):
        if stride != next_one:
            return False
        next_one *= size
    return True


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows the tensor as a view of another one, which it keeps alive."""
    return tensor._is_view()


def detached_alias(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.detach()``, which shares the version counter, also inside a dispatch mode.

    Inside a mode the kernels that share counters (``ADInplaceOrView``) are off; this switches them on, unseen.
    """
    if mode_count():
        with torch._C._DisableTorchDispatch():
            return _detached(tensor)
    return _detached(tensor)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    if not _is_excluded(_COUNTS_VERSIONS):
        return tensor.detach()
    torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTS_VERSIONS, False)
    try:
        return tensor.detach()
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTS_VERSIONS, True)


def called_below_autograd() -> bool:
    """Whether the op that a dispatch mode sees was called from inside another op's kernel.

    There views get separate version counters, and writes change none. It is also true of ops that create a tensor
    (``torch.ones``, ``torch.rand_like``), and of ops that another mode passes on.
    """
    with _as_on_entry():  # the keys excluded when the op was called; by now autograd's always are
        return bool(_is_excluded(_COUNTS_VERSIONS))


_COUNTS_VERSIONS = torch._C.DispatchKey.ADInplaceOrView
_as_on_entry: Any = torch._C._RestorePythonTLSSnapshot  # type: ignore[attr-defined]
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


def with_lazy_views(method: Callable[..., Any]) -> Callable[..., Any]:
    """The ``__torch_dispatch__`` of a mode, changed so that kernels below it may use lazy views.

    Torch calls a mode with the resolution of conjugate, negative and zero views switched off for the thread. A kernel
    that conjugates, such as that of ``linalg.pinv``, then gives other numbers than without a mode.
    """

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _is_excluded(_LAZY_VIEWS[0]):
            return method(*args, **kwargs)
        for key in _LAZY_VIEWS:
            _set_excluded(key, False)
        try:
            return method(*args, **kwargs)
        finally:
            for key in _LAZY_VIEWS:
                _set_excluded(key, True)

    return run


_LAZY_VIEWS = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor)
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded


# --- Autograd -------------------------------------------------------------------------------------------------------


def in_backward() -> bool:
    """Whether this thread runs a backward pass, whose saves and ops belong to no forward."""
    return graph_task() != OUTSIDE


OUTSIDE = -1
"""The graph task of a thread that runs no backward."""


def graph_task() -> int:
    """The number of the backward pass that this thread runs. A pass inside another has its own."""
    return int(torch._C._current_graph_task_id())


def running_modules() -> Iterator[torch.nn.Module]:
    """The modules that this thread is in a call of, the innermost first.

    Only torch's own frames are asked for their locals. A frame keeps what it was asked for until it ends, up to Python
    3.12: in a user's function that would hold tensors.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


_CALL: Any = torch.nn.Module._call_impl.__code__

is_scripted: Callable[[], bool] = torch._C._is_tracing
"""Whether TorchScript traces this thread. It notes the shapes that are read."""


def is_no_step() -> bool:
    """Whether a call of a model is exported, traced by TorchScript, or part of a function that is transformed."""
    return torch.compiler.is_exporting() or is_scripted() or torch._C._functorch.peek_interpreter_stack() is not None


def is_in_transformed_op(*, or_compiled: bool) -> bool:
    """Whether this thread runs an op that ``vmap`` or a transform of ``torch.func`` has passed on, or a compiled
    function. When these end, torch puts the thread's dispatch keys back as they were.

    For an op it has also taken the transforms off its stack, so only the callers' frames tell.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (
        frame.f_code.co_filename in _TRANSFORMS or (or_compiled and _runs_compiled(frame.f_code))
    ):
        frame = frame.f_back
    return frame is not None


def _runs_compiled(code: CodeType) -> bool:
    return code.co_name == "compile_wrapper" and code.co_filename == _COMPILED


_TRANSFORMS = {
    one.__file__ for one in (torch._functorch.vmap, torch._functorch.eager_transforms, torch._vmap_internals)
}
"""Files whose functions call the function that is transformed."""
_COMPILED = torch.__file__.removesuffix("__init__.py") + "_dynamo/eval_frame.py"
"""The file of ``compile_wrapper``, which calls a compiled function. Importing it takes seconds."""


@contextlib.contextmanager
def outside_transforms() -> Iterator[None]:
    """A block whose ops are outside every surrounding transform: ``vmap`` and those of ``torch.func``.

    Otherwise random ops raise, or draw for each entry of a batch.
    """
    depth, levels = torch._C._vmapmode_increment_nesting() - 1, []
    for _ in range(depth + 1):
        torch._C._vmapmode_decrement_nesting()
    while torch._C._functorch.peek_interpreter_stack() is not None:
        levels.append(torch._C._functorch.pop_dynamic_layer_stack())
    try:
        yield
    finally:
        while levels:
            torch._C._functorch.push_dynamic_layer_stack(levels.pop())
        for _ in range(depth):
            torch._C._vmapmode_increment_nesting()


def backward_node() -> Any:
    """The autograd node that this thread runs, or None outside backward."""
    return torch._C._current_autograd_node()


def backward_node_number() -> int:
    """The number that the running node got in forward, or -1 outside backward."""
    node = backward_node()
    return -1 if node is None else int(node._sequence_nr())


def nodes_behind(outputs: Any, after: int = -1) -> list[Any]:
    """The nodes that a backward from these outputs may run; an output is a tensor, or an edge of the graph. ``after``:
    only nodes with higher numbers, and those on the way to them.
    """
    pending = [_node_of(output) for output in outputs]
    seen: dict[Any, None] = {}
    while pending:
        node = pending.pop()
        if node is not None and node not in seen and (after < 0 or sequence_number(node) > after):
            seen[node] = None
            pending += [following for following, _ in node.next_functions]
    return list(seen)


def _node_of(output: Any) -> Any:
    if not isinstance(output, torch.Tensor):
        return output.node
    return torch.autograd.graph.get_gradient_edge(output).node if output.requires_grad else None


def sequence_number(node: Any) -> int:
    """The number of a node, set when forward made it. It connects backward to the layer of forward."""
    return int(node._sequence_nr())


def last_sequence_number() -> int:
    """The number of the last node that was made in this thread."""
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]


@contextlib.contextmanager
def intercept_autograd(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """A block in which ``around(run)`` replaces the one function through which Python runs autograd.

    ``backward``, ``torch.autograd.grad`` and ``torch.func`` all go through it, even for a graph that saves nothing. The
    block that was entered last is called first. Blocks of several threads may end in any order.
    """
    entry = object()
    with _AROUND_LOCK:
        if not _AROUND:
            _AROUND[None] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
            torch.autograd._engine_run_backward = _run_backward  # type: ignore[attr-defined]
        _AROUND[entry] = around
    try:
        yield
    finally:
        with _AROUND_LOCK:
            del _AROUND[entry]
            if len(_AROUND) == 1:
                torch.autograd._engine_run_backward = _AROUND.pop(None)  # type: ignore[attr-defined]


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    found = dict(_AROUND)
    run = found.pop(None, None) or torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    for around in found.values():
        run = around(run)
    return run(*args, **kwargs)


_AROUND: dict[object | None, Callable[..., Any]] = {}
"""Torch's own function, and its replacements in the order of entering; empty if there are none."""
_AROUND_LOCK = threading.Lock()


# --- Modules --------------------------------------------------------------------------------------------------------


def owned_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The module's own dictionary of parameters, to change in place: ``register_parameter`` would refuse some."""
    return module._parameters


def owned_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own dictionary of buffers, to restore the same names and tensors."""
    return module._buffers


def modules_of(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The model and its modules, each once, without making names."""
    seen: set[torch.nn.Module] = set()
    pending = [model]
    while pending:
        module = pending.pop()
        if module not in seen:
            seen.add(module)
            yield module
            pending += [child for child in module._modules.values() if child is not None]


def own_attribute(module: torch.nn.Module, name: str) -> Any:
    """An attribute or child of the module, without its author's ``__getattr__``, which may raise for unknown names.
    None if there is none.
    """
    own = vars(module)
    if name in own:
        return own[name]
    children = own.get("_modules")
    return children.get(name) if isinstance(children, dict) else None


def is_training(module: torch.nn.Module) -> bool:
    """Whether it is in train mode. A frozen module of TorchScript has no mode."""
    return bool(getattr(module, "training", False))


def is_scripted_module(module: torch.nn.Module) -> bool:
    """Whether TorchScript has compiled or loaded it, so that it takes no hooks. A traced one takes some."""
    return isinstance(module, torch.jit._script.RecursiveScriptModule)


def is_made(module: torch.nn.Module) -> bool:
    """Whether its constructor has run far enough that its modules can be read."""
    return "_modules" in vars(module)


OWN_DICTIONARIES = ("_parameters", "_buffers", "_modules")
"""The dictionaries of a module's parameters, buffers and modules. Other attributes belong to its author."""


def non_persistent_buffers(module: torch.nn.Module) -> set[str]:
    """Names of the module's buffers that its state dict leaves out."""
    return module._non_persistent_buffers_set


def set_non_persistent_buffers(module: torch.nn.Module, names: set[str]) -> None:
    """Restores these names, after a step that registered buffers."""
    module._non_persistent_buffers_set = set(names)
