"""The training scripts in accelerate's own wheel, plain and in a session: is every step the same to the bit?

``accelerate.test_utils.scripts`` are run as they are, in one process on the CPU. A session is opened where a script
prepares its model and ends with the script, or where it prepares another: ``poochplan.auto``, once with the steps
before the plan in-core, once with them swapped. Losses, gradients, parameters and the generator are compared by digests
of their bytes.

Scripts that would download get what they ask for here: a small BERT with dropout, and tokens drawn from a seed.

    python -m benchmarks.judges.accelerate_scripts -o benchmarks/results/judges/accelerate.json
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

import poochplan
from benchmarks.facts import facts_of_run, write_results
from benchmarks.judges.training import AUTO_BUDGET, LINK, WAIT_S, digest
from poochplan.verify import seed_everything

HOME = "accelerate.test_utils.scripts"
PACKAGES = ("torch", "accelerate", "transformers")
BATCH, TOKENS, VOCABULARY = 16, 24, 99
BEFORE: tuple[Literal["in-core", "swap"], ...] = ("in-core", "swap")
ALONE = {
    "test_cli": "trains nothing",
    "test_ops": "trains nothing",
    "test_ddp_comm_hook": "needs more than one process",
    "test_distributed_data_loop": "needs two processes",
    "test_merge_weights": "needs an accelerator (FSDP)",
    "test_notebook": "launches processes",
    "external_deps.test_ds_alst_ulysses_sp": "needs DeepSpeed",
    "external_deps.test_ds_multiple_model": "needs DeepSpeed",
    "external_deps.test_metrics": "trains nothing",
    "external_deps.test_peak_memory_usage": "reads an accelerator's memory",
    "external_deps.test_pippy": "needs accelerators",
    "external_deps.test_zero3_integration": "needs DeepSpeed",
}
"""Scripts that cannot be judged here, and why."""


class Metric:
    """In the place of one that would be downloaded."""

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self.right = (predictions == references).float().mean().item()

    def compute(self) -> dict[str, float]:
        return {"accuracy": self.right, "f1": self.right}


def batches(*_: object) -> tuple[Any, Any]:
    """A loader of each kind, in the place of GLUE's."""
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (20 * BATCH, TOKENS), generator=drawn)
    labels = (tokens.sum(1) % 2).tolist()
    rows = [{"input_ids": one, "labels": label} for one, label in zip(tokens, labels, strict=True)]

    def collated(some: list[dict[str, Any]]) -> BatchEncoding:
        return BatchEncoding(torch.utils.data.default_collate(some))

    return tuple(
        torch.utils.data.DataLoader(part, shuffle=shuffled, collate_fn=collated, batch_size=BATCH)  # type: ignore[arg-type]
        for part, shuffled in ((rows, True), (rows[: 2 * BATCH], False))
    )  # type: ignore[return-value]


def model(*_: object, **__: object) -> torch.nn.Module:
    """In the place of a pretrained one."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, **sizes)).train()


def loaded(name: str) -> types.ModuleType:
    """The script, which imports libraries that are not there, with what it would download."""
    absent = {one: types.ModuleType(one) for one in ("evaluate", "datasets") if one not in sys.modules}
    for stub in absent.values():
        stub.load = stub.load_dataset = lambda *_: Metric()  # type: ignore[attr-defined]
    with patch.dict(sys.modules, absent):
        script = importlib.import_module(f"{HOME}.{name}")
    if hasattr(script, "get_dataloaders"):
        script.get_dataloaders = batches
        script.AutoModelForSequenceClassification = types.SimpleNamespace(from_pretrained=model)
    return script


def with_arguments(*arguments: str) -> Callable[[types.ModuleType, Path], None]:
    """Calls ``main`` as from the command line; ``{}`` is a folder of its own."""

    def go(script: types.ModuleType, folder: Path) -> None:
        with patch.object(sys, "argv", ["script", *(one.format(folder) for one in arguments)]):
            script.main()

    return go


def resumed(script: types.ModuleType, folder: Path) -> None:
    """Two epochs, and the second again from the checkpoint of the first."""
    with_arguments("--output_dir", "{}", "--partial_train_epoch", "1")(script, folder)
    with_arguments("--output_dir", "{}", "--resume_from_checkpoint", "{}/epoch_0")(script, folder)


SCRIPTS: dict[str, Callable[[types.ModuleType, Path], None]] = {
    "test_script": with_arguments(),
    "test_sync": with_arguments(),
    "external_deps.test_performance": with_arguments("--output_dir", "{}", "--num_epochs", "2"),
    "external_deps.test_checkpointing": resumed,
}


class Sessions:
    """Opens one for each model that is prepared. State: the open one, reports of the others, digests of all steps."""

    def __init__(self, before_plan: Literal["in-core", "swap"] | None, cache: Path) -> None:
        self._before, self._cache = before_plan, cache
        self.session: Any = None
        self.reports: list[Any] = []
        self.seen: list[str] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While a script runs."""
        prepare, backward = Accelerator.prepare, Accelerator.backward

        def prepared(own: Accelerator, *given: Any, **kwargs: Any) -> Any:
            self.close()
            results = prepare(own, *given, **kwargs)
            self._open(results if isinstance(results, tuple) else (results,))
            return results

        def after_backward(own: Accelerator, loss: torch.Tensor, **kwargs: Any) -> None:
            self.seen.append(digest([loss]))
            backward(own, loss, **kwargs)
            parameters = [one for model in own._models for one in model.parameters() if one.grad is not None]
            self.seen.append(digest(one.grad for one in parameters))

        def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
            self.seen.append(digest(one for group in optimizer.param_groups for one in group["params"]))
            self.seen.append(digest([torch.get_rng_state()]))
            if self.session is not None:
                self.session.wait_until_planned(WAIT_S)

        with ExitStack() as stack:
            stack.enter_context(patch.object(Accelerator, "prepare", prepared))
            stack.enter_context(patch.object(Accelerator, "backward", after_backward))
            stack.callback(register_optimizer_step_post_hook(stepped).remove)
            stack.callback(self.close)
            yield

    def _open(self, results: tuple[Any, ...]) -> None:
        models = [one for one in results if isinstance(one, torch.nn.Module)]
        if self._before is not None and models:
            optimizers = [one for one in results if isinstance(one, torch.optim.Optimizer)]
            asked = {"budget": AUTO_BUDGET, "cache": self._cache, "link": LINK, "quiet": True, "time_limit_s": 0.3}
            asked |= {"before_plan": self._before, "on_refusal": "swap"}
            self.session = poochplan.auto(models[0], optimizers, **asked).__enter__()

    def close(self) -> None:
        """The open session, if there is one."""
        if self.session is not None:
            self.session.close()
            self.reports.append(self.session.report())
            self.session = None


def run(name: str, before_plan: Literal["in-core", "swap"] | None = None) -> Sessions:
    """The script, in sessions unless ``before_plan`` is None."""
    script = loaded(name)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # type: ignore[attr-defined]
    seed_everything(0)
    default_rng = np.random.default_rng
    with ExitStack() as stack:
        seeded = patch("numpy.random.default_rng", lambda seed=None: default_rng(seed or 0))  # some data have no seed
        stack.enter_context(seeded)
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        sessions = Sessions(before_plan, Path(folder, "cache"))
        with sessions.watching():
            SCRIPTS[name](script, Path(folder))
    return sessions


def judged(name: str) -> dict[str, Any]:
    """What is found of one script."""
    try:
        plain, again = run(name), run(name)
    except Exception as error:
        return {"status": "fails plain", "reason": f"{type(error).__name__}: {str(error)[:200]}"}
    if plain.seen != again.seen:
        return {"status": "unsteady"}
    found: dict[str, Any] = {"status": "equal", "digests": len(plain.seen), "sessions": {}}
    for before in BEFORE:
        try:
            ours = run(name, before)
        except Exception as error:
            return found | {"status": "raised", "reason": f"{type(error).__name__}: {str(error)[:300]}"}
        total = [one.total for one in ours.reports]
        found["sessions"][before] = {
            "opened": len(ours.reports),
            "steps": sum(one.steps for one in total),
            "followed": sum(one.steps_followed for one in ours.reports),
            "out_bytes": sum(one.out_bytes for one in total),
            "replayed_values": sum(one.replayed_values for one in total),
            "served_bytes": sum(one.served_bytes for one in total),
            "fallbacks": sum(one.fallbacks for one in total),
        }
        if ours.seen != plain.seen:
            found["status"] = "different"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(SCRIPTS), choices=SCRIPTS, metavar="SCRIPT")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {name: judged(name) for name in given.only}
    for name, one in found.items():
        print(f"{name}: {one['status']} {one.get('reason', '')} {one.get('sessions', '')}")
    write_results(given.output, facts_of_run(given, PACKAGES) | {"scripts": found, "not judged": ALONE})
    raise SystemExit(any(one["status"] in ("different", "raised") for one in found.values()))


if __name__ == "__main__":
    main()
