"""Recurrent networks with separate time steps: cells called step by step, and a Seq2Seq with attention at each step.

:mod:`.sequence` has the fused layers of torch.nn, about which a plan can only decide as a whole.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from poochplan.runtime.devices.opening import usable_device
from poochplan.workload import Workload

from .common import make_optimizer, reversal, seeded

State = tuple[torch.Tensor, torch.Tensor]
"""Hidden and cell state: ``[batch, width]`` each, of several layers ``[layers, batch, width]``."""


class LSTMSteps(nn.Module):
    """Computes ``nn.LSTM(width, width, layers, batch_first=True)``. Each layer is a cell, called once a time step."""

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.hidden_size, self.num_layers = width, layers
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, sequence: torch.Tensor, state: State | None = None) -> tuple[torch.Tensor, State]:
        """The last layer's hidden states ``[batch, length, width]``, and all last states ``[layers, batch, width]``."""
        if state is None:
            shape = (self.num_layers, sequence.shape[0], self.hidden_size)
            state = torch.zeros(shape, device=sequence.device), torch.zeros(shape, device=sequence.device)
        states = list(zip(*(part.unbind(0) for part in state), strict=True))
        hidden = []
        for letter in sequence.unbind(1):
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(letter, states[layer])
                letter = self.dropout(states[layer][0]) if layer + 1 < self.num_layers else states[layer][0]
            hidden.append(letter)
        last_hidden, last_cell = (torch.stack(parts) for parts in zip(*states, strict=True))
        return torch.stack(hidden, 1), (last_hidden, last_cell)


class Bahdanau(nn.Module):
    """Additive attention (Bahdanau et al., 2015, appendix A.1.2).

    Each decoder step saves a value ``[batch, source length, width]``; these values take most of the memory.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.key = nn.Linear(width, width, bias=False)
        self.query = nn.Linear(width, width)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, hidden: torch.Tensor, memory: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """The context ``[batch, width]`` of one step; memory and keys are ``[batch, source length, width]``."""
        energies = torch.tanh(keys + self.query(hidden).unsqueeze(1))
        weights = torch.softmax(self.score(energies).squeeze(-1), dim=-1)
        return torch.bmm(weights.unsqueeze(1), memory).squeeze(1)


class Luong(nn.Module):
    """Multiplicative attention (Luong et al., 2015, section 3.1, "general"): ``[batch, source length]`` a step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.key = nn.Linear(width, width, bias=False)

    def forward(self, hidden: torch.Tensor, memory: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """The context ``[batch, width]`` of one step; memory and keys are ``[batch, source length, width]``."""
        weights = torch.softmax(torch.bmm(keys, hidden.unsqueeze(-1)).squeeze(-1), dim=-1)
        return torch.bmm(weights.unsqueeze(1), memory).squeeze(1)


class Seq2SeqSteps(nn.Module):
    """An LSTM encoder and an LSTM decoder, each a cell called once a time step, with attention at each decoder step."""

    def __init__(self, vocabulary: int, width: int, attention: Bahdanau | Luong, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.LSTMCell(width, width)
        self.decoder = nn.LSTMCell(2 * width, width)
        self.attention = attention
        self.join = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Logits ``[batch, length, vocabulary]`` from the source and the shifted target, both ``[batch, length]``."""
        memory, state = self._encode(self.dropout(self.embedding(source)))
        decoded = self._decode(self.dropout(self.embedding(previous)), memory, state)
        logits: torch.Tensor = self.head(self.dropout(decoded))
        return logits

    def _encode(self, embedded: torch.Tensor, state: State | None = None) -> tuple[torch.Tensor, State]:
        """All hidden states ``[batch, length, width]``, and the last state. Without ``state`` it begins at zero."""
        if state is None:
            zeros = torch.zeros(embedded.shape[0], embedded.shape[2], dtype=embedded.dtype, device=embedded.device)
            state = zeros, zeros
        hidden = []
        for letter in embedded.unbind(1):
            state = self.encoder(letter, state)
            hidden.append(state[0])
        return torch.stack(hidden, 1), state

    def _decode(self, embedded: torch.Tensor, memory: torch.Tensor, state: State) -> torch.Tensor:
        """The joined state and context of each step, ``[batch, length, width]``. The next step reads the context."""
        keys = self.attention.key(memory)
        joined = [state[0]]
        for letter in embedded.unbind(1):
            state = self.decoder(torch.cat((letter, joined[-1]), dim=-1), state)
            context = self.attention(state[0], memory, keys)
            joined.append(torch.tanh(self.join(torch.cat((state[0], context), dim=-1))))
        return torch.stack(joined[1:], 1)


def seq2seq_steps(
    *,
    batch_size: int = 32,
    sequence_length: int = 64,
    vocabulary: int = 256,
    width: int = 256,
    attention: Literal["bahdanau", "luong"] = "bahdanau",
    dropout: float = 0.1,
    optimizer: str = "adamw",
    lr: float = 1e-3,
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """:class:`Seq2SeqSteps` learns to write a random sequence backwards, with teacher forcing and cross entropy."""
    where, data = usable_device(device), seeded(seed)
    attends: Bahdanau | Luong = Bahdanau(width) if attention == "bahdanau" else Luong(width)
    model = Seq2SeqSteps(vocabulary, width, attends, dropout).train().to(where)
    step = reversal(model, batch_size, sequence_length, vocabulary, where, data)
    return Workload(model, step, make_optimizer(optimizer, model, lr))
