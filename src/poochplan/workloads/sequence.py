"""Recurrent networks of torch.nn: a sequence-to-sequence LSTM with attention, and a character-level language model."""

from __future__ import annotations

import torch
from torch import nn

from poochplan.errors import UsageError
from poochplan.runtime.devices.opening import usable_device
from poochplan.workload import Workload

from .common import make_optimizer, seeded

_START_TOKEN = 0  # what the decoder reads first; the data use tokens from 1 on


class Seq2Seq(nn.Module):
    """An LSTM encoder, an LSTM decoder that starts from its state, and attention from the one to the other."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)
        self.decoder = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)
        self.attention = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.join = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Logits ``[batch, length, vocabulary]`` from the source and the shifted target, both ``[batch, length]``."""
        memory, state = self.encoder(self.dropout(self.embedding(source)))
        decoded, _ = self.decoder(self.dropout(self.embedding(previous)), state)
        context, _ = self.attention(decoded, memory, memory, need_weights=False)
        joined = torch.tanh(self.join(torch.cat((decoded, context), dim=-1)))
        logits: torch.Tensor = self.head(self.dropout(joined))
        return logits


def seq2seq(
    *,
    batch_size: int = 32,
    sequence_length: int = 128,
    vocabulary: int = 256,
    width: int = 256,
    layers: int = 2,
    heads: int = 4,
    dropout: float = 0.1,
    optimizer: str = "adamw",
    lr: float = 1e-3,
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """:class:`Seq2Seq` learns to write a random sequence backwards, with teacher forcing and cross entropy."""
    where, data = usable_device(device), seeded(seed)
    model = Seq2Seq(vocabulary, width, layers, heads, dropout).train().to(where)
    source = torch.randint(_START_TOKEN + 1, vocabulary, (batch_size, sequence_length), generator=data).to(where)
    target = source.flip(1)
    previous = torch.nn.functional.pad(target[:, :-1], (1, 0), value=_START_TOKEN)

    def step() -> torch.Tensor:
        return nn.functional.cross_entropy(model(source, previous).flatten(0, 1), target.flatten())

    return Workload(model, step, make_optimizer(optimizer, model, lr))


class CharRNN(nn.Module):
    """An LSTM that predicts the next character."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Logits ``[batch, length, vocabulary]`` from character numbers ``[batch, length]``."""
        hidden, _ = self.lstm(self.embedding(characters))
        logits: torch.Tensor = self.head(self.dropout(hidden))
        return logits


def char_rnn(
    *,
    batch_size: int = 32,
    sequence_length: int = 256,
    width: int = 256,
    layers: int = 2,
    dropout: float = 0.1,
    optimizer: str = "adamw",
    lr: float = 2e-3,
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """:class:`CharRNN` on excerpts of the Python language reference, which Python ships as ``pydoc_data.topics``.

    The vocabulary is the set of characters in that text, so it may differ between Python versions.

    Raises
    ------
    UsageError
        The text is not installed, or is shorter than one excerpt.
    """
    where, data = usable_device(device), seeded(seed)
    text = _reference_text()
    if len(text) <= sequence_length:
        raise UsageError(
            f"sequence_length: expected less than the text's {len(text)} characters, found {sequence_length}"
        )
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    encoded = torch.tensor([alphabet[character] for character in text])
    model = CharRNN(len(alphabet), width, layers, dropout).train().to(where)
    starts = torch.randint(len(text) - sequence_length, (batch_size, 1), generator=data)
    excerpts = encoded[starts + torch.arange(sequence_length + 1)].to(where)
    inputs, target = excerpts[:, :-1].contiguous(), excerpts[:, 1:].contiguous()

    def step() -> torch.Tensor:
        return nn.functional.cross_entropy(model(inputs).flatten(0, 1), target.flatten())

    return Workload(model, step, make_optimizer(optimizer, model, lr))


def _reference_text() -> str:
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        raise UsageError(
            "char_rnn reads pydoc_data.topics, which this Python was installed without; "
            "install the full standard library"
        ) from error
    return "\n".join(text for _, text in sorted(topics.items()))
