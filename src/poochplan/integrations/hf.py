"""For the Trainer of transformers, and those that are made of it (TRL's, peft's use of it).

from poochplan.integrations.hf import PlanCallback
Trainer(model=model, args=args, train_dataset=data, callbacks=[PlanCallback(budget="60%")]).train()
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from poochplan.online.auto import auto, check_budget
from poochplan.runtime.session import Session

from .calls import Call, check_only_one, owner_of_method
from .wrapping import called_by


class PlanCallback(TrainerCallback):
    """``train()`` runs inside :func:`poochplan.auto`. State: the ``session``, of the last ``train()`` after it.

    Takes what :func:`poochplan.auto` takes, but for model and optimizer. The session ends with ``train()``; where that
    raises, at the latest when something is trained next.
    """

    def __init__(self, *, budget: str | int | float, **options: Any) -> None:
        check_budget(budget)
        self.session: Session | None = None
        self._options: dict[str, Any] = {"budget": budget, **options}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        assert model is not None, "the Trainer gives its model to its callbacks"
        self.close()
        trainer, call = owner_of_method(Trainer), Call.of_method(Trainer)
        if trainer is not None:
            check_only_one(self, trainer.callback_handler.callbacks)
        session = auto(called_by(trainer, model), optimizer, **self._options)
        session.__enter__()
        if call is not None:
            session._lasts_while(call.is_running)
        self.session = session

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the session, if one is open."""
        if self.session is not None:
            self.session.close()
