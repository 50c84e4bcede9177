"""What the capture and the recorder need to know of an operator and a call of it: from its schema and a few lists; what
it writes, one answer for both, on whose agreeing exactness rests; and its arguments as a flat list and back, which is
what ``pytree`` does, quickly where they are flat: only lists that hold tensors are opened.

Composite operators that do not go with modes or hooks are held to what they do without. With a mode ``ctc_loss`` hands
lengths on as tensors, which are then saved: a step that is looked at would save other tensors than one that is not, and
leave its plan. ``rrelu`` saves its noise before that is drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import Any, NamedTuple

import torch

from poochplan.torch_private.tensor_internals import (
    OpOverload,
    covers_itself_once,
    cudnn_takes_ctc_loss,
    mode_stack,
    pytree,
    schema_of,
    topmost_hooks,
    version_of,
)

from .storages import is_plain, storage_key

# Allocations whose contents are not written yet: writes to them outside the dispatcher are not seen.
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
_CTC_LOSS = torch.ops.aten.ctc_loss
CUDNN_RNN, CUDNN_RNN_DROPOUT, CUDNN_RNN_TRAIN = "aten._cudnn_rnn.default", 11, 12
"""The operator, and the positions of two of its arguments; its last is the state of its generator."""


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
    """Creates storages that have not been written yet."""
    overwriting: bool
    """Writes the whole of its first argument without reading it."""
    trusted: bool
    """Whether it does what its schema says, so that it can be run again."""
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


@functools.cache
def held_to_their_way() -> torch.library.Library | None:
    """From the first mode of this process on, which makes no difference as long as there is none; None on ROCm."""
    if torch.version.hip is not None:
        return None
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCPU", "AutogradCUDA"):
        library.impl("ctc_loss.Tensor", _ctc_loss, key)
        library.impl("rrelu", functools.partial(_rrelu, torch.ops.aten.rrelu.default), key)
        library.impl("rrelu_", functools.partial(_rrelu, torch.ops.aten.rrelu_.default), key)
    return library


def _rrelu(op: Any, tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Its saved values are kept if there are saved-tensors hooks: it saves its noise before the kernel has drawn it, so
    a hook that copies would copy older contents. Torch's database of operators has no other such op.
    """
    if topmost_hooks() is None or not is_plain(tensor, tensor.device.type):
        found: torch.Tensor = op.decompose(tensor, *rest)
        return found
    with torch.autograd.graph.saved_tensors_hooks(_Kept, _Kept.given_back):
        found = op.decompose(tensor, *rest)
    return found


class _Kept:
    """A saved tensor as it is; whoever writes it gets the error that autograd would raise."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor.detach(), version_of(tensor)

    def given_back(self) -> torch.Tensor:
        if version_of(self._tensor) != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: what "
                f"rrelu saved is at version {version_of(self._tensor)}, expected {self._version}"
            )
        return self._tensor


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    *rest: Any,
) -> torch.Tensor:
    tensors = (log_probs, targets, input_lengths, target_lengths)
    modes = mode_stack()
    is_looked_at = bool(modes) and not any(mode.is_infra_mode() for mode in modes)  # which traces, or makes up data
    is_real = all(is_plain(tensor, tensor.device.type) for tensor in tensors)
    if not (is_looked_at and is_real) or _is_of_cudnn(*tensors, blank):
        found: torch.Tensor = _CTC_LOSS.Tensor.decompose(*tensors, blank, *rest)
        return found
    found = _CTC_LOSS.IntList(log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), blank, *rest)
    return found


def _is_of_cudnn(log_probs: torch.Tensor, *others: Any) -> bool:
    """Whether cuDNN computes it, which takes tensors with and without a mode."""
    return log_probs.is_cuda and bool(cudnn_takes_ctc_loss(log_probs, *others))


class Writes(NamedTuple):
    """The existing storages that a call writes."""

    in_place: list[torch.Tensor]
    """The arguments whose contents are others afterwards, and stay so when the call is replayed."""
    scratch: dict[int, torch.Tensor]
    """Running statistics by argument position: a replay gives the call throw-away tensors in their place, so that the
    model's own are no part of ``in_place``."""
    overwritten: torch.Tensor | None
    """The argument of which every byte of the storage is written and none is read."""
    repeatable: bool
    """Whether it can be run again: the operator does what its schema says, by the same algorithm on any thread, and its
    statistics are buffers of the model."""


def writes_of(
    facts: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], *, static: Container[int], device_type: str
) -> Writes:
    """The writes of the call, determined before it runs. ``static``: storage keys of the model's parameters and
    buffers.
    """
    scratch = _statistics(facts, args)
    foreign = [tensor for tensor in scratch.values() if storage_key(tensor) not in static]
    declared = [x for x in _declared(facts, args, kwargs) if not any(x is one for one in scratch.values())]
    target = args[0] if facts.overwriting else None
    whole = isinstance(target, torch.Tensor) and is_plain(target, device_type) and covers_storage(target)
    return Writes(
        in_place=[*declared, *foreign],
        scratch=scratch,
        overwritten=target if whole else None,
        repeatable=facts.trusted and not foreign and not is_chosen_by_timing(facts, device_type),
    )


def covers_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are all of its storage, each once."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes() and covers_itself_once(tensor)


def _statistics(facts: Traits, args: tuple[Any, ...]) -> dict[int, torch.Tensor]:
    """The running statistics that this call only writes, because it normalises by its batch; by argument position."""
    if not facts.statistics or (len(args) > 5 and args[5] is False):
        return {}
    return {position: args[position] for position in facts.statistics if isinstance(args[position], torch.Tensor)}


def _declared(facts: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that the operator writes in place, by its schema."""
    if facts.name == CUDNN_RNN:  # does not declare that dropout between its layers moves a generator on
        drops = args[CUDNN_RNN_DROPOUT] > 0 and args[CUDNN_RNN_TRAIN]
        return [args[-1]] if drops and isinstance(args[-1], torch.Tensor) else []
    if not facts.written:
        return []
    candidates = [args[position] for position in facts.written if position < len(args)]
    candidates += [value for name, value in kwargs.items() if name in facts.written_names]
    return [leaf for leaf in outputs_of(tuple(candidates)) if isinstance(leaf, torch.Tensor)]


class Flat(NamedTuple):
    """A call whose arguments hold no tensors within containers."""

    positional: int
    names: tuple[str, ...]


Layout = Flat | pytree.TreeSpec


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Layout]:
    """All leaves in order, and how they lay."""
    leaves = [*args, *kwargs.values()] if kwargs else list(args)
    for leaf in leaves:
        if type(leaf) not in _LEAVES and not _is_leaf(leaf):
            return pytree.tree_flatten((args, kwargs))
    return leaves, _flat(len(args), tuple(kwargs) if kwargs else ())


@functools.cache
def _flat(positional: int, names: tuple[str, ...]) -> Flat:
    return Flat(positional, names)


def unflatten(leaves: list[Any], layout: Layout) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that ``flatten`` took apart, with other leaves in their places."""
    if isinstance(layout, Flat):
        return tuple(leaves[: layout.positional]), dict(zip(layout.names, leaves[layout.positional :], strict=True))
    args, kwargs = pytree.tree_unflatten(leaves, layout)
    return args, kwargs


def outputs_of(outputs: Any) -> list[Any]:
    """The leaves of an op's result."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if type(outputs) is tuple and all(type(output) in _LEAVES for output in outputs):
        return list(outputs)
    return pytree.tree_leaves(outputs)


_LEAVES = {torch.Tensor, torch.nn.Parameter, int, float, bool, type(None), torch.dtype, torch.device}


def _is_leaf(argument: Any) -> bool:
    if isinstance(argument, (list, tuple)):
        return not argument or type(argument[0]) in (int, bool, float, torch.SymInt)
    return not isinstance(argument, dict)
