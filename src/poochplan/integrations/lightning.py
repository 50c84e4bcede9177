"""For Lightning's Trainer.

from poochplan.integrations.lightning import PlanCallback
Trainer(callbacks=[PlanCallback(budget="60%")]).fit(module, data)
"""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from .trainers import PlansTraining, outermost


class PlanCallback(PlansTraining, Callback):
    """Runs the training of ``fit()`` inside :func:`poochplan.auto`. State: the ``session`` of the last ``fit()``.

    It has the arguments of :func:`poochplan.auto` without model and optimizer. The session ends with training, also by
    an error.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(outermost(pl_module), trainer.optimizers, trainer.callbacks)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.close()
