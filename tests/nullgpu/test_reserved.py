"""What torch's own allocator reserves, beside the model of it and beside what plans say."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from poochplan.planner.arena.caching_allocator import CachingAllocator
from poochplan.torch_private.cuda_internals import set_allocator

WHERE = torch.device("cuda", 0)
MIB = 1 << 20
EXPANDING = pytest.mark.parametrize("is_expandable", [False, True], ids=["fixed segments", "expandable segments"])


@pytest.fixture
def segments(is_expandable: bool) -> Iterator[bool]:
    torch.cuda.empty_cache()
    set_allocator(f"expandable_segments:{is_expandable}")
    yield is_expandable
    torch.cuda.empty_cache()
    set_allocator("expandable_segments:False")


@EXPANDING
@pytest.mark.parametrize("seed", range(3))
def test_the_model_reserves_what_the_allocator_does(segments: bool, seed: int) -> None:
    """On a stream of its own, whose blocks no other stream gets, so that its segments are empty at first."""
    draw, model, held = random.Random(seed), CachingAllocator(is_expandable=segments), []
    before_bytes = torch.cuda.memory_reserved(WHERE)
    with torch.cuda.stream(torch.cuda.Stream(WHERE)):
        for _ in range(600):
            if held and draw.random() < 0.5:
                tensor, piece = held.pop(draw.randrange(len(held)))
                del tensor
                model.free(piece)
            else:
                size_bytes = draw.choice((draw.randint(1, MIB), draw.randint(MIB, 90 * MIB), draw.randint(1, 4096)))
                held.append((torch.empty(size_bytes, dtype=torch.uint8, device=WHERE), model.allocate(size_bytes)))
            assert torch.cuda.memory_reserved(WHERE) - before_bytes == model.reserved_bytes
