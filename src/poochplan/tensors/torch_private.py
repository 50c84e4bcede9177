"""Every private name of torch that poochplan stands on, and what each is for. No other module names one.

torch promises nothing about these: when another version breaks, it is here that one looks. A test holds the rest of the
package to it. `make test-torch VERSION=...` tells whether a version still has them all, and that they mean the same.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as mode_stack

__all__ = [
    "COO_PARTS",
    "FAKE_LOG",
    "OWN_DICTIONARIES",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "OpOverload",
    "TorchDispatchMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "allocation_events",
    "allocation_mark",
    "backward_node",
    "boxed",
    "call_attribute",
    "captures_graphs",
    "clear_cublas_workspaces",
    "code_of_backward",
    "compile_module",
    "compile_with_inductor",
    "compiled_by_inductor",
    "compiles_autograd",
    "counts_as_graph_pass",
    "counts_as_partitioner",
    "covers_itself_once",
    "detached_alias",
    "dispatch_hidden_from_compiler",
    "dispatch_keys",
    "forget_compiled",
    "gpu_sleep",
    "graph_task",
    "has_topmost_hooks",
    "hidden_from_compiler",
    "in_backward",
    "inductor_mode",
    "inductor_settings",
    "intercept_autograd",
    "is_compiled",
    "is_compiled_backward",
    "is_made",
    "is_tracing",
    "last_sequence_number",
    "log_allocations",
    "lowered_as_output",
    "memory_stats_calls",
    "mode_count",
    "mode_stack",
    "more_compiles",
    "mutated_inputs",
    "non_persistent_buffers",
    "not_lowered",
    "owned_buffers",
    "owned_modules",
    "owned_parameters",
    "packet_of",
    "pytree",
    "raw_stream",
    "schema_of",
    "sequence_number",
    "set_non_persistent_buffers",
    "stand_before_memory_stats",
    "stock_partition",
    "storage_identity",
    "topmost_hooks",
    "topmost_mode",
    "uncompile",
    "unseen_by_modes",
    "version_of",
    "without_modes",
    "without_torch_function",
]

# --- Re-exported as they are -------------------------------------------------------------------------------------
# TorchDispatchMode   sees every op with its arguments below autograd: recording, metering and profiling. Its own
#                     __enter__ and __exit__ also take a mode from the middle of the stack.
# mode_stack          the dispatch modes of this thread: ours may lie below others' when it is to be switched off.
# without_modes       a block in which no dispatch mode sees an op: copies, checks and replays are not the step's.
# pytree              tensors within containers, in arguments and results of ops and in a model's inputs.
# OpOverload          what an op is called through; anything else (a higher-order operator) is opaque.
# FakeTensor(Mode)    tensors without memory: mode "fake", and telling the compiler's own from the step's.
# *Exception          what a step that needs a tensor's content, or an op without a meta kernel, raises under them.
# FunctionalTensor    what the compiler traces with: a backward over these is the compiler's, not the step's.

mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many dispatch modes this thread has: none, nearly always."""

FAKE_LOG = "torch._subclasses.fake_tensor"
"""The logger that prints the frames of an error that is raised anyway."""

# --- Tensors and storages: read for each op, so these are C functions ----------------------------------------------

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often a tensor was written in place, counted together with its views: whether a value is still what it was."""

storage_identity: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""The address of a storage's implementation: one number for all tensors on it, for as long as it lives."""

schema_of: Callable[[Any], torch.FunctionSchema] = attrgetter("_schema")
"""An op's schema: which arguments it writes, and whether its results are views."""

COO_PARTS = ("_indices", "_values")
"""The methods that give a sparse tensor's parts also where it is not coalesced; the public ones refuse it."""


def topmost_mode(count: int) -> TorchDispatchMode:
    """The mode that sees an op first, of ``count`` of them."""
    return torch._C._get_dispatch_stack_at(count - 1)


def unseen_by_modes() -> contextlib.AbstractContextManager[object]:
    """:data:`without_modes`, which takes long, where there is a mode at all."""
    return without_modes() if mode_count() else _NOTHING


_NOTHING = contextlib.nullcontext()


def packet_of(func: Any) -> Any:
    """The op without its overload, the key of torch's table of floating point operations; None for what has none."""
    return getattr(func, "_overloadpacket", None)


without_torch_function: Callable[[], contextlib.AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""A block in which asking a tensor of a subclass for its storage runs no code of that class."""

dispatch_keys: Callable[[torch.Tensor], Any] = torch._C._dispatch_keys
"""The set of the tensor's dispatch keys, and by ``raw_repr()`` a number: tensors of one set differ in dtype, shape and
memory only."""


def covers_itself_once(tensor: torch.Tensor) -> bool:
    """Whether no two elements of the tensor share memory. False where torch cannot tell quickly."""
    return bool(torch._debug_has_internal_overlap(tensor) == 0)


def detached_alias(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.detach()``, which shares the version counter, also inside a dispatch mode.

    There the kernels that share counters (``ADInplaceOrView``) are switched off for the thread; they are switched on
    for this one call. No mode sees it.
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


_COUNTS_VERSIONS = torch._C.DispatchKey.ADInplaceOrView
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


# --- Autograd -------------------------------------------------------------------------------------------------------


def in_backward() -> bool:
    """Whether this thread runs a backward pass: what is saved or run there belongs to no forward."""
    return torch._C._current_graph_task_id() != -1


def graph_task() -> int:
    """The number of the backward pass that this thread runs: one that runs within another has its own."""
    return int(torch._C._current_graph_task_id())


def has_topmost_hooks(hooks: torch.autograd.graph.saved_tensors_hooks) -> bool:
    """Whether these are the saved-tensors hooks that leaving any would take off: torch takes off the topmost."""
    topmost = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return topmost is not None and topmost[0] is hooks.pack_hook


def topmost_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """The pack and unpack that autograd would call on this thread; None where there are none."""
    found: tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def backward_node() -> Any:
    """The autograd node that this thread runs, or None outside backward."""
    return torch._C._current_autograd_node()


def sequence_number(node: Any) -> int:
    """The number a node was given when forward made it: it leads from backward to the layer of forward."""
    return int(node._sequence_nr())


def last_sequence_number() -> int:
    """The number that the node made last in this thread was given."""
    return int(torch.autograd._get_sequence_nr()) - 1  # type: ignore[attr-defined]


@contextlib.contextmanager
def intercept_autograd(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """A block in which ``around(run)`` stands for the one function through which Python runs autograd.

    ``backward``, ``torch.autograd.grad`` and ``torch.func`` all pass it, also for a graph that saves nothing.
    """
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    torch.autograd._engine_run_backward = around(run)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]


# --- Modules and the compiler ---------------------------------------------------------------------------------------


def owned_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The module's own dictionary of parameters, to change in place; ``register_parameter`` would refuse some."""
    return module._parameters


def owned_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own dictionary of buffers, to put back as it was: which there are, and the same tensors."""
    return module._buffers


def owned_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The module's own dictionary of modules, to walk a model without making names."""
    return module._modules


def is_made(module: torch.nn.Module) -> bool:
    """Whether its constructor has got so far that it can be asked for its modules."""
    return "_modules" in vars(module)


OWN_DICTIONARIES = ("_parameters", "_buffers", "_modules")
"""Where a module keeps its parameters, buffers and modules: every other attribute is its author's."""


def non_persistent_buffers(module: torch.nn.Module) -> set[str]:
    """Names of the module's buffers that its state dict leaves out."""
    return module._non_persistent_buffers_set


def set_non_persistent_buffers(module: torch.nn.Module, names: set[str]) -> None:
    """Puts them back as they were, where a step registered buffers."""
    module._non_persistent_buffers_set = set(names)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``torch.compile`` wraps the module (``_orig_mod``) or its call (``module.compile()``)."""
    wrapped = getattr(module, "_orig_mod", None) is not None
    return wrapped or getattr(module, "_compiled_call_impl", None) is not None


def compile_module(module: torch.nn.Module, **options: Any) -> None:
    """``module.compile()``, which leaves uncompiled what is all torch's own, such as an ``nn.Sequential`` of layers:
    the compiler passes over the frames of torch's files. ``torch.compile(module)`` traces them, and so does this.
    """
    from torch._dynamo.external_utils import wrap_inline

    call = module._call_impl
    if type(module).forward.__module__.startswith("torch.nn."):
        call = wrap_inline(call)
    module._compiled_call_impl = torch.compile(call, **options)


def uncompile(module: torch.nn.Module) -> None:
    """Takes back ``module.compile()``."""
    module._compiled_call_impl = None


def forget_compiled() -> None:
    """Lets go of all that was compiled in this process; what is called again is compiled again, by the caches.

    What was compiled before counts where a function is compiled again, and beyond eight times it is silently not.
    """
    torch.compiler.reset()


@contextlib.contextmanager
def more_compiles(factor: int) -> Iterator[None]:
    """A block in which a function may be compiled so many times as often as else before it is silently not."""
    from torch._dynamo import config

    with config.patch(recompile_limit=factor * config.recompile_limit):
        yield


def captures_graphs(module: torch.nn.Module) -> bool:
    """Whether a compiled module runs as CUDA graphs (``mode="reduce-overhead"``, or the option of that name)."""
    compiled = module if getattr(module, "_orig_mod", None) is not None else module._compiled_call_impl
    settings = getattr(compiled, "get_compiler_config", lambda: None)()
    return bool(settings and settings.get("triton.cudagraphs"))


def call_attribute(module: torch.nn.Module) -> str:
    """The attribute through which a compiled module is called: what stands in its place is called instead."""
    return "forward" if getattr(module, "_compiled_call_impl", None) is None else "_compiled_call_impl"


def hidden_from_compiler(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The hook, into which the compiler does not look when a region that it has compiled calls it.

    Where nothing compiled runs, which asks no more than one look at the compiler's callback, it is called as it is.
    ``torch.compiler.disable`` alone would switch the compiler off and on around each call.
    """
    if not _compiler_is_there():  # nothing is compiled, and importing it takes seconds
        return hook
    hidden = torch.compiler.disable(hook)

    @functools.wraps(hook)
    def run(argument: Any) -> Any:
        return hook(argument) if _compiler_callback() is None else hidden(argument)

    _skip_code(run)
    return run


def dispatch_hidden_from_compiler(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same for the ``__torch_dispatch__`` of a class of modes, in place of what torch wraps it in."""
    hidden: Callable[..., Any] | None = None

    def run(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal hidden
        if _compiler_callback() is None:
            return method(self, func, types, args, kwargs)
        if hidden is None:
            _skip_code(run)
            hidden = torch.compiler.disable(method)
        return hidden(self, func, types, args, kwargs)

    return run


_compiler_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback


def _compiler_is_there() -> bool:
    return "torch._dynamo" in sys.modules


def _skip_code(function: Any) -> None:
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def is_tracing() -> bool:
    """Whether the compiler traces in this thread: the backward it runs then is not the step's."""
    return TracingContext.try_get() is not None


def mutated_inputs(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Of a forward that the compiler has split off, the inputs that are written behind each call of it; all of them
    where that is not told.
    """
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    inputs, (outputs,) = graph.find_nodes(op="placeholder"), graph.find_nodes(op="output")
    by_place = {one.meta.get("desc"): one for one in inputs}
    told = outputs.meta.get("desc")
    if told is None:
        return set(inputs)
    written = [one.mutated_input for one in told if isinstance(one, InputMutationAOTOutput)]
    return {by_place[one] for one in written} if all(one in by_place for one in written) else set(inputs)


def is_compiled_backward(node: Any) -> bool:
    """Whether a node of autograd runs a backward that the compiler has made."""
    return type(node).__name__ == "CompiledFunctionBackward"


def code_of_backward(node: Any) -> tuple[object, str, int]:
    """Of a node with a compiled backward: what is called in it, its source where Inductor made it (else empty), and how
    many numbers it is given before the saved tensors.

    It is given these in the order in which they are unpacked. What is compiled when it first runs is None before that.
    """
    called = getattr(getattr(type(node), "_forward_cls", None), "compiled_bw", None)
    source = getattr(called, "source_code", "")
    return called, source if isinstance(source, str) else "", len(getattr(node, "symints", ()))


def compiles_autograd() -> bool:
    """Whether torch is set to compile the whole backward, and traces through the backwards of compiled regions."""
    import torch._dynamo.config

    return bool(torch._dynamo.config.compiled_autograd)


def inductor_settings() -> Any:
    """Inductor's settings, a module; importing it takes seconds where nothing has been compiled."""
    import torch._inductor.config

    return torch._inductor.config


def counts_as_partitioner(kind: type) -> None:
    """Has Inductor take instances of the class as ``custom_partitioner_fn``."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    CustomPartitionerFn.register(kind)


def counts_as_graph_pass(kind: type) -> None:
    """Has Inductor take instances of the class as passes over a graph that its caches know."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    CustomGraphPass.register(kind)


def stock_partition(joint: Any, inputs: Any, **kwargs: Any) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """What Inductor splits a joint graph with where nobody sets a partitioner: the forward, and the backward."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def compile_with_inductor(graph: Any, inputs: Any, lower: Callable[..., Any], settings: dict[str, Any]) -> Any:
    """What Inductor's backend makes of a graph under these of its settings; ``lower`` makes code of each half of it.

    Saved tensors are not donated to the backward: it would write into what only stands for one. The backward is lowered
    with its forward, and not when it first runs, by when what arrives in it would have to be known.
    """
    import torch._functorch._aot_autograd.graph_compile as steps
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    given: Any = steps
    stock = given.collect_bw_donated_buffer_idxs
    given.collect_bw_donated_buffer_idxs = lambda *_: []  # with the setting off, a graph cannot go back twice
    try:
        with config.patch(force_non_lazy_backward_lowering=True):
            return compile_fx(graph, inputs, inner_compile=lower, config_patches=settings)
    finally:
        given.collect_bw_donated_buffer_idxs = stock


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """The callable, which is given a list of its arguments that it may empty."""
    setattr(run, "_boxed_call", True)  # noqa: B010
    return run


@contextlib.contextmanager
def not_lowered(run: Callable[..., Any], partitioner: Any) -> Iterator[None]:
    """A block in which Inductor splits graphs by ``partitioner`` and makes no code of the halves: ``run`` gives what is
    called in its place. What is compiled meanwhile is in no cache.
    """
    import torch._inductor.compile_fx
    from torch._functorch import config

    inductor: Any = torch._inductor.compile_fx
    stock = inductor.compile_fx
    settings = {"custom_partitioner_fn": partitioner, "fx_graph_cache": False}

    def split(graph: Any, inputs: Any, inner_compile: Any = None, **kwargs: Any) -> Any:
        with config.patch(donated_buffer=False, enable_autograd_cache=False), inductor_settings().patch(settings):
            return stock(graph, inputs, inner_compile=run, **kwargs)  # which may come back here

    inductor.compile_fx = split
    try:
        yield
    finally:
        inductor.compile_fx = stock


def lowered_as_output(op: Any) -> None:
    """Has Inductor make what ``op`` is given first as it would make an output of the graph at the place of the op's
    result: in the strides that its graph tells, or channels last. So no copy is made of the result, to lay it so.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    if op in lowering.lowerings:
        return
    call = lowering.fallback_handler(op, add_to_fallback_set=False)

    def lower(value: Any, after: Any = None) -> Any:
        node = V.graph.current_node
        fake = node.meta["val"]
        strides: Any = fake.stride()
        if fake.dim() == 4 and node in V.graph.nodes_prefer_channels_last and is_dense(fake):
            strides = ir.FlexibleLayout.stride_ordered_for_memory_format(value.get_size(), torch.channels_last)
        value.realize()
        return call(ir.ExternKernel.require_exact_strides(value, strides), after)

    lowering.register_lowering(op, type_promotion_kind=None)(lower)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie next to each other, in whatever order, and none lies on another."""
    return torch._prims_common.is_non_overlapping_and_dense_or_false(tensor)


def inductor_mode(mode: str) -> dict[str, Any]:
    """What a mode of ``torch.compile`` sets of Inductor's settings."""
    import torch._inductor

    return torch._inductor.list_mode_options(mode)


def compiled_by_inductor(graph: Any, inputs: Any, **kwargs: Any) -> Any:
    """The code of one graph without autograd."""
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner(graph, inputs, **kwargs)


# --- The CPU's allocator ----------------------------------------------------------------------------------------------


def log_allocations() -> bool:
    """Starts to log what this thread allocates on the CPU; False where a profiler is on already, which there is one of.

    By the profiler of old: it starts in microseconds, and says nothing on stderr.
    """
    if _profiling._profiler_enabled():
        return False
    experimental = torch._C._profiler._ExperimentalConfig()
    state = _profiling.ProfilerState.CPU
    _profiling._enable_profiler_legacy(_profiling.ProfilerConfig(state, False, True, False, False, False, experimental))
    return True


allocation_mark: Callable[[str], contextlib.AbstractContextManager[object]] = torch._C._profiler._RecordFunctionFast
"""A block of that name in the log, which no dispatch mode sees; nothing where nothing is logged."""


def allocation_events() -> list[tuple[str, str, int]]:
    """Ends the log: (kind, name, bytes) of each event of this thread, in order; ``memory_alloc`` below 0 is freed.

    Of a log that began within a backward that then raised there is nothing: autograd has taken it off.
    """
    try:
        logged = _profiling._disable_profiler_legacy()
    except RuntimeError:
        return []
    return [(str(event.kind()), event.name(), event.cpu_memory_usage()) for events in logged for event in events]


_profiling: Any = torch.autograd


# --- CUDA -----------------------------------------------------------------------------------------------------------


def clear_cublas_workspaces() -> None:
    """Gives back what cuBLAS holds between ops, which no tensor shows: so its bytes can be counted."""
    torch._C._cuda_clearCublasWorkspaces()


MemoryStats = Callable[[int], dict[str, Any]]
ResetPeaks = Callable[[int], object]


def memory_stats_calls() -> tuple[MemoryStats, ResetPeaks]:
    """Through which every public call reads the allocator's statistics of a GPU, and begins its peaks anew."""
    return torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats


def stand_before_memory_stats(stats: MemoryStats, reset: ResetPeaks) -> None:
    """Has the public calls go through these two."""
    torch._C._cuda_memoryStats = stats  # type: ignore[assignment]
    torch._C._cuda_resetPeakMemoryStats = reset  # type: ignore[assignment]


def raw_stream(index: int) -> int:
    """The address of the current stream of a GPU: tells for the price of a number whether it is still the same one."""
    return int(torch._C._cuda_getCurrentRawStream(index))


def gpu_sleep(cycles: int) -> None:
    """Keeps the current stream busy, so that what is queued behind it is timed without the host's gaps."""
    torch.cuda._sleep(cycles)
