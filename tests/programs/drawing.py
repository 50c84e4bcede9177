"""Random training programs, as data: what a seed draws. ``training.py`` makes them real."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum


class Feature(StrEnum):
    """What a program may have; a program has some seven of them."""

    VIEWS = "views"
    IN_PLACE = "in-place writes"
    RANDOM = "random ops"
    BUFFERS = "buffers written in forward"
    SHARED = "shared parameters"
    NO_GRAD = "no-grad parts"
    TENSOR_HOOKS = "tensor hooks"
    MODULE_HOOKS = "module hooks"
    SAVED_HOOKS = "saved-tensor hooks"
    CHECKPOINT = "checkpoint inside"
    REENTRANT = "reentrant checkpoint inside"
    AUTOCAST = "autocast"
    SEVERAL_FORWARDS = "several forwards a step"
    SEVERAL_INPUTS = "several inputs"
    SEVERAL_LOSSES = "several losses"
    STATE = "detached state kept"
    RETAIN_GRAPH = "retain_graph, two backwards"
    FORWARD_RAISES = "exception in forward"
    HOOK_RAISES = "exception in a hook"
    DIVERGES = "steps that differ from the profiled one"


CHANCE = 0.34
"""Of each feature."""
PLAIN_BLOCKS = ("linear", "attention", "normalised", "convolution", "recurrent")
BLOCKS: dict[Feature, tuple[str, ...]] = {
    Feature.VIEWS: ("chunked", "transposed", "interleaved", "windowed"),
    Feature.IN_PLACE: ("activated in place", "filled", "scattered", "written through a view", "gru cell"),
    Feature.RANDOM: ("dropout", "noise", "own generator", "dropout in place"),
    Feature.BUFFERS: ("batch norm", "counted", "averaged"),
    Feature.SHARED: ("tied",),
    Feature.NO_GRAD: ("gated without gradients",),
    Feature.TENSOR_HOOKS: ("hooked",),
}
"""Kinds of blocks that have a feature of their own."""
WRAPPERS: dict[Feature, tuple[str, ...]] = {
    Feature.MODULE_HOOKS: ("module hooks",),
    Feature.SAVED_HOOKS: ("saved as copies", "saved as halves"),
    Feature.CHECKPOINT: ("checkpoint",),
    Feature.REENTRANT: ("reentrant checkpoint",),
}
"""What may be around a block."""
PLAIN = "plain"
EVENTS: dict[Feature, tuple[str, ...]] = {
    Feature.RETAIN_GRAPH: ("two backwards",),
    Feature.FORWARD_RAISES: ("forward raises",),
    Feature.HOOK_RAISES: ("backward hook raises", "forward hook raises"),
    Feature.DIVERGES: (
        "smaller batch",
        "larger batch",
        "a block left out",
        "a block twice",
        "a forward thrown away",
        "an evaluation between",
        "autocast switched",
        "no backward",
        "two steps at once",
    ),
}
"""Steps that are not as the profiled one."""
MORE_EVENTS = {Feature.IN_PLACE: "a saved tensor written", Feature.AUTOCAST: "backward inside autocast"}
"""And those that a program with the feature may have."""
SAME_STEP = (PLAIN, "an evaluation between")
"""Those whose own forward and backward are all the same the profiled ones."""
LAYERS_DRAWN = "layers drawn"
"""Each block runs by chance: stochastic depth."""
FOLLOWED = (*SAME_STEP, "two backwards", "backward inside autocast")
"""Those that follow the plan, whatever came before: the second of two backwards has no points of its own."""
LEAVES_SOMETHING = ("backward hook raises", "a saved tensor written")
"""Behind these autograd holds a part of the abandoned graph until the next backward, in-core as under a plan."""
WITHOUT_BACKWARD = ("forward raises", "forward hook raises", "no backward")
ABANDONED = (*LEAVES_SOMETHING, *WITHOUT_BACKWARD)
"""Behind these a step that saves something before its model is called counts as a part of the abandoned one."""


@dataclass(frozen=True)
class Block:
    kind: str
    wrapper: str = ""


@dataclass(frozen=True)
class Program:
    """What one seed draws. ``events`` says what each training step is, the first and the last plain."""

    seed: int
    features: frozenset[Feature]
    blocks: tuple[Block, ...]
    events: tuple[str, ...]
    rows: int
    width: int
    optimizer: str
    sliced: bool
    """Batches are slices of one data set."""
    keeps_whole: bool
    """The state kept is all of the hidden tensor, not a copy of its mean."""
    checkpoints_model: bool
    """The model is called within a checkpoint, which is not reentrant."""
    announces: bool
    """Each step is announced to the session."""
    late_from: int | None = None
    """The first step in which late blocks write."""
    logs: bool = False
    """What each step computes for a log is held, with its graph, until the next step has computed it."""
    learns: bool = True

    def __str__(self) -> str:
        return f"program {self.seed} ({', '.join(sorted(self.features))})"


def draw(seed: int, always: Collection[Feature] = ()) -> Program:
    """The program of a seed, which has the features ``always`` too."""
    chance = random.Random(seed)
    features = {feature for feature in Feature if chance.random() < CHANCE} | set(always)
    while len(features) < 3:
        features.add(chance.choice(list(Feature)))
    kinds = [chance.choice(PLAIN_BLOCKS) for _ in range(chance.randint(1, 2))]
    kinds += [chance.choice(some) for feature, some in BLOCKS.items() if feature in features]
    chance.shuffle(kinds)
    blocks = [Block(kind) for kind in kinds]
    for feature, some in WRAPPERS.items():
        if feature in features:
            _wrap(blocks, chance.choice(some), chance)
    if Feature.SHARED in features:  # the tied block takes the weights of a linear one
        blocks.insert(chance.randint(0, len(blocks)), Block("linear"))
    special = [chance.choice(some) for feature, some in EVENTS.items() if feature in features]
    special += [event for feature, event in MORE_EVENTS.items() if feature in features and chance.random() < 0.35]
    chance.shuffle(special)
    between = (PLAIN,) if len(special) > 1 and chance.random() < 0.5 else ()
    return Program(
        seed=seed,
        features=frozenset(features),
        blocks=tuple(blocks),
        events=(PLAIN, *special[:1], *between, *special[1:], PLAIN),
        rows=chance.choice((6, 8, 12, 16)),
        width=chance.choice((16, 24, 32, 48)),
        optimizer=chance.choice(("sgd", "momentum", "adamw")),
        sliced=chance.random() < 0.3,
        keeps_whole=chance.random() < 0.5,
        checkpoints_model=Feature.CHECKPOINT in features and chance.random() < 0.3,
        announces=chance.random() < 0.3,
    )


def _wrap(blocks: list[Block], wrapper: str, chance: random.Random) -> None:
    bare = [index for index, block in enumerate(blocks) if not block.wrapper]
    if not bare:
        blocks.append(Block("linear"))
        bare = [len(blocks) - 1]
    index = chance.choice(bare)
    blocks[index] = Block(blocks[index].kind, wrapper)
