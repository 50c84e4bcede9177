"""Trainers wrap optimizers, or give them closures: their loops have the bits of their plain ones."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch

import poochplan
from poochplan.formats.plan import Plan
from tests.runtime.optimizer_state.trainings import SIDE, Training, away, planned

pytestmark = pytest.mark.cpu_device


def batches() -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randn(4, SIDE) for _ in range(4)]


def in_session(plan: Plan | None, training: Training, optimizer: Any) -> contextlib.AbstractContextManager[Any]:
    if plan is None:
        return contextlib.nullcontext()
    return poochplan.apply(plan, training.model, optimizer, quiet=True)


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")

    def trained(plan: Plan | None) -> list[bytes]:
        training = Training()
        helper = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer = helper.prepare(training.model, training.optimizer)
        schedule = helper.prepare(torch.optim.lr_scheduler.StepLR(training.optimizer, 1, 0.5))
        with in_session(plan, training, optimizer) as session:
            for batch in batches():
                with helper.accumulate(model):
                    loss = model(batch)
                    helper.backward(loss)
                    if helper.sync_gradients:
                        helper.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    training.see(loss)
            assert plan is None or away(session, training.optimizer)
        return training.seen

    plan = planned()
    assert trained(None) == trained(plan)


@pytest.mark.filterwarnings("ignore")
def test_lightning() -> None:
    lightning: Any = pytest.importorskip("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def trained(plan: Plan | None) -> list[bytes]:
        training = Training()

        class Module(lightning.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.net = training.model

            def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
                return self.net(batch)  # type: ignore[no-any-return]

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return training.optimizer

            def on_train_batch_end(self, *_: Any) -> None:
                training.see()

        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", gradient_clip_val=0.1, **quiet)
        with in_session(plan, training, training.optimizer) as session:
            trainer.fit(Module(), torch.utils.data.DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
            assert plan is None or away(session, training.optimizer)
        return training.seen

    plan = planned()
    assert trained(None) == trained(plan)
