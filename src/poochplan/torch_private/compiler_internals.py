"""Private names of torch's compiler, and the purpose of each."""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, Literal

import torch
from torch._guards import TracingContext

from .tensor_internals import is_dense, own_attribute


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``torch.compile`` wraps the module (``_orig_mod``) or its call (``module.compile()``)."""
    wrapped = own_attribute(module, "_orig_mod") is not None
    return wrapped or own_attribute(module, "_compiled_call_impl") is not None


def compiled_with(module: torch.nn.Module) -> str:
    """The compiler of a module and its settings, in words; empty for a module that is not compiled."""
    if not is_compiled(module):
        return ""
    found: Any = own_attribute(module, "dynamo_ctx")
    if found is None:  # ``module.compile()``, whose callable has another attribute
        told = getattr(module._compiled_call_impl, "get_compiler_config", None)
        cells = [cell.cell_contents for cell in getattr(told, "__closure__", None) or ()]
        found = next((one for one in cells if hasattr(one, "callback")), None)
    backend: Any = getattr(found, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__qualname__", type(backend).__qualname__)
    options = sorted(map(str, getattr(backend, "config", {}).items()))
    return f"{name} {options} dynamic={getattr(found, '_dynamic', None)}"


def compile_module(module: torch.nn.Module, **options: Any) -> None:
    """``module.compile()``. Unlike it, this also compiles modules that consist only of torch's own code, such as an
    ``nn.Sequential`` of layers: the compiler skips the frames of torch's files, but ``torch.compile(module)`` traces
    them.
    """
    from torch._dynamo.external_utils import wrap_inline

    call = module._call_impl
    if type(module).forward.__module__.startswith("torch.nn."):
        call = wrap_inline(call)
    module._compiled_call_impl = torch.compile(call, **options)


def uncompile(module: torch.nn.Module) -> None:
    module._compiled_call_impl = None


def forget_compiled() -> None:
    """Drops all code that was compiled in this process. Later calls compile again, from the caches.

    Earlier compilations count when a function is compiled again; beyond eight, it is silently not compiled.
    """
    torch.compiler.reset()


def compiled_graphs() -> int:
    """Number of graphs that torch.compile has compiled in this process, including those from caches."""
    if not _compiler_is_there():
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@contextlib.contextmanager
def more_compiles(factor: int) -> Iterator[None]:
    """A block in which a function may be compiled so many times as often before it is silently not compiled."""
    from torch._dynamo import config

    with config.patch(recompile_limit=factor * config.recompile_limit):
        yield


def running_as_written() -> contextlib.AbstractContextManager[Any]:
    """A block in which compiled functions and modules run as they are written. Kernels of Inductor read and write the
    memory that fake tensors do not have.
    """
    return torch.compiler.set_stance("force_eager") if _compiler_is_there() else contextlib.nullcontext()


def captures_graphs(module: torch.nn.Module) -> bool:
    """Whether a compiled module runs as CUDA graphs (``mode="reduce-overhead"``, or the option of that name)."""
    compiled = module if own_attribute(module, "_orig_mod") is not None else module._compiled_call_impl
    settings = getattr(compiled, "get_compiler_config", lambda: None)()
    return bool(settings and settings.get("triton.cudagraphs"))


def call_attribute(module: torch.nn.Module) -> str:
    """The attribute through which a compiled module is called; an object in its place is called instead."""
    return "forward" if own_attribute(module, "_compiled_call_impl") is None else "_compiled_call_impl"


def hidden_from_compiler(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, which the compiler does not trace when a compiled region calls it.

    If no compiled code runs, which is one check of the compiler's callback, it is called directly.
    ``torch.compiler.disable`` alone would switch the compiler off and on around each call.
    """
    if not _compiler_is_there():  # nothing is compiled, and importing the compiler takes seconds
        return hook
    hidden = torch.compiler.disable(hook)

    @functools.wraps(hook)
    def run(*arguments: Any) -> Any:
        return hook(*arguments) if _compiler_callback() is None else hidden(*arguments)

    _skip_code(run)
    return run


def run_as_written(*functions: Callable[..., Any]) -> None:
    """The compiler does not trace these functions themselves. What they call must be hidden from it."""
    for function in functions if _compiler_is_there() else ():
        _skip_code(function)


def leave_alone(*packages: str) -> None:
    """Has the compiler run these packages' functions as they are where code around the model is compiled, and calls
    them outside its graphs. Otherwise it compiles one after another, and fails at some.
    """
    for name, module in sys.modules.copy().items() if _compiler_is_there() else ():
        if name.startswith(packages) and name not in _LEFT_ALONE:
            _LEFT_ALONE.add(name)
            for code in _codes_in(module):
                _skip_code(code)


_LEFT_ALONE = set[str]()
"""Names of modules whose functions the compiler leaves alone."""


def _codes_in(module: Any) -> Iterator[CodeType]:
    """The code of the module's functions and methods, and of those inside them."""
    pending, seen = list(vars(module).values()), set[int]()
    while pending:
        one = pending.pop()
        if isinstance(one, CodeType):
            yield one
            pending += one.co_consts
        elif isinstance(one, property):
            pending.append(one.fget)
        elif getattr(one, "__module__", None) == module.__name__ and id(one) not in seen:
            seen.add(id(one))
            pending += vars(one).values() if isinstance(one, type) else (getattr(one, "__wrapped__", None),)
            code = getattr(one, "__code__", None)
            pending += (code,) if getattr(code, "co_filename", "") == module.__file__ else ()


def dispatch_hidden_from_compiler(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same for the ``__torch_dispatch__`` of a class of modes, replacing torch's wrapper of it."""
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


def compiler_callback() -> Callable[[], object] | None:
    """Gives what traces this thread's code, or None; None itself if the compiler is not there."""
    return _compiler_callback if _compiler_is_there() else None


def _compiler_is_there() -> bool:
    return "torch._dynamo" in sys.modules


def _skip_code(function: Any) -> None:
    """``function``: or its code."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(getattr(function, "__code__", function))


def is_tracing() -> bool:
    """Whether the compiler traces in this thread. A backward that it runs then is not part of the step."""
    return TracingContext.try_get() is not None


def mutated_inputs(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Those inputs of a forward split off by the compiler that are written after each call; all if that is unknown."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    inputs, (outputs,) = graph.find_nodes(op="placeholder"), graph.find_nodes(op="output")
    by_place = {one.meta.get("desc"): one for one in inputs}
    told = outputs.meta.get("desc")
    if told is None:
        return set(inputs)
    written = [one.mutated_input for one in told if isinstance(one, InputMutationAOTOutput)]
    return {by_place[one] for one in written} if all(one in by_place for one in written) else set(inputs)


def is_compiled_backward(node: Any) -> bool:
    return type(node).__name__ == "CompiledFunctionBackward"


def code_of_backward(node: Any) -> tuple[object, str, int]:
    """For a node with a compiled backward: the function that it calls, its source if Inductor made it (else empty), and
    the number of integers that it gets before the saved tensors.

    It gets these in the order in which they are unpacked. None before code that is compiled late has run.
    """
    called = getattr(getattr(type(node), "_forward_cls", None), "compiled_bw", None)
    source = getattr(called, "source_code", "")
    return called, source if isinstance(source, str) else "", len(getattr(node, "symints", ()))


def compiles_autograd() -> bool:
    """Whether torch is set to compile the whole backward, and traces through the backwards of compiled code."""
    import torch._dynamo.config

    return bool(torch._dynamo.config.compiled_autograd)


def inductor_settings() -> Any:
    """Inductor's settings, a module. Importing it takes seconds if nothing has been compiled."""
    import torch._inductor.config

    return torch._inductor.config


_USED = {
    "torch._functorch._aot_autograd.descriptors": ("InputMutationAOTOutput",),
    "torch._functorch._aot_autograd.graph_compile": ("collect_bw_donated_buffer_idxs",),
    "torch._functorch.config": ("donated_buffer", "enable_autograd_cache", "force_non_lazy_backward_lowering"),
    "torch._functorch.partitioners": ("min_cut_rematerialization_partition",),
    "torch._inductor.compile_fx": ("compile_fx", "compile_fx_inner"),
    "torch._inductor.config": ("custom_partitioner_fn", "post_grad_custom_post_pass"),
    "torch._inductor.custom_graph_pass": ("CustomGraphPass", "CustomPartitionerFn"),
    "torch._inductor.ir": ("ExternKernel.require_exact_strides", "FlexibleLayout.stride_ordered_for_memory_format"),
    "torch._inductor.lowering": ("fallback_handler", "lowerings", "register_lowering"),
}
"""The compiler's names that are used here, by module."""


@functools.cache
def lacking_in_compiler() -> str:
    """The first of the compiler's used names that is missing; empty if none is. Imports the compiler: seconds.

    It does not check the form of generated code: if code cannot be read, no unpack is deferred.
    """
    for module, names in _USED.items():
        try:
            found: Any = importlib.import_module(module)
        except ImportError:
            return module
        for name in names:
            try:
                operator.attrgetter(name)(found)
            except AttributeError:
                return f"{module}.{name}"
    return ""


def counts_as(kind: type, what: Literal["CustomPartitionerFn", "CustomGraphPass"]) -> None:
    """Has Inductor accept the class as a partitioner, or as passes that its caches know. It loads Inductor."""
    import torch._inductor.custom_graph_pass

    getattr(torch._inductor.custom_graph_pass, what).register(kind)


def takes_several_passes() -> bool:
    """Whether a setting of passes accepts a list of them, and not only one."""
    import torch._inductor.custom_graph_pass

    return hasattr(torch._inductor.custom_graph_pass, "get_custom_graph_passes")


def stock_partition(joint: Any, inputs: Any, **kwargs: Any) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Inductor's default split of a joint graph: the forward, and the backward."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def compile_with_inductor(graph: Any, inputs: Any, lower: Callable[..., Any], settings: dict[str, Any]) -> Any:
    """The result of Inductor's backend for a graph under these settings; ``lower`` makes code of each half of it.

    Saved tensors are not donated to the backward: it would write into placeholders. The backward is lowered together
    with its forward, and not when it first runs, because its deferred unpacks must be known before.
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
    """The callable, with a list of its arguments that it may empty."""
    setattr(run, "_boxed_call", True)  # noqa: B010
    return run


@contextlib.contextmanager
def not_lowered(run: Callable[..., Any], partitioner: Any) -> Iterator[None]:
    """A block in which Inductor splits graphs by ``partitioner`` and generates no code for the halves: ``run`` returns
    the callable that is used instead. Results compiled meanwhile are in no cache.
    """
    import torch._inductor.compile_fx
    from torch._functorch import config

    inductor: Any = torch._inductor.compile_fx
    stock = inductor.compile_fx
    settings = {"custom_partitioner_fn": partitioner, "fx_graph_cache": False}

    def split(graph: Any, inputs: Any, inner_compile: Any = None, **kwargs: Any) -> Any:
        with config.patch(donated_buffer=False, enable_autograd_cache=False), inductor_settings().patch(settings):
            return stock(graph, inputs, inner_compile=run, **kwargs)  # this may call the function again

    inductor.compile_fx = split
    try:
        yield
    finally:
        inductor.compile_fx = stock


def lowered_as_output(op: Any) -> None:
    """Has Inductor lay out the first argument of ``op`` as it would lay out an output of the graph at the place of the
    op's result: in the graph's strides, or channels last. So no copy of the result is needed to change its layout.
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


def inductor_mode(mode: str) -> dict[str, Any]:
    """Inductor's settings for a mode of ``torch.compile``."""
    import torch._inductor

    return torch._inductor.list_mode_options(mode)


def compiled_by_inductor(graph: Any, inputs: Any, **kwargs: Any) -> Any:
    """The code of one graph without autograd."""
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner(graph, inputs, **kwargs)
