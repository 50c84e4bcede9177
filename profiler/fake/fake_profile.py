"""Mode ``fake``: the profile of a step that ran without memory, and the bytes that it would need in-core."""

from __future__ import annotations

import contextlib

import msgspec
import torch

from poochplan.formats.profile import ROOFLINE, Device, Kind, Link, Memory, Phase, Profile, preset_link
from poochplan.profiler.assembly.assemble import this_machine
from poochplan.profiler.capture.capture import collected_after
from poochplan.profiler.graph_capture import GraphCapture
from poochplan.profiler.link import measure_link
from poochplan.profiler.live.after_capture import OpTiming, difference_note
from poochplan.profiler.live.capturing import Capturing
from poochplan.profiler.live.step_function import StepFunction
from poochplan.profiler.request import Options
from poochplan.runtime.compiled_hooks import hooks_for
from poochplan.runtime.metering.census import wrapper_of
from poochplan.tensors.modes import compiled_modules
from poochplan.torch_private.tensor_internals import tensors_in
from poochplan.units import counted

from .fake import FakeCapture, faked
from .op_bench import OpBench, give_memory, memory_note
from .roofline import Roofline, parse_roofline


def fake_profile(steps: StepFunction, roofline: Roofline | None, options: Options, notes: list[str]) -> Profile:
    """The profile of a step without memory. Its durations come from a roofline, or from ops run by themselves."""
    model, say = steps.model, options.say
    compiled = compiled_modules(model)
    with faked(model, steps.optimizer) as fakes, contextlib.ExitStack() as opened:
        fake = FakeCapture(model, fakes, roofline)
        if compiled:
            fake = GraphCapture(model, fakes, roofline)
            opened.enter_context(hooks_for(model).capturing_graphs(fake))
        say(f"warming up in mode fake ({counted(options.warmup, 'step')})")
        for _ in range(options.warmup):
            steps.one_step()
        say("capturing one step in mode fake")
        seen = steps.run(Capturing(steps.context, fake))
        if seen.lives_on and not compiled:
            fake = FakeCapture(model, fakes, roofline)
            seen = steps.run(Capturing(steps.context, fake, seen.capture))
        differ: list[str] = []
        if not compiled:
            with collected_after(fake):
                differ = difference_note(fake.ops, steps.run(OpTiming(steps.context, None)).timer)
        notes = [*notes, *fake.notes(), *differ]
    device, link, own = _machine_of(fake, roofline, steps.context.where, options)
    phase_seconds = dict.fromkeys(Phase, 0.0)
    for op in fake.ops:
        phase_seconds[op.phase] += op.duration_s
    unverified = "no replay was verified: writes of kernels that bypass the dispatcher were not noticed"
    profile = seen.draft(
        "fake",
        fake.durations(),
        [phase_seconds],
        [*notes, *own, unverified],
        link=link,
        workload=options.workload,
        device=device,
    )
    profile = msgspec.structs.replace(profile, times=msgspec.structs.replace(profile.times, iterations=0))
    return fake.told_of_graphs(profile) if isinstance(fake, GraphCapture) else profile


def _machine_of(
    capture: FakeCapture, roofline: Roofline | None, where: torch.device, options: Options
) -> tuple[Device, Link, list[str]]:
    """The device and link of the roofline or of this machine, and notes. On this machine, ops get measured costs."""
    if roofline is not None:
        device = Device(kind="cpu", name=roofline.name + ROOFLINE, memory_bytes=roofline.memory_bytes)
        note = f"durations are a roofline's ({roofline.name}), nothing was run, and peaks count live tensors alone"
        return device, options.link or preset_link(roofline.link), [note]
    link = options.link
    if link is None:
        options.say("measuring the link")
        link = measure_link(where, options.spill_dir, options.throttle_bytes_per_s)
    device = this_machine(where)
    bench = OpBench(device)
    costs = bench.costs(capture.specs, options.say)
    for op, cost in zip(capture.ops, costs, strict=True):
        op.duration_s = 0.0 if id(op) in capture.fused else cost.seconds
    keys = [spec.key for spec in capture.specs]
    unknown, distinct = give_memory(capture.ops, capture.values, keys, costs), len(set(keys))
    if len(unknown) < distinct:
        capture.workspace.memory, capture.unmeasured_ops = Memory.ALLOCATED, len(unknown)
    counts = ", ".join(f"{count} {what}" for what, count in bench.counts.items())
    note = f"durations are those of distinct ops, run by themselves on made-up tensors ({counts} from bytes)"
    return device, link, [note, memory_note(unknown, distinct)]


def step_without_memory(steps: StepFunction) -> Profile | None:
    """The in-core step, untimed, with the static bytes that exist before the first one; None if it only runs with data.
    It runs twice, on fake tensors. Its errors are ignored: the real step will raise them.
    """
    model, optimizer = steps.model, steps.optimizer
    if compiled_modules(model) or wrapper_of(model) is not None:  # it would be compiled, or wait for other ranks
        return None
    # Of the optimizer's state, which is empty before the first step.
    state = tensors_in(list(optimizer.state.values())) if optimizer is not None else []
    there_bytes = sum(x.numel() * x.element_size() for x in state if x.layout is torch.strided)
    try:
        with faked(model, optimizer) as fakes:
            steps.one_step()
            rates = parse_roofline("h200")  # the durations are not used
            seen = steps.run(Capturing(steps.context, FakeCapture(model, fakes, rates)))
            if seen.lives_on:
                seen = steps.run(Capturing(steps.context, FakeCapture(model, fakes, rates), seen.capture))
    except Exception:  # the step's code may raise anything when tensors have no content
        return None
    draft = seen.untimed("fake")
    before = {str(kind): draft.static_bytes[kind] for kind in (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT)}
    return msgspec.structs.replace(draft, static_bytes=before | {str(Kind.OPTIMIZER_STATE): there_bytes})


def beside_static(profile: Profile) -> int:
    """Bytes that the in-core step adds to those that exist before it."""
    return profile.in_core_peak_bytes - sum(profile.static_bytes.values())
