"""Loops of fourteen training stacks whose steps take about a tenth of a second, for ``benchmarks/loops.py``.

Each is a function of ``around``, which gives what is around the loop (a session of ``auto``'s, or nothing), and of
``goes_on``, called behind each step.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

WIDTH, ROWS, BLOCKS, CLASSES = 512, 512, 12, 10
TOKENS, WORDS = 128, 512
Around = Callable[[Any, Any], contextlib.AbstractContextManager[Any]]
GoesOn = Callable[[Any], bool]
"""Is told the session; whether another step is to come."""


def blocks(count: int = BLOCKS, out: int = CLASSES) -> nn.Sequential:
    parts = (
        nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        for _ in range(count)
    )
    return nn.Sequential(*parts, nn.Linear(WIDTH, out))


def batch(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, WIDTH), torch.randint(CLASSES, (rows,))


def looped(model: nn.Module, around: Around, goes_on: GoesOn, step: Callable[[int], None], optimizer: Any) -> None:
    number = 0
    with around(model, optimizer) as session:
        while True:
            step(number)
            number += 1
            if not goes_on(session):
                return


def stepped(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def mlp(around: Around, goes_on: GoesOn, *, changed: str = "") -> None:
    """Accumulation of 4, bfloat16, compiled blocks, a loader with workers, a state dict that is loaded in between."""
    model = blocks()
    optimizer, data = adam(model), [batch(ROWS // 4) for _ in range(4)] if changed == "accumulation" else [batch()]
    if changed == "compiled":
        for block in list(model)[1:4]:
            block.compile(backend="aot_eager")
    workers = 2 if changed == "loader" else 0
    rows = torch.utils.data.TensorDataset(*batch(64 * ROWS))
    loader = iter(torch.utils.data.DataLoader(rows, ROWS, num_workers=workers)) if workers else None

    def step(number: int) -> None:
        nonlocal loader
        if changed == "state" and number % 40 == 39:
            model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()})
        parts = data
        if loader is not None:
            found = next(loader, None)
            if found is None:
                loader = iter(torch.utils.data.DataLoader(rows, ROWS, num_workers=workers))
                found = next(loader)
            parts = [found]
        for inputs, labels in parts[:-1]:
            (cross_entropy(model(inputs), labels) / len(parts)).backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=changed == "bfloat16"):
            loss = cross_entropy(model(parts[-1][0]), parts[-1][1]) / len(parts)
        stepped(optimizer, loss)

    looped(model, around, goes_on, step, optimizer)


def two_sessions(around: Around, goes_on: GoesOn) -> None:
    """One loop behind the other in one process, the second for as many steps."""
    steps = 0

    def first(session: Any) -> bool:
        nonlocal steps
        steps += 1
        return steps < 60 and goes_on(session)

    mlp(around, first)
    mlp(around, goes_on)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.gate, self.after = blocks(4, WIDTH), nn.Linear(WIDTH, 2), blocks(6)
        self.experts = nn.ModuleList(blocks(1, WIDTH) for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.before(rows)
        chances = self.gate(rows).softmax(-1)
        chosen, mixed = chances.argmax(-1), torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            own = (chosen == number).nonzero().squeeze(-1)
            mixed = mixed.index_add(0, own, expert(rows[own]) * chances[own, number : number + 1])
        return self.after(mixed)


def experts(around: Around, goes_on: GoesOn) -> None:
    model, data = Experts(), batch()
    optimizer = adam(model)
    looped(model, around, goes_on, lambda _: stepped(optimizer, cross_entropy(model(data[0]), data[1])), optimizer)


def gan(around: Around, goes_on: GoesOn) -> None:
    generator, judge = blocks(4, WIDTH), blocks(6, 1)
    for_generator, for_judge = adam(generator), adam(judge)
    real, ones, zeros = batch()[0], torch.ones(ROWS, 1), torch.zeros(ROWS, 1)

    def step(_: int) -> None:
        for_judge.zero_grad()
        fake = generator(torch.randn(ROWS, WIDTH))
        binary_cross_entropy_with_logits(judge(real), ones).backward()
        binary_cross_entropy_with_logits(judge(fake.detach()), zeros).backward()
        for_judge.step()
        for_generator.zero_grad()
        stepped(for_generator, binary_cross_entropy_with_logits(judge(fake), ones))

    models: Any = {"generator": generator, "judge": judge}
    looped(models, around, goes_on, step, [for_generator, for_judge])


def language_model(kind: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if kind == "llama":
        sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 10, "num_attention_heads": 8}
        return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=TOKENS * 4, **sizes))
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=TOKENS, n_embd=256, n_layer=4, n_head=4))


def texts(around: Around, goes_on: GoesOn, *, kind: str = "gpt2") -> None:
    """Llama, eight lengths, adapters of low rank, accelerate, and the wrapper for data-parallel training."""
    model = language_model(kind)
    tokens = [torch.randint(WORDS, (2 if kind == "llama" else 4, TOKENS * (4 if kind == "llama" else 1)))]
    if kind == "lengths":
        tokens = [torch.randint(WORDS, (4, length)) for length in range(TOKENS // 8, TOKENS + 1, TOKENS // 8)]
    if kind == "lora":
        import peft

        adapters = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], r=4, fan_in_fan_out=True)
        model = peft.get_peft_model(model, adapters)
    if kind == "ddp":
        rendezvous = f"file://{tempfile.mkdtemp()}/ranks"
        torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
        model = nn.parallel.DistributedDataParallel(model)
    optimizer: Any = adam(model)
    backward: Any = torch.Tensor.backward
    if kind == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward

    def step(number: int) -> None:
        part = tokens[-1 - number % len(tokens)]
        backward(model(input_ids=part, labels=part).loss)
        optimizer.step()
        optimizer.zero_grad()

    looped(model, around, goes_on, step, optimizer)


def trainer(around: Around, goes_on: GoesOn) -> None:
    """The session is opened by ``train()``: as the callback for it does."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model, data = (
        language_model("gpt2"),
        [{"input_ids": text, "labels": text} for text in torch.randint(WORDS, (4096, TOKENS))],
    )

    class Around(TrainerCallback):
        session: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.stack = contextlib.ExitStack()
            self.session = self.stack.enter_context(around(kwargs["model"], kwargs["optimizer"]))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = not goes_on(self.session)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.stack.close()

    settings = TrainingArguments(tempfile.mkdtemp(), max_steps=4000, per_device_train_batch_size=4, use_cpu=True)
    settings.save_strategy, settings.report_to, settings.disable_tqdm = "no", [], True
    Trainer(model, settings, None, data, callbacks=[Around()]).train()


def lightning(around: Around, goes_on: GoesOn) -> None:
    """With a validation every 50 steps."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    class Module(LightningModule):
        def training_step(self, data: list[torch.Tensor]) -> torch.Tensor:
            return cross_entropy(self.net(data[0]), data[1])

        validation_step = training_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self)

    class Around(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.stack = contextlib.ExitStack()
            self.session = self.stack.enter_context(around(pl_module, trainer.optimizers))

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = not goes_on(self.session)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.stack.close()

    module, rows = Module(), torch.utils.data.TensorDataset(*batch(50 * ROWS))
    module.net = blocks()
    held_out = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch(4 * ROWS)), ROWS)
    options = {"enable_progress_bar": False, "enable_checkpointing": False, "logger": False, "min_steps": None}
    Trainer(max_epochs=1000, accelerator="cpu", callbacks=[Around()], **options).fit(
        module, torch.utils.data.DataLoader(rows, ROWS), held_out
    )


def _of(loop: Callable[..., None], **options: Any) -> Callable[[Around, GoesOn], None]:
    return lambda around, goes_on: loop(around, goes_on, **options)


STACKS: dict[str, Callable[[Around, GoesOn], None]] = {
    "trainer": trainer,
    "lightning": lightning,
    "accelerate": _of(texts, kind="accelerate"),
    "lora": _of(texts, kind="lora"),
    "ddp": _of(texts, kind="ddp"),
    "experts": experts,
    "accumulation": _of(mlp, changed="accumulation"),
    "bfloat16": _of(mlp, changed="bfloat16"),
    "compiled_blocks": _of(mlp, changed="compiled"),
    "gan": gan,
    "lengths": _of(texts, kind="lengths"),
    "loader": _of(mlp, changed="loader"),
    "two_sessions": two_sessions,
    "state_dict": _of(mlp, changed="state"),
    "llama": _of(texts, kind="llama"),
}
