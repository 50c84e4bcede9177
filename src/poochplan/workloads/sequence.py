"""Recurrent networks of torch.nn: a sequence-to-sequence LSTM with attention, and a character-level language model."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from poochplan.errors import UsageError
from poochplan.runtime.devices.opening import usable_device
from poochplan.workload import Workload

from .common import make_optimizer, reversal, seeded
from .unrolled import LSTMSteps, State

TextName = Literal["reference", "small", "large"]
"""The text: the whole language reference, its beginning, or both it and sources of the standard library."""

TEXT_BYTES = {"small": 285_000, "large": 4_400_000}
"""Sizes of the two data sets of "Improving TensorFlow's Memory Swapping by Prioritizing Earlier Tensors", 2019."""
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"})


class Seq2Seq(nn.Module):
    """An LSTM encoder, an LSTM decoder that starts from its state, and attention from decoder to encoder."""

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
    step = reversal(model, batch_size, sequence_length, vocabulary, where, data)
    return Workload(model, step, make_optimizer(optimizer, model, lr))


class CharRNN(nn.Module):
    """An LSTM that predicts the next character: fused layers, or cells step by step if it is ``unrolled``."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float, *, unrolled: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm: nn.LSTM | LSTMSteps = (
            LSTMSteps(width, layers, dropout)
            if unrolled
            else nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, characters: torch.Tensor, state: State | None = None) -> tuple[torch.Tensor, State]:
        """Logits ``[batch, length, vocabulary]`` from character numbers ``[batch, length]``, and the state after them.

        Without ``state`` it begins at zero.
        """
        hidden, state_after = self.lstm(self.embedding(characters), state)
        logits: torch.Tensor = self.head(self.dropout(hidden))
        return logits, state_after


def char_rnn(
    *,
    batch_size: int = 32,
    sequence_length: int = 256,
    width: int = 256,
    layers: int = 2,
    dropout: float = 0.1,
    text: TextName = "reference",
    chunks: int = 1,
    unrolled: bool = False,
    optimizer: str = "adamw",
    lr: float = 2e-3,
    seed: int = 0,
    device: str = "cpu",
) -> Workload:
    """:class:`CharRNN` on text that Python ships (:mod:`.corpus`).

    ``text`` is ``"reference"``, the Python language reference, or a text of fixed size: ``"small"`` (285 KB) or
    ``"large"`` (4.4 MB). The vocabulary is the set of its characters, which may differ between Python versions.

    With one chunk, every step reads the same excerpts, each from a state of zeros. With more ``chunks``,
    back-propagation is truncated. The text is then read in ``batch_size`` parallel rows. Each step reads a chunk of
    ``sequence_length`` characters, from the detached state at the end of the previous chunk. After the last chunk the
    rows begin again, with zeros. 0 means as many chunks as the text has.

    ``unrolled`` calls cells step by step, so that plans can decide about time steps; a fused layer is one op.

    Raises ``UsageError`` if the text is not installed, or is too short.
    """
    where, data = usable_device(device), seeded(seed)
    written = text_of(text)
    alphabet = {character: number for number, character in enumerate(sorted(set(written)))}
    model = CharRNN(len(alphabet), width, layers, dropout, unrolled=unrolled).train().to(where)
    encoded = torch.tensor([alphabet[character] for character in written])
    count, starts = _starts(len(written), batch_size, sequence_length, chunks, data)
    read = [encoded[starts + torch.arange(sequence_length + 1) + number * sequence_length] for number in range(count)]
    batches = [(rows[:, :-1].contiguous().to(where), rows[:, 1:].contiguous().to(where)) for rows in read]
    inputs, target = batches[0]

    def same_again() -> torch.Tensor:
        return nn.functional.cross_entropy(model(inputs)[0].flatten(0, 1), target.flatten())

    step = same_again if chunks == 1 else Chunks(model, batches)
    return Workload(model, step, make_optimizer(optimizer, model, lr))


def _starts(
    text_length: int, batch_size: int, sequence_length: int, chunks: int, data: torch.Generator
) -> tuple[int, torch.Tensor]:
    """The number of chunks, and the beginning of each row in the text, ``[batch, 1]``: random for a single chunk, at
    equal distances for more. Raises ``UsageError`` if the text is too short.
    """
    row_length = text_length if chunks == 1 else text_length // batch_size
    count = chunks or (row_length - 1) // sequence_length
    if count < 1 or count * sequence_length >= row_length:
        raise UsageError(
            f"sequence_length: expected less than the text's {row_length} characters a row, found {chunks} chunks of "
            f"{sequence_length}; read less of it"
        )
    if chunks == 1:
        return count, torch.randint(text_length - sequence_length, (batch_size, 1), generator=data)
    return count, torch.arange(batch_size).unsqueeze(1) * row_length


class Chunks:
    """Steps of truncated back-propagation: each reads the next chunk of the rows, from the state that it kept."""

    def __init__(self, model: CharRNN, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.model, self.batches = model, batches
        self.next = 0
        inputs, lstm = batches[0][0], model.lstm
        shape = (lstm.num_layers, inputs.shape[0], lstm.hidden_size)
        # Two tensors, like a kept state: the first chunk then follows the same plan as the others.
        self.state = torch.zeros(shape, device=inputs.device), torch.zeros(shape, device=inputs.device)

    def __call__(self) -> torch.Tensor:
        """The loss of the next chunk. It keeps a detached state."""
        inputs, target = self.batches[self.next]
        logits, (hidden, cell) = self.model(inputs, self.state)
        self.next = (self.next + 1) % len(self.batches)
        if self.next:
            self.state = hidden.detach(), cell.detach()
        else:
            self.state = torch.zeros_like(hidden), torch.zeros_like(cell)
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def text_of(name: TextName) -> str:
    """The text of that name. Texts of fixed size are ASCII, with ``?`` for other characters.

    Raises ``UsageError`` if Python was installed without its language reference, or with too little source.
    """
    reference = _reference()
    size_bytes = TEXT_BYTES.get(name)
    if size_bytes is None:
        return reference
    parts, found_bytes = [reference], len(reference)
    for source in _sources() if found_bytes < size_bytes else ():
        parts.append(source)
        found_bytes += 1 + len(source)
        if found_bytes >= size_bytes:
            break
    text = "\n".join(parts)[:size_bytes].encode("ascii", "replace").decode("ascii")
    if len(text) < size_bytes:
        raise UsageError(
            f"text={name!r}: expected {size_bytes} characters of Python's own sources, found {len(text)}; install the "
            "full standard library, or take text='small'"
        )
    return text


def _reference() -> str:
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        raise UsageError(
            "char_rnn reads pydoc_data.topics, which this Python was installed without; "
            "install the full standard library"
        ) from error
    return "\n".join(text for _, text in sorted(topics.items()))


def _sources() -> Iterator[str]:
    """Sources of the standard library without its tests, in the order of their paths."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if not _LEFT_OUT.intersection(path.relative_to(library).parts):
            yield path.read_text(encoding="utf-8", errors="replace")
