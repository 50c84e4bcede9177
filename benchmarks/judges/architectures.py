"""Architectures of transformers and timm, small, in train mode: five steps plain and under plans, equal to the bit?

Each architecture that can be built from a config is made small by the names of its fields, and trains with dropout.
It runs plain (twice, so that what does not repeat itself is known), and with everything swapped, everything recomputed,
both mixed, and under a solved plan for 70% of its memory. An arena serves from the third step on. Losses, gradients,
buffers, parameters and the generator are compared by digests of their bytes after every step.

    python -m benchmarks.judges.architectures -o benchmarks/results/judges/transformers.json --share 40
    python -m benchmarks.judges.architectures -o ... --share 40         # goes on with others; seeded, in one order
    python -m benchmarks.judges.architectures --library timm -o benchmarks/results/judges/timm.json
    python -m benchmarks.judges.architectures --only bert gpt2
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import logging
import multiprocessing
import os
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

from benchmarks.facts import facts_of_run, write_results
from benchmarks.judges.training import Training, judged, profile_of

LIMIT_S = 150
PACKAGES = ("torch", "transformers", "timm", "numpy")


class NotBuildable(Exception):  # noqa: N818 - no failure of ours
    """Why the architecture cannot be tried."""


def of_transformers(name: str) -> Callable[[], Training]:
    """The smallest training of it that runs."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    from benchmarks.judges import shrinking

    names = MODEL_MAPPING_NAMES[name]
    try:
        model_class = getattr(transformers, names if isinstance(names, str) else names[0])
        kinds = list(shrinking.configs(CONFIG_MAPPING[name]))
    except Exception as error:
        raise NotBuildable(_line(error)) from None
    reasons = []
    for config in kinds:

        def fresh(config: Any = config) -> nn.Module:
            return shrinking.built(model_class, config)

        try:
            torch.manual_seed(0)
            batches = list(shrinking.inputs(fresh()))
        except Exception as error:
            reasons.append(_line(error))
            continue
        for batch in batches:
            make = partial(_training, fresh, batch)
            try:
                torch.manual_seed(0)
                make().loss_of().backward()  # type: ignore[no-untyped-call]
                return make
            except Exception as error:
                reasons.append(_line(error))
    raise NotBuildable(reasons[0] if reasons else "its forward takes none of the inputs that are tried")


def _training(fresh: Callable[[], nn.Module], batch: dict[str, torch.Tensor]) -> Training:
    from benchmarks.judges import shrinking

    model = fresh()
    return Training(model, lambda: shrinking.loss_of(model(**batch)))


def of_timm(name: str) -> Callable[[], Training]:
    """With dropout where the architecture takes it, on images of its smallest size that runs."""
    import timm

    def fresh() -> nn.Module:
        for options in ({"drop_rate": 0.1, "drop_path_rate": 0.1}, {"drop_rate": 0.1}, {}):
            with contextlib.suppress(TypeError, AssertionError):
                return timm.create_model(name, pretrained=False, num_classes=10, **options).train()
        raise NotBuildable("it takes no number of classes")

    with torch.device("meta"):
        count = sum(one.numel() for one in fresh().parameters())
    if count > 6_000_000:
        raise NotBuildable(f"too large: {count} parameters")
    reasons = []
    for size in (64, 128, 224):

        def make(size: int = size) -> Training:
            model, images = fresh(), torch.randn(2, 3, size, size)
            return Training(model, lambda: model(images).float().square().mean())

        try:
            make().loss_of().backward()  # type: ignore[no-untyped-call]
            return make
        except Exception as error:
            reasons.append(_line(error))
    raise NotBuildable(reasons[0])


def names_of(library: str) -> list[str]:
    """Every architecture of it: of timm one of each family of models, the smallest by its name's length."""
    if library == "transformers":
        from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

        return sorted(MODEL_MAPPING_NAMES)
    import timm

    return sorted(
        {min(timm.list_models(module=one), key=lambda name: (len(name), name)) for one in timm.list_modules()}
    )


def tried(library: str, name: str) -> dict[str, Any]:
    """What is found of one architecture."""
    began_s = time.perf_counter()
    try:
        make = (of_transformers if library == "transformers" else of_timm)(name)
    except NotBuildable as reason:
        found = {"status": "not buildable", "reason": str(reason)}
    except Exception as error:
        found = {"status": "not buildable", "reason": _line(error)}
    else:
        try:
            found = judged(make)
        except Exception as error:
            ours = type(error).__module__.startswith("poochplan")
            last = [frame for frame in traceback.extract_tb(error.__traceback__) if "benchmarks" not in frame.filename]
            where = f"{Path(last[-1].filename).name}:{last[-1].lineno}" if last else ""
            found = {"status": "refused" if ours else "raised", "reason": f"{_line(error)} ({where})"}
    return found | {"seconds": round(time.perf_counter() - began_s, 1)}


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def apart(library: str, name: str, limit_s: float) -> dict[str, Any]:
    """The same in a process of its own, which may end or hang."""
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)

    def run() -> None:
        faulthandler.dump_traceback_later(limit_s - 2, exit=True)  # where it hangs
        theirs.send(tried(library, name))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv() if ours.poll(limit_s) else {"status": "too slow", "reason": f"{limit_s} s"}
    except EOFError:
        process.join()
        found = {"status": "process ended", "reason": f"exit code {process.exitcode}"}
    process.kill()
    process.join()
    return found


def warm_up(library: str) -> None:
    """What is imported, built or measured once for a process, before others are forked from it."""
    if library == "transformers":
        judged(of_transformers("bert"))
    else:
        profile_of(of_timm(min(names_of(library), key=len)))
    gc.collect()
    gc.freeze()  # a session looks at all that the collector knows, and these are many


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=("transformers", "timm"), default="transformers")
    parser.add_argument("--share", type=int, default=1 << 20, help="at most so many that have not been tried")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which they are tried")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="for one architecture")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    held = json.loads(given.output.read_text()) if given.output and given.output.exists() else {"architectures": {}}
    results: dict[str, Any] = held["architectures"]
    every = names_of(given.library)
    left = given.only or [name for name in every if name not in results]
    random.Random(given.seed).shuffle(left)
    warm_up(given.library)
    for name in left[: given.share]:
        results[name] = apart(given.library, name, given.limit_s)
        print(f"{name}: {results[name]['status']} {results[name].get('reason', '')[:150]}", flush=True)
        counts = dict(Counter(one["status"] for one in results.values()))
        summary = {"of": len(every), "tried": len(results), "counts": counts}
        summary["served"] = sum(_is_served(one) for one in results.values())
        facts = facts_of_run(given, PACKAGES) | summary
        write_results(given.output, facts | {"architectures": dict(sorted(results.items()))})
    wrong = [name for name in left if results.get(name, {}).get("status") in ("different", "raised", "process ended")]
    raise SystemExit(bool(wrong))


def _is_served(found: dict[str, Any]) -> bool:
    """Whether an arena served bytes under every one of its plans."""
    return bool(found.get("plans")) and all(one["served_bytes"] for one in found["plans"].values())


if __name__ == "__main__":
    main()
