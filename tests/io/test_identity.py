"""What distinguishes fits: every argument, and everything that the arguments hold."""

import inspect
from functools import partial

import pyro
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal, init_to_mean, init_to_median
from pyro.nn import PyroSample

from pyrohmm import (
    HMM,
    DenseHMM,
    DiversityPrior,
    GradientStep,
    HMMModule,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    cooccurrence,
    dense,
    fit_cooccurrence,
    fit_em,
    fit_map,
    fit_svi,
    msteps,
    normal,
    starts,
)
from pyrohmm.infer.descent import FitOptions
from pyrohmm.io.files import FREE

GENERATOR = torch.Generator().manual_seed(0)
SYMBOLS = torch.randint(3, (6, 8), generator=GENERATOR)
LENGTHS = torch.full((6,), 8)


def symbols(**options):
    return Sequences(SYMBOLS, LENGTHS, **options)


def numbers():
    return Sequences(torch.randn(6, 8, 2, generator=torch.Generator().manual_seed(1)), LENGTHS)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def module(concentration=1.0):
    return TabularHMM(2, categorical(3, concentration))


def model(concentration=1.0, **options):
    return MarginalModel(module(concentration), **options)


def quadratic(hmm):
    return -hmm.log_transition.exp().square().flatten(-2).sum(-1)


def stronger(hmm):
    return -2 * hmm.log_transition.exp().square().flatten(-2).sum(-1)


def weighed(weight, hmm):
    return weight * quadratic(hmm)


class Hidden:
    """Keeps its argument under another name."""

    def __init__(self, weight):
        self._w = weight

    def __call__(self, hmm):
        return self._w * quadratic(hmm)


class Own(HMMModule):
    """Logits with a prior that is a distribution."""

    def __init__(self, scale):
        super().__init__()
        self.logits = PyroSample(pyro.distributions.Normal(torch.zeros(2, 3), scale).to_event(2))

    def forward(self, lengths, observed=None):
        even = torch.full((2, 2), 0.5).log()
        emission = pyro.distributions.Categorical(logits=self.logits)
        return HMM(even[0], even, emission, lengths, observed)


def scaled(weight):
    return lambda hmm: weight * quadratic(hmm)


def cosine(optimizer, steps=99):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def falling(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def falling_slowly(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (2 + step))


# Another value of each argument of each fit, and what must be the same for both.
GRADIENT = {
    "learning_rate": ({}, 0.2),
    "batch_size": ({}, 2),
    "validation": ({}, symbols()),
    "elbo": ({}, Trace_ELBO(num_particles=2)),
    "optimizer": ({}, partial(torch.optim.SGD, lr=0.1)),
    "schedule": ({}, cosine),
    "clip_norm": ({}, 1.0),
    "average": ({}, 0.9),
    "validate_every": ({"validation": symbols()}, 1),
    "batch_tokens": ({}, 16),
    "windows": ({}, (2, 4)),
    "generator": ({"generator": seeded(1)}, seeded(2)),
    "precision": ({}, torch.bfloat16),
    "sharded": ({}, True),
    "name": ({}, "another"),
}
CHANGES = {
    fit_map: GRADIENT
    | {
        "model": ({}, model(2.0)),
        "data": ({}, symbols(total=60)),
        "start": ({"start": init_to_mean}, init_to_median),
        "restarts": ({}, 2),
        "priors": ({}, False),
    },
    fit_svi: GRADIENT
    | {
        "model": ({}, model(2.0)),
        "guide": ({}, AutoDelta),
        "data": ({}, symbols(total=60)),
    },
    fit_em: {
        "module": ({}, module(2.0)),
        "data": ({}, symbols(total=60)),
        "start": ({}, starts.from_prior),
        "restarts": ({}, 2),
        "batch_size": ({}, 2),
        "decay": ({"batch_size": 2}, 0.8),
        "log_prior": ({}, quadratic),
        "transition_step": ({"log_prior": DiversityPrior(1.0)}, msteps.LogitGradient()),
        "gradient_step": ({}, GradientStep(3)),
        "acceleration": ({}, True),
        "priors": ({}, False),
        "sharded": ({}, True),
        "generator": ({"generator": seeded(1)}, seeded(2)),
        "name": ({"name": "one"}, "another"),
    },
    fit_cooccurrence: {
        name: change
        for name, change in GRADIENT.items()
        if name
        not in (
            "batch_size",
            "batch_tokens",
            "windows",
            "validate_every",
            "validation",
            "precision",
            "sharded",
        )
    }
    | {
        "module": ({}, module(2.0)),
        "data": ({}, Sequences(SYMBOLS.flip(1) // 2, LENGTHS)),
        "num_symbols": ({"module": TabularHMM(2, categorical(3))}, None),
        "lags": ({}, (1, 2)),
        "loss": ({"weight": 1.0}, cooccurrence.cross_entropy),
        "stationary": ({}, cooccurrence.stationary_detached),
        "weight": ({}, 3.0),
        "priors": ({}, False),
        "log_prior": ({}, quadratic),
        "start": ({"start": init_to_mean}, init_to_median),
        "restarts": ({}, 2),
        "validation": ({}, symbols()),
        "validate_every": ({"validation": symbols()}, 1),
    },
}
SAME = {"num_symbols"}  # that of the module and of the data: no other value fits


def run(fit, path, **options):
    pyro.set_rng_seed(0)
    options = {"num_iterations": 2, "progress": False, "checkpoint": path} | options
    if fit in (fit_map, fit_svi):
        options = {"model": model()} | options
    else:
        options = {"module": module()} | options
    if fit is fit_svi:
        options["guide"] = options.get("guide", AutoNormal)(options["model"])
    return fit(**{"data": symbols()} | options)


def check_refused(fit, path, one, other):
    run(fit, path, **one)
    run(fit, path, **one)  # the same fit goes on
    before = path.read_bytes()
    with pytest.raises(ValueError, match="belongs to another fit"):
        run(fit, path, **other)
    assert path.read_bytes() == before


def arguments_of(fit):
    arguments = {*inspect.signature(fit).parameters}
    if "options" in arguments:
        arguments |= {*FitOptions.__annotations__}
    if fit is fit_cooccurrence:
        arguments -= {"batch_tokens", "windows", "precision", "sharded"}
    return arguments - {"options"}


def test_no_argument_of_a_fit_is_left_out():
    for fit, changes in CHANGES.items():
        assert set(changes) | {*FREE} >= arguments_of(fit)


@pytest.mark.parametrize(
    ("fit", "name"),
    [(fit, name) for fit, changes in CHANGES.items() for name in changes if name not in SAME],
)
def test_another_value_of_any_argument_is_another_fit(fit, name, tmp_path):
    common, value = CHANGES[fit][name]
    check_refused(fit, tmp_path / "x", common, common | {name: value})


@pytest.mark.parametrize("fit", [fit_map, fit_svi, fit_em])
def test_what_says_only_how_long_may_change(fit, tmp_path):
    """And what is shown: no step becomes another one."""
    gradient = {} if fit is fit_em else {"validation": symbols()}
    run(fit, tmp_path / "x", **gradient)
    changes = {"num_iterations": 3, "tolerance": 0.5, "progress": True}
    if gradient:
        changes |= {"patience": 5, "report": lambda validation: None}
    alone = {"checkpoint", "group"}  # fits of several ranks are in test_process_group
    assert {*changes, *alone} >= {*FREE} & arguments_of(fit)
    for name, value in changes.items():
        run(fit, tmp_path / "x", **gradient | {name: value})


def dense_with(kernel):
    return MarginalModel(DenseHMM(2, 3, 2, kernel=kernel))


def gaussian(family, **options):
    return MarginalModel(TabularHMM(2, family(2, **options)))


INSIDE = {
    "normal weight": ({"model": gaussian(normal)}, {"model": gaussian(normal, weight=5.0)}),
    "kernel's width": (
        {"model": dense_with(dense.rbf(1.0))}, {"model": dense_with(dense.rbf(2.0))}
    ),
    "function": ({"model": model(log_prior=quadratic)}, {"model": model(log_prior=stronger)}),
    "arguments of a function": (
        {"model": model(log_prior=partial(weighed, 1.0))},
        {"model": model(log_prior=partial(weighed, 2.0))},
    ),
    "prior of a module": ({"model": MarginalModel(Own(1.0))}, {"model": MarginalModel(Own(2.0))}),
    "hidden attribute": (
        {"model": model(log_prior=Hidden(1.0))}, {"model": model(log_prior=Hidden(2.0))}
    ),
    "diversity": (
        {"model": model(log_prior=DiversityPrior(1.0))},
        {"model": model(log_prior=DiversityPrior(2.0))},
    ),
    "function of a schedule": ({"schedule": falling}, {"schedule": falling_slowly}),
    "steps of a schedule": ({"schedule": cosine}, {"schedule": partial(cosine, steps=50)}),
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
def test_what_arguments_hold_is_compared(name, tmp_path):
    one, other = INSIDE[name]
    data = {} if name != "normal weight" else {"data": numbers()}
    check_refused(fit_map, tmp_path / "x", one | data, other | data)


def test_code_is_not_compared_and_a_name_is(tmp_path):
    """What only the user can know to be another fit."""
    run(fit_map, tmp_path / "x", model=model(log_prior=scaled(1.0)), name="weak")
    run(fit_map, tmp_path / "x", model=model(log_prior=scaled(2.0)), name="weak")
    with pytest.raises(ValueError, match="its name is 'weak', and here it is 'strong'"):
        run(fit_map, tmp_path / "x", model=model(log_prior=scaled(2.0)), name="strong")


def test_the_start_of_em_at_an_hmm_is_compared(tmp_path):
    even = torch.full((2, 2), 0.5).log()
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]])
    for first, matches in ((probs, True), (probs.flip(0), False)):
        hmm = HMM(even[0], even, pyro.distributions.Categorical(first), torch.tensor([1]))
        if matches:
            run(fit_em, tmp_path / "x", module=hmm)
            run(fit_em, tmp_path / "x", module=hmm)
        else:
            with pytest.raises(
                ValueError, match=r"belongs to another fit: its start\.emission\.probs"
            ):
                run(fit_em, tmp_path / "x", module=hmm)
