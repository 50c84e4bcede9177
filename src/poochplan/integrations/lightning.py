"""For Lightning's Trainer.

from poochplan.integrations.lightning import PlanCallback
Trainer(callbacks=[PlanCallback(budget="60%")]).fit(module, data)
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from poochplan.online.auto import auto, check_budget
from poochplan.runtime.session import Session

from .calls import check_only_one
from .wrapping import outermost


class PlanCallback(Callback):
    """``fit()`` trains inside :func:`poochplan.auto`. State: the ``session``, of the last ``fit()`` after it.

    Takes what :func:`poochplan.auto` takes, but for model and optimizer. The session ends with training, however that
    ends.
    """

    def __init__(self, *, budget: str | int | float, **options: Any) -> None:
        check_budget(budget)
        self.session: Session | None = None
        self._options: dict[str, Any] = {"budget": budget, **options}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close()
        check_only_one(self, trainer.callbacks)  # type: ignore[attr-defined]
        session = auto(outermost(pl_module), trainer.optimizers, **self._options)
        session.__enter__()
        self.session = session

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.close()

    def close(self) -> None:
        """Ends the session, if one is open."""
        if self.session is not None:
            self.session.close()
