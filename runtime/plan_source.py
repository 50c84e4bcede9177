"""PlanSource: what says which plan each step of a session follows: the given ones, or a study that has some made."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from poochplan.formats.plan import Instructions
from poochplan.formats.profile import Profile
from poochplan.runtime.engine.cursor import Segment
from poochplan.runtime.engine.mechanism import Mechanism, rebuild_together
from poochplan.runtime.engine.saved_value import SavedValue
from poochplan.runtime.step_policies.step_policy import KeepAll, StepPolicy

from .attachment import Attachment, Hooks, own_hooks
from .plan_in_force import PlanInForce


class PlanSource:
    """A base: no step follows a plan. A session asks it for the step policy of each step (it is the engine's
    :class:`~.step_policies.step_policy.Chooser`), and tells it what becomes of them.
    """

    is_given = False
    """Whether the user has said what is followed: then a step that follows nothing is complained about."""
    gives_up = False
    """Whether something leaves the device from the first step on."""
    alternatives: Sequence[Instructions] = ()
    latest: PlanInForce | None = None
    """What was followed last, else the first in force; None before there is one."""

    @property
    def plans(self) -> Mapping[Hashable, PlanInForce]:
        """Those in force, by kind of step."""
        return {}

    @property
    def profiles(self) -> Mapping[Any, Profile]:
        """Of the steps, by the same kinds, as far as they are known."""
        return {}

    def attached(self, attachment: Attachment) -> Hooks:
        """The session begins: what autograd is to call."""
        return own_hooks(attachment)

    def rebuild(self, value: SavedValue, mechanism: Mechanism) -> None:
        """Brings back what is to be replayed."""
        rebuild_together(value, mechanism)

    def around_call(self, path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """What is called in the place of a compiled callable."""
        return call

    def choose(self, segment: Segment) -> StepPolicy | None:
        """See :class:`~.step_policies.step_policy.Chooser`."""
        return KeepAll()

    def following(self, segment: Segment) -> PlanInForce | None:
        """What the segment, which has its step policy, follows or was to."""
        return None

    def begins(self, segment: Segment) -> None:
        """A segment that has its step policy is about to begin; no log of another step's goes on."""

    def optimizing(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of the models' is about to step."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """It has."""

    def ended(self, segment: Segment) -> None:
        """A segment is over, and all is known of it."""

    def plan_again(self, plan: PlanInForce, more_bytes: int) -> str:
        """Steps take so much more than the plan knows of: has another one made. Gives what comes of that, in words."""
        return ""

    def wait(self, timeout_s: float | None) -> bool:
        """Between two steps, until no plan is under way; whether there is one for every kind of step that is known."""
        return True

    def close(self) -> None:
        """The session has ended."""
