"""apply: a plan and a model in, a session out, inside which training steps follow the plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from ..errors import UsageError
from ..planner.schema import Plan
from ..profiler.schema import ALLOCATION_UNIT_BYTES
from .cpu import CpuDevice
from .engine import Engine
from .meter import LiveBytesMeter
from .modes import around_compiled, uncompiled_hooks
from .report import Report, StepReport
from .signature import check_model
from .storages import storage_key

_METERED_FIRST_STEPS = 2


def apply(
    plan: Plan,
    model: torch.nn.Module,
    *,
    spill_dir: str | Path | None = None,
    on_divergence: Literal["warn", "error"] = "warn",
    meter: Literal["first-steps", "always", "never"] = "first-steps",
) -> Session:
    """A session: within ``with apply(plan, model) as session:`` every training step of ``model`` follows the plan.

    Parameters
    ----------
    plan: made for this model; see :func:`poochplan.plan`.
    model: unmodified; hooks are put on it for the length of the block.
    spill_dir: directory of the spill file (CPU device); by default ``$POOCH_SPILL_DIR``, then a disk-backed
        temporary directory. About ``plan.prediction.host_bytes`` are used there.
    on_divergence: when a step is not the planned one, ``"warn"`` falls back to swapping every saved value,
        ``"error"`` raises :class:`~poochplan.errors.DivergenceError`.
    meter: when to meter the real peak of live bytes. It takes some 20 us per op; by default the first two steps, which
        differ (optimizer state) and after which every step is the same.

    Raises
    ------
    ModelMismatchError
        The plan is for another model; names the first parameter or buffer that differs.
    UsageError
        The plan is for a device this release does not run on.
    SpillError
        The spill directory cannot be used.
    """
    if on_divergence not in ("warn", "error"):
        raise UsageError(f'on_divergence: expected "warn" or "error", found {on_divergence!r}')
    if meter not in ("first-steps", "always", "never"):
        raise UsageError(f'meter: expected "first-steps", "always" or "never", found {meter!r}')
    if plan.device != "cpu":
        raise UsageError(f"this release runs plans on the cpu device, and this plan is for {plan.device}")
    check_model(plan.model, model, "plan")
    return Session(plan, model, spill_dir=spill_dir, on_divergence=on_divergence, meter=meter)


class Session:
    """A context manager. States: *new*, *open* (inside the block), *closed*.

    After the block handles that are still alive can be unpacked (backward outside the ``with``); the host tier is given
    back with the last of them.
    """

    def __init__(
        self,
        plan: Plan,
        model: torch.nn.Module,
        *,
        spill_dir: str | Path | None,
        on_divergence: str,
        meter: str,
    ) -> None:
        self.plan = plan
        self.model = model
        self._meter_when = meter
        self._meter = LiveBytesMeter(plan.device, ALLOCATION_UNIT_BYTES)
        self._total = StepReport()
        self._closed = False
        self._gradients_checked = False
        self._stack = ExitStack()
        self._device = CpuDevice(spill_dir, throttle_bytes_per_s=plan.link.throttle_bytes_per_s)
        self.engine = Engine(
            plan,
            self._device,
            self._static_storages,
            on_divergence=on_divergence,
            on_step_end=self._end_of_step,
            on_idle=self._idle,
        )

    def __enter__(self) -> Session:
        if self._closed:
            raise UsageError("this session has been closed; call apply(plan, model) for a new one")
        try:
            self._device.write_ahead(self.engine.host.planned_bytes)
        except OSError as error:
            warnings.warn(
                f"poochplan: the spill file in {self._device.file.directory} cannot hold the planned "
                f"{self.engine.host.planned_bytes} bytes ({error.strerror}); values that do not fit are kept",
                RuntimeWarning,
                stacklevel=2,
            )
        self._stack.callback(self.model.register_forward_pre_hook(self._forward_begins).remove)
        self._stack.enter_context(around_compiled(self.model, self._without_modes))
        self._stack.enter_context(uncompiled_hooks(self.engine.pack, self.engine.unpack))
        if self._meter_when != "never":
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                self._meter.watch(tensor)
            self._meter.switch_on()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.end_step()
        self._stack.close()
        self.report()
        self._meter.switch_off()
        self._closed = True
        if self.engine.live_handles == 0:
            self._device.close()

    def step(self) -> None:
        """Says that a new step begins here. Only needed when handles of an earlier forward are still alive."""
        self.engine.begin_step()

    def report(self) -> Report:
        """What the steps so far did; a step counts as ended when the next begins or nothing of it is held any more."""
        last = self.engine.stats
        self._take_peak(last)
        total = StepReport()
        total.add(self._total)
        if last.steps:
            total.add(last)
        return Report(
            last_step=last,
            total=total,
            predicted_peak_bytes=self.plan.prediction.peak_bytes,
            predicted_first_step_peak_bytes=self.plan.prediction.first_step_peak_bytes,
            budget_bytes=self.plan.budget_bytes,
        )

    # -- called by the engine and by torch --------------------------------------------------------------------

    def _forward_begins(self, module: torch.nn.Module, args: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1  # a checkpoint of the user's runs forward again there
        if torch.is_grad_enabled() and not in_backward and self.engine.live_handles == 0:
            self._check_gradients()
            self.engine.begin_step()

    def _end_of_step(self, stats: StepReport) -> None:
        self._take_peak(stats)
        self._total.add(stats)
        self._meter.restart()
        if self._meter_when == "first-steps" and self._total.steps >= _METERED_FIRST_STEPS:
            self._meter.switch_off()

    def _take_peak(self, stats: StepReport) -> None:
        if self._meter.is_on:
            stats.peak_bytes = self._meter.peak_bytes

    def _idle(self) -> None:
        if self._closed:
            self._device.close()

    def _static_storages(self) -> set[int]:
        return {storage_key(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())}

    def _check_gradients(self) -> None:
        if self._gradients_checked or self.plan.gradients_live_through_forward:
            return
        live = sum(p.grad.untyped_storage().nbytes() for p in self.model.parameters() if p.grad is not None)
        if live:
            self._gradients_checked = True
            warnings.warn(
                f"poochplan: gradients of an earlier step ({live} bytes) are still there in forward, the plan was made "
                "without; call optimizer.zero_grad(set_to_none=True) before the step, or profile with accumulate",
                RuntimeWarning,
                stacklevel=2,
            )

    def _without_modes(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def quiet(*args: Any, **kwargs: Any) -> Any:
            with self.engine.recorder.away(), self._meter.away():
                return call(*args, **kwargs)

        return quiet
