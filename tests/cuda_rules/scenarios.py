"""What the CUDA device goes through on the stand-in, each in a few copies; tells what was wrong."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch

from poochplan.runtime.devices import transfers  # a mutant may stand there
from poochplan.runtime.devices.cuda import CudaDevice
from poochplan.runtime.devices.pinned import PAGE_BYTES, PinnedMemory, cupy_or_none
from tests.cuda_rules.machine import WHERE, Machine, on_stand_in
from tests.runtime.adversarial import pinned_bytes

SIZE = 4096
Scenario = Callable[[Machine, CudaDevice], list[str]]


def filled(device: CudaDevice, number: int) -> torch.UntypedStorage:
    storage = device.allocate(SIZE)
    on(storage).fill_(number)
    return storage


def on(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=WHERE).set_(storage)


def overwrite() -> None:
    """Whoever gets the block writes into it."""
    for _ in range(3):
        torch.full((SIZE,), 255, dtype=torch.uint8, device=WHERE)


def wrong_if_not(number: int, storage: torch.UntypedStorage) -> list[str]:
    return [] if bool((on(storage) == number).all()) else [f"other bytes than {number} came back"]


def wrong_back(device: CudaDevice, number: int, offset: int = 0) -> list[str]:
    """What is wrong with what comes back from there."""
    back = device.allocate(SIZE)
    transfers.copy_in(device, back, offset).wait()
    return wrong_if_not(number, back)


def filled_aside(device: CudaDevice, number: int) -> tuple[torch.cuda.Stream, torch.UntypedStorage, object]:
    """A storage that was made on another stream; what the device has for that keeps it known."""
    side = torch.cuda.Stream(WHERE)
    with torch.cuda.stream(side):
        return side, filled(device, number), device.compute


def swapped(gpu: Machine, device: CudaDevice) -> list[str]:
    """Out, let go, overwritten, and back."""
    for number in range(3):
        transfers.copy_out(device, filled(device, number), number * SIZE).wait()
        overwrite()
    return [wrong for number in range(3) for wrong in wrong_back(device, number, number * SIZE)]


def both_ways(gpu: Machine, device: CudaDevice) -> list[str]:
    """A copy in is queued before the copy out is waited for: each has an end of its own."""
    transfers.copy_out(device, filled(device, 3), SIZE).wait()
    back = device.allocate(SIZE)
    out = transfers.copy_out(device, filled(device, 1), 0)
    into = transfers.copy_in(device, back, SIZE)
    out.wait()
    overwrite()
    into.wait()
    return [*wrong_if_not(3, back), *wrong_back(device, 1)]


def read_at_once(gpu: Machine, device: CudaDevice) -> list[str]:
    """A failed session reads what a queued copy has yet to write, and may hold the host for it."""
    torch.cuda._sleep(1000)
    out, back = transfers.copy_out(device, filled(device, 6), 0), device.allocate(SIZE)
    device.read(back, 0)
    gpu.blocking_copies = 0
    out.wait()
    return wrong_if_not(6, back)


def waited_for(gpu: Machine, device: CudaDevice) -> list[str]:
    """A copy that was waited for holds no memory."""
    copy = transfers.copy_out(device, filled(device, 1), 0)
    before = gpu.memory.allocated_bytes
    copy.wait()
    return [] if gpu.memory.allocated_bytes == before - SIZE else ["a copy holds what it has copied"]


def dropped(gpu: Machine, device: CudaDevice) -> list[str]:
    """Copies that nobody waits for and that alone hold their storages."""
    for copy in (transfers.copy_out, transfers.copy_in):
        copy(device, filled(device, 1), 0)
        overwrite()
    return []


def let_go_on_another_stream(gpu: Machine, device: CudaDevice) -> list[str]:
    side = torch.cuda.Stream(WHERE)
    copy = transfers.copy_out(device, filled(device, 7), 0)
    with torch.cuda.stream(side):
        copy.wait()
    del copy
    overwrite()
    return wrong_back(device, 7)


def saved_on_another_stream(gpu: Machine, device: CudaDevice) -> list[str]:
    """The copy is asked for on the main stream, which knows nothing of the one that wrote the value."""
    _, storage, home = filled_aside(device, 9)
    transfers.copy_out(device, storage, 0).wait()
    del home
    torch.cuda.synchronize()
    return wrong_if_not(9, storage)


def used_on_another_stream(gpu: Machine, device: CudaDevice) -> list[str]:
    """A value came back on the main stream, an op of another one reads it, and its buffer is taken at once."""
    side = torch.cuda.Stream(WHERE)
    transfers.copy_out(device, filled(device, 5), 0).wait()
    back, home = device.allocate(SIZE), device.compute
    transfers.copy_in(device, back, 0).wait()
    with torch.cuda.stream(side):
        device.use(back, home)
        read = on(back).clone()
    del back
    overwrite()
    torch.cuda.synchronize()
    return wrong_if_not(5, read.untyped_storage())


def replayed_from_another_stream(gpu: Machine, device: CudaDevice) -> list[str]:
    """What a replay reads was written on another stream, and is written there again right behind it."""
    side, there, _home = filled_aside(device, 3)
    with device.replaying():
        again = on(there).clone()
    with torch.cuda.stream(side):
        on(there).fill_(4)
    torch.cuda.synchronize()
    return wrong_if_not(3, again.untyped_storage())


def replayed_in_vain(gpu: Machine, device: CudaDevice) -> list[str]:
    """A replay that raises has the streams wait for what it has queued all the same."""
    side, there, _home = filled_aside(device, 3)
    with contextlib.suppress(KeyError), device.replaying():
        on(there).clone()
        raise KeyError
    with torch.cuda.stream(side):
        on(there).fill_(4)
    return []


def trimmed(gpu: Machine, device: CudaDevice) -> list[str]:
    """Pages are given back while a copy of a dead value is queued, and those in use are not."""
    torch.cuda._sleep(1000)
    kept = transfers.copy_out(device, filled(device, 2), 4 * SIZE)
    transfers.copy_out(device, filled(device, 1), 4 * SIZE + PAGE_BYTES)
    device.trim_host([(0, 4 * SIZE + PAGE_BYTES)])
    found = [] if device._host.behind_bytes == PAGE_BYTES else ["the last page was not given back"]
    kept.wait()
    return [*found, *wrong_back(device, 2, 4 * SIZE)]


def pinned_ahead(gpu: Machine, device: CudaDevice) -> list[str]:
    """Of what a thread has pinned ahead nothing is left where pages are given back, and none where a plan comes."""
    found = []
    for comes in (lambda: device.trim_host([(0, 4 * SIZE)]), lambda: device.reserve_host(SIZE, PAGE_BYTES)):
        transfers.copy_out(device, filled(device, 1), 4 * SIZE).wait()
        for page in device._host._ahead:
            page.result()
        found += [] if device._host._ahead else ["none was pinned ahead"]
        comes()
        still = sum(gpu.host_memory.pinned.values()) - pinned_bytes(device._host)
        found += [f"{still} bytes that were pinned ahead are still there"] if still else []
    return found


def closed_while_pinning(gpu: Machine, device: CudaDevice) -> list[str]:
    transfers.copy_out(device, filled(device, 1), 4 * SIZE).wait()
    ahead = list(device._host._ahead)
    device.close()
    for page in ahead:  # one that the thread still pins would be seen only later
        if not page.cancelled():
            page.result()
    return [] if ahead else ["none is pinned ahead"]


def by_cupy(gpu: Machine, device: CudaDevice) -> list[str]:
    return [] if cupy_or_none() is None or device._memcpy is not None else ["CuPy is there and is not used"]


def grown(gpu: Machine, device: CudaDevice) -> list[str]:
    """A larger plan's bytes are pinned while values lie on the slab and on pages, and copies of others are queued."""
    torch.cuda._sleep(1000)
    kept = [transfers.copy_out(device, filled(device, number), (2 + number) * SIZE) for number in (1, 2)]
    dead = transfers.copy_out(device, filled(device, 3), 0)
    device._host.forget_ahead()  # a page that the thread pins meanwhile belongs to no value
    pinned = set(gpu.host_memory.pinned)
    device.reserve_host(PAGE_BYTES, 8 * SIZE)
    found = [] if pinned < set(gpu.host_memory.pinned) else ["other memory than before is pinned"]
    transfers.copy_out(device, filled(device, 4), 8 * SIZE + PAGE_BYTES - SIZE).wait()
    for number, offset in ((1, 3 * SIZE), (2, 4 * SIZE), (4, 7 * SIZE + PAGE_BYTES)):
        found += wrong_back(device, number, offset)
    for copy in (*kept, dead):
        copy.wait()
    return found


def retired(gpu: Machine, device: CudaDevice) -> list[str]:
    """The slab of a plan before is given back behind the last copy of it, and the one that is followed stays."""
    device.reserve_host(4 * SIZE, 4 * SIZE)
    torch.cuda._sleep(1000)
    left = transfers.copy_out(device, filled(device, 1), 0)
    kept = transfers.copy_out(device, filled(device, 2), 4 * SIZE)
    device.trim_host([(4 * SIZE, 8 * SIZE)])
    found = [] if pinned_bytes(device._host) == 4 * SIZE else ["the slab before was not given back"]
    for copy in (left, kept):
        copy.wait()
    return [*found, *wrong_back(device, 2, 4 * SIZE)]


def left_open(gpu: Machine, device: CudaDevice) -> list[str]:
    """The device is closed over copies that are queued, and twice."""
    copies = [transfers.copy_out(device, filled(device, 1), 0), transfers.copy_in(device, filled(device, 1), SIZE)]
    device.close()
    device.close()
    for copy in copies:
        copy.wait()
    still = [f"{size_bytes} bytes are still pinned" for size_bytes in gpu.host_memory.pinned.values()]
    return [*still, *(["a slab that was given back is still there"] if pinned_bytes(device._host) else [])]


def given_back(gpu: Machine, device: CudaDevice) -> list[str]:
    """Pinned memory goes with ``free``, though somebody still knows it."""
    before = len(gpu.host_memory.pinned)
    memory = PinnedMemory(SIZE, cupy_or_none())
    memory.free()
    memory.free()
    return [] if len(gpu.host_memory.pinned) == before else ["it is still pinned"]


SCENARIOS: tuple[Scenario, ...] = (
    swapped,
    both_ways,
    read_at_once,
    waited_for,
    dropped,
    let_go_on_another_stream,
    saved_on_another_stream,
    used_on_another_stream,
    replayed_from_another_stream,
    replayed_in_vain,
    trimmed,
    pinned_ahead,
    closed_while_pinning,
    by_cupy,
    grown,
    retired,
    left_open,
    given_back,
)


def complaints(scenarios: tuple[Scenario, ...] = SCENARIOS) -> Iterator[str]:
    """Of each scenario, with copies by CuPy and by torch."""
    for cupy in (True, False):
        for scenario in scenarios:
            with on_stand_in(cupy=cupy) as gpu, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    device = CudaDevice(WHERE)
                    device.reserve_host(4 * SIZE)
                    found = scenario(gpu, device)
                    device.close()
                except Exception as error:
                    found = [repr(error)]
                found += gpu.violations
                found += ["memory is still pinned"] if gpu.host_memory.pinned else []
                found += ["a copy has held the host"] if gpu.blocking_copies else []
            yield from (f"{scenario.__name__}: {one}" for one in found)
