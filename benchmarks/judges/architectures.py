"""Architectures of transformers, small, in train mode: five steps plain and under plans, equal to the bit?

Each architecture that can be built from a config is made small by the names of its fields, and trains with dropout.
It runs plain (twice, so that what does not repeat itself is known), and with everything swapped, everything recomputed,
both mixed, and under a solved plan for 70% of its memory. An arena serves from the third step on. Losses, gradients,
buffers, parameters and the generator are compared by digests of their bytes after every step.

    python -m benchmarks.judges.architectures -o benchmarks/results/judges/transformers.json --share 40
    python -m benchmarks.judges.architectures -o ... --share 40         # goes on with others; seeded, in one order
    python -m benchmarks.judges.architectures --only bert gpt2

timm is not among them: its layers import torchvision, which has no build for a torch without CUDA of this version.
"""

from __future__ import annotations

import argparse
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
from benchmarks.judges.training import Training, judged, profile_of, run

LIMIT_S = 150
PACKAGES = ("torch", "transformers", "numpy")


class NotBuildable(Exception):  # noqa: N818 - no failure of ours
    """Why the architecture cannot be tried."""


def training_of(name: str) -> Callable[[], Training]:
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


def names() -> list[str]:
    """Every architecture that has a model and a config."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def tried(name: str) -> dict[str, Any]:
    """What is found of one architecture."""
    began_s = time.perf_counter()
    try:
        make = training_of(name)
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


def apart(name: str, limit_s: float) -> dict[str, Any]:
    """The same in a process of its own, which may end or hang."""
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)

    def try_it() -> None:
        faulthandler.dump_traceback_later(limit_s - 2, exit=True)  # where it hangs
        theirs.send(tried(name))

    process = multiprocessing.get_context("fork").Process(target=try_it)
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


def warm_up() -> None:
    """What is imported, built or measured once for a process, before others are forked from it.

    Nothing is planned here: a solver's threads are not there in a process that is forked.
    """
    make = training_of("bert")
    run(make)
    profile_of(make)
    gc.collect()
    gc.freeze()  # a session looks at all that the collector knows, and these are many


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    every, again = names(), ("too slow", "process ended")
    left = given.only or [name for name in every if results.get(name, {"status": again[0]})["status"] in again]
    random.Random(given.seed).shuffle(left)
    warm_up()
    for name in left[: given.share]:
        results[name] = apart(name, given.limit_s)
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
    return bool(found.get("plans")) and all(
        one["served_bytes"] for kind, one in found["plans"].items() if kind != "solved" or len(found["plans"]) == 4
    )


if __name__ == "__main__":
    main()
