"""Parameters with which each workload that ships takes well under a second a step."""

from __future__ import annotations

import torch

from poochplan.workload import Workload

_TEXT = {"batch_size": "2", "sequence_length": "16", "layers": "2", "width": "32", "heads": "2", "vocabulary": "64"}
SMALL = {
    "resnet50": {"batch_size": "2", "image_size": "32", "hidden_sizes": "[64, 64, 64, 64]", "depths": "[1, 1, 1, 1]"},
    "gpt2": _TEXT,
    "bert": _TEXT,
    "unet3d": {"side": "32", "features": "[4, 4, 8, 8, 16, 4]"},
    "demo": {"side": "32", "features": "[4, 4, 8, 8, 16, 4]"},
    "tiny": {},
    "seq2seq": {"batch_size": "4", "sequence_length": "12", "width": "16", "vocabulary": "20"},
    "seq2seq_steps": {"batch_size": "4", "sequence_length": "6", "width": "16", "vocabulary": "20"},
    "char_rnn": {"batch_size": "4", "sequence_length": "12", "width": "16"},
}


def losses(workload: Workload, steps: int) -> list[torch.Tensor]:
    found = []
    for _ in range(steps):
        loss = workload.step()
        loss.backward()
        assert workload.optimizer is not None
        workload.optimizer.step()
        workload.optimizer.zero_grad()
        found.append(loss.detach())
    return found
