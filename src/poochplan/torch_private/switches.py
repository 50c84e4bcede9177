"""Global switches of torch that decide which kernel an op runs, with which bits: read where an op is recorded, and set
again where it is replayed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import torch

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


_DETERMINISTIC = _Switch(
    _C._get_deterministic_algorithms,
    lambda is_on: _C._set_deterministic_algorithms(is_on, warn_only=_C._get_deterministic_algorithms_warn_only()),
)
_ALWAYS = (
    _DETERMINISTIC,
    _Switch(torch.get_default_dtype, torch.set_default_dtype),
    _Switch(_matmul_precision, _set_matmul_precision),
)
"""Of every type of device."""
_OF = {
    "cpu": (
        _Switch(torch.get_num_threads, torch.set_num_threads),
        *(one for op in ("conv", "rnn", "matmul") for one in _precision("mkldnn", op)),
        *_flags("mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled", "deterministic_algorithms_warn_only"),
    ),
    "cuda": (
        *(one for op in ("conv", "rnn", "matmul") for one in _precision("cuda", op)),
        *_flags("cudnn_enabled", "cudnn_deterministic", "cudnn_benchmark"),
        *_flags("cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction"),
        *_flags("cublas_allow_fp16_accumulation", "blas_preferred_backend", "linalg_preferred_backend"),
        *(one for name in ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp") for one in _sdp(name)),
    ),
}


class SwitchState(NamedTuple):
    """How switches are."""

    switches: tuple[_Switch, ...]
    values: tuple[Any, ...]


def state_now(kind: str) -> SwitchState:
    """How all switches of a type of device are now. Equal states are one object."""
    switches = (*_ALWAYS, *_OF.get(kind, ()))
    return _one_object(SwitchState(switches, tuple([switch.get() for switch in switches])))


@functools.cache
def _one_object(state: SwitchState) -> SwitchState:
    return state


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
