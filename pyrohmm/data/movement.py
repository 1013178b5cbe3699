"""Step lengths and turning angles of animals, from their locations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._checks import names_checked
from .sequences import Sequences
from .steps import begins
from .tables import Gaps

RADIUS = 6371.0088  # of the earth, in kilometres: the mean one
OTHERS = {"longitude": ("latitude", "lat"), "latitude": ("longitude", "lon", "lng")}
STILL = 1e-9  # kilometres, above the rounding of places that are the same


@names_checked
def movement(
    longitude: Any,
    latitude: Any,
    time: Any = None,
    animal: Any = None,
    *,
    frame: Any = None,
    covariates: Sequence[str] | None = None,
    plane: bool = False,
    gaps: Gaps = "missing",
) -> Sequences:
    r"""Step lengths and turning angles ``(N, T, 2)`` of N tracks of locations.

    The step at t goes from location t to location t + 1 along a great circle, in kilometres. Its
    turning angle is that between the step before and this one, in radians from :math:`-\pi` to
    :math:`\pi`, positive to the left. Both are NaN where they are not known: at the last location,
    before and after a missing one; angles also at the first, and beside a step of length zero. On
    the globe what is below a micrometre is zero, as from 180 to -180 degrees east.

    Args:
        longitude: ``(M,)`` degrees east, NaN or None where missing; with ``frame`` a column's name.
        latitude: ``(M,)`` degrees north, likewise.
        time: ``(M,)``, by which the locations of an animal are sorted; by default they are in
            order.
        animal: ``(M,)``, the animal at each location; all are of one by default. With ``frame``
            also several columns, such as animal and burst.
        frame: A DataFrame, or a dict of columns, whose columns the others name.
        covariates: Columns of ``frame``.
        plane: Coordinates are x and y in a plane, and steps in their unit.
        gaps: Where times skip some multiples of one step: see :meth:`Sequences.from_dataframe`. By
            default these are missing locations.

    Returns:
        Sequences whose steps are the locations in the order of time, themselves kept as
        ``data.locations`` ``(N, T, 2)``. ``data.to_dataframe(states=)`` has the state of each row,
        and ``plots.track(data.locations, states)`` is a map.

    Raises:
        ValueError: If degrees are out of range, columns differ in length, times occur twice, or
            (with ``gaps="missing"``) are not multiples of one step.

    References:
        moveHMM: an R package for the statistical modelling of animal movement data using hidden
        Markov models (Michelot, Langrock and Patterson, 2016).

    Example:
        >>> data = movement(longitude=[0.0, 0.0, 0.01], latitude=[0.0, 0.02, 0.02])
        >>> data.values  # to the north, and right
        tensor([[[ 2.2239,     nan],
                 [ 1.1120, -1.5708],
                 [    nan,     nan]]], dtype=torch.float64)
    """
    if frame is None:
        parts = {"longitude": longitude, "latitude": latitude, "time": time, "animal": animal}
        frame = {name: part for name, part in parts.items() if part is not None}
        longitude, latitude, time, animal = (name if name in frame else None for name in parts)
        sizes = {name: len(part) for name, part in frame.items()}
        if len(set(sizes.values())) > 1:
            text = f"{', '.join(sizes)} must have an entry for each location, NaN if it is missing"
            raise ValueError(f"{text}; got lengths {[*sizes.values()]}. Of names give frame=.")
    data = Sequences.from_dataframe(
        frame, columns=[longitude, latitude], by=animal, time=time, covariates=covariates, gaps=gaps
    )
    known, places = data.known, cast(Tensor, data.packed("values")).double()
    sides = zip((longitude, latitude), OTHERS.items(), places[known].mT, (360, 90))
    for column, (name, others), degrees, most in () if plane else sides:
        swapped = str(column).lower() in others
        if wrong := [column] * swapped + degrees[degrees.abs() > most].tolist():
            text = f"{name} must be degrees from -{most} to {most}; got {wrong[0]}. The"
            raise ValueError(f"{text} longitude comes first; in a plane give plane=True.")
    places = places.masked_fill(~known.unsqueeze(-1), torch.nan)
    lengths, turns = (part[0] for part in _steps(places.unsqueeze(0), plane))
    apart = begins(data.lengths)[1:]  # from the last location of an animal to the first of another
    lengths = lengths.masked_fill(apart, torch.nan)
    turns = turns.masked_fill(apart[1:] | apart[:-1], torch.nan)
    ahead, between = pad(lengths, (0, 1), value=torch.nan), pad(turns, (1, 1), value=torch.nan)
    values = torch.stack([ahead, between[: len(ahead)]], -1)
    # the last location at least is missing
    data._rows |= {"values": values, "observed": ~values.isnan().all(-1), "locations": places}
    return data


def _steps(places: Tensor, plane: bool) -> tuple[Tensor, Tensor]:
    """Lengths ``(N, T-1)`` of the steps between places ``(N, T, 2)``, and turns ``(N, T-2)``."""
    if plane:
        headings = pad(places.diff(dim=1), (0, 1))
        lengths = headings.norm(dim=-1)
        up = torch.tensor([0.0, 0.0, 1.0]).to(places)
    else:
        east, north = places.deg2rad().unbind(-1)
        axes = [north.cos() * east.cos(), north.cos() * east.sin(), north.sin()]
        points = torch.stack(axes, -1)  # on the unit sphere
        # normals of the great circles: the headings, turned to the left
        headings = torch.linalg.cross(points[:, :-1], points.diff(dim=1))
        cosine = (points[:, :-1] * points[:, 1:]).sum(-1)
        lengths = RADIUS * torch.atan2(headings.norm(dim=-1), cosine)
        up = points[:, 1:-1]
    before, after = headings[:, :-1], headings[:, 1:]
    turns = torch.atan2((up * torch.linalg.cross(before, after)).sum(-1), (before * after).sum(-1))
    still = lengths <= (0 if plane else STILL)
    beside = still[:, :-1] | still[:, 1:]
    return lengths.masked_fill(still, 0.0), turns.masked_fill(beside, torch.nan)
