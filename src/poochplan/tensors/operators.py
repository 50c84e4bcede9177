"""What the capture and the recorder need to know of an operator, from its schema and a few lists."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from poochplan.torch_private.tensor_internals import OpOverload, schema_of

# Allocations whose contents nobody has written yet: what is done to them outside the dispatcher is not seen.
_UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "set_"}
)
# Write the whole of their argument without reading it, so that an uninitialised one is as good as any.
_OVERWRITING = frozenset(
    {"bernoulli_", "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"}
    | {"fill_", "zero_", "copy_"}
)
# Fresh-looking outputs that lie on their input's storage without saying so in the schema.
_UNDECLARED_VIEWS = frozenset({"_unsafe_view", "_reshape_alias", "lift_fresh", "detach", "alias"})
# Neither read nor write a tensor's content, whatever their schemas say.
_NOT_COMPUTE = frozenset({"prim::device", "aten::record_stream"})
# Change their running statistics without declaring it, or as a side effect of the forward; what they return in training
# does not depend on them. (Others that write without declaring it are found when their replay is verified.)
_BATCH_NORMS = frozenset(
    {"native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"}
    | {"cudnn_batch_norm", "miopen_batch_norm"}
    | {"batch_norm_update_stats", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"}
)
# Positions of outputs whose kernels leave some of their bytes unwritten, so that no two runs need give the same ones:
# oneDNN pads the rows of an LSTM's workspace, which only its own backward reads.
_PARTLY_UNWRITTEN = {"aten.mkldnn_rnn_layer.default": frozenset({3})}
# The same by the names that a schema has for them. Attention of CUDA writes the state of its generator where it drops,
# and else returns memory as it found it; what is called unused it never writes. (The efficient kernels pad their
# logsumexp with infinities, and cuDNN's state begins as zeros: these are bits like others.)
_NAMED_UNWRITTEN = {
    "_scaled_dot_product_flash_attention": frozenset({"rng_state", "unused", "philox_seed", "philox_offset"}),
    "_flash_attention_forward": frozenset({"rng_state", "unused", "philox_seed", "philox_offset"}),
    "_scaled_dot_product_efficient_attention": frozenset({"philox_seed", "philox_offset"}),
    "_efficient_attention_forward": frozenset({"philox_seed", "philox_offset"}),
}
# cuDNN's, whose algorithm ``torch.backends.cudnn.benchmark`` chooses by timing them, in each thread anew.
_CONVOLUTIONS = frozenset(
    {"convolution", "_convolution", "convolution_overrideable"}
    | {"cudnn_convolution", "cudnn_convolution_transpose", "cudnn_convolution_relu", "cudnn_convolution_add_relu"}
    | {"miopen_convolution", "miopen_convolution_transpose", "miopen_depthwise_convolution"}
)
# Operators of other namespaces (custom ones) may draw random numbers or write without saying so.
_KNOWN_NAMESPACES = ("aten", "prims")


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
    """Bears storages that nobody has written yet."""
    overwriting: bool
    """Writes the whole of its first argument without reading it."""
    trusted: bool
    """Does what its schema says, so that it can be run again."""
    partly_unwritten: frozenset[int] = frozenset()
    """Positions of outputs that are never bitwise the same; the others are."""
    may_write: bool = True
    """Whether a call may write an argument; where not, nothing has to be asked of it."""
    makes_alike: bool = False
    """Makes a tensor like its argument, whose content it does not read."""
    convolves: bool = False
    """Whether cuDNN may choose how it is computed by trying; see :func:`is_chosen_by_timing`."""


@functools.cache
def traits(func: Any) -> Traits:
    """Facts about an ``OpOverload``; anything else (a higher-order operator) counts as opaque."""
    if not isinstance(func, OpOverload):
        return Traits(str(func), False, (), frozenset(), (), False, True, False, False)
    schema = schema_of(func)
    base = schema.name.split("::")[-1]
    written = [
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and schema.name not in _NOT_COMPUTE
    ]
    aliases = bool(schema.returns) and all(
        result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
    )
    statistics = tuple(
        position
        for position, argument in enumerate(schema.arguments)
        if base in _BATCH_NORMS and argument.name in ("running_mean", "running_var")
    )
    return Traits(
        name=str(func),
        pure_view=not written and (aliases or base in _UNDECLARED_VIEWS or schema.name in _NOT_COMPUTE),
        written=tuple(position for position, _ in written),
        written_names=frozenset(name for _, name in written),
        statistics=statistics,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        uninitialised=base in _UNINITIALISED,
        overwriting=base in _OVERWRITING,
        trusted=schema.name.split("::")[0] in _KNOWN_NAMESPACES,
        partly_unwritten=_PARTLY_UNWRITTEN.get(str(func), frozenset()) | _unwritten_by_name(base, schema),
        may_write=bool(written or statistics or base in _OVERWRITING or base == "_cudnn_rnn"),
        makes_alike=base.endswith("_like"),
        convolves=base in _CONVOLUTIONS,
    )


def _unwritten_by_name(base: str, schema: torch.FunctionSchema) -> frozenset[int]:
    names = _NAMED_UNWRITTEN.get(base, frozenset())
    return frozenset(position for position, result in enumerate(schema.returns) if result.name in names)


def is_chosen_by_timing(facts: Traits, device_type: str) -> bool:
    """Whether a call may give other bits on another thread: a convolution under ``torch.backends.cudnn.benchmark``.

    What each algorithm takes is found out, and remembered, by each thread for itself. A replay runs on autograd's.
    """
    return facts.convolves and device_type == "cuda" and bool(torch.backends.cudnn.benchmark)
