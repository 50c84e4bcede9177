"""Language models of Hugging Face transformers, from a configuration, with random weights and dropout on.

The tokens are random: only the step matters, and no tokenizer can be loaded offline.
"""

from __future__ import annotations

import torch

from poochplan.runtime.devices.opening import usable_device
from poochplan.workload import Workload

from .common import make_optimizer, require, seeded
from .hugging_face import transformer

_IGNORED_LABEL = -100  # the ignore_index of cross entropy, as transformers uses it


def gpt2(
    *,
    batch_size: int = 4,
    sequence_length: int = 256,
    layers: int = 6,
    width: int = 384,
    heads: int = 6,
    vocabulary: int = 8192,
    dropout: float = 0.1,
    optimizer: str = "adamw",
    lr: float = 3e-4,
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """GPT-2 as a causal language model: each token predicts the next; ``width`` is the size of the embedding."""
    return transformer(
        "gpt2",
        batch_size=batch_size,
        length=sequence_length,
        layers=layers,
        optimizer=optimizer,
        lr=lr,
        seed=seed,
        device=device,
        vocab_size=vocabulary,
        n_positions=sequence_length,
        n_embd=width,
        n_head=heads,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )


def bert(
    *,
    batch_size: int = 4,
    sequence_length: int = 256,
    layers: int = 6,
    width: int = 384,
    heads: int = 6,
    vocabulary: int = 8192,
    dropout: float = 0.1,
    masked_share: float = 0.15,
    optimizer: str = "adamw",
    lr: float = 3e-4,
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """BERT as a masked language model: ``masked_share`` of the tokens are hidden and must be predicted."""
    transformers = require("transformers")
    where, data = usable_device(device), seeded(seed)
    config = transformers.BertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=sequence_length,
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = transformers.BertForMaskedLM(config).train().to(where)
    mask_token = vocabulary - 1
    tokens = torch.randint(1, mask_token, (batch_size, sequence_length), generator=data)  # 0 is the padding token
    hidden = torch.rand(tokens.shape, generator=data) < masked_share
    hidden[:, 0] = True  # at least one label per sequence, or the loss of a tiny batch would be 0/0
    inputs = tokens.masked_fill(hidden, mask_token).to(where)
    labels = tokens.masked_fill(~hidden, _IGNORED_LABEL).to(where)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=inputs, labels=labels).loss
        return loss

    return Workload(model, step, make_optimizer(optimizer, model, lr))
