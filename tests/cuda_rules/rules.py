"""The dispatch mode below all others: results go onto the device, devices do not mix, accesses are noted."""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .functional import KERNELS, convolution_found_by_trying, on_host
from .memory import is_on_device

if TYPE_CHECKING:
    from .machine import Machine
    from .streams import Stream

aten = torch.ops.aten
_UNINITIALISED = {aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided}
_READS_BACK = {aten._local_scalar_dense, aten.equal, aten.nonzero, aten.is_nonzero, aten.masked_select, aten._unique2}
"""Ops that hold the host until their result is known."""
_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot}
_TAKES_HOST_TENSORS = {aten.set_, aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten.copy_}


_BACKWARD: set[Any] = set()
"""Code of the Python functions that call autograd's engine."""
_MOST_FRAMES = 7
"""Of one dispatch mode above this one, with what torch puts between."""


def runs_backward(function: Any) -> None:
    """What is asked for right below this function, the formulas of backward ask for."""
    _BACKWARD.add(function.__code__)


def _asked_by_a_formula() -> bool:
    """Whether no Python asked for this op, but for the modes that it has passed."""
    frame: Any = sys._getframe(2)
    steps = 0
    while frame is not None and steps < _MOST_FRAMES:
        if frame.f_code in _BACKWARD:
            return True
        steps = 0 if frame.f_code.co_name == "__torch_dispatch__" else steps + 1
        frame = frame.f_back
    return False


_ALONE = 4, 2
"""Uses of a tensor and of its storage, as an op finds them, where only autograd's buffer of gradients has it."""


def _is_added_in_place(func: Any, into: Any, *rest: Any) -> bool:
    """Whether autograd would add this gradient in place: a dispatch mode keeps it from that, and a GPU does not."""
    if func is not aten.add.Tensor or torch.is_grad_enabled() or not on_device(into) or len(rest) > 1:
        return False
    uses = into._use_count(), torch._C._storage_Use_Count(into.untyped_storage()._cdata)
    other = rest[0]
    is_alike = isinstance(other, torch.Tensor) and (other.shape, other.dtype) == (into.shape, into.dtype)
    return is_alike and into.is_contiguous() and uses == _ALONE


def _fills_bucket(kwargs: dict[str, Any]) -> bool:
    """Whether it writes into a bucket of data-parallel training, which C++ has made in host memory here."""
    return "out" in kwargs and not on_device(kwargs["out"])


def on_device(tensor: Any) -> bool:
    return _is_plain(tensor) and is_on_device(tensor.untyped_storage())


def _is_plain(tensor: Any) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


class Rules(TorchDispatchMode):
    """What CUDA does with an op, as far as it can be told from outside."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self._facts: dict[Any, tuple[bool, tuple[int | str, ...], bool]] = {}
        self._names: dict[tuple[Any, int], str] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # the product puts its modes above torch's own, and this is the hardware

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._machine.runs_backward and not kwargs and _is_added_in_place(func, *args):
            func = aten.add_.Tensor
        kwargs = dict(kwargs or {})
        tensors = _tensors_in(args)
        if kwargs:
            tensors += _tensors_in(kwargs.values())
        there = [tensor for tensor in tensors if on_device(tensor)]
        asked = kwargs.get("device")
        packet = getattr(func, "_overloadpacket", func)
        if asked is not None and asked.type == "cpu" and len(there) == len(tensors) and _asked_by_a_formula():
            asked = kwargs["device"] = self._machine.where  # the device of a tensor, which torch takes for the host
        if packet is aten.copy_ and self._is_transfer(args[0], args[1]):
            return self._transfer(args[0], args[1], bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else 0)))
        if packet is aten._to_copy and there and asked is not None and asked.type == "cpu":
            self._reads_back()
        elif there and packet not in _TAKES_HOST_TENSORS and not _fills_bucket(kwargs):
            self._refuse_to_mix(tensors)
        if asked is not None:
            if asked.type == "cuda":
                self._machine.is_asked(asked, f"{func} made a tensor in the memory")
            kwargs["device"] = torch.device("cpu") if asked.type == "cuda" else asked
        pins = kwargs.pop("pin_memory", None)
        is_there = asked.type == "cuda" if asked is not None else bool(there)
        if not is_there and not there:
            return self._pinned(func(*args, **kwargs)) if pins else func(*args, **kwargs)
        if packet in _READS_BACK:
            self._reads_back()
        stream = self._machine.current
        is_view, written, random = self._facts_of(func)
        if is_view:
            return func(*args, **kwargs)
        stream.catch_up()
        if packet in _PRODUCTS:
            self._machine.multiplies(stream)
        if self._machine.runs_backward and torch._C._current_autograd_node() is None:
            self._behind_all_before(stream, there)
        self._note(func, stream, there, [args[at] if isinstance(at, int) else kwargs.get(at) for at in written])
        if packet in _UNINITIALISED:
            return self._placed(self._unfilled(func, args, kwargs), stream, uninitialised=True)
        random = random and kwargs.get("generator") is None
        kernel = KERNELS.get(packet) or self._algorithm(func, packet)
        outputs = self._with_generator(kernel, args, kwargs) if random else kernel(*args, **kwargs)
        if not is_there or _fills_bucket(kwargs):
            return outputs
        placed = self._placed(outputs, stream, uninitialised=False)
        stays = on_host(packet, args, kwargs)
        return tuple(outputs[at] if at in stays else one for at, one in enumerate(placed)) if stays else placed

    def _algorithm(self, func: Any, packet: Any) -> Any:
        """cuDNN in benchmark mode: what another thread finds by trying is another algorithm."""
        if packet is aten.convolution and torch.backends.cudnn.benchmark and self._machine.runs_backward:
            return functools.partial(convolution_found_by_trying, func)
        return func

    def _facts_of(self, func: Any) -> tuple[bool, tuple[int | str, ...], bool]:
        """Whether it only makes a view, which of its arguments it writes, and whether it draws."""
        if func not in self._facts:
            schema = func._schema
            written = [
                argument.name if argument.kwarg_only else index
                for index, argument in enumerate(schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            aliases = any(result.alias_info is not None for result in schema.returns)
            draws = torch.Tag.nondeterministic_seeded in func.tags
            self._facts[func] = aliases and not written, tuple(written), draws
        return self._facts[func]

    def _refuse_to_mix(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if not on_device(tensor) and tensor.ndim > 0 and tensor.numel() > 0:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"{self._machine.where} and cpu!"
                )

    def _note(self, func: Any, stream: Stream, there: list[torch.Tensor], written: list[Any]) -> None:
        work = stream.begins()
        addresses = {tensor.untyped_storage().data_ptr() for tensor in _tensors_in(written)}
        seen: set[int] = set()
        size_bytes = 0
        for tensor in there:
            address = tensor.untyped_storage().data_ptr()
            if address and address not in seen:
                seen.add(address)
                size_bytes += tensor.nbytes
                what = self._names.get((func, stream.number))
                if what is None:
                    what = self._names[func, stream.number] = f"{func} on stream {stream.number}"
                self._machine.access(stream, work, address, what, writes=address in addresses)
        stream.op_runs(size_bytes)

    def _behind_all_before(self, stream: Stream, there: list[torch.Tensor]) -> None:
        """Autograd adds up gradients between nodes, and has streams wait for each other as that needs."""
        for tensor in there:
            block = self._machine.memory.block_at(tensor.untyped_storage().data_ptr())
            if block is not None:
                block.accesses.known_to(stream)

    def _with_generator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Random ops draw from the device's generator."""
        of_host, of_device = torch.default_generator, self._machine.generator
        before = of_host.get_state()
        of_host.set_state(of_device.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            of_device.set_state(of_host.get_state())
            of_host.set_state(before)

    def _unfilled(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Deterministic algorithms fill what is not initialised: another op, counted here. It is poisoned anyway."""
        settings: Any = torch.utils.deterministic  # type: ignore[attr-defined]
        fills, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
        try:
            outputs = func(*args, **kwargs)
        finally:
            settings.fill_uninitialized_memory = fills
        if fills and torch.are_deterministic_algorithms_enabled():
            self._machine.filled_bytes += sum(tensor.nbytes for tensor in _tensors_in([outputs]))
        return outputs

    # -- where results lie ------------------------------------------------------------------------------------

    def _placed(self, outputs: Any, stream: Stream, uninitialised: bool) -> Any:
        moved: dict[int, torch.UntypedStorage] = {}

        def place(leaf: Any) -> Any:
            if not _is_plain(leaf) or is_on_device(leaf.untyped_storage()):
                return leaf
            storage = leaf.untyped_storage()
            if storage._cdata not in moved:
                moved[storage._cdata] = self._on_device(storage, stream, uninitialised)
            empty = torch.empty(0, dtype=leaf.dtype)
            return empty.set_(moved[storage._cdata], leaf.storage_offset(), leaf.shape, leaf.stride())

        if isinstance(outputs, (tuple, list)):
            return type(outputs)(
                [place(one) for one in leaf] if isinstance(leaf, list) else place(leaf) for leaf in outputs
            )
        return place(outputs)

    def _on_device(self, storage: torch.UntypedStorage, stream: Stream, uninitialised: bool) -> torch.UntypedStorage:
        size_bytes = storage.nbytes()
        new = self._machine.memory.allocate(size_bytes, stream)
        if size_bytes and not uninitialised:
            self._machine.access(
                stream, stream.begins(), new.data_ptr(), f"an op on stream {stream.number}", writes=True
            )
            ctypes.memmove(new.data_ptr(), storage.data_ptr(), size_bytes)
        return new

    def _pinned(self, tensor: Any) -> Any:
        """torch's own pinned memory."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            address, memory = storage.data_ptr(), self._machine.host_memory
            memory.pinned[address] = storage.nbytes()
            weakref.finalize(storage, memory.unpin, address).atexit = False
        return tensor

    # -- between host and device ------------------------------------------------------------------------------

    def _is_transfer(self, to: torch.Tensor, source: torch.Tensor) -> bool:
        return _is_plain(to) and _is_plain(source) and on_device(to) is not on_device(source)

    def _transfer(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """Pinned ones are queued; all others hold the host until everything queued on the stream has run."""
        machine, stream = self._machine, self._machine.current
        there, here = (to, source) if on_device(to) else (source, to)
        whole = to.is_contiguous() and source.is_contiguous() and to.shape == source.shape and to.dtype == source.dtype
        if whole and non_blocking and to.nbytes and machine.host_memory.is_pinned(here.data_ptr()):
            machine.queue_copy(to.data_ptr(), source.data_ptr(), to.nbytes, stream)
            return to
        machine.blocking_copies += here.ndim > 0
        stream.catch_up()
        self._note(aten.copy_.default, stream, [there], [to])
        if not on_device(to):
            self._reads_back()
        return aten.copy_.default(to, source, False)

    def _reads_back(self) -> None:
        self._machine.reads += 1
        self._machine.current.synchronise()


def _tensors_in(leaves: Any) -> list[torch.Tensor]:
    """Arguments are tensors, lists of them, and what is neither."""
    found = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, (list, tuple)):
            found += [one for one in leaf if isinstance(one, torch.Tensor)]
    return found
