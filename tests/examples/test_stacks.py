"""The examples of other libraries: bitwise what they are without poochplan, also resumed, and within the budget."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
import transformers

from poochplan.errors import AuditError, UsageError
from poochplan.integrations import hf
from poochplan.integrations import lightning as for_lightning
from poochplan.integrations.trainers import called_by
from tests.examples.lightning_ranks import Watches
from tests.examples.ranks import EXAMPLES, main_of, no_session
from tests.examples.ranks import QUICK as SHORT
from tests.live_bytes import outside_meter
from tests.online.caches import costs_are_known, empty_cache
from tests.torchrun import TORCHRUN, torchrun

QUICK: dict[str, Any] = {"before_plan": "swap", **SHORT}


@pytest.fixture(autouse=True, scope="module")
def _a_cache(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with empty_cache(tmp_path_factory.mktemp("cache")):
        costs_are_known()
        yield


def parameters_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def metered(call: Any) -> tuple[Any, int]:
    with outside_meter() as meter:
        result = call()
    return result, meter.peak


class Generates(transformers.TrainerCallback):
    """Between steps; and waits for the plan, so that a loop this short sees it."""

    def __init__(self, plans: hf.PlanCallback | None = None) -> None:
        self.plans = plans
        self.texts: list[torch.Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % 6 == 0:
            self.texts.append(model.generate(torch.zeros(1, 4, dtype=torch.int64), max_new_tokens=4, do_sample=False))
        if self.plans is not None and self.plans.session is not None and state.global_step >= 11:
            self.plans.session.wait_until_planned(120)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The example without poochplan, and its checkpoints."""
    folder, generates = tmp_path_factory.mktemp("hf"), Generates()
    trainer, peak_bytes = metered(lambda: main_of("hf_trainer")(generates, folder=str(folder)))
    found = {"losses": losses_of(trainer), "parameters": parameters_of(trainer.model), "texts": generates.texts}
    return found | {"folder": folder, "peak_bytes": peak_bytes}


def losses_of(trainer: transformers.Trainer) -> list[float]:
    return [row.get("loss", row.get("eval_loss", 0.0)) for row in trainer.state.log_history]


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers_is_the_same_in_60_percent_of_its_memory(
    trained: dict[str, Any], tmp_path: Path
) -> None:
    budget_bytes = int(trained["peak_bytes"] * 0.6)
    plans = hf.PlanCallback(budget=budget_bytes, cache=tmp_path / "cache", **QUICK)
    generates = Generates(plans)
    trainer, peak_bytes = metered(lambda: main_of("hf_trainer")(plans, generates, folder=str(tmp_path)))
    assert losses_of(trainer)[:-1] == trained["losses"][:-1]  # the last row is the run time
    assert same(parameters_of(trainer.model), trained["parameters"])
    assert same(generates.texts, trained["texts"])
    assert plans.session is not None
    assert plans.session.plan is not None
    assert plans.session.total.fallbacks == 0
    assert peak_bytes <= budget_bytes
    assert not has_hooks()


@pytest.mark.filterwarnings("ignore")
def test_a_training_that_is_resumed_with_poochplan_is_what_it_is_without(
    trained: dict[str, Any], tmp_path: Path
) -> None:
    plans = hf.PlanCallback(budget=int(trained["peak_bytes"] * 0.6), cache=tmp_path / "cache", **QUICK)
    resume = str(trained["folder"] / "checkpoint-10")
    expected = main_of("hf_trainer")(folder=str(tmp_path / "plain"), resume=resume)
    found = main_of("hf_trainer")(plans, folder=str(tmp_path / "planned"), resume=resume)
    assert losses_of(found)[:-1] == losses_of(expected)[:-1]
    assert same(parameters_of(found.model), parameters_of(expected.model))
    assert plans.session is not None
    assert plans.session.profile is not None


@pytest.mark.filterwarnings("ignore")
def test_lightning_is_the_same_in_less_memory_and_resumes_in_the_middle(tmp_path: Path) -> None:
    main, plain = main_of("lightning_module"), Watches()
    saves = lightning.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=10, save_top_k=-1)
    expected, plain_bytes = metered(lambda: main(plain, saves, folder=str(tmp_path)))
    budget_bytes = int(plain_bytes * 0.75)  # the data set is a third of it
    plans = for_lightning.PlanCallback(budget=budget_bytes, cache=tmp_path / "cache", **QUICK)
    waits = Watches(plans, range(13, 1000))
    found, peak_bytes = metered(lambda: main(plans, waits, folder=str(tmp_path)))
    assert waits.losses == plain.losses
    assert same(parameters_of(found), parameters_of(expected))
    assert plans.session is not None
    assert plans.session.plan is not None
    assert peak_bytes <= budget_bytes
    checkpoint = next(tmp_path.glob("*step=10*.ckpt"))
    alone = main(folder=str(tmp_path), resume=str(checkpoint))
    resumed = main(plans, Watches(plans, range(13, 1000)), folder=str(tmp_path), resume=str(checkpoint))
    assert same(parameters_of(resumed), parameters_of(alone))


class Stops(transformers.TrainerCallback):
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise self.error("stop")


class StopsLightning(lightning.Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            raise ValueError("stop")


def has_hooks() -> bool:
    return bool(torch._C._autograd._top_saved_tensors_default_hooks(True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_session_of_a_train_that_raises_is_over_before_anything_else_is_trained(
    error: type[BaseException], tmp_path: Path
) -> None:
    plans = hf.PlanCallback(budget="60%", cache=tmp_path / "cache", **QUICK)
    with pytest.raises(error) as caught:  # its traceback holds the Trainer's frames
        main_of("hf_trainer")(plans, Stops(error), folder=str(tmp_path))
    assert plans.session is not None
    segments = plans.session._engine.segment.number
    model = torch.nn.Linear(4, 4)
    model(torch.ones(2, 4)).square().sum().backward()
    assert caught.value.__traceback__ is not None
    assert not has_hooks()
    assert plans.session._engine.segment.number == segments


@pytest.mark.filterwarnings("ignore")
def test_lightning_says_that_fit_has_raised_and_the_session_is_over(tmp_path: Path) -> None:
    plans = for_lightning.PlanCallback(budget="60%", cache=tmp_path / "cache", **QUICK)
    with pytest.raises(ValueError, match="stop"):
        main_of("lightning_module")(plans, StopsLightning(), folder=str(tmp_path))
    assert not has_hooks()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "callback"), [("hf_trainer", hf.PlanCallback), ("lightning_module", for_lightning.PlanCallback)]
)
def test_a_callback_that_is_given_twice_is_refused(name: str, callback: Any, tmp_path: Path) -> None:
    both = [callback(budget="60%", cache=tmp_path / "cache", **QUICK) for _ in range(2)]
    with pytest.raises(UsageError, match="expected one PlanCallback, found several"):
        main_of(name)(*both, folder=str(tmp_path))
    assert not has_hooks()


class Late(torch.nn.Module):
    """Begins to write what it has saved, by NumPy, once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.writes = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(5)), False

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            hidden = layer(rows)
            rows = hidden.sin()
            if self.writes:
                hidden.detach().numpy()[:] += 0.5
        return {"loss": rows.square().mean()}


class Begins(transformers.TrainerCallback):
    """Has the model write once there is a plan, and twenty steps were taken."""

    def __init__(self, plans: hf.PlanCallback) -> None:
        self.plans = plans

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        assert self.plans.session is not None
        if state.global_step == 20:
            model.writes = self.plans.session.wait_until_planned(120)


@pytest.mark.parametrize("on_audit", ["error", "warn"])
def test_a_late_write_ends_train_with_an_error_if_that_is_asked_for_and_is_told_else(
    on_audit: str, tmp_path: Path
) -> None:
    plans = hf.PlanCallback(budget="85%", cache=tmp_path / "cache", on_audit=on_audit, **QUICK)
    settings = transformers.TrainingArguments(
        str(tmp_path), max_steps=50, per_device_train_batch_size=128, use_cpu=True, save_strategy="no", report_to="none"
    )
    data = [{"rows": row} for row in torch.randn(128, 64)]
    trainer = transformers.Trainer(Late(), settings, None, data, callbacks=[plans, Begins(plans)])
    found = "the audit found other bytes than forward left in"
    with pytest.raises(AuditError, match=found) if on_audit == "error" else pytest.warns(RuntimeWarning, match=found):
        trainer.train()
    assert (trainer.state.global_step == 50) == (on_audit == "warn")
    plans.close()
    assert not has_hooks()


@pytest.mark.parametrize("callback", [hf.PlanCallback, for_lightning.PlanCallback])
def test_a_budget_that_cannot_be_meant_is_refused_where_it_is_written(callback: Any) -> None:
    for budget in ("60 percent", 60):
        with pytest.raises(UsageError, match="budget: expected"):
            callback(budget=budget)


def test_the_compiled_model_is_the_one_that_the_trainer_calls() -> None:
    model = torch.nn.Linear(2, 2)
    compiled: Any = torch.compile(model)
    assert called_by(SimpleNamespace(model_wrapped=compiled), model) is compiled
    assert called_by(SimpleNamespace(model_wrapped=model), model) is model
    assert called_by(None, model) is model


@pytest.mark.parametrize(("name", "share"), [("auto_loop", 0.6), ("accelerate_loop", 0.75)])
def test_a_loop_is_the_same_in_less_memory(
    name: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("poochplan.auto", no_session, raising=False)
        (losses, model, _), plain_bytes = metered(lambda: main_of(name)())
    budget_bytes = int(plain_bytes * share)
    (planned, planned_model, session), peak_bytes = metered(
        lambda: main_of(name)(budget=budget_bytes, cache=tmp_path, **QUICK)
    )
    assert planned == losses
    assert same(parameters_of(planned_model), parameters_of(model))
    assert session.total.fallbacks == 0
    assert session.profile is not None
    assert peak_bytes <= budget_bytes


def two_ranks(module: str, folder: Path, *arguments: str, **options: Any) -> list[dict[str, Any]]:
    """The facts of each rank: both have trained as without poochplan, and have followed one plan."""
    both = torchrun(f"tests.examples.{module}", folder, *arguments, **options)
    for facts in both:
        assert facts["planned"] == facts["plain"]
        assert facts["fallbacks"] == 0
        assert facts.get("peak_bytes", 0) <= facts.get("budget_bytes", 0)
    first, second = both
    assert first["plan"] == second["plan"] is not None
    assert first["followed"] == second["followed"] > 0
    return both


@pytest.mark.parametrize("name", ["ddp", "fsdp", pytest.param("accelerate", marks=pytest.mark.deep)])
def test_ranks_follow_one_plan_from_the_same_step_on_with_the_buckets_counted(name: str, tmp_path: Path) -> None:
    assert two_ranks("ranks", tmp_path, name)[0]["counts_buckets"] == (name != "fsdp")


def test_the_trainer_of_transformers_on_two_processes_is_the_same_in_60_percent_of_its_memory(tmp_path: Path) -> None:
    first, second = two_ranks("trainer_ranks", tmp_path)
    for facts in (first, second):
        assert facts["metered_bytes"] <= facts["budget_bytes"], "with the buckets, which no tensor of Python's lies on"
    assert first["planned"]["parameters"] == second["planned"]["parameters"]


def test_lightning_with_fsdp2_on_two_processes_is_the_same_under_one_plan(tmp_path: Path) -> None:
    first, second = two_ranks("lightning_ranks", tmp_path)
    assert first["plain"]["losses"] != second["plain"]["losses"], "each rank has its own batches"


ACCELERATE = ("accelerate.commands.launch", "--config_file", str(EXAMPLES / "accelerate_fsdp.yaml"))


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("accelerate_fsdp", (*ACCELERATE, "--main_process_port", "0")),
        pytest.param("trainer_fsdp", TORCHRUN, marks=pytest.mark.deep),  # its Trainer calls accelerate
    ],
)
def test_the_fsdp_plugin_of_accelerate_on_two_processes_is_the_same_under_one_plan(
    name: str, launcher: tuple[str, ...], tmp_path: Path
) -> None:
    first, second = two_ranks("accelerate_ranks", tmp_path, name, launcher=launcher)
    for facts in (first, second):
        assert facts["plain"]["units"] > 1, "accelerate has sharded each block"
        assert facts["moved"] > 0
    assert first["plain"]["parameters"] != second["plain"]["parameters"], "each rank has its own shards"
