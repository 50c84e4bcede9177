"""Whole volumes against patches: cases with labels, what each way sees of them, and what the page shows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from benchmarks.volume_cases import CLASSES, GRID, Case, Grid, deformed, other_scanner, template
from benchmarks.volume_tables import differences, held_out_dice, lines, runs_of
from benchmarks.volume_training import METHODS, Setting, Training, dice, padded_to, seconds_to, train

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "full-volume.json"
SHAPE = (48, 48, 48)
SMALL = Setting(features=(4, 4, 4, 4, 4, 4), patch=(32, 32, 32), patches=3)
FOUND = json.loads(RESULTS.read_text())


def counted(name: str) -> Case:
    """A case whose labels follow from its image, voxel by voxel."""
    image = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    return Case(name=name, image=image, labels=(image % 3).astype(np.uint8))


def made_up_template(shape: tuple[int, int, int]) -> npt.NDArray[np.float32]:
    """As :func:`template` gives it, but drawn: white matter inside grey matter inside fluid."""
    axes = np.meshgrid(*(np.linspace(-1, 1, side) for side in shape), indexing="ij")
    radius = np.sqrt(sum(axis**2 for axis in axes))
    white = (radius < 0.45).astype(np.float32)
    grey = ((radius < 0.7) & (white == 0)).astype(np.float32)
    fluid = ((radius < 0.85) & (white + grey == 0)).astype(np.float32)
    return np.stack([0.9 * white + 0.6 * grey + 0.3 * fluid, grey, white]).astype(np.float32)


def test_a_seed_gives_one_copy_and_another_seed_another() -> None:
    of = made_up_template(SHAPE)
    first, again, other = deformed(of, 1), deformed(of, 1), deformed(of, 2)
    assert np.array_equal(first.image, again.image)
    assert np.array_equal(first.labels, again.labels)
    assert not np.array_equal(first.image, other.image)
    assert not np.array_equal(first.labels, other.labels)


@pytest.mark.parametrize("seed", range(3))
def test_the_labels_of_a_copy_are_bent_as_its_image_is(seed: int) -> None:
    of = made_up_template(SHAPE)
    case = deformed(of, seed)
    assert set(np.unique(case.labels)) == set(range(len(CLASSES)))
    unbent = (2 * of[2] + of[1]).astype(np.uint8)
    white = int((case.labels == 2).sum())
    brightest = (case.image > np.sort(case.image.ravel())[-white - 1]).astype(np.uint8) * 2  # white matter is
    assert dice(brightest, case.labels)[1] > dice(brightest, unbent)[1] + 0.1


def test_dice_is_twice_what_both_say_over_what_either_says() -> None:
    found = np.array([0, 1, 1, 1, 2, 0], dtype=np.uint8)
    labels = np.array([0, 1, 0, 1, 0, 0], dtype=np.uint8)
    assert dice(found, labels) == [4 / 5, 0.0]
    assert dice(labels, labels) == [1.0, 1.0]  # of the class that neither says as well


def test_a_padded_volume_has_sides_of_the_multiple_and_lies_where_is_said() -> None:
    image = torch.randn(1, 1, 26, 32, 20)
    padded, inside = padded_to(image, 16)
    assert padded.shape == (1, 1, 32, 32, 32)
    assert torch.equal(padded[(..., *inside)], image)
    assert torch.equal(padded[0, 0, 2, :, 6:26], image[0, 0, 1])  # reflected


def test_patches_are_cut_out_of_image_and_labels_at_one_place() -> None:
    training = Training("patches", SMALL, [counted("a"), counted("b")], seed=0)
    images, labels = training.batch()
    assert images.shape == labels.shape == (SMALL.patches, 1, *SMALL.patch)
    assert torch.equal((images % 3).long(), labels)
    assert len({float(image.min()) for image in images}) == SMALL.patches


def test_a_step_on_whole_volumes_sees_one_whole() -> None:
    images, labels = Training("whole", SMALL, [counted("a")], seed=0).batch()
    assert torch.equal(images[0, 0], torch.from_numpy(counted("a").image))
    assert torch.equal((images % 3).long(), labels)


def test_both_ways_begin_with_the_same_weights() -> None:
    ways = [Training(method, SMALL, [counted("a")], seed=5).model.state_dict() for method in METHODS]
    assert all(torch.equal(first, second) for first, second in zip(*(way.values() for way in ways), strict=True))


def test_where_context_says_nothing_both_ways_predict_the_same() -> None:
    case = deformed(made_up_template(SHAPE), 0)
    pointwise = torch.nn.Conv3d(1, len(CLASSES), 1)
    found = []
    for method in METHODS:
        training = Training(method, SMALL, [case], seed=0)
        training.model = pointwise
        found.append(training.predicted(case))
    assert np.array_equal(*found)
    assert len(np.unique(found[0])) > 1


class Bytes:
    """A meter of 100 bytes more at each look."""

    def __init__(self) -> None:
        self._peaks = itertools.count(100, 100)
        self.peak = 0

    def restart(self) -> None:
        self.peak = next(self._peaks)


def test_looks_come_evenly_in_the_seconds_of_steps_and_bytes_count_with_the_arena() -> None:
    training = Training("patches", SMALL, [deformed(made_up_template(SHAPE), 0)], seed=0)
    clock = itertools.count().__next__  # a step takes one second, a look none
    course = train(training, [], budget_s=4, looks=2, meter=Bytes(), arena_bytes=lambda: 7, clock=clock)
    assert [(look["seconds"], look["steps"]) for look in course.looks] == [(2, 2), (4, 4)]
    assert course.peak_bytes == 500 + 7  # the fourth step, behind three and one look
    assert course.looking_peak_bytes == 600 + 7


def test_seconds_to_a_score_are_those_of_the_first_look_that_has_it() -> None:
    looks = [{"seconds": second, "dice": [score, score]} for second, score in ((1, 0.5), (2, 0.8), (3, 0.7))]
    assert seconds_to(looks, 0.6) == 2
    assert seconds_to(looks, 0.9) is None


def test_the_template_lies_on_the_grid_whole() -> None:
    pytest.importorskip("nilearn")
    t1, grey, white = template(GRID)
    assert t1.shape == GRID.shape
    border = np.ones(GRID.shape, dtype=bool)
    border[1:-1, 1:-1, 1:-1] = False
    assert (t1[border] > 0.05).mean() < 0.01
    litres = [(tissue * GRID.voxel_mm**3).sum() / 1e6 for tissue in (grey, white)]
    assert 0.5 < litres[1] < litres[0] < 1.5  # a head's


def test_the_other_scanner_has_the_templates_labels_at_its_own_places() -> None:
    pytest.importorskip("nilearn")
    case, alike = other_scanner()
    shifted = template(Grid(shape=case.image.shape, centre_mm=(0.0, 30.0, 40.0)))[0]  # type: ignore[arg-type]
    assert alike > 0.5 > np.corrcoef(case.image.ravel(), shifted.ravel())[0, 1]
    assert set(np.unique(case.labels)) == {0, 1, 2}


def test_whole_volumes_took_no_more_bytes_than_patches_in_core() -> None:
    budget_bytes = FOUND["in_core_peak_bytes"]["patches"]
    assert budget_bytes < FOUND["in_core_peak_bytes"]["whole"]
    for run in runs_of(FOUND, "whole"):
        assert run["peak_bytes"] <= budget_bytes
        assert run["session"]["fallbacks"] == 0
        assert run["session"]["steps_followed"] == run["steps"]


def test_both_ways_had_the_same_seeds_and_seconds() -> None:
    seeds = [[run["seed"] for run in runs_of(FOUND, method)] for method in METHODS]
    assert seeds == [[0, 1, 2], [0, 1, 2]]
    asked_s = FOUND["arguments"]["seconds"]
    assert all(asked_s <= run["seconds"] < asked_s + 5 * run["median_step_s"] for run in FOUND["runs"])
    assert differences(FOUND, lambda run: run["seed"]) == [0, 0, 0]


def test_the_page_shows_what_was_found() -> None:
    page = (ROOT / "benchmarks" / "pages" / "papers.md").read_text()
    assert [line for line in lines(FOUND) if line not in page] == []
    for run in FOUND["runs"]:
        assert np.allclose(held_out_dice(run), run["looks"][-1]["dice"], atol=1e-4)
