"""The recurrent networks that are compared over an epoch, and the policies that each is run under."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OURS = "ilp"


@dataclass(frozen=True)
class Recurrent:
    """A ready workload at one size."""

    config: str
    settings: dict[str, Any]
    epoch_steps: int
    """Of one epoch: as many as the text has chunks; of data without an end, as many as are called one."""
    curve_steps: int
    """Steps of the loss curve."""
    policies: tuple[str, ...]
    large: dict[str, Any] = field(default_factory=dict)
    """What is otherwise where it is simulated: sizes of a GPU."""


_TEXT = {"batch_size": 50, "sequence_length": 100, "width": 128, "chunks": 0, "unrolled": True}
"""Two layers of 128 and 50 rows of text, as char-rnn has it by itself; its own chunks are of 50 characters."""
_OF_TEXT = ("earliest-first", "latest-first", "swap-all", OURS)
_LARGE_TEXT = {"batch_size": 256, "sequence_length": 256, "width": 512, "chunks": 2, "text": "large"}

RECURRENT: dict[str, Recurrent] = {
    "char-rnn-small": Recurrent("char_rnn", _TEXT | {"text": "small"}, 56, 28, _OF_TEXT, _LARGE_TEXT),
    "char-rnn-large": Recurrent("char_rnn", _TEXT | {"text": "large"}, 879, 28, _OF_TEXT),
    "seq2seq-steps": Recurrent(
        "seq2seq_steps",
        {"sequence_length": 40, "width": 192},
        10,
        10,
        ("seq2seq", "swap-all", OURS),
        {"batch_size": 128, "sequence_length": 64, "width": 512},
    ),
}
TINY: dict[str, Recurrent] = {
    "tiny-text": Recurrent(
        "char_rnn",
        _TEXT | {"batch_size": 8, "sequence_length": 8, "width": 32, "chunks": 3, "text": "small"},
        3,
        4,
        _OF_TEXT,
    ),
    "tiny-steps": Recurrent("seq2seq_steps", {"batch_size": 8, "sequence_length": 8, "width": 32}, 2, 3, ("seq2seq",)),
}
"""For tests."""
ALL = RECURRENT | TINY
