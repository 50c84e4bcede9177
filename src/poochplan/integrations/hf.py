"""For the Trainer of transformers, and trainers derived from it (TRL's, for example).

from poochplan.integrations.hf import PlanCallback
Trainer(model=model, args=args, train_dataset=data, callbacks=[PlanCallback(budget="60%")]).train()
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .trainers import PlansTraining, called_by, running_method


class PlanCallback(PlansTraining, TrainerCallback):
    """Runs ``train()`` inside :func:`poochplan.auto`. State: the ``session`` of the last ``train()``.

    It has the arguments of :func:`poochplan.auto` without model and optimizer. The session ends with ``train()``. If
    ``train()`` raises, the session ends at the latest with the next training.
    """

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
        trainer, is_running = running_method(Trainer)
        callbacks = () if trainer is None else trainer.callback_handler.callbacks
        session = self._begin(called_by(trainer, model), optimizer, callbacks)
        if trainer is not None:
            session._lasts_while(is_running)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()
