"""Log-likelihoods that other packages have published, and ours of the same models and data.

Parts, in ``published.json``. Data lie in the directory ``PYROHMM_DATA``, written by R:

``speed``: response times of the package depmixS4, ``write.csv(speed, "speed.csv")``; one state, two
states, and transitions that follow the reward for accuracy, with the coefficients that its vignette
prints (version 1.5-1).

``balance``: four answers of each of 779 children, ``write.csv(balance, "balance.csv")``; three
latent classes whose probabilities follow the age (same vignette).

``elk``: steps and angles of four elk, of ``models.RData`` beside the vignettes of moveHMM, which
holds its fit ``m`` as well: ``write.csv(m$data, "elk.csv")``; two states and transitions that
follow the distance to water. That fit is of 2015, and counted the first step of the second and
later tracks twice, with a transition between; it is compared on tracks that begin so. Covariates of
a transition are those of the step that is entered there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pyro
import torch
from common import arguments, write
from pyro.distributions import Beta, Normal

from pyrohmm import (
    Fit,
    RegressionHMM,
    Sequences,
    TabularHMM,
    categorical,
    fit_em,
    formulas,
    gamma,
    normal,
    regression,
    streams,
    von_mises,
    zero_inflated,
)

FLAT = 1.0, 1e-9  # of a gamma prior
SPEED = {"one state": -305.33, "two states": -88.73, "transition ~ scale(Pacc)": -44.2}
COEFFICIENTS = [[-2.472, -3.581], [-0.9518, 1.3924]]  # from the slow state, and from the fast one
ELK = [[-2.05051614, -0.3598238], [-0.69020155, 1.07781769]]


def evidence(fit: Fit, data: Sequences) -> float:
    """Log-likelihood of the data."""
    return float(fit.hmm(data).log_prob(data.values).sum())


def gap(fit: Fit, coefficients: list[list[float]]) -> float:
    """Largest difference of the coefficients of transitions from those published."""
    ours = fit.parameters["module.transition.coefficients"].squeeze(1)
    return float((ours - torch.tensor(coefficients)).abs().max())


def speed(frame: Any) -> list[dict[str, Any]]:
    """Response times of three models."""
    design = formulas(frame, transition="~ scale(Pacc)")
    data = Sequences.from_dataframe(design.table(frame), columns="rt", covariates=design.names)
    bare = Sequences(data.values, data.lengths)
    plain = fit_em(TabularHMM(2, normal(0)), bare, restarts=10).hmm(bare)
    family = regression(Normal, loc=None)
    models = [
        RegressionHMM(1, family),
        RegressionHMM(2, family).begin_at(plain),
        RegressionHMM(2, family, design["transition"]).begin_at(plain),
    ]
    fits = [fit_em(module, data, tolerance=1e-12) for module in models]
    found = [
        {"part": "speed", "model": name, "log_likelihood": evidence(fit, data), "published": theirs}
        for (name, theirs), fit in zip(SPEED.items(), fits)
    ]
    coefficients = sorted(COEFFICIENTS, key=lambda row: -row[0])
    if plain.emission.mean[0] > plain.emission.mean[1]:
        coefficients.reverse()
    return [*found[:2], {**found[2], "gap": gap(fits[2], coefficients)}]


def balance(frame: Any) -> list[dict[str, Any]]:
    """Latent classes of children."""
    frame["child"] = range(len(frame))
    design = formulas(frame, initial="~ age")
    data = Sequences.from_dataframe(
        design.table(frame), by="child", columns=["d1", "d2", "d3", "d4"], covariates=design.names
    )
    bare, family = Sequences(data.values, data.lengths), streams(*[categorical(2)] * 4)
    plain = fit_em(TabularHMM(3, family), bare, restarts=20)
    module = RegressionHMM(3, family, initial=design["initial"]).begin_at(plain.hmm(bare))
    fit = fit_em(module, data, tolerance=1e-12, start=plain, num_iterations=3000)
    return [{"part": "balance", "model": "initial ~ age", "log_likelihood": evidence(fit, data),
             "published": -917.5}]  # fmt: skip


def elk(frame: Any) -> list[dict[str, Any]]:
    """Steps and angles, tracks as they are and as in the published fit."""
    steps = zero_inflated(gamma(0, FLAT, FLAT), Beta(1.0, 1.0))
    family = streams(steps, von_mises(0, 0.0, 1e-9, *FLAT))
    found = []
    for doubled in (True, False):
        tracks = []
        for number, (_, track) in enumerate(frame.groupby("ID", sort=False)):
            if doubled and number:
                track = pd.concat([track.iloc[:1], track])
            tracks.append(track.assign(water=track.dist_water.shift(-1).fillna(0.0)))
        table = pd.concat(tracks)
        design = formulas(table, transition="~ water")
        data = Sequences.from_dataframe(
            design.table(table), by="ID", columns=["step", "angle"], covariates=design.names
        )
        bare = Sequences(data.values, data.lengths, data.observed)
        plain = fit_em(TabularHMM(2, family), bare, restarts=20)
        order = plain.hmm(bare).emission.log_prob(torch.tensor([3.0, 0.0])).argsort()
        hmm = plain.hmm(bare).permute_states(order)  # the state of short steps first
        module = RegressionHMM(2, family, design["transition"]).begin_at(hmm)
        start = {name: value[order] for name, value in plain.parameters.items()}
        fit = fit_em(module, data, tolerance=1e-12, start=start, num_iterations=3000)
        found.append({"part": "elk", "doubled": doubled, "log_likelihood": evidence(fit, data),
                      "published": -1892.94962404, "gap": gap(fit, ELK)})  # fmt: skip
    return found


def main() -> None:
    """Run the parts whose data are there, and write their results."""
    options = arguments(__doc__, picture=False)
    torch.set_default_dtype(torch.float64)
    found = []
    for part in (speed, balance, elk):
        path = Path(os.environ.get("PYROHMM_DATA", ".")) / f"{part.__name__}.csv"
        if path.exists():
            pyro.set_rng_seed(0)
            found += part(pd.read_csv(path, index_col=0))
    if found and not options.quick:
        write("published", found)


if __name__ == "__main__":
    main()
