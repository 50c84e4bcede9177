"""Replays in compiled graphs: gradients keep their bits whichever saved tensors are made again; what may not be is
refused. Graphs run node by node here: what kernels do with them is looked at in ``test_save_points.py``.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from tests.runtime.compiled_nets import (
    Chain,
    Checkpointed,
    Make,
    MovingScale,
    WritesItsInput,
    channels_last,
    node_by_node,
    of,
    same,
)

pytestmark = pytest.mark.cpu_device
MAKES = {"chain": of(Chain), "convolutions": channels_last, "moving scale": of(MovingScale)}


@pytest.mark.parametrize("name", MAKES)
def test_gradients_and_statistics_keep_their_bits_whatever_is_replayed(name: str) -> None:
    reference, noted = node_by_node(MAKES[name])
    for seed in range(6):
        chance = random.Random(seed)
        replays = {
            key: [one for one in names if seed == 0 or chance.random() < 0.5]
            for key, names in noted.replayable().items()
        }
        found, _ = node_by_node(MAKES[name], replays)
        assert same(found, reference), replays


def test_a_replay_stands_before_its_first_reader_and_its_nodes_nowhere_else() -> None:
    _, noted = node_by_node(of(Chain))
    ((key, names),) = noted.replayable().items()
    before = {(node.op, node.name) for node in noted.splits[key].backward.graph.nodes}
    for name in names:
        _, replayed = node_by_node(of(Chain), {key: [name]})
        nodes = [node for node in replayed.splits[key].backward.graph.nodes if "poochplan" not in str(node.target)]
        copied = [n for n, node in enumerate(nodes) if node.op != "placeholder" and (node.op, node.name) not in before]
        assert copied
        assert copied == list(range(copied[0], copied[-1] + 1))
        assert nodes[copied[-1]].users


def test_what_several_replays_need_is_made_once() -> None:
    _, noted = node_by_node(of(Chain))
    ((key, names),) = noted.replayable().items()
    assert "addmm" in names
    _, alone = node_by_node(of(Chain), {key: ["addmm"]})
    _, all_of_them = node_by_node(of(Chain), {key: names})
    assert products(alone.splits[key].backward) == products(all_of_them.splits[key].backward)


def products(module: torch.fx.GraphModule) -> int:
    return sum("addmm" in str(node.target) for node in module.graph.nodes)


@pytest.mark.parametrize(("kind", "why"), [(MovingScale, "an input that the step writes"), (WritesItsInput, "")])
def test_what_reads_an_input_that_is_written_is_refused(kind: type[nn.Module], why: str) -> None:
    _, noted = node_by_node(of(kind))
    reasons = {(key, name): found for key, names in noted.why.items() for name, found in names.items()}
    never = {
        place: found for place, found in reasons.items() if "that the step writes" in found or "nothing saves" in found
    }
    assert never
    assert any(why in found for found in never.values())
    for (key, name), found in never.items():
        with pytest.raises(
            Exception, match=f"{name} cannot be recomputed in the compiled code: {found}; call poochplan.compile"
        ):
            node_by_node(of(kind), {key: [name]})


def test_no_replay_starts_from_a_seed_that_the_backward_makes_for_a_checkpoint() -> None:
    _, noted = node_by_node(of(Checkpointed))
    ((key, reasons),) = noted.why.items()
    assert any("which the backward makes itself" in why for why in reasons.values())
    _, replayed = node_by_node(of(Checkpointed), noted.replayable())  # which can be written
    assert list(replayed.splits) == [key]


def test_a_name_that_the_graph_does_not_save_is_refused() -> None:
    _, noted = node_by_node(of(Chain))
    (key,) = noted.why
    with pytest.raises(Exception, match="expected saved tensors named nothing in compiled code, found none"):
        node_by_node(of(Chain), {key: ["nothing"]})


class Short(nn.Module):
    """In 16 bits: what products make and take lies in memory, what is between may be rounded there or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.last(self.first(batch).sin().tanh().exp())  # type: ignore[no-any-return]


def test_what_kernels_may_round_or_not_is_never_replayed() -> None:
    _, noted = node_by_node(of(Short))
    ((key, reasons),) = noted.why.items()
    assert (
        reasons["exp"] == "its bits depend on where exp is rounded to 16 bits, which depends on what is fused with it"
    )
    assert reasons["addmm"] == ""
    assert noted.replayable()[key]


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.first(batch).tanh()).tanh())  # type: ignore[no-any-return]


def test_numbers_are_drawn_again_from_the_seed_that_is_saved() -> None:
    _, noted = node_by_node(of(Dropped))
    ((key, names),) = noted.replayable().items()
    _, replayed = node_by_node(of(Dropped), {key: names})
    split = replayed.splits[key]
    forward, backward = ([n for n in half.graph.nodes if n.op == "call_function"] for half in split[:2])
    assert any("inductor_random" in str(node.target) for node in backward)
    assert any("inductor_lookup_seed" in str(node.target) for node in forward)
    assert not any("inductor_lookup_seed" in str(node.target) for node in backward)
    assert any("inductor_lookup_seed" in node.name for node in split.saved())


def key_of(make: Make) -> str:
    _, noted = node_by_node(make)
    (key,) = noted.why
    return key


def test_the_same_network_has_the_same_key_with_other_weights_and_its_replays_in_it() -> None:
    key = key_of(of(Chain))

    def others() -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(7)
        return of(Chain)()

    assert key_of(others) == key
    _, noted = node_by_node(of(Chain))
    _, replayed = node_by_node(of(Chain), noted.replayable())
    assert list(replayed.why) == [key]


def frozen() -> tuple[nn.Module, torch.Tensor]:
    model, batch = of(Chain)()
    model.norm.requires_grad_(False)  # type: ignore[union-attr]
    return model, batch


def contiguous() -> tuple[nn.Module, torch.Tensor]:
    model, batch = channels_last()
    return model.to(memory_format=torch.contiguous_format), batch.contiguous()


def test_other_code_has_another_key_and_so_has_a_frozen_layer_which_saves_less() -> None:
    others: list[Make] = [
        lambda: (Chain(), torch.randn(32, 16)),
        lambda: (Chain().double(), torch.randn(64, 16).double()),
    ]
    makes = [of(Chain), *others, of(MovingScale), channels_last, contiguous, frozen]
    assert len({key_of(make) for make in makes}) == len(makes)
