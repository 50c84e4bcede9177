"""Architectures of a library, small, in train mode: five steps plain and under plans, equal to the bit?

Each architecture of transformers that can be built from a config is made small by the names of its fields, and trains
with dropout. timm gives a small model of each of its files, torch_geometric its models and layers, MONAI its networks;
the last two get arguments by the names of their parameters. Each runs plain, and with everything swapped, everything
recomputed, both mixed, and under a solved plan for 70% of its memory. An arena serves from the third step on. Losses,
gradients, buffers, parameters and the generator are compared by digests of their bytes after every step. Where any
differ, plain runs are compared with each other.

    python -m benchmarks.judges.architectures -o benchmarks/results/judges/transformers.json --share 40
    python -m benchmarks.judges.architectures -o ... --share 40         # goes on with others; seeded, in one order
    python -m benchmarks.judges.architectures --only bert gpt2
    python -m benchmarks.judges.architectures --library timm -o benchmarks/results/judges/timm.json
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import logging
import multiprocessing
import os
import random
import re
import sys
import time
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

from benchmarks.facts import facts_of_run, write_results
from benchmarks.judges.training import Training, judged, profile_of, run

LIMIT_S, MOST_PARAMETERS = 150, 40_000_000


class NotBuildable(Exception):  # noqa: N818 - no failure of ours
    """Why the architecture cannot be tried."""


Candidates = Iterator[Callable[[], Training] | Exception]


def of_transformers(name: str) -> Candidates:
    """Small configs of it with inputs of every kind."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    from benchmarks.judges import shrinking

    names = MODEL_MAPPING_NAMES[name]
    model_class = getattr(transformers, names if isinstance(names, str) else names[0])
    for config in shrinking.configs(CONFIG_MAPPING[name]):

        def fresh(config: Any = config) -> nn.Module:
            return shrinking.built(model_class, config)

        try:
            torch.manual_seed(0)
            batches = list(shrinking.inputs(fresh()))
        except Exception as error:
            yield error
            continue
        for batch in batches:
            yield partial(_training, fresh, batch)


def of_timm(name: str) -> Candidates:
    """Small ones of a file, at the smallest size of image that one takes."""
    import timm

    def rank(model: str) -> tuple[bool, str]:
        return not re.search(r"tiny|nano|atto|femto|pico|small|mini|micro|xxs|_s\b|18|48|50", model), model

    numbers = {"drop_rate": 0.1, "drop_path_rate": 0.1, "embed_dim": 64, "depth": 2, "num_heads": 2}
    asked = ("img_size embed_dim depth num_heads drop_rate", "img_size drop_rate drop_path_rate", "drop_rate", "")
    for model in sorted(timm.list_models(module=name), key=rank)[:4]:
        for size, own in product((64, 128, 224), asked):
            options = {one: (numbers | {"img_size": size})[one] for one in own.split()}
            make = partial(timm.create_model, model, num_classes=10, **options)
            yield partial(_training, partial(_built, make), {"x": torch.randn(2, 3, size, size)})


def of_names(name: str, home: str) -> Candidates:
    """A class of that module; it and its forward get what their parameters' names say, then only what they must."""
    for number, everything in product(range(2), (True, False)):
        drawn = GRAPH if home.startswith("torch_geometric") else volume(2 + number)
        model_class = getattr(importlib.import_module(home), name.split(".")[-1])
        try:
            given = named(model_class, drawn, everything=everything)
            batch = named(model_class.forward, drawn, everything=everything)
        except Exception as error:
            yield error
            continue

        def make(model_class: Any = model_class, given: dict[str, Any] = given) -> nn.Module:
            return model_class(**copy.deepcopy(given))

        yield partial(_training, partial(_built, make), batch)


def named(function: Callable[..., Any], drawn: dict[str, Any], *, everything: bool) -> dict[str, Any]:
    """Arguments for it by its parameters' names; raises ``NotBuildable`` where it must have another."""
    found = {}
    for name, one in inspect.signature(function).parameters.items():
        must = one.default is one.empty and one.kind is not one.VAR_KEYWORD and one.kind is not one.VAR_POSITIONAL
        if name in drawn and (must or everything):
            found[name] = drawn[name]
        elif must and name != "self":
            raise NotBuildable(f"{function.__qualname__} takes {name}, which is not known here")
    return found


def _graph() -> dict[str, Any]:
    nodes, edges, width = 40, 200, 16
    drawn = torch.Generator().manual_seed(0)
    ends = torch.randint(nodes, (2, edges), generator=drawn)
    found: dict[str, Any] = {"in_channels": width, "hidden_channels": width, "out_channels": width, "channels": width}
    found |= {"num_layers": 2, "depth": 2, "heads": 2, "dropout": 0.1, "edge_dim": 4, "num_nodes": nodes, "K": 2}
    found |= {"num_relations": 3, "dim": 4, "kernel_size": 2, "num_timesteps": 2, "aggregators": ["mean", "max"]}
    found |= {"scalers": ["identity"], "deg": torch.ones(20, dtype=torch.long), "embedding_dim": width}
    found |= {"x": torch.randn(nodes, width, generator=drawn), "edge_index": ends, "index": ends[0]}
    found |= {"edge_type": torch.randint(3, (edges,), generator=drawn), "batch": torch.zeros(nodes, dtype=torch.long)}
    found |= {"edge_attr": torch.randn(edges, 4, generator=drawn), "pos": torch.randn(nodes, 3, generator=drawn)}
    found |= {"z": torch.randint(1, 10, (nodes,), generator=drawn), "edge_weight": torch.rand(edges, generator=drawn)}
    found |= {"nn": nn.Linear(width, width), "mlp": nn.Linear(width, width), "alpha": 0.1, "k": 4, "mode": "cat"}
    found |= {"space_dimensions": 4, "propagate_dimensions": 8, "num_rels": 3, "filter_size": 2, "num_classes": 4}
    found |= {"x_0": found["x"], "hyperedge_index": ends, "pos_edge_index": ends, "neg_edge_index": ends.flip(0)}
    found |= {"first_aggr": True, "num_embeddings": nodes, "num_node_types": 3, "num_edge_types": 3}
    found |= {"edge_type_emb_dim": 4, "edge_attr_emb_dim": 4, "node_type": found["batch"]}
    return found | {"normal": found["pos"], "n_id": torch.arange(nodes), "y": found["batch"]}


GRAPH = _graph()
"""What models of graphs and their layers take, by names of parameters."""


def volume(dims: int) -> dict[str, Any]:
    """The same of networks of images and volumes."""
    size, drawn = 64 if dims == 2 else 32, torch.Generator().manual_seed(0)
    shape = (size,) * dims
    found: dict[str, Any] = {"spatial_dims": dims, "dimensions": dims, "in_channels": 1, "out_channels": 2}
    found |= {"img_size": shape, "input_size": shape, "image_size": size, "in_shape": (1, *shape), "patch_size": 8}
    found |= {"channels": (8, 16, 32), "strides": (2, 2, 2), "num_classes": 2, "n_classes": 2, "classes": 2}
    found |= {"hidden_size": 32, "mlp_dim": 64, "num_heads": 2, "num_layers": 2, "init_filters": 8, "feature_size": 12}
    found |= {"dropout_rate": 0.1, "dropout_prob": 0.1, "latent_size": 8, "num_res_blocks": 1, "norm_num_groups": 4}
    found |= {"encoder_channels": (8, 16, 32), "decoder_channels": (32, 16, 8), "latent_shape": (4, 8, 8)}
    found |= {"num_channel_initial": 8, "depth": 2, "init_features": 8, "growth_rate": 4, "block_config": (2, 2)}
    found |= {"out_kernel_initializer": "kaiming_uniform", "out_activation": None, "num_channels": 4, "label_nc": 2}
    found |= {"block": "basic", "layers": (1, 1, 1, 1), "block_inplanes": (8, 16, 32, 64), "backbone": "resnet10"}
    found |= {"pretrained": False, "input_image_size": shape, "hidden_channels": (16, 16), "num_d": 2}
    found |= {"num_layers_d": 2, "extract_levels": (0, 1), "out_shape": (2,), "depths": (1, 1, 1, 1)}
    found |= {
        "conditioning_embedding_in_channels": 1,
        "start_shape": (4, 8, 8),
        "attention_levels": (False, False, True),
    }
    for name in ("x", "inputs", "x_in", "images", "input", "img", "moving", "fixed", "controlnet_cond", "seg"):
        found[name] = torch.randn(2, 1, *shape, generator=drawn)
    return found | {"timesteps": torch.tensor([1, 5])}


def _built(make: Callable[[], nn.Module]) -> nn.Module:
    """In train mode; counted without memory first where that can be."""
    try:
        with torch.device("meta"):
            count = sum(one.numel() for one in make().parameters())
    except Exception:
        count = 0
    if count > MOST_PARAMETERS:
        raise NotBuildable(f"too large: {count} parameters")
    return make().train()


def _training(fresh: Callable[[], nn.Module], batch: dict[str, torch.Tensor]) -> Training:
    from benchmarks.judges import shrinking

    model = fresh()
    return Training(model, lambda: shrinking.loss_of(model(**batch)))


def training_of(name: str, library: str = "transformers") -> Callable[[], Training]:
    """The smallest training of it that runs."""
    reasons = []
    try:
        for make in LIBRARIES[library].candidates(name):
            try:
                if isinstance(make, Exception):
                    raise make
                torch.manual_seed(0)
                make().loss_of().backward()  # type: ignore[no-untyped-call]
                return make
            except Exception as error:
                reasons.append(_line(error))
    except Exception as error:
        reasons.append(_line(error))
    raise NotBuildable(reasons[-1] if reasons else "its forward takes none of the inputs that are tried")


def _names_of_transformers() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def _names_of_timm() -> list[str]:
    without_torchvision()
    import timm

    return sorted(one for one in timm.list_modules() if timm.list_models(module=one))


def _classes(home: str) -> list[str]:
    module = importlib.import_module(home)
    every = {getattr(module, one) for one in dir(module) if inspect.isclass(getattr(module, one))}
    return sorted(f"{home}.{one.__name__}" for one in every if issubclass(one, nn.Module))


@dataclass(frozen=True)
class Library:
    """Whose architectures are tried."""

    names: Callable[[], list[str]]
    candidates: Callable[[str], Candidates]
    """Trainings of one, the best first, and why others are none."""
    first: str
    """One that is tried before others are forked."""


GRAPHS, NETS = ("torch_geometric.nn.models", "torch_geometric.nn.conv"), "monai.networks.nets"
LIBRARIES = {
    "transformers": Library(_names_of_transformers, of_transformers, "bert"),
    "timm": Library(_names_of_timm, of_timm, "resnet"),
    "torch_geometric": Library(
        lambda: [name for home in GRAPHS for name in _classes(home)],
        lambda name: of_names(name, name.rpartition(".")[0]),
        f"{GRAPHS[0]}.GCN",
    ),
    "monai": Library(lambda: _classes(NETS), lambda name: of_names(name, NETS), f"{NETS}.BasicUNet"),
}


class _Nothing(type):
    """Of classes of a library that is not there: each attribute is its own name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of torchvision without content: timm imports it, and its networks use none of it but a class's name."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        ours = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def exec_module(self, module: types.ModuleType) -> None:
        def named(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Nothing(name, (), {"__module__": module.__name__})

        module.__getattr__ = named  # type: ignore[method-assign]


def without_torchvision() -> None:
    """timm can be imported from now on; torchvision has no build for a torch without CUDA of this version."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_Absent())


def tried(name: str, library: str = "transformers") -> dict[str, Any]:
    """What is found of one architecture."""
    began_s = time.perf_counter()
    try:
        make = training_of(name, library)
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


def apart(name: str, library: str, limit_s: float) -> dict[str, Any]:
    """The same in a process of its own, which may end or hang."""
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)

    def try_it() -> None:
        faulthandler.dump_traceback_later(limit_s - 2, exit=True)  # where it hangs
        theirs.send(tried(name, library))

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


def warm_up(library: str) -> None:
    """What is imported, built or measured once for a process, before others are forked from it.

    Nothing is planned here: a solver's threads are not there in a process that is forked.
    """
    make = training_of(LIBRARIES[library].first, library)
    run(make)
    profile_of(make)
    gc.collect()
    gc.freeze()  # a session looks at all that the collector knows, and these are many


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=LIBRARIES, default="transformers")
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
    every, again = LIBRARIES[given.library].names(), ("too slow", "process ended")
    left = given.only or [name for name in every if results.get(name, {"status": again[0]})["status"] in again]
    random.Random(given.seed).shuffle(left)
    warm_up(given.library)
    for name in left[: given.share]:
        results[name] = in_short(apart(name, given.library, given.limit_s))
        print(f"{name}: {results[name]['status']} {results[name].get('reason', '')[:150]}", flush=True)
        counts = dict(Counter(one["status"] for one in results.values()))
        summary = {"of": len(every), "tried": len(results), "counts": counts}
        summary["served"] = sum(one.get("served", False) for one in results.values())
        facts = facts_of_run(given, ("torch", given.library, "numpy")) | summary
        write_results(given.output, facts | {"architectures": dict(sorted(results.items()))})
    wrong = [name for name in left if results.get(name, {}).get("status") in ("different", "raised", "process ended")]
    raise SystemExit(bool(wrong))


def in_short(found: dict[str, Any]) -> dict[str, Any]:
    """With whether an arena ``served`` bytes under every plan, and without plans that have nothing more to tell."""
    plans = found.get("plans", {})
    served = bool(plans) and all(
        one["served_bytes"] for kind, one in plans.items() if kind != "solved" or len(plans) == 4
    )
    tells = found["status"] != "equal" or any(one["fallbacks"] or "over_budget" in one for one in plans.values())
    return {key: one for key, one in found.items() if tells or key != "plans"} | {"served": served}


if __name__ == "__main__":
    main()
