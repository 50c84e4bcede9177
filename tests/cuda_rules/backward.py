"""Autograd's device thread: backward runs on a thread of its own, each node on the stream of its forward."""

from __future__ import annotations

import bisect
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from .rules import on_device, runs_backward
from .streams import Stream

if TYPE_CHECKING:
    from .machine import Machine

_NO_NUMBER = (1 << 63) - 1
"""Nodes that accumulate gradients have a number above all others."""


class DeviceThread:
    """One thread, from the beginning to the end of :meth:`running`. It has the caller's dispatch modes, as torch's."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name="stand-in autograd", daemon=True)

    @contextlib.contextmanager
    def running(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def on_the_thread(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is self.thread or not any(on_device(one) for one in outputs):
                return run(outputs, *args, **kwargs)  # backward within backward stays on its thread
            return self._call(lambda: run(outputs, *args, **kwargs), outputs)

        runs_backward(run)
        patch.setattr(torch.autograd, "_engine_run_backward", on_the_thread)
        self.thread.start()
        try:
            yield
        finally:
            self._jobs.put(None)
            self.thread.join()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job

    def _call(self, run: Callable[[], Any], outputs: Any) -> Any:
        modes, caller = _get_current_dispatch_mode_stack(), self._machine.current
        results: list[Any] = []
        done = threading.Event()

        def job() -> None:
            try:
                with contextlib.ExitStack() as stack:
                    for mode in modes:
                        TorchDispatchMode.__enter__(mode)
                        stack.callback(TorchDispatchMode.__exit__, mode, None, None, None)
                    stack.enter_context(self._on_streams(outputs, caller))
                    results.append((run(), None))
            except BaseException as error:
                results.append((None, error))
            finally:
                done.set()

        self._jobs.put(job)
        done.wait()
        found, error = results[0]
        if error is not None:
            raise error
        return found

    @contextlib.contextmanager
    def _on_streams(self, outputs: Any, caller: Stream) -> Iterator[None]:
        """Each node on its forward's stream, behind those whose gradients it takes; the caller's waits for the last."""
        machine = self._machine
        machine._thread.stream, machine._thread.backward = caller, True
        if len({stream for _, stream in machine.switches}) < 2:
            yield
            return
        used: set[Stream] = {caller}
        waits: dict[Any, set[Stream]] = {}
        handles: list[Any] = []
        for node in _nodes(outputs):
            before, behind = self._hooks(node, waits, used, caller)
            handles.append(node.register_prehook(before))
            handles.append(node.register_hook(behind))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for stream in used - {caller}:
                caller.wait_for(stream.mark())

    def _hooks(
        self, node: Any, waits: dict[Any, set[Stream]], used: set[Stream], caller: Stream
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        machine = self._machine

        def before(gradients: tuple[Any, ...]) -> None:
            stream = self._stream_of(node)
            machine._thread.stream = stream
            used.add(stream)
            for other in waits.pop(node, {caller}) - {stream}:
                stream.wait_for(other.mark())
            for gradient in gradients:
                block = machine.memory.block_at(gradient.untyped_storage().data_ptr()) if on_device(gradient) else None
                if block is not None and block.stream is not stream:
                    block.recorded.add(stream)

        def behind(*_: Any) -> None:
            for following, _ in node.next_functions:
                if following is not None:
                    waits.setdefault(following, set()).add(machine.current)

        return before, behind

    def _stream_of(self, node: Any) -> Stream:
        """That which was current when the node was made; one that accumulates stays where its gradient is."""
        number, switches = int(node._sequence_nr()), self._machine.switches
        if number >= _NO_NUMBER or number < 0:
            return self._machine.current
        index = bisect.bisect_right([first for first, _ in switches], number) - 1
        return switches[index][1] if index >= 0 else self._machine.default_stream


def _nodes(outputs: Any) -> list[Any]:
    found: list[Any] = []
    pending = [one.grad_fn for one in outputs if one.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        found.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return found
