"""The libraries' own loops for ``benchmarks/stacks.py``: the examples, and peft in the Trainer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import poochplan
from tests.examples.ranks import main_of, no_session
from tests.live_bytes import outside_meter
from tests.online.runs import Run, bytes_of

STUDIED = 14
"""Steps of an optimizer after which every kind of segment is profiled, and planning is waited for."""
Trained = tuple[list[float], torch.nn.Module, Any]
"""Losses, the model, and the session."""


def run_library(name: str, options: dict[str, Any] | None) -> Run:
    """One training of a library's, with these options of ``auto`` or without poochplan."""
    with tempfile.TemporaryDirectory() as folder, outside_meter() as meter:
        losses, model, session = LIBRARIES[name](options, folder)
        peak_bytes = meter.peak
    state = bytes_of((*model.parameters(), *model.buffers()))
    planned = 0 if session is not None and session.plan is not None else None
    return Run([losses], state, [peak_bytes], session, planned)


def _callbacks(options: dict[str, Any] | None) -> list[Any]:
    """That which plans, and one that waits for the plan, so that a loop this short sees it; none without options."""
    if options is None:
        return []
    from poochplan.integrations.hf import PlanCallback
    from tests.examples.trainer_ranks import Waits

    plans = PlanCallback(**options)
    return [plans, Waits(plans, range(11, 1000))]


def _told(trainer: Any, callbacks: list[Any]) -> Trained:
    from tests.examples.trainer_ranks import losses_of

    return losses_of(trainer), trainer.model, callbacks[0].session if callbacks else None


def transformers_trainer(options: dict[str, Any] | None, folder: str) -> Trained:
    callbacks = _callbacks(options)
    return _told(main_of("hf_trainer")(*callbacks, folder=folder), callbacks)


def peft_in_trainer(options: dict[str, Any] | None, folder: str) -> Trained:
    """Adapters of low rank on the example's network."""
    import peft
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=64, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0)
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], r=4, fan_in_fan_out=True)
    model = peft.get_peft_model(GPT2LMHeadModel(config), adapters)
    data = [{"input_ids": text, "labels": text} for text in torch.randint(64, (160, 64))]
    settings = TrainingArguments(folder, max_steps=20, per_device_train_batch_size=8, use_cpu=True, logging_steps=1)
    settings.save_strategy, settings.report_to = "no", []
    callbacks = _callbacks(options)
    trainer = Trainer(model, settings, None, data, callbacks=callbacks)
    trainer.train()
    return _told(trainer, callbacks)


def lightning_trainer(options: dict[str, Any] | None, folder: str) -> Trained:
    from poochplan.integrations.lightning import PlanCallback
    from tests.examples.lightning_ranks import Watches

    plans = PlanCallback(**options) if options is not None else None
    watches = Watches(plans, range(13, 1000))
    module = main_of("lightning_module")(*([plans] if plans is not None else []), watches, folder=folder)
    return watches.losses, module, plans and plans.session


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
