"""Facts about operators and their calls, for the capture and the recorder:

* what an operator is, from its schema and a few lists;
* what a call writes, with one answer for both, because exactness needs them to agree;
* a call's arguments as a flat list and back. It is like ``pytree``, but quick for flat arguments: only lists with
  tensors are opened.

Two composite operators behave differently under modes or hooks, and are changed to behave as without them. Under a mode
``ctc_loss`` passes lengths on as tensors and saves them, so an observed step would save other tensors than an ordinary
one, and diverge. ``rrelu`` saves its noise before that is drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import Any, NamedTuple

import torch

from poochplan.torch_private.hooks import topmost_hooks
from poochplan.torch_private.tensor_internals import (
    OpOverload,
    covers_itself_once,
    cudnn_takes_ctc_loss,
    mode_stack,
    pytree,
    schema_of,
    without_modes,
)

from .storages import CheckedTensor, is_plain, storage_key

# Allocations without contents yet: later writes outside the dispatcher are not seen.
_UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "set_"}
)
# They write their whole argument without reading it, so it may be uninitialised.
_OVERWRITING = frozenset(
    {"bernoulli_", "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"}
    | {"fill_", "zero_", "copy_"}
)
# Their outputs seem new, but use the input's storage without declaring it in the schema.
_UNDECLARED_VIEWS = frozenset({"_unsafe_view", "_reshape_alias", "lift_fresh", "detach", "alias"})
# They neither read nor write a tensor's content, unlike their schemas.
_NOT_COMPUTE = frozenset({"prim::device", "aten::record_stream"})
# They change running statistics without declaring it, or as a side effect of the forward. Their results in training do
# not depend on these. (The verification of replays finds other undeclared writes.)
_BATCH_NORMS = frozenset(
    {"native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"}
    | {"cudnn_batch_norm", "miopen_batch_norm"}
    | {"batch_norm_update_stats", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"}
)
# Positions of outputs with bytes that their kernels do not write, so that two runs may differ there: oneDNN pads the
# rows of an LSTM's workspace, which only its own backward reads.
_PARTLY_UNWRITTEN = {"aten.mkldnn_rnn_layer.default": frozenset({3})}
# The same by their names in the schema. Attention on CUDA writes its generator's state only with dropout, and never
# writes outputs named "unused". (The efficient kernels pad their logsumexp with infinities, and cuDNN's state begins as
# zeros: these bits repeat.)
_NAMED_UNWRITTEN = {
    "_scaled_dot_product_flash_attention": frozenset({"rng_state", "unused", "philox_seed", "philox_offset"}),
    "_flash_attention_forward": frozenset({"rng_state", "unused", "philox_seed", "philox_offset"}),
    "_scaled_dot_product_efficient_attention": frozenset({"philox_seed", "philox_offset"}),
    "_efficient_attention_forward": frozenset({"philox_seed", "philox_offset"}),
}
# cuDNN's: ``torch.backends.cudnn.benchmark`` chooses their algorithm by timing, separately in each thread.
_CONVOLUTIONS = frozenset(
    {"convolution", "_convolution", "convolution_overrideable"}
    | {"cudnn_convolution", "cudnn_convolution_transpose", "cudnn_convolution_relu", "cudnn_convolution_add_relu"}
    | {"miopen_convolution", "miopen_convolution_transpose", "miopen_depthwise_convolution"}
)
# Operators of other namespaces (custom ones) may draw random numbers or write without declaring it.
_KNOWN_NAMESPACES = ("aten", "prims")
_VECTOR_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "lgamma"),
    *("log", "log10", "log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
_CTC_LOSS = torch.ops.aten.ctc_loss
CUDNN_RNN, CUDNN_RNN_DROPOUT, CUDNN_RNN_TRAIN = "aten._cudnn_rnn.default", 11, 12
"""The operator, and the positions of two of its arguments; its last is the state of its generator."""


class Traits(NamedTuple):
    name: str
    """For example ``aten.convolution.default``."""
    pure_view: bool
    """Whether it takes no memory and writes nothing. Profile and recording leave it out."""
    written: tuple[int, ...]
    """Positions of the arguments that it declares to write."""
    written_names: frozenset[str]
    """The same arguments by name, for those passed by keyword."""
    statistics: tuple[int, ...]
    """Positions of running statistics that a replay must not change again."""
    random: bool
    uninitialised: bool
    """Whether it creates storages that have not been written yet."""
    overwriting: bool
    """Whether it writes the whole of its first argument without reading it."""
    trusted: bool
    """Whether it does what its schema says, so that it can be run again."""
    partly_unwritten: frozenset[int] = frozenset()
    """Positions of outputs that may differ between two runs."""
    may_write: bool = True
    """Whether a call may write an argument; if not, its arguments need not be checked."""
    makes_alike: bool = False
    """Whether it makes a tensor like its argument without reading the argument's content."""
    convolves: bool = False
    """Whether cuDNN may choose its algorithm by timing; see :func:`is_chosen_by_timing`."""


@functools.cache
def traits(func: Any) -> Traits:
    """Facts about an ``OpOverload``; other operators (higher-order ones) count as opaque."""
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
        partly_unwritten=_PARTLY_UNWRITTEN.get(str(func), frozenset())
        | {at for at, one in enumerate(schema.returns) if one.name in _NAMED_UNWRITTEN.get(base, ())},
        may_write=bool(written or statistics or base in _OVERWRITING or base == "_cudnn_rnn"),
        makes_alike=base.endswith("_like"),
        convolves=base in _CONVOLUTIONS,
    )


def is_chosen_by_timing(facts: Traits, device_type: str) -> bool:
    """Whether a call may give other bits on another thread: a convolution under ``torch.backends.cudnn.benchmark``.

    Each thread measures and remembers the algorithms separately. A replay runs on autograd's thread.
    """
    return facts.convolves and device_type == "cuda" and bool(torch.backends.cudnn.benchmark)


@functools.cache
def past_first_calls() -> None:
    """Calls each function of MKL's vector library once, on this thread alone; costs less than a millisecond.

    Otherwise a function's first call in a process may be imprecise (5e-5 for ``tanh``) in what one of several threads
    computes, as https://github.com/pytorch/pytorch/issues/188792 explains. The same step has other bits then.
    """
    with without_modes(), torch.no_grad():
        for name in _VECTOR_FUNCTIONS:
            for dtype in (torch.float32, torch.float64):
                getattr(torch, name)(torch.full((1,), 0.5, dtype=dtype, device="cpu"))


@functools.cache
def held_to_their_way() -> torch.library.Library | None:
    """Changes these operators from the first mode of this process on, and not before; None on ROCm."""
    if torch.version.hip is not None:
        return None
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCPU", "AutogradCUDA", "AutogradXPU", "AutogradPrivateUse1"):
        library.impl("ctc_loss.Tensor", _ctc_loss, key)
        library.impl("rrelu", functools.partial(_rrelu, torch.ops.aten.rrelu.default), key)
        library.impl("rrelu_", functools.partial(_rrelu, torch.ops.aten.rrelu_.default), key)
    return library


def _rrelu(op: Any, tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Keeps its saved values if there are saved-tensors hooks. It saves its noise before the kernel draws it, so a hook
    would copy older contents. Torch's database of operators has no other such op.
    """
    if topmost_hooks() is None or not is_plain(tensor, tensor.device.type):
        found: torch.Tensor = op.decompose(tensor, *rest)
        return found
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: CheckedTensor(saved, "what rrelu saved"), CheckedTensor.given_back
    ):
        found = op.decompose(tensor, *rest)
    return found


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
    is_looked_at = bool(modes) and not any(mode.is_infra_mode() for mode in modes)  # which traces or makes fake data
    is_real = all(is_plain(tensor, tensor.device.type) for tensor in tensors)
    takes_lists = is_looked_at and is_real
    if takes_lists and log_probs.is_cuda:  # cuDNN has tensors as lengths with and without a mode
        takes_lists = not cudnn_takes_ctc_loss(*tensors, blank)
    if not takes_lists:
        found: torch.Tensor = _CTC_LOSS.Tensor.decompose(*tensors, blank, *rest)
        return found
    found = _CTC_LOSS.IntList(log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), blank, *rest)
    return found


class Writes(NamedTuple):
    """The existing storages that a call writes."""

    in_place: list[torch.Tensor]
    """The arguments whose contents change, also when the call is replayed."""
    scratch: dict[int, torch.Tensor]
    """Running statistics by argument position, not in ``in_place``: a replay passes temporary tensors instead."""
    overwritten: torch.Tensor | None
    """The argument whose storage is written completely and not read."""
    repeatable: bool
    """Whether it can be run again: the operator does what its schema says, by the same algorithm on any thread, and its
    statistics are buffers of the model."""


def writes_of(
    facts: Traits, args: tuple[Any, ...], kwargs: dict[str, Any], static: Container[int], device_type: str
) -> Writes:
    """The writes of the call, before it runs. ``static``: storage keys of the model's parameters and buffers."""
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
    """Whether the tensor's elements cover its whole storage, each byte once."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes() and covers_itself_once(tensor)


def _statistics(facts: Traits, args: tuple[Any, ...]) -> dict[int, torch.Tensor]:
    """By argument position: running statistics that this call only writes, because it normalises by its batch."""
    if not facts.statistics or (len(args) > 5 and args[5] is False):
        return {}
    return {position: args[position] for position in facts.statistics if isinstance(args[position], torch.Tensor)}


def _declared(facts: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that the operator writes in place, by its schema."""
    if facts.name == CUDNN_RNN:  # it does not declare that dropout between its layers advances a generator
        drops = args[CUDNN_RNN_DROPOUT] > 0 and args[CUDNN_RNN_TRAIN]
        return [args[-1]] if drops and isinstance(args[-1], torch.Tensor) else []
    if not facts.written:
        return []
    candidates = [args[position] for position in facts.written if position < len(args)]
    candidates += [value for name, value in kwargs.items() if name in facts.written_names]
    return [leaf for leaf in outputs_of(tuple(candidates)) if isinstance(leaf, torch.Tensor)]


class Flat(NamedTuple):
    """The layout of a call without tensors in containers."""

    positional: int
    names: tuple[str, ...]


ArgumentTree = Flat | pytree.TreeSpec


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], ArgumentTree]:
    """All leaves in order, and where they were."""
    leaves = [*args, *kwargs.values()] if kwargs else list(args)
    for leaf in leaves:
        if type(leaf) not in _LEAVES and not _is_leaf(leaf):
            return pytree.tree_flatten((args, kwargs))
    return leaves, _flat(len(args), tuple(kwargs) if kwargs else ())


@functools.cache
def _flat(positional: int, names: tuple[str, ...]) -> Flat:
    return Flat(positional, names)


def unflatten(leaves: list[Any], tree: ArgumentTree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that ``flatten`` took apart, with other leaves."""
    if isinstance(tree, Flat):
        return tuple(leaves[: tree.positional]), dict(zip(tree.names, leaves[tree.positional :], strict=True))
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    return args, kwargs


def outputs_of(outputs: Any) -> list[Any]:
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
