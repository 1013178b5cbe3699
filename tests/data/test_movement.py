"""Movement: step lengths and turning angles against textbook formulas, and the rows they are of."""

import math
from itertools import pairwise

import pandas
import pytest
import torch

from pyrohmm import (
    Sequences,
    TabularHMM,
    fit_em,
    gamma,
    movement,
    streams,
    von_mises,
    zero_inflated,
)

EAST = [-3.5, -3.4, 179.9, -179.95, 10.0, 10.01, 10.01, 10.02]
NORTH = [56.0, 56.05, -60.0, -59.9, 80.0, 80.02, 80.02, 79.5]


def haversine(a, b):
    (east, north), (far_east, far_north) = (map(math.radians, point) for point in (a, b))
    square = math.sin((far_north - north) / 2) ** 2
    square += math.cos(north) * math.cos(far_north) * math.sin((far_east - east) / 2) ** 2
    return 2 * 6371.0088 * math.asin(math.sqrt(square))


def bearing(a, b):
    """Clockwise from the north, where the great circle leaves ``a``."""
    (east, north), (far_east, far_north) = (map(math.radians, point) for point in (a, b))
    across = math.sin(far_east - east) * math.cos(far_north)
    along = math.cos(north) * math.sin(far_north)
    along -= math.sin(north) * math.cos(far_north) * math.cos(far_east - east)
    return math.atan2(across, along)


def test_steps_on_the_sphere_are_those_of_the_haversine_formula():
    found = movement(EAST, NORTH).values[0]
    points = list(zip(EAST, NORTH))
    lengths = [haversine(a, b) for a, b in pairwise(points)]
    torch.testing.assert_close(found[:-1, 0], torch.tensor(lengths).double(), rtol=1e-6, atol=1e-9)
    turns = [
        bearing(b, a) + math.pi - bearing(b, c) for a, b, c in zip(points, points[1:], points[2:])
    ]
    moves = [0, 1, 2, 3]  # an animal that rests has no direction
    for t in moves:
        assert math.remainder(found[t + 1, 1].item() - turns[t], 2 * math.pi) == pytest.approx(
            0, abs=1e-9
        )
    assert found[:, 1].isnan().tolist() == [True, *[False] * 4, True, True, True]
    # geosphere::distHaversine(r = 6371.0088) in R
    printed = [8.338089037, 19534.973507664, 13.906942569, 17755.935047659, 2.232251689]
    torch.testing.assert_close(found[:5, 0], torch.tensor(printed).double(), rtol=1e-9, atol=0)


def test_short_steps_are_those_in_the_tangent_plane():
    """At 60 degrees a degree of longitude is half as long; steps of a few metres keep 6 digits."""
    metre = 180 / (math.pi * 6371008.8)
    walk = torch.randn(50, 2, dtype=torch.double).cumsum(0)
    east, north = 20 + 2 * metre * walk[:, 0], 60 + metre * walk[:, 1]
    found = movement(east, north).values[0] * torch.tensor([1000.0, 1.0])
    flat = movement(*walk.T, plane=True).values[0]
    torch.testing.assert_close(found, flat, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(
    ("east", "north"),
    [
        ([179.0, 180, -180, -179], [0.0] * 4),
        ([359.0, 360, 0, 1], [10.0] * 4),
        ([0.0, 0, 50, 100], [89.0, 90, 90, 89]),
    ],
)
def test_one_place_in_other_numbers_is_rest(east, north):
    found = movement(east, north).values[0]
    first, last = (haversine(*list(zip(east, north))[part]) for part in (slice(2), slice(2, 4)))
    assert found[:3, 0].tolist() == [pytest.approx(first), 0.0, pytest.approx(last)]
    assert found[:, 1].isnan().all()


def test_angles_are_positive_to_the_left_and_unknown_at_rest():
    # the definition of moveHMM's turnAngle: atan2 after, less atan2 before
    found = movement([0.0, 3, 3, 3, 0], [0.0, 0, 4, 4, 4], plane=True).values[0]
    assert found[:4, 0].tolist() == [3, 4, 0, 3]
    assert found[1, 1].item() == pytest.approx(math.pi / 2)
    assert found[:, 1].isnan().tolist() == [True, False, True, True, True]
    assert found[4].isnan().all()


TABLE = {
    "x": [5.0, 0, 3, 3, 0, 2, 1],
    "y": [0.0, 0, 0, 4, 4, 0, 0],
    "hour": [9, 1, 2, 3, 5, 2, 1],
    "who": list("caaaabb"),
}


@pytest.mark.parametrize("kind", [dict, pandas.DataFrame])
def test_gaps_animals_and_rows(kind):
    """Steps beside a skipped hour are missing; a state goes back to the row of its location."""
    data = movement("x", "y", "hour", "who", frame=kind(TABLE), plane=True)
    assert data.lengths.tolist() == [1, 5, 2]
    assert data.values[1, :, 0].nan_to_num(-1).tolist() == [3, 4, -1, -1, -1]
    assert data.observed.sum(1).tolist() == [0, 2, 1]
    assert data.locations[1, 3].isnan().all()
    assert data.locations[2, 2:].isnan().all()  # padding is no place: plots draw no line to it
    assert data[1:2].locations[0, 4].tolist() == [0, 4]
    states = torch.arange(5).expand(3, 5)
    assert data.to_dataframe(states=states)["state"].tolist() == [0, 0, 1, 2, 4, 1, 0]
    single = movement(*(TABLE[name][1:5] for name in ("x", "y", "hour")), plane=True)
    torch.testing.assert_close(single.values, data.values[1:2], equal_nan=True)


@pytest.mark.parametrize("names", [("latlon_lon", "latlon_lat"), (0, 1), ("lonely", "lateral")])
def test_only_names_of_the_other_axis_are_refused(names):
    frame = pandas.DataFrame(dict(zip(names, (EAST, NORTH))))
    found = movement(*names, frame=frame).values
    torch.testing.assert_close(found, movement(EAST, NORTH).values, equal_nan=True)
    for swapped in (("lat", "lon"), ("x", "Longitude"), ("LATITUDE", "y"), ("x", "lng")):
        table = frame.set_axis(list(swapped), axis="columns")
        with pytest.raises(ValueError, match="The longitude comes first"):
            movement(*swapped, frame=table)


def test_a_location_that_is_missing_is_beside_missing_steps():
    data = movement([0.0, 1, math.nan, 3, 4, 5], [0.0, 1, 2, 3, 4, 5], plane=True)
    assert data.values[0, :, 0].isnan().tolist() == [False, True, True, False, False, True]
    assert data.values[0, :, 1].isnan().tolist() == [True] * 4 + [False, True]
    assert data.observed[0].tolist() == [True, False, False, True, True, False]


def test_a_fit_finds_two_kinds_of_movement():
    """Steps and angles that are known in part take part; zeros belong to the resting state."""
    torch.manual_seed(0)
    states = (torch.arange(300) // 30) % 2
    length = torch.distributions.Gamma(2.0, 2.0 / torch.tensor([0.2, 3.0])[states]).sample()
    length = length.masked_fill((states == 0) & (torch.rand(300) < 0.2), 0.0)
    turn = torch.distributions.VonMises(0.0, torch.tensor([0.1, 10.0])[states]).sample()
    heading = turn.cumsum(0)
    x, y = length * heading.cos(), length * heading.sin()
    data = movement(x.double().cumsum(0), y.double().cumsum(0), plane=True)
    family = streams(zero_inflated(gamma(0)), von_mises(0))
    fit = fit_em(TabularHMM(2, family), data, num_iterations=20)
    path = fit.hmm(data).viterbi(data.values)[0, :-1]  # of the step after each location
    right = (path == states[1:]).double().mean().item()
    assert max(right, 1 - right) > 0.97


def test_intervals_take_angles_that_are_missing():
    """Those of steps alone, where every angle but three is missing."""
    torch.manual_seed(0)
    steps = torch.distributions.Gamma(2.0, 1.0).sample((100,)).double()
    values = torch.stack([steps, torch.full((100,), math.nan).double()], -1)
    values[:3, 1] = torch.tensor([0.0, 2.0, 4.0])
    both, alone = Sequences.from_list([values]), Sequences.from_list([steps])
    fit = fit_em(TabularHMM(1, streams(gamma(0), von_mises(0))), both, tolerance=1e-10)
    bare = fit_em(TabularHMM(1, gamma(0)), alone, tolerance=1e-10)
    low, high = fit.intervals(both)["module.emission.parts.0.rate"]
    wanted = bare.intervals(alone)["module.emission.rate"]
    torch.testing.assert_close((low, high), wanted, rtol=1e-4, atol=1e-4)
