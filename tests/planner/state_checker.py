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
            self._take_away(chunks, self._made_bytes(chunks))
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

    def _take_away(self, chunks: list[StateChunk], made_bytes: list[int]) -> None:
        """Streamed state takes the window alone: what is there while a chunk is stepped, and what is made of it."""
        queue = [number for number, chunk in enumerate(chunks) if chunk.streamed]
        for number, chunk in enumerate(chunks):
            before = sum(other < number for other in queue)
            there = range(before - 1, before + 2) if chunk.streamed else range(before - 2, before + 1)
            beside = sum(chunks[queue[j]].size_bytes for j in there if 0 <= j < len(queue))
            if self.optimizer_ops:
                self.window_bytes = max(self.window_bytes, beside + made_bytes[number])
            self.sizes.update(dict.fromkeys(self._values(chunk) if chunk.streamed else [], 0))

    def _made_bytes(self, chunks: list[StateChunk]) -> list[int]:
        """By chunk: most bytes that are made of its state at any op. They take nothing elsewhere."""
        of_chunk = [set(self._values(chunk)) for chunk in chunks]
        shares: dict[int, list[Fraction]] = {}
        made: dict[int, int] = {}  # temporary: the op that makes it
        for number in self.optimizer_ops:
            op = self.profile.ops[number]
            touched = [(one, self.profile.values[one].size_bytes) for one in {*op.inputs, *op.writes}]
            weights = [
                sum(
                    Fraction(size_bytes) * (1 if one in own else shares[made[one]][place] if one in made else 0)
                    for one, size_bytes in touched
                )
                for place, own in enumerate(of_chunk)
            ]
            if sum(weights):
                shares[number] = [weight / sum(weights) for weight in weights]
                new = [one for one in op.outputs if self.profile.values[one].kind.value == "temporary"]
                made.update({one: number for one in new if self.profile.values[one].size_bytes >= 65536})
        most = [0] * len(chunks)
        for number in shares:
            tick = self.profile.op_ticks[number]
            live = [one for one, maker in made.items() if maker <= number and self.profile.values[one].freed >= tick]
            for place in range(len(chunks)):
                parts = sum(
                    (self.rounded(self.profile.values[one].size_bytes) * shares[made[one]][place] for one in live),
                    self.profile.ops[number].workspace_bytes * shares[number][place],
                )
                most[place] = max(most[place], -(-parts.numerator // parts.denominator))
        self.sizes.update(dict.fromkeys(made, 0))
        for number in shares:
            self.workspace[number] = 0
        return most

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
