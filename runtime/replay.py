"""Replay: bringing a recomputed value back by running its recorded writers again, bitwise.

``docs/semantics.md`` says which ops run and what is freed when; the simulator follows the same rules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .arguments import outputs_of, unflatten
from .recorder import RecordedOp, Scratch, Slot, View

if TYPE_CHECKING:
    from .entry import Entry


Leaves = dict[tuple["Slot", int], torch.UntypedStorage]
"""What a replay starts from: the storage of each content that it does not build."""

WRITTEN_SINCE = "an input of the replay was written in place since it was read"


class NotReplayable(Exception):  # noqa: N818 - a verdict, caught where the recipe is made
    """A writer was not recorded, is opaque, or an input is gone; the value is swapped instead.

    ``slot``: the input that it is about, where it is about one.
    """

    def __init__(self, reason: str, slot: Slot | None = None) -> None:
        super().__init__(reason)
        self.slot = slot


class Closure:
    """All that a need comes to: the ops to run, the contents they start from, and the values they bring back."""

    def __init__(self) -> None:
        self.ops: dict[int, RecordedOp] = {}
        self.leaves: dict[tuple[Slot, int], Entry | None] = {}
        """Contents that are there already: saved values, or (None) what recording found in place."""
        self.rebuilt: dict[Slot, None] = {}
        self.targets: list[tuple[Slot, Entry]] = []
        """Saved values that wait for a replay themselves and are brought back along the way."""

    def in_order(self) -> list[RecordedOp]:
        return [self.ops[order] for order in sorted(self.ops)]


def closure_of(root: Slot, generation: int, *, follow_recipes: bool) -> Closure:
    """Follows ``need(root, generation)`` of ``docs/semantics.md`` to its end.

    With ``follow_recipes`` a saved input that waits for a replay is brought back too; without, it is a leaf.

    Raises ``NotReplayable`` when a writer of the root is missing or opaque, or an op on the way writes something
    that the replay does not own.
    """
    closure = Closure()
    pending, seen = [(root, generation)], set()
    while pending:
        need = slot, wanted = pending.pop()
        if need in seen:
            continue
        seen.add(need)
        entry = slot.entry_at(wanted) if slot is not root else None
        writers = slot.writers_up_to(wanted)
        if entry is not None and not (follow_recipes and entry.waits_for_replay):
            closure.leaves[need] = entry
            continue
        if entry is not None:
            closure.targets.append((slot, entry))
        if writers is None:
            if slot is root or entry is not None:
                raise NotReplayable("a writer of the value was not recorded or cannot be run again")
            if wanted != len(slot.writes):
                raise NotReplayable(WRITTEN_SINCE, slot)
            closure.leaves[need] = None
            continue
        closure.rebuilt[slot] = None
        for op in writers:
            closure.ops[op.order] = op
            # Of the slot itself an op reads what the writers before it left: they run anyway.
            pending += [(view.slot, view.generation) for view in op.views() if view.slot is not slot]
    if any(written not in closure.rebuilt for op in closure.ops.values() for written in op.writes):
        raise NotReplayable("an op of the replay writes into something it does not own")
    for op in closure.ops.values():
        for view in op.views():
            if not view.still_there:
                raise NotReplayable(WRITTEN_SINCE, view.slot)
    return closure


class Recipe:
    """What the replay of one value needs to stay, held from its save point until it is back.

    ``entries`` are saved values it reads (on the device, on the host, or recipes of their own); ``storages`` what was
    there before recording began: parameters, buffers, inputs.
    """

    __slots__ = ("__weakref__", "entries", "generation", "slot", "storages")

    def __init__(self, slot: Slot, generation: int) -> None:
        self.slot = slot
        self.generation = generation
        self.entries: list[Entry] = []
        self.storages: list[torch.UntypedStorage] = []
        self.refresh()

    def refresh_if_possible(self) -> None:
        """Like :meth:`refresh`; when something it reads was written meanwhile it keeps what it holds, and the replay
        will say so.
        """
        with contextlib.suppress(NotReplayable):
            self.refresh()

    def refresh(self) -> None:
        """Works out anew what has to stay; called again when a slot on the way has become a saved value."""
        closure = closure_of(self.slot, self.generation, follow_recipes=False)
        entries, storages = [], []
        for (slot, _), entry in closure.leaves.items():
            if entry is not None:
                entries.append(entry)
            else:
                storages.append(_storage_of(slot))
                slot.wait_for_entry(self)
        for slot in closure.rebuilt:
            if slot is not self.slot:
                slot.wait_for_entry(self)
        self.entries, self.storages = entries, storages


def _storage_of(slot: Slot) -> torch.UntypedStorage:
    storage = slot.storage()
    if storage is None:
        raise NotReplayable("an input of the replay is gone")
    return storage


def replay(
    entry: Entry,
    resident: Callable[[Entry], torch.UntypedStorage],
    run: Callable[[list[RecordedOp], Leaves, set[Slot], str], dict[Slot, torch.UntypedStorage]],
) -> list[Entry]:
    """Brings ``entry``, and every saved value on the way that waits for a replay, back onto the device.

    ``resident(other)`` gives the storage of a saved value that is not waiting for a replay, waiting for its copy;
    ``run`` is :func:`run_ops`, or calls it.
    Returns the saved values that came back. Raises ``RuntimeError`` as autograd would when an input was written in
    place after it was read.
    """
    try:
        closure = closure_of(entry.slot, entry.generation, follow_recipes=True)
        there = {
            need: _storage_of(need[0]) if source is None else resident(source)
            for need, source in closure.leaves.items()
        }
    except NotReplayable as reason:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"it is to be recomputed, and {reason}"
        ) from None
    targets = [(entry.slot, entry), *closure.targets]
    built = run(closure.in_order(), there, {slot for slot, _ in targets}, entry.device_type)
    for slot, target in targets:
        target.came_back(built[slot])
    return [target for _, target in targets]


def run_ops(
    ops: list[RecordedOp], there: Leaves, keep: set[Slot], device_type: str
) -> dict[Slot, torch.UntypedStorage]:
    """Runs the ops in order; returns the storages of the slots in ``keep``. Temporaries go after their last use."""
    last_use: dict[Slot, int] = {}
    for op in ops:
        for view in op.views():
            last_use[view.slot] = op.order
    built: dict[Slot, torch.UntypedStorage] = {}
    # No graph comes of it: what goes in is detached.
    with torch.autocast(device_type, enabled=False):
        for op in ops:
            with torch.set_grad_enabled(op.grad_enabled):
                outputs = _call(op, there, built)
            for position, slot in op.births:
                if slot in keep or last_use.get(slot, 0) > op.order:
                    built[slot] = outputs[position].untyped_storage()
            del outputs
            for slot in {view.slot for view in op.views()}:
                if last_use[slot] == op.order and slot not in keep:
                    built.pop(slot, None)
    return built


def _call(op: RecordedOp, there: Leaves, built: dict[Slot, torch.UntypedStorage]) -> list[Any]:
    def restore(argument: Any) -> Any:
        if isinstance(argument, View):
            # What the op writes is the replay's own, never a saved value.
            owned = argument.slot in op.writes
            storage = None if owned else there.get((argument.slot, argument.generation))
            return argument.geometry.on(built[argument.slot] if storage is None else storage)
        if isinstance(argument, Scratch):
            return torch.ones(argument.shape, dtype=argument.dtype, device=argument.device)
        return argument

    args, kwargs = unflatten([restore(argument) for argument in op.arguments], op.spec)
    if op.generator is None or op.state is None:
        return outputs_of(op.func(*args, **kwargs))
    now = op.generator.get_state()
    op.generator.set_state(op.state)
    try:
        return outputs_of(op.func(*args, **kwargs))
    finally:
        op.generator.set_state(now)
