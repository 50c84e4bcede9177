"""The Trainer of transformers within 60% of its memory: one callback is added. python examples/hf_trainer.py"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from poochplan.integrations.hf import PlanCallback


def main(*callbacks: TrainerCallback, folder: str = "hf-run", resume: str | None = None) -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=64, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0)
    texts = torch.randint(64, (160, 64))
    data = [{"input_ids": text, "labels": text} for text in texts]
    settings = TrainingArguments(
        folder, max_steps=20, per_device_train_batch_size=8, gradient_accumulation_steps=2, use_cpu=True
    )
    settings.eval_strategy, settings.eval_steps, settings.save_steps, settings.logging_steps = "steps", 5, 10, 1
    trainer = Trainer(GPT2LMHeadModel(config), settings, None, data, data[:8], callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    main(PlanCallback(budget="60%"))
