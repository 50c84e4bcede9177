"""Global switches of torch that decide which kernel an op runs, with which bits: read where an op is recorded, and set
again where it is replayed. Reading takes less than a microsecond, because an op has only those that concern it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

_C: Any = torch._C


class _Switch(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], None]


def _flag(name: str) -> _Switch:
    return _Switch(getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{name}"))


def _flags(*names: str) -> tuple[_Switch, ...]:
    """Those that this version of torch has."""
    return tuple(_flag(name) for name in names if hasattr(_C, f"_get_{name}") and hasattr(_C, f"_set_{name}"))


def _sdp(name: str) -> tuple[_Switch, ...]:
    get, put = getattr(_C, f"_get_{name}_enabled", None), getattr(_C, f"_set_sdp_use_{name.removesuffix('_sdp')}", None)
    return () if get is None or put is None else (_Switch(get, put),)


def _matmul_precision() -> str | None:
    try:
        return str(_C._get_float32_matmul_precision())
    except RuntimeError:  # set by the new names alone, which :func:`_precision` reads
        return None


def _set_matmul_precision(value: str | None) -> None:
    if value is not None:
        _C._set_float32_matmul_precision(value)


def _precision(backend: str, op: str) -> tuple[_Switch, ...]:
    get, put = getattr(_C, "_get_fp32_precision_getter", None), getattr(_C, "_set_fp32_precision_setter", None)
    if get is None or put is None:
        return ()

    def set_to(value: str) -> None:
        put(backend, op, "none")  # as the whole backend: it may have been so before
        if get(backend, op) != value:
            put(backend, op, value)

    return (_Switch(functools.partial(get, backend, op), set_to),)


_THREADS = _Switch(torch.get_num_threads, torch.set_num_threads)
_DETERMINISTIC = _Switch(
    _C._get_deterministic_algorithms,
    lambda is_on: _C._set_deterministic_algorithms(is_on, warn_only=_C._get_deterministic_algorithms_warn_only()),
)
_DTYPE = _Switch(torch.get_default_dtype, torch.set_default_dtype)
_MATMUL = _Switch(_matmul_precision, _set_matmul_precision)
_ONEDNN, _CUDNN = _flags("mkldnn_enabled"), _flags("cudnn_enabled")
_ALWAYS = {"cpu": (_THREADS, *_ONEDNN)}
"""Of every op."""
_OTHERS = (_DETERMINISTIC, _DTYPE)
"""Of ops that are not computed element by element."""
_NAMED = {
    ("cpu", "conv"): (_MATMUL, *_precision("mkldnn", "conv")),
    ("cpu", "rnn"): (_MATMUL, *_precision("mkldnn", "rnn"), *_precision("mkldnn", "matmul")),
    ("cpu", "mm"): (_MATMUL, *_precision("mkldnn", "matmul")),
    ("cuda", "conv"): (_MATMUL, *_CUDNN, *_precision("cuda", "conv")),
    ("cuda", "rnn"): (_MATMUL, *_CUDNN, *_precision("cuda", "rnn"), *_precision("cuda", "matmul")),
    ("cuda", "mm"): (_MATMUL, *_precision("cuda", "matmul")),
}
"""Of ops with this in their names."""
_MULTIPLY = "attention", "linear", "linalg", "matmul", "addmv", "addr", "dot", "cdist", "lu_", "cholesky", "triangular"
_SAME_AS = {"lstm": "rnn", "gru": "rnn"} | dict.fromkeys(_MULTIPLY, "mm")
_RARE = {
    "cpu": _flags("mkldnn_deterministic", "nnpack_enabled", "deterministic_algorithms_warn_only"),
    "cuda": (
        *_flags("cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction"),
        *_flags("cublas_allow_fp16_accumulation", "blas_preferred_backend", "linalg_preferred_backend"),
        *_flags("cudnn_deterministic", "cudnn_benchmark"),
        *(one for name in ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp") for one in _sdp(name)),
    ),
}
"""Read only when recording begins, because reading all takes several microseconds."""


class SwitchState(NamedTuple):
    """How switches are. Equal ones of a window are one object."""

    switches: tuple[_Switch, ...]
    values: tuple[Any, ...]


def state_now(kind: str) -> SwitchState:
    """How all switches of a type of device are now."""
    named = (switch for (of, _), switches in _NAMED.items() if of == kind for switch in switches)
    switches = tuple(dict.fromkeys((*_ALWAYS.get(kind, ()), *_OTHERS, *named, *_RARE.get(kind, ()))))
    return SwitchState(switches, tuple(switch.get() for switch in switches))


class SwitchReader:
    """State: the states of switches that a window of recording has met, and those that are read where it begins."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        rare = _RARE.get(kind, ())
        self._rare = SwitchState(rare, tuple(switch.get() for switch in rare))
        self._of: dict[str, tuple[tuple[Callable[[], Any], ...], dict[tuple[Any, ...], SwitchState]]] = {}
        """By the name of an op: the functions that read its switches, and the states met."""

    def now(self, name: str, func: Any) -> SwitchState:
        """How the switches that concern an op are now."""
        known = self._of.get(name)
        if known is None:
            known = self._of[name] = tuple(switch.get for switch in _switches_of(func, self._kind)), {}
        getters, states = known
        values = tuple([get() for get in getters])
        state = states.get(values)
        if state is None:
            switches = (*_switches_of(func, self._kind), *self._rare.switches)
            state = states[values] = SwitchState(switches, (*values, *self._rare.values))
        return state


@functools.cache
def _switches_of(func: Any, kind: str) -> tuple[_Switch, ...]:
    """The switches that concern an op on that type of device, without the rare ones."""
    found = dict.fromkeys(_ALWAYS.get(kind, ()))
    if not isinstance(func, OpOverload) or torch.Tag.pointwise not in func.tags:
        is_own = isinstance(func, OpOverload) and func.namespace == "aten"
        name = func._schema.name if is_own else "any of conv, rnn and mm"
        parts = (_SAME_AS.get(part, part) for part in ("conv", "rnn", "mm", *_SAME_AS) if part in name)
        found |= dict.fromkeys((*_OTHERS, *(one for part in parts for one in _NAMED.get((kind, part), ()))))
    return tuple(found)


class SwitchesAsRecorded(contextlib.AbstractContextManager["SwitchesAsRecorded"]):
    """A block in which :meth:`turn` sets switches. Behind it all are as before."""

    def __init__(self) -> None:
        self._same = set[int]()
        """States, by ``id``, that hold now; they live as long as their ops."""
        self._before: list[tuple[_Switch, Any]] = []

    def turn(self, state: SwitchState) -> None:
        """Sets the switches that are not as they were."""
        if id(state) in self._same:
            return
        for switch, value in zip(state.switches, state.values, strict=True):
            now = switch.get()
            if now != value:
                self._before.append((switch, now))
                self._same.clear()
                switch.set(value)
        self._same.add(id(state))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            switch, value = self._before.pop()
            switch.set(value)
