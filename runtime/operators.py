"""What the capture and the recorder need to know of an operator, from its schema and a few lists."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

# Allocations whose contents nobody has written yet: what is done to them outside the dispatcher is not seen.
_UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "set_"}
)
# Fresh-looking outputs that lie on their input's storage without saying so in the schema.
_UNDECLARED_VIEWS = frozenset({"_unsafe_view", "_reshape_alias", "lift_fresh", "detach", "alias"})
# Change their running statistics (these argument positions) without declaring it, or as a side effect of the forward.
_RUNNING_STATISTICS = {
    "native_batch_norm": (3, 4),
    "_native_batch_norm_legit": (3, 4),
    "_batch_norm_with_update": (3, 4),
    "cudnn_batch_norm": (3, 4),
    "miopen_batch_norm": (3, 4),
}


class Traits(NamedTuple):
    """Facts about one operator overload."""

    name: str
    """For example ``aten.convolution.default``."""
    pure_view: bool
    """Takes no memory and writes nothing: left out of profile and recording."""
    written: tuple[int, ...]
    """Positions of the arguments it declares to write."""
    written_names: frozenset[str]
    """The same arguments by name, for those passed by keyword."""
    statistics: tuple[int, ...]
    """Positions of running statistics that a replay must not change again."""
    random: bool
    uninitialised: bool


@functools.cache
def traits(func: Any) -> Traits:
    """Facts about an ``OpOverload``; anything else (a higher-order operator) counts as opaque."""
    if not isinstance(func, torch._ops.OpOverload):
        return Traits(str(func), False, (), frozenset(), (), False, True)
    schema = func._schema
    base = schema.name.split("::")[-1]
    written = [
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    aliases = bool(schema.returns) and all(
        result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
    )
    return Traits(
        name=str(func),
        pure_view=not written and (aliases or base in _UNDECLARED_VIEWS),
        written=tuple(position for position, _ in written),
        written_names=frozenset(name for _, name in written),
        statistics=_RUNNING_STATISTICS.get(base, ()),
        random=torch.Tag.nondeterministic_seeded in func.tags,
        uninitialised=base in _UNINITIALISED,
    )
