"""The libraries' own loops for ``benchmarks/stacks.py``: the examples, and peft in the Trainer."""

from __future__ import annotations

import runpy
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import poochplan
from tests.examples.ranks import no_session
from tests.live_bytes import outside_meter
from tests.online.runs import Run, bytes_of

EXAMPLES = Path(__file__).parents[1] / "examples"
STUDIED = 14
"""Steps of an optimizer after which every kind of segment is profiled, and planning is waited for."""
Trained = tuple[list[float], torch.nn.Module, Any]
"""Losses, the model, and the session."""


def main_of(name: str) -> Callable[..., Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]  # type: ignore[no-any-return]


def run_library(name: str, options: dict[str, Any] | None) -> Run:
    """One training of a library's, with these options of ``auto`` or without poochplan."""
    with tempfile.TemporaryDirectory() as folder, outside_meter() as meter:
        losses, model, session = LIBRARIES[name](options, folder)
        peak_bytes = meter.peak
    state = bytes_of((*model.parameters(), *model.buffers()))
    planned = 0 if session is not None and session.plan is not None else None
    return Run([losses], state, [peak_bytes], session, planned)


def transformers_trainer(options: dict[str, Any] | None, folder: str) -> Trained:
    from poochplan.integrations.hf import PlanCallback

    plans = PlanCallback(**options) if options is not None else None
    trainer = main_of("hf_trainer")(*([plans, _waiting(plans)] if plans is not None else []), folder=folder)
    return _losses(trainer), trainer.model, plans and plans.session


def peft_in_trainer(options: dict[str, Any] | None, folder: str) -> Trained:
    """Adapters of low rank on the example's network."""
    import peft
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from poochplan.integrations.hf import PlanCallback

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=64, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0)
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], r=4, fan_in_fan_out=True)
    model = peft.get_peft_model(GPT2LMHeadModel(config), adapters)
    data = [{"input_ids": text, "labels": text} for text in torch.randint(64, (160, 64))]
    settings = TrainingArguments(folder, max_steps=20, per_device_train_batch_size=8, use_cpu=True, logging_steps=1)
    settings.save_strategy, settings.report_to = "no", []
    plans = PlanCallback(**options) if options is not None else None
    callbacks = [plans, _waiting(plans)] if plans is not None else []
    trainer = Trainer(model, settings, None, data, callbacks=callbacks)
    trainer.train()
    return _losses(trainer), model, plans and plans.session


def _losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def _waiting(plans: Any) -> Any:
    """A callback that waits for the plan, so that a loop this short sees it."""
    from transformers import TrainerCallback

    class Waiting(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step >= 11 and plans.session is not None:
                plans.session.wait_until_planned(120)

    return Waiting()


def lightning_trainer(options: dict[str, Any] | None, folder: str) -> Trained:
    from lightning.pytorch import Callback

    from poochplan.integrations.lightning import PlanCallback

    plans = PlanCallback(**options) if options is not None else None
    losses: list[float] = []

    class Watching(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
            losses.append(outputs["loss"].item())
            if trainer.global_step >= 13 and plans is not None and plans.session is not None:
                plans.session.wait_until_planned(120)

    module = main_of("lightning_module")(*([plans] if plans is not None else []), Watching(), folder=folder)
    return losses, module, plans and plans.session


def loop_of(name: str, **arguments: Any) -> Callable[[dict[str, Any] | None, str], Trained]:
    """An example that calls ``auto`` itself. It does not wait for its plan: a step of its optimizer does."""

    def trained(options: dict[str, Any] | None, folder: str) -> Trained:
        auto, steps = poochplan.auto, count(1)
        sessions: list[Any] = []

        def started(*given: Any, **named: Any) -> Any:
            sessions.append(no_session() if options is None else auto(*given, **named))
            return sessions[-1]

        def waits(*_: Any) -> None:
            if next(steps) == STUDIED and options is not None:
                sessions[-1].wait_until_planned(120)

        poochplan.auto = started
        hook = register_optimizer_step_post_hook(waits)
        try:
            losses, model, session = main_of(name)(**arguments, **(options or {}))
        finally:
            poochplan.auto = auto
            hook.remove()
        return losses, model, session if options is not None else None

    return trained


LIBRARIES: dict[str, Callable[[dict[str, Any] | None, str], Trained]] = {
    "transformers_trainer": transformers_trainer,
    "peft_in_trainer": peft_in_trainer,
    "lightning": lightning_trainer,
    "accelerate": loop_of("accelerate_loop", epochs=20),  # 40 steps: half of them follow the plan
}
"""Data-parallel training has processes of its own: ``tests/examples/ranks.py``."""
