"""An independent judge of optimizer state in a plan: bytes and seconds, from ``docs/optimizer-state.md`` alone."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache

from poochplan.formats.plan import Plan, StateChunk
from poochplan.formats.profile import Profile


class StreamedState:
    """What the plan's chunks make of a step: the bytes of values and ops, those of the window, the seconds of ops."""

    def __init__(self, profile: Profile, plan: Plan, rounded: Callable[[int], int]) -> None:
        self.profile, self.rounded = profile, rounded
        self.seconds = [op.duration_s for op in profile.ops]
        self.sizes = {number: value.size_bytes for number, value in enumerate(profile.values)}
        self.workspace = [op.workspace_bytes for op in profile.ops]
        self.window_bytes = 0
        self.optimizer_ops = [n for n, op in enumerate(profile.ops) if op.phase.value == "optimizer"]
        own: dict[int, list[StateChunk]] = {}
        for chunk in plan.state:
            own.setdefault(chunk.optimizer, []).append(chunk)
        for number, chunks in own.items():
            self._check(number, chunks)
            self._take_away(chunks)
            self._shrink(chunks)
        added_s = sum(self._phase_s(chunks) - self._own_s(chunks) for chunks in own.values())
        if self.optimizer_ops:
            self.seconds[self.optimizer_ops[-1]] += added_s

    def _values(self, chunk: StateChunk) -> list[int]:
        parameters = self.profile.optimizers[chunk.optimizer].parameters
        return [value for place in range(chunk.first, chunk.first + chunk.count) for value in parameters[place]]

    def _state_bytes(self, values: list[int]) -> int:
        return sum(self.rounded(self.profile.values[value].size_bytes) for value in values)

    def _check(self, number: int, chunks: list[StateChunk]) -> None:
        optimizer = self.profile.optimizers[number]
        places = [place for chunk in chunks for place in range(chunk.first, chunk.first + chunk.count)]
        assert places == list(range(len(optimizer.parameters))), "each parameter in one chunk, in order"
        assert optimizer.separable or len(chunks) == 1, "one chunk, as it cannot be cut"
        assert any(chunk.streamed for chunk in chunks), "some of it is streamed"
        assert all(chunk.size_bytes == self._state_bytes(self._values(chunk)) for chunk in chunks), "sizes"
        for values in map(self._values, chunks):
            assert all(self.profile.values[value].kind.value == "optimizer_state" for value in values), "state alone"

    def _take_away(self, chunks: list[StateChunk]) -> None:
        """Streamed state takes the window alone: what is there beside a chunk are the one before and the one after."""
        sizes = [chunk.size_bytes for chunk in chunks if chunk.streamed]
        if self.optimizer_ops:
            beside = [sizes[max(0, j - 1) : j + 2] for j in range(len(sizes))]
            self.window_bytes = max([self.window_bytes, *map(sum, beside)])
        for chunk in chunks:
            self.sizes.update(dict.fromkeys(self._values(chunk) if chunk.streamed else [], 0))

    def _shrink(self, chunks: list[StateChunk]) -> None:
        """What an op makes of the state of several chunks, or of what was made of it, is of one chunk at a time."""
        share = Fraction(max(one.size_bytes for one in chunks), sum(one.size_bytes for one in chunks))
        of_chunk = [set(self._values(chunk)) for chunk in chunks]
        made = set[int]()
        for number in self.optimizer_ops:
            op = self.profile.ops[number]
            touched = {*op.inputs, *op.writes}
            if touched & made or sum(bool(touched & values) for values in of_chunk) > 1:
                new = [one for one in op.outputs if self.profile.values[one].kind.value == "temporary"]
                made.update(new)
                self.sizes.update({one: _part(self.sizes[one], share) for one in new})
                self.workspace[number] = _part(self.workspace[number], share)

    # -- seconds ----------------------------------------------------------------------------------------------

    def _own_s(self, chunks: list[StateChunk]) -> float:
        parameters = [own for optimizer in self.profile.optimizers for own in optimizer.parameters]
        all_bytes = sum(self._state_bytes(list(own)) for own in parameters)
        all_s = sum(self.profile.ops[number].duration_s for number in self.optimizer_ops)
        return all_s * sum(chunk.size_bytes for chunk in chunks) / all_bytes

    def _phase_s(self, chunks: list[StateChunk]) -> float:
        """When the last of all copies and steps is done: each begins when all that it waits for is done."""
        own_s, link = self._own_s(chunks), self.profile.link
        if not self.optimizer_ops:
            return own_s
        throttle = link.throttle_bytes_per_s or float("inf")
        steps = [number for number, chunk in enumerate(chunks) if chunk.streamed]
        whole = sum(chunk.size_bytes for chunk in chunks)

        def copy_s(way: str, j: int) -> float:
            one = getattr(link, way)
            rate = min(one.bandwidth_bytes_per_s, throttle)
            return (one.latency_s + chunks[steps[j]].size_bytes / rate) / link.duplex

        @cache
        def stepped_s(number: int) -> float:
            if number < 0:
                return 0.0
            begins_s = stepped_s(number - 1)
            if number in steps:
                j = steps.index(number)
                begins_s = max(begins_s, is_in_s(j), is_out_s(j - 2))
            return begins_s + own_s * chunks[number].size_bytes / whole

        @cache
        def is_in_s(j: int) -> float:
            if j == 0:
                return copy_s("inward", 0)
            queued_s = max(stepped_s(steps[j - 1] - 1), is_out_s(j - 3))
            return max(queued_s, is_in_s(j - 1)) + copy_s("inward", j)

        @cache
        def is_out_s(j: int) -> float:
            return 0.0 if j < 0 else max(stepped_s(steps[j]), is_out_s(j - 1)) + copy_s("outward", j)

        return max(stepped_s(len(chunks) - 1), is_out_s(len(steps) - 1))


def _part(size_bytes: int, share: Fraction) -> int:
    whole = size_bytes * share
    return -(-whole.numerator // whole.denominator)
