"""The Trainer with FSDP2 within 80% of its memory: torchrun --nproc-per-node 2 examples/trainer_fsdp.py"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from poochplan.integrations.hf import PlanCallback


def main(*callbacks: TrainerCallback, folder: str = "hf-run") -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=64, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0)
    texts, sharding = torch.randint(64, (320, 64)), {"version": 2, "transformer_layer_cls_to_wrap": "GPT2Block"}
    data = [{"input_ids": text, "labels": text} for text in texts]
    settings = TrainingArguments(
        folder, max_steps=20, logging_steps=1, save_strategy="no", fsdp=True, fsdp_config=sharding
    )
    trainer = Trainer(GPT2LMHeadModel(config), settings, None, data, callbacks=list(callbacks))
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(PlanCallback(budget="80%"))
