"""Dispatch modes that can be switched on and off in the middle of a step, and kept away from compiled callables."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, SupportsIndex

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from poochplan.errors import UsageError
from poochplan.guard import Guard, guard_here, guarded_around, guarded_dispatch
from poochplan.torch_private.attributes import with_attributes
from poochplan.torch_private.compiler_internals import (
    call_attribute,
    dispatch_hidden_from_compiler,
    hidden_from_compiler,
    is_compiled,
    run_as_written,
)
from poochplan.torch_private.hooks import Hooks, as_given, stand_aside
from poochplan.torch_private.tensor_internals import (
    TorchDispatchMode,
    in_backward,
    is_in_transformed_op,
    is_no_step,
    is_scripted_module,
    mode_count,
    mode_stack,
    pop_mode,
    push_mode,
    topmost_mode,
    with_lazy_views,
)

from .operators import held_to_their_way


class ToggledMode(TorchDispatchMode):
    """A dispatch mode that is pushed and removed by calls, from inside hooks, in any order.

    It is below the modes of users, which pop the topmost when they end, and above torch's own (fake tensors). So users'
    modes see the same ops as without it, and it sees the ops that really run.

    States: *off* (not on the stack), *on*, and *muted* (on the stack, but passive). Both calls are idempotent. *Muted*
    exists because autograd runs each node of backward under the stack at the beginning of backward: a mode removed
    meanwhile comes back. So it is with an op inside a transform, and with a compiled function, behind which torch would
    call the removed mode. Inside these a mode that is off stays off. Subclasses check :attr:`is_on` in their
    ``__torch_dispatch__``, and run each op by :meth:`run_op`.
    """

    supports_higher_order_operators = True
    """``torch.cond`` and similar operators reach a mode as one op; without this they raise."""
    opens_compiled = False
    """Whether it is switched on inside compiled functions, and off again before they end."""

    def __init__(self) -> None:
        super().__init__()
        held_to_their_way()
        self._pushed = False
        self._muted = False
        self._comes_back = False
        self.guard: Guard | None = guard_here()
        if self.guard is not None:
            self.guard.modes.add(self)
        self.outcome: tuple[int, Any] | None = None
        """Of the op that runs, under a guard: 0 and its result, or the identity of its error; None before."""

    def run_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of the op that was dispatched."""
        if self.guard is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except BaseException as error:
            self.outcome = id(error), None
            raise
        self.outcome = 0, result
        return result

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__torch_dispatch__" in vars(cls):
            method = guarded_dispatch(dispatch_hidden_from_compiler(vars(cls)["__torch_dispatch__"]))
            method = with_lazy_views(method)
            setattr(cls, "__torch_dispatch__", method)  # noqa: B010

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch would wrap every __torch_dispatch__ in two calls that switch the compiler off and on; ours checks first.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise a compiled callable that is first called under this mode is never compiled (torch >= 2.9).
        return True

    @property
    def is_on(self) -> bool:
        return self._pushed and not self._muted

    def switch_on(self) -> None:
        """Puts the mode on the calling thread's stack. It works from the next op, or from the rest of this one."""
        self._muted = False
        if not self._pushed or not self._is_there():
            if is_in_transformed_op(or_compiled=not self.opens_compiled):
                self._muted = self._pushed
                self._comes_back = True
                return
            self._pushed = True
            self._comes()

    def switch_off(self) -> None:
        """Takes the mode off the calling thread's stack, at any position."""
        if not self.is_on:  # it is off or muted already: ``away`` must not switch it on again
            self._comes_back = False
        if not self._pushed:
            return
        is_restored = in_backward() or is_in_transformed_op(or_compiled=not self.opens_compiled)
        if is_restored or not self._is_there():
            self._muted = True
            return
        self._pushed = False
        self._goes()

    def _is_there(self) -> bool:
        """Whether the calling thread's ops reach it."""
        return self in mode_stack()

    def _comes(self) -> None:
        above = _users_modes()
        _take_off(above)
        _put_on([self, *above])

    def _goes(self) -> None:
        stack = mode_stack()
        above = stack[stack.index(self) + 1 :]
        _take_off([self, *above])
        _put_on(above)

    def leave_stack(self) -> None:
        """Switches the mode off if it is on the stack, also a muted one. Where :meth:`away` has taken it off, it comes
        back.
        """
        if self._pushed:
            self.switch_off()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """A block in which the mode is off. Afterwards it is as before, or as the last call meanwhile wanted it."""
        outer, self._comes_back = self._comes_back, self.is_on
        if self._comes_back:
            self.switch_off()
        try:
            yield
        finally:
            comes_back, self._comes_back = self._comes_back, outer
            if comes_back:
                self.switch_on()


def _users_modes() -> list[TorchDispatchMode]:
    """The modes of this thread above ours and torch's own, the lowest first."""
    stack = mode_stack()
    count = 0
    while count < len(stack) and not (isinstance(stack[-1 - count], ToggledMode) or stack[-1 - count].is_infra_mode()):
        count += 1
    return stack[len(stack) - count :]


def _take_off(topmost: list[TorchDispatchMode]) -> None:
    for _ in topmost:
        pop_mode()


def _put_on(modes: list[TorchDispatchMode]) -> None:
    for mode in modes:
        push_mode(mode)


_NONE: list[TorchDispatchMode] = []


class Unseen:
    """A block whose ops are not part of the step, so that users' modes do not see them. Ours and torch's own stay.

    A mode with a true attribute ``sees_poochplan`` stays too.
    """

    __slots__ = ("_hidden",)

    def __enter__(self) -> None:
        count = mode_count()
        if not count or isinstance(topmost_mode(count), ToggledMode):
            self._hidden = _NONE
            return
        self._hidden = _users_modes()
        if self._hidden:
            _here.hidden_modes += len(self._hidden)
            _take_off(self._hidden)
            _put_on([mode for mode in self._hidden if getattr(mode, "sees_poochplan", False)])

    def __exit__(self, *_: object) -> None:
        if self._hidden:
            _take_off(_users_modes())
            _put_on(self._hidden)
            _here.hidden_modes -= len(self._hidden)


class _Here(threading.local):
    hidden_modes = 0
    """Number of modes that blocks of :class:`Unseen` have removed."""
    compiled_depth = 0
    """Number of compiled callables of :func:`around_compiled` that it is inside."""


_here = _Here()


def is_dispatched_plainly() -> bool:
    """Whether no mode, not even a hidden one, sees the op that this thread runs."""
    return not mode_count() and not _here.hidden_modes


def uncompiled_hooks(
    pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor], before: Callable[..., Hooks] = as_given
) -> torch.autograd.graph.saved_tensors_hooks:
    """Saved-tensors hooks that the compiler does not look into when compiled code calls them. Attributes of the tensors
    come back with them. ``before`` gives what autograd calls in their place, without these two.
    """
    pack, unpack = with_attributes(hidden_from_compiler(pack), hidden_from_compiler(unpack))
    run_as_written(pack, unpack)
    return torch.autograd.graph.saved_tensors_hooks(*before(pack, unpack))


@contextlib.contextmanager
def hooked(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Iterator[None]:
    """A block under these hooks. They are off where its code forbids hooks: there autograd keeps what is saved."""
    hooks = uncompiled_hooks(pack, unpack)
    with stand_aside(hooks), hooks:
        yield


def compiled_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The outermost modules of ``model`` that ``torch.compile`` has wrapped, by path."""
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        if is_compiled(module) and not inside(name, found):
            found[name] = module
    return found


def inside(name: str, roots: dict[str, torch.nn.Module]) -> bool:
    """Whether the module path ``name`` is one of ``roots`` or is below one."""
    return any(root in ("", name) or name.startswith(root + ".") for root in roots)


AroundCall = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Returns the callable that replaces a compiled callable, which is given with its path."""


def unseen_by(mode: ToggledMode, around_call: AroundCall) -> AroundCall:
    """Wraps a compiled callable by ``around_call``; the mode is off while it runs."""

    def wrap(path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def unseen(*args: Any, **kwargs: Any) -> Any:
            run = around_call(path, call)
            with mode.away():
                return run(*args, **kwargs)

        return unseen

    return wrap


@contextlib.contextmanager
def around_compiled(model: torch.nn.Module, wrap: AroundCall) -> Iterator[None]:
    """A block in which ``wrap(path, call)`` replaces each compiled callable of ``model``.

    A compiled module gets no hook: hooks are part of the compiled code, and adding one compiles it again.
    """
    with contextlib.ExitStack() as stack:
        for name, module in compiled_modules(model).items():
            attribute = call_attribute(module)
            stack.callback(_restore, module, attribute, module.__dict__.get(attribute))
            original = getattr(module, attribute)
            run = guarded_around(partial(wrap, name))(_noticed(original))
            object.__setattr__(module, attribute, _untraced(run, original))
        yield


def _untraced(call: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """``call``; ``original`` where the compiler traces code around it."""

    def untraced(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if torch.compiler.is_compiling() else call(*args, **kwargs)

    return untraced


def in_compiled_call() -> bool:
    """Whether this thread is inside a compiled callable of :func:`around_compiled`."""
    return _here.compiled_depth > 0


def _noticed(call: Callable[..., Any]) -> Callable[..., Any]:
    def noticed(*args: Any, **kwargs: Any) -> Any:
        _here.compiled_depth += 1
        try:
            return call(*args, **kwargs)
        finally:
            _here.compiled_depth -= 1

    return noticed


OptimizerHook = Callable[[torch.optim.Optimizer], None]
Begins = Callable[[tuple[Any, ...], dict[str, Any]], object]
Ends = Callable[[Any], object]


@contextlib.contextmanager
def around_calls(model: torch.nn.Module, begins: Begins | None = None, ends: Ends | None = None) -> Iterator[None]:
    """Calls ``begins(args, kwargs)`` before each call of ``model`` for the length of a block, and ``ends(result)``
    after it. The result is None if the call raised; after an interrupt ``ends`` is not called. A call that is exported,
    traced or transformed calls neither.

    It uses hooks, which do nothing in a graph that is compiled of the code around the model. If the model itself is
    compiled, it wraps its callable. If it is entered after another :func:`around_compiled`, its call comes first.
    Copies, pickles and exports of the model do not carry it: torch leaves out the attribute through which a compiled
    module is called, and the hooks are left out here.
    """
    if "" in compiled_modules(model):
        with around_compiled(model, lambda _, call: _told(call, begins, ends)):
            yield
        return
    begun = hidden_from_compiler(begins) if begins is not None else None
    ended = hidden_from_compiler(ends) if ends is not None else None
    guard = guard_here()

    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        try:
            if begun is not None and not torch.compiler.is_compiling() and not is_no_step():
                begun(args, kwargs)
        except BaseException as error:
            if guard is None or not guard.takes(error):
                raise

    def behind(module: torch.nn.Module, args: Any, result: Any) -> None:
        try:
            if ended is not None and not torch.compiler.is_compiling() and not is_no_step():
                ended(result)
        except BaseException as error:
            if guard is None or not guard.takes(error):
                raise

    if is_scripted_module(model):
        raise UsageError(
            "model: expected one that takes hooks, found TorchScript (torch.jit.script or load) as a whole; give a "
            "module that contains it, such as torch.nn.Sequential(model), and call that"
        )
    with contextlib.ExitStack() as stack:
        if begins is not None:
            handle = stack.enter_context(model.register_forward_pre_hook(before, with_kwargs=True))
            stack.enter_context(left_out_of_copies(handle))
        if ends is not None:
            handle = stack.enter_context(model.register_forward_hook(behind, always_call=True))
            stack.enter_context(left_out_of_copies(handle))
        yield


def _told(call: Callable[..., Any], begins: Begins | None, ends: Ends | None) -> Callable[..., Any]:
    def told(*args: Any, **kwargs: Any) -> Any:
        if begins is not None:
            begins(args, kwargs)
        if ends is None:
            return call(*args, **kwargs)
        try:
            result = call(*args, **kwargs)
        except Exception:
            ends(None)
            raise
        ends(result)
        return result

    return told


@contextlib.contextmanager
def around_optimizer_steps(model: torch.nn.Module, before: OptimizerHook, after: OptimizerHook) -> Iterator[None]:
    """In a block, calls ``before`` and ``after`` around each step of an optimizer with a parameter of ``model``."""

    known = weakref.WeakSet[torch.optim.Optimizer]()  # one for each parameter would look through the model as often
    guard = guard_here()

    def is_of_model(optimizer: torch.optim.Optimizer) -> bool:
        if optimizer not in known:
            own = set(map(id, model.parameters()))
            if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
                return False
            known.add(optimizer)
        return True

    def told(tell: OptimizerHook) -> Callable[[torch.optim.Optimizer, Any, Any], None]:
        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            try:
                if not torch.compiler.is_compiling() and is_of_model(optimizer):
                    tell(optimizer)
            except BaseException as error:
                if guard is None or not guard.takes(error):
                    raise

        return hook

    handles = register_optimizer_step_pre_hook(told(before)), register_optimizer_step_post_hook(told(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def behind_backward(action: Callable[[], object]) -> None:
    """Calls ``action`` once on this thread: at the next step of an optimizer, or call of a module, outside backward.

    For what autograd brings back with its thread's state when the backward pass ends.
    """
    thread = threading.get_ident()

    @hidden_from_compiler
    def told(*_: object) -> None:
        if threading.get_ident() == thread and not in_backward():
            for handle in handles:
                handle.remove()
            handles.clear()
            action()

    handles = [register_optimizer_step_pre_hook(told), register_module_forward_pre_hook(told)]


@contextlib.contextmanager
def left_out_of_copies(handle: RemovableHandle) -> Iterator[None]:
    """A block in which copies of a module do not get the hook of this handle. The hook is removed at its end."""
    with handle, contextlib.ExitStack() as stack:
        for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
            stack.enter_context(_CopiesWithout.on(reference(), handle.id))
        yield


class _CopiesWithout:
    """Replaces two methods of one dictionary of hooks: ``__reduce_ex__``, which copying and pickling call, and
    ``values``, by which TorchScript finds what it compiles. A call of the module reads ``items``.

    They are attributes of the dictionary itself, because users' handles refer to that. A copy is a plain ordered
    dictionary without ``left_out``.
    """

    def __init__(self, hooks: OrderedDict[int, Any]) -> None:
        self.hooks = hooks
        self.left_out: set[int] = set()

    def __call__(self, protocol: SupportsIndex) -> Any:
        return self._others().__reduce_ex__(protocol)

    def values(self) -> Any:
        return self._others().values()

    def _others(self) -> OrderedDict[int, Any]:
        return OrderedDict((number, hook) for number, hook in self.hooks.items() if number not in self.left_out)

    @classmethod
    @contextlib.contextmanager
    def on(cls, hooks: Any, number: int) -> Iterator[None]:
        """A block in which copies do not get the hook of that number."""
        copies = vars(hooks).setdefault("__reduce_ex__", cls(hooks))
        vars(hooks)["values"] = copies.values
        copies.left_out.add(number)
        try:
            yield
        finally:
            copies.left_out.discard(number)
            if not copies.left_out:
                vars(hooks).pop("__reduce_ex__", None)
                vars(hooks).pop("values", None)


def _restore(module: torch.nn.Module, attribute: str, original: Any) -> None:
    if original is None:
        module.__dict__.pop(attribute, None)
    else:
        object.__setattr__(module, attribute, original)
