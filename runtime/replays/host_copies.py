"""Copies of what a replay reads and the step may still write: buffers, and small tensors from before the step.

In-core, nobody would need their old contents. A copy is made when the first recipe of the step reads the content. It is
used only if the version counter shows a write since. It takes no memory of the device.
"""

from __future__ import annotations

import ctypes

import torch

from poochplan.runtime.devices.pinned import small_buffer
from poochplan.tensors.storages import bytes_of
from poochplan.torch_private.tensor_internals import unseen_by_modes

MOST_BYTES = 1 << 24
"""Of a buffer that is copied in each step whose replays read it."""
MOST_OTHERS_BYTES = 1 << 20
"""Of another tensor from before the step."""
_ALIGNED = 64
"""Kernels choose by the position of their arguments in such a stretch of memory."""


class HostCopy:
    """The present contents of a storage, on the host."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._where, self._size_bytes = storage.device, storage.nbytes()
        if self._where.type == "cpu":
            self._memory = bytearray(self._size_bytes + _ALIGNED)
            begin, address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)), storage.data_ptr()
            self._offset = (address - begin) % _ALIGNED
            ctypes.memmove(begin + self._offset, address, self._size_bytes)
            return
        with unseen_by_modes():
            self._pinned = small_buffer(self._size_bytes)
            self._pinned.copy_(bytes_of(storage), non_blocking=True)

    def storage(self) -> torch.UntypedStorage:
        """A storage on the device with these contents; on the CPU the copy itself."""
        if self._where.type == "cpu":
            count, offset = self._size_bytes, self._offset
            found = torch.frombuffer(self._memory, dtype=torch.uint8, count=count, offset=offset)
            return found.untyped_storage()
        return self._pinned.to(self._where, non_blocking=True).untyped_storage()
