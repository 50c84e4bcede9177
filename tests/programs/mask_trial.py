"""A random program with dropout, under plans that hold the bits of its masks, and what casts and clones read."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from unittest import mock

from poochplan.formats import narrow
from poochplan.formats.profile import Profile

from .cast_trial import held, with_casts
from .drawing import Block, Program
from .trial import Outcome, trial_of

DROPPING = ("dropout", "dropout in place", "native dropout", "native dropout", "bool noise", "noise")
SMALLEST_BYTES = 64
"""The masks of these programs are small."""


def mask_trial(program: Program) -> Outcome:
    """Random decisions about its values and their smaller forms, each in a session of its own, on both devices."""
    return trial_of(with_masks(program), partial(held, completed=_with_small_masks))


def with_masks(program: Program) -> Program:
    """The program with two or three blocks with masks more, and as many with casts."""
    chance, blocks = random.Random(f"masks {program.seed}"), list(with_casts(program).blocks)
    for kind in chance.sample(DROPPING, chance.choice((2, 3))):
        blocks.insert(chance.randint(0, len(blocks)), Block(kind))
    return replace(program, blocks=tuple(blocks))


def _with_small_masks(profile: Profile) -> Profile:
    with mock.patch.object(narrow, "LEAST_MASK_BYTES", SMALLEST_BYTES):
        return narrow.with_smaller(profile)
