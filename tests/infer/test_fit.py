"""The training loop: what it finds, when it ends, what it refuses, what it leaves alone."""

import math
from contextlib import nullcontext
from functools import partial

import numpy as np
import pyro
import pytest
import torch
from hmmlearn.hmm import CategoricalHMM
from pyro import distributions as dist
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoNormal,
    init_to_value,
)
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch.distributions import constraints

from pyrohmm import (
    HMM,
    HMMModule,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    fit_map,
    fit_svi,
    normal,
)
from pyrohmm.data.batches import Batches
from pyrohmm.infer.descent import Validation


def with_guide(model):
    return model, AutoNormal(model)


QUICK = {"num_iterations": 30, "progress": False}
TO_THE_END = {
    "num_iterations": 250,
    "learning_rate": 0.2,
    "schedule": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98),
    "tolerance": None,
}
POINT = {
    "module.initial": torch.tensor([0.6, 0.4], dtype=torch.float64),
    "module.transition": torch.tensor([[0.8, 0.2], [0.3, 0.7]], dtype=torch.float64),
    "module.emission.probs": torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]], dtype=torch.float64),
}
ONE = torch.ones(1, dtype=torch.long)
both_settings = pytest.mark.parametrize("local", [False, True], ids=["global", "local"])


def symbols(num_sequences=4, num_steps=5, num_symbols=3):
    lengths = torch.randint(1, num_steps + 1, (num_sequences,))
    lengths[0] = num_steps
    return Sequences(torch.randint(0, num_symbols, (num_sequences, num_steps)), lengths)


def tabular(**options):
    return MarginalModel(TabularHMM(2, categorical(3)), **options)


def from_point():
    return init_to_value(values=POINT)


def local_params(local):
    return pyro.settings.context(module_local_params=local)


class Dropout(HMMModule):
    """One state whose log-odds are drawn to zero at random, while it is in training."""

    def __init__(self, logit=0.0):
        super().__init__()
        self.logit = torch.nn.Parameter(torch.tensor(logit))
        self.drop = torch.nn.Dropout(0.5)
        self.modes = []

    def forward(self, lengths, observed=None):
        self.modes.append(self.drop.training)
        logits = torch.stack([torch.zeros(()), self.drop(self.logit)]).unsqueeze(0)
        one = torch.zeros(1)
        return HMM(one, one.unsqueeze(0), dist.Categorical(logits=logits), lengths, observed)


def ones(share, total=100):
    """Sequences of one step, of which a share is one and the others zero."""
    values = (torch.arange(total) < share * total).long()
    return Sequences(values.unsqueeze(1), torch.ones(total, dtype=torch.long))


class Net(HMMModule):
    """A user's module: a network and no prior."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(2, 3)
        self.start = torch.nn.Parameter(torch.zeros(2))
        self.transition = torch.nn.Parameter(torch.randn(2, 2))

    def forward(self, lengths, observed=None):
        logits = self.body(torch.eye(2))
        return HMM(
            self.start.log_softmax(-1),
            self.transition.log_softmax(-1),
            dist.Categorical(logits=logits),
            lengths,
            observed,
        )


def truth():
    """Two sticky states that are easily told apart."""
    return (
        torch.tensor([0.7, 0.3]).log(),
        torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log(),
        dist.Categorical(torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]])),
    )


def drawn_from(parts, lengths):
    hmm = HMM(*parts, lengths)
    return hmm, Sequences(hmm.sample(), lengths)


def log_likelihood(fit, data):
    return fit.hmm(data).log_prob(data.values).sum().item()


# The global parameter store (T2)


@both_settings
@pytest.mark.parametrize("fails", [False, True])
def test_the_parameter_store_is_left_exactly_as_found(local, fails):
    """Even where names collide with those of the guide, and even if the fit fails."""
    data = symbols()
    with local_params(local):
        pyro.param("mine", torch.ones(2), constraint=constraints.positive)
        pyro.param(
            "AutoDelta.module.initial", torch.tensor([0.1, 0.9]), constraint=constraints.simplex
        )
        store = pyro.get_param_store()
        before = {name: store[name].unconstrained() for name in store.keys()}
        copies = {name: value.detach().clone() for name, value in before.items()}
        if fails:
            with pytest.raises(RuntimeError, match="on purpose"):
                fit_map(tabular(log_prior=fail_at_third_call()), data, **QUICK)
        else:
            fit = fit_map(tabular(), data, start=from_point(), **QUICK)
            fit.hmm(data)
            model = tabular()
            fit_svi(model, AutoNormal(model), data, **QUICK)
        assert list(store.keys()) == list(before)
        for name, value in before.items():
            assert store[name].unconstrained() is value
            assert value.equal(copies[name])


def fail_at_third_call():
    calls = []

    def log_prior(hmm):
        calls.append(None)
        if len(calls) > 5:
            raise RuntimeError("on purpose")
        return hmm.log_initial.new_zeros(())

    return log_prior


@both_settings
@pytest.mark.parametrize("make_guide", [AutoDelta, AutoNormal])
def test_an_earlier_fit_draws_as_before_after_a_later_one(local, make_guide):
    """The same model, the same sites, two guides: each keeps its own parameters."""
    data = symbols()
    with local_params(local):
        model = tabular()
        first = fit_svi(model, make_guide(model), data, **QUICK)
        pyro.set_rng_seed(1)
        before = first.hmm(data)
        fit_svi(model, make_guide(model), data, learning_rate=0.5, **QUICK)
        pyro.param("AutoDelta.module.initial", torch.tensor([0.1, 0.9]))
        pyro.set_rng_seed(1)
        after = first.hmm(data)
        assert after.log_transition.equal(before.log_transition)
        assert after.emission.logits.equal(before.emission.logits)


@both_settings
def test_parameters_of_the_module_are_trained_in_both_settings(local):
    data = symbols()
    with local_params(local):
        module = Net()
        before = {name: value.detach().clone() for name, value in module.named_parameters()}
        fit = fit_map(MarginalModel(module), data, **QUICK)
        assert fit.losses[-1] < fit.losses[0] - 0.1
        for name, value in module.named_parameters():
            assert not value.equal(before[name]), name
        expected = module(data.lengths, data.observed)
        assert fit.hmm(data).log_transition.equal(expected.log_transition)
        assert -log_likelihood(fit, data) < fit.losses[0]


# The same bits


def test_a_generator_alone_decides_on_minibatches():
    data = symbols(8)
    runs = []
    for seed in (1, 1, 2):
        pyro.set_rng_seed(torch.randint(100, ()).item() + len(runs))
        generator = torch.Generator().manual_seed(seed)
        fit = fit_map(
            tabular(), data, start=from_point(), batch_size=3, generator=generator, **QUICK
        )
        runs.append(fit.losses)
    assert runs[0].equal(runs[1])
    assert not runs[0].equal(runs[2])


def test_the_first_loss_of_map_is_minus_the_log_joint():
    data = symbols()
    fit = fit_map(tabular(), data, start=from_point(), num_iterations=1)
    hmm = HMM(
        POINT["module.initial"].log(),
        POINT["module.transition"].log(),
        dist.Categorical(POINT["module.emission.probs"]),
        data.lengths,
    )
    prior = math.log(1) + 2 * math.log(1) + 2 * math.log(2)  # flat on simplexes of area 1/(n-1)!
    expected = -hmm.log_prob(data.values).sum() - prior
    torch.testing.assert_close(fit.losses, expected.reshape(1))
    assert fit.num_observed == int(data.lengths.sum())
    assert fit.reason == "it took all 1 steps"


# What a loss is


def rounds_of(batches, number):
    found = []
    for _ in range(number):
        found.append([batches.take()])
        while not batches.at_end_of_round:
            found[-1].append(batches.take())
    return found


def test_batches_of_steps_hold_each_sequence_once_a_round_beside_others_each_time():
    lengths = torch.randint(1, 30, (60,))
    lengths[7] = 50
    data = Sequences(torch.arange(60).unsqueeze(1).expand(60, 50), lengths)
    neighbours = []
    for batches in rounds_of(Batches(data, batch_tokens=40), 3):
        groups = [tuple(sorted(batch.values[:, 0].tolist())) for batch in batches]
        assert sorted(n for group in groups for n in group) == list(range(60))
        for batch in batches:
            assert len(batch) == 1 or len(batch) * batch.num_steps <= 40
        padded = sum(len(batch) * batch.num_steps for batch in batches)
        assert padded <= 1.15 * data.lengths.sum()
        assert (7,) in groups
        assert groups != sorted(groups, key=lambda group: lengths[list(group)].max())
        neighbours.append(set(groups))
    assert neighbours[0] != neighbours[1] != neighbours[2]
    assert len(neighbours[0]) < 45


# When it ends


def test_tolerance_compares_the_means_of_two_windows_of_25():
    """The fit ends at the first window that is no better than the one before, and says so."""
    tolerance = 0.01
    fit = fit_map(
        tabular(), symbols(), num_iterations=1000, tolerance=tolerance, start=from_point()
    )
    assert fit.converged
    assert "less than 0.01" in fit.reason
    assert len(fit.losses) % 25 == 0
    means = fit.losses.reshape(-1, 25).mean(-1)
    fell = (means[:-1] - means[1:]) / means[1:].abs()
    assert fell[-1] < tolerance
    assert (fell[1:-1] >= tolerance).all()


# What steers it


def test_clip_norm_bounds_the_gradient_per_observed_step():
    data = symbols()
    norms = []
    for clip_norm in (None, 0.01):
        module = Net()
        before = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
        fit_map(
            MarginalModel(module),
            data,
            num_iterations=1,
            clip_norm=clip_norm,
            optimizer=lambda given: torch.optim.SGD(given, lr=1.0),
        )
        after = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
        norms.append((after - before).norm().item())
    assert norms[0] > 0.01 * data.num_observed
    assert norms[1] == pytest.approx(0.01 * data.num_observed, rel=1e-5)


class TwoTerms(HMMModule):
    """Logits of symbols that are a sum of two parameters, whose gradients are the same."""

    def __init__(self):
        super().__init__()
        self.one = torch.nn.Parameter(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
        self.other = torch.nn.Parameter(torch.zeros(2, 3))

    def forward(self, lengths, observed=None):
        half = torch.full((2, 2), 0.5).log()
        emission = dist.Categorical(logits=self.one + self.other)
        return HMM(half[0], half, emission, lengths, observed)


def test_the_gradient_that_two_parameters_share_is_clipped_once():
    module, given = TwoTerms(), Sequences(torch.randint(3, (12, 6)))
    before = [part.detach().clone() for part in module.parameters()]
    fit_map(
        MarginalModel(module), given, num_iterations=1, clip_norm=1e-3,
        optimizer=lambda parts: torch.optim.SGD(parts, lr=1.0),
    )  # fmt: skip
    moved = [(part - old).norm() for part, old in zip(module.parameters(), before)]
    each = torch.tensor(1e-3 * given.num_observed / math.sqrt(2))
    torch.testing.assert_close(torch.stack(moved), each.expand(2), rtol=1e-4, atol=0.0)


def test_the_schedule_is_stepped_once_a_step():
    made = {}

    def optimizer(given):
        made["optimizer"] = torch.optim.SGD(given, lr=0.5)
        return made["optimizer"]

    def schedule(given):
        assert given is made["optimizer"]
        return torch.optim.lr_scheduler.ExponentialLR(given, 0.9)

    fit_map(tabular(), symbols(), num_iterations=7, optimizer=optimizer, schedule=schedule)
    assert made["optimizer"].param_groups[0]["lr"] == pytest.approx(0.5 * 0.9**7)


def test_modules_train_while_steps_are_taken_and_rest_where_a_fit_is_used():
    module = Dropout(3.0)
    module.eval()
    module.drop.train()
    model = MarginalModel(module)
    fit = fit_map(model, ones(0.7), num_iterations=40, validation=ones(0.6), progress=False)
    assert module.modes.count(True) >= 40
    assert module.modes.count(False) == 3  # a check, after 25 steps, at the end
    assert (module.training, module.drop.training) == (False, True)
    module.modes.clear()
    drawn = [hmm.emission.logits for hmm in fit.hmms([ones(0.5), ones(0.1)])]
    drawn.append(fit.hmm(ones(0.5)).emission.logits)
    assert drawn[0].equal(drawn[1])
    assert drawn[0].equal(drawn[2])
    assert module.modes == [False] * 3
    assert (module.training, module.drop.training) == (False, True)


# Held-out data, and averages


def by_descent(**options):
    """A fit that starts at even odds, goes by steps of one length, and records where it was."""
    module = Dropout()
    module.drop = torch.nn.Identity()
    path = []

    class Noted(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            path.append(module.logit.item())

    common = {"tolerance": None, "progress": False, "optimizer": partial(Noted, lr=0.002)}
    fit = fit_map(MarginalModel(module), ones(0.9), **common | {"num_iterations": 60} | options)
    return fit, module.logit.item(), path


def surprise(logit, share):
    """Nats per step of ones in a share of the steps."""
    return math.log(1 + math.exp(logit)) - share * logit


def test_the_parameters_that_predict_held_out_data_best_are_kept():
    """Training goes to log 9, past the best for the data held out, log 3/2."""
    told = []
    fit, logit, path = by_descent(validation=ones(0.6), validate_every=2, report=told.append)
    assert told == fit.validation
    assert [found.step for found in fit.validation] == list(range(2, 61, 2))
    for found in fit.validation:
        assert found.nats == pytest.approx(surprise(path[found.step - 1], 0.6))
    best = min(fit.validation, key=lambda found: found.nats)
    assert 2 < best.step < 30
    assert logit == path[best.step - 1]
    assert path[-1] > math.log(1.5) + 0.5  # so that it would show
    drawn = fit.hmm(ones(0.6))
    nats = -drawn.log_prob(ones(0.6).values).mean().item()
    assert nats == pytest.approx(best.nats)
    assert f"held out  {best.nats:.4f} nats per step, the best of 30 validations" in fit.summary()


def test_patience_ends_a_fit_after_so_many_validations_without_a_better_one():
    every, _, _ = by_descent(validation=ones(0.6), validate_every=2)
    best = min(every.validation, key=lambda found: found.nats)
    fit, _, path = by_descent(validation=ones(0.6), validate_every=2, patience=3)
    assert len(path) == len(fit.losses) == best.step + 6
    assert fit.converged
    assert fit.reason == "3 validations in a row were no better than the best"
    assert fit.validation == every.validation[: len(fit.validation)]


def test_held_out_data_are_judged_at_a_draw_of_a_guide_that_knows_no_median():
    def model(data):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        emission = dist.Normal(loc.unsqueeze(-1), 1.0)
        hmm = HMM(torch.zeros(1), torch.zeros(1, 1), emission, data.lengths)
        with pyro.plate("data", len(data)):
            pyro.sample("x", hmm, obs=data.values)
        return hmm

    seen = []

    def guide(data):
        scale = pyro.param("scale", torch.tensor(1.0), constraint=constraints.positive)
        seen.append(pyro.sample("loc", dist.Normal(5.0, scale)).item())

    data = Sequences(torch.zeros(3, 2), torch.tensor([2, 2, 2]))
    fit = fit_svi(model, guide, data, num_iterations=1, validation=data)
    expected = 0.5 * math.log(2 * math.pi) + 0.5 * seen[-2] ** 2
    assert fit.parameters["loc"].item() == seen[-1]  # another one, that stays
    assert fit.validation == [Validation(1, pytest.approx(expected))]


def test_a_plateau_of_held_out_data_shortens_the_steps():
    made = []

    def schedule(optimizer):
        made.append(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1))
        return made[0]

    fit, _, path = by_descent(validation=ones(0.6), validate_every=2, schedule=schedule)
    best = min(range(len(fit.validation)), key=lambda i: fit.validation[i].nats)
    assert made[0].last_epoch == len(fit.validation) == 30
    assert made[0].best == fit.validation[best].nats
    there = by_descent(validation=ones(0.6), validate_every=2)[2]
    shorter = 2 * (best + 3)  # two more validations than the best one, none of them better
    assert path[:shorter] == there[:shorter]
    step, other = path[shorter] - path[shorter - 1], there[shorter] - there[shorter - 1]
    assert step == pytest.approx(other / 2)

    with pytest.raises(ValueError, match="mode='min'"):
        by_descent(
            validation=ones(0.6),
            schedule=partial(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="max"),
        )


def test_averages_are_those_of_the_parameters_after_each_step():
    fit, logit, path = by_descent(average=0.8, validation=ones(0.6), validate_every=60)
    mean = path[0]
    for n, value in enumerate(path[1:], start=2):
        decay = min(0.8, (1 + n) / (10 + n))
        mean = decay * mean + (1 - decay) * value
    assert logit == pytest.approx(mean)
    assert fit.validation[0].nats == pytest.approx(surprise(mean, 0.6))
    _, last, there = by_descent(average=0.8)
    assert there == path  # which averages do not touch
    assert last == logit


def test_pyro_param_in_a_function_is_trained():
    """Never left where it was in silence: pyro.param is how most Pyro models are written."""
    data = symbols()
    start = torch.tensor([[0.5, 0.5], [0.4, 0.6]])

    def model(data):
        transition = pyro.param("transition", start, constraint=constraints.simplex)
        probs = pyro.sample("probs", dist.Dirichlet(torch.ones(2, 3)).to_event(1))
        first = torch.tensor([0.3, 0.7]).log()
        hmm = HMM(first, transition.log(), dist.Categorical(probs), data.lengths, data.observed)
        with pyro.plate("data", len(data)):
            pyro.sample("x", hmm, obs=data.values)
        return hmm

    fit = fit_map(model, data, num_iterations=30)
    assert not torch.allclose(fit.hmm(data).log_transition.exp(), start)


def test_a_guide_of_functions_is_trained():
    data = symbols()

    def guide(data):
        for name, value in POINT.items():
            point = pyro.param(name + ".point", value, constraint=constraints.simplex)
            pyro.sample(name, dist.Delta(point, event_dim=value.dim()))

    fit = fit_svi(tabular(), guide, data, **QUICK)
    assert fit.losses[-1] < fit.losses[0]
    transition = fit.hmm(data).log_transition.exp()
    assert not torch.allclose(transition, POINT["module.transition"])


def test_tensors_of_a_fitted_hmm_carry_no_gradient():
    """Of variables, of parameters without a prior, and of parameters that constraints bind."""
    data = numbers()

    class Free(HMMModule):
        def __init__(self):
            super().__init__()
            self.loc = torch.nn.Parameter(torch.tensor([0.0, 1.0]))
            self.scale = PyroParam(torch.ones(2), constraints.positive)
            self.stay = PyroSample(dist.Beta(2.0, 2.0))

        def forward(self, lengths, observed=None):
            rows = torch.stack([torch.stack([self.stay, 1 - self.stay], -1)] * 2, -2)
            emission = dist.Normal(self.loc, self.scale)
            return HMM(rows[..., 0, :].log(), rows.log(), emission, lengths, observed)

    for module in (Free(), TabularHMM(2, normal(0))):
        for fit in (
            fit_map(MarginalModel(module), data, num_iterations=3, progress=False),
            fit_svi(*with_guide(MarginalModel(module)), data, num_iterations=3, progress=False),
        ):
            hmm = fit.hmm(data)
            hmm.emission.mean.numpy()  # as matplotlib reads it
            for tensor in (hmm.emission.mean, hmm.emission.stddev, hmm.log_transition):
                assert not tensor.requires_grad
    assert module.emission.prior_loc is not None
    assert all(p.requires_grad for p in Free().parameters())


# Models and guides of one's own


def numbers(*event):
    values = torch.randn(3, 5, *event, generator=torch.Generator().manual_seed(0))
    return Sequences(values, torch.tensor([5, 5, 2]))


def test_means_quantiles_and_samples_of_a_variational_fit():
    """Against those of the guide, which are known: a normal distribution of each logarithm."""

    def model(data):
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        hmm = HMM(torch.zeros(1), torch.zeros(1, 1), dist.Poisson(rate[..., None]), data.lengths)
        with pyro.plate("data", len(data)):
            pyro.sample("x", hmm, obs=data.values)
        return hmm

    data = Sequences(torch.full((2, 3), 4.0), torch.tensor([3, 3]))
    guide = AutoNormal(model)
    fit = fit_svi(model, guide, data, num_iterations=200, learning_rate=0.05, progress=False)
    loc, scale = (part.detach() for part in guide._get_loc_and_scale("rate"))
    found, again = fit.mean(20_000), fit.mean(20_000)
    assert found["rate"].equal(again["rate"])
    torch.testing.assert_close(found["rate"], (loc + scale**2 / 2).exp(), rtol=0.01, atol=0.0)
    probs = [0.05, 0.5, 0.9]
    quantiles = fit.quantiles(probs, 20_000)["rate"]
    expected = dist.LogNormal(loc, scale).icdf(torch.tensor(probs))
    torch.testing.assert_close(quantiles, expected, rtol=0.01, atol=0.0)
    torch.testing.assert_close(fit.parameters["rate"], loc.exp())  # the median
    samples = fit.samples(50)["rate"]
    assert samples.shape == (50,)
    assert not samples.equal(fit.samples(50)["rate"])
    assert not samples.requires_grad
    with pytest.raises(ValueError, match="probs must be a list of numbers between 0 and 1"):
        fit.quantiles([0.5, 2.0])


# What it finds


def test_flat_priors_reach_what_em_of_hmmlearn_reaches():
    """From the same start, on ragged sequences, within 0.1 nat."""
    _, data = drawn_from(truth(), torch.randint(3, 16, (30,)))
    rows = [row[:length] for row, length in zip(data.values.tolist(), data.lengths.tolist())]
    em = CategoricalHMM(2, n_iter=2000, tol=1e-7, params="ste", init_params="", n_features=3)
    em.startprob_ = POINT["module.initial"].numpy()
    em.transmat_ = POINT["module.transition"].numpy()
    em.emissionprob_ = POINT["module.emission.probs"].numpy()
    stacked, lengths = np.concatenate(rows).reshape(-1, 1), data.lengths.tolist()
    em.fit(stacked, lengths)
    fit = fit_map(tabular(), data, start=from_point(), **TO_THE_END)
    assert log_likelihood(fit, data) == pytest.approx(em.score(stacked, lengths), abs=0.1)


def test_map_ends_at_a_maximum_of_the_density_in_its_own_space():
    """By Newton's decrement, in nats; without the Jacobians of unconstrained parameters."""
    module = TabularHMM(1, normal(2, loc=0.5, weight=2.0, concentration=3.0, rate=1.5))
    slower = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)  # noqa: E731
    options = {**TO_THE_END, "num_iterations": 400, "schedule": slower}
    fit = fit_map(MarginalModel(module), numbers(2), **options)
    assert fit.information(numbers(2)).decrement < 1e-9


def test_map_of_known_states_is_the_mode_of_every_dirichlet_posterior():
    """Each state emits its own symbol, so transitions and starts can be counted."""
    data = Sequences.from_list([[0, 0, 1, 1, 1, 0], [1, 0, 0], [0]])
    starts, transitions = torch.tensor([2.0, 1.0]), torch.tensor([[2.0, 1.0], [2.0, 2.0]])
    prior = torch.tensor([[5.0, 1.5], [2.0, 1.0]])
    model = MarginalModel(TabularHMM(2, categorical(2), 3.0, prior))
    known = poutine.condition(model, {"module.emission.probs": torch.eye(2)})
    fit = fit_map(known, data, **TO_THE_END)
    hmm = fit.hmm(data)
    for found, counts in [
        (hmm.log_initial, starts + 3.0 - 1),
        (hmm.log_transition, transitions + prior - 1),
    ]:
        expected = counts / counts.sum(-1, keepdim=True)
        torch.testing.assert_close(found.exp(), expected, rtol=0.0, atol=1e-4)
    assert fit.names == ["module.initial", "module.transition"]


class KnownScale(PyroModule):
    """Normal of variance one whose mean has a standard normal prior: conjugate."""

    def __init__(self, num_states):
        super().__init__()
        self.loc = PyroSample(dist.Normal(torch.zeros(num_states), 1.0).to_event(1))

    def forward(self):
        return dist.Normal(self.loc, 1.0)


def test_svi_of_one_normal_state_finds_posterior_and_evidence_exactly():
    """The posterior is normal, so that the bound is tight. To 5 % of the standard deviation."""
    data = Sequences(torch.randn(3, 4) + 1, torch.tensor([4, 1, 3]))
    model = MarginalModel(TabularHMM(1, KnownScale))
    guide = AutoNormal(model)
    elbo = Trace_ELBO(10, vectorize_particles=True, max_plate_nesting=1)
    fit = fit_svi(model, guide, data, elbo=elbo, **TO_THE_END)
    seen = torch.cat([row[:length] for row, length in zip(data.values, data.lengths)])
    precision = 1 + len(seen)
    low, high = guide.quantiles([0.15865525, 0.84134475], data)["module.emission.loc"]
    mean, spread = seen.sum().item() / precision, precision**-0.5
    assert (low + high).item() / 2 == pytest.approx(mean, abs=0.05 * spread)
    assert (high - low).item() / 2 == pytest.approx(spread, rel=0.05)
    covariance = torch.eye(len(seen)) + 1
    evidence = dist.MultivariateNormal(torch.zeros(len(seen)), covariance).log_prob(seen)
    assert fit.losses[-100:].mean().item() == pytest.approx(-evidence.item(), abs=0.02)


def test_hard_zeros_stay_zero_under_training():
    """A left-to-right chain that may not emit symbol 0 in its last state."""
    start = torch.tensor([1.0, 0.0, 0.0])
    transition = torch.tensor([[0.6, 0.4, 0.0], [0.0, 0.7, 0.3], [0.0, 0.0, 1.0]])
    probs = torch.tensor([[0.6, 0.2, 0.2], [0.1, 0.8, 0.1], [0.0, 0.2, 0.8]])
    hmm, data = drawn_from(
        (start.log(), transition.log(), dist.Categorical(probs)), torch.full((9,), 6)
    )
    fit = fit_map(MarginalModel(TabularHMM.from_hmm(hmm)), data, num_iterations=150, tolerance=None)
    found = fit.hmm(data)
    assert found.log_initial.exp().equal(start)
    assert (found.log_transition == -torch.inf).equal(transition == 0)
    assert (found.emission.probs == 0).equal(probs == 0)
    assert fit.losses[-1] < fit.losses[0]
    assert not torch.allclose(found.log_transition[0, :2].exp(), transition[0, :2])
    assert fit.names == []


# What it refuses


@pytest.mark.parametrize("batch_size", [None, 1])
def test_an_impossible_sequence_is_found_in_whichever_minibatch(batch_size):
    half = torch.full((2, 2), 0.5).log()
    probs = dist.Categorical(torch.tensor([[0.5, 0.5, 0.0]] * 2))
    hmm = HMM(half[0], half, probs, ONE)
    data = Sequences.from_list([[0, 1], [1], [0, 0, 1], [2, 0]])
    with pytest.raises(FloatingPointError, match="probability zero"):
        fit_map(
            MarginalModel(TabularHMM.from_hmm(hmm)), data, batch_size=batch_size, num_iterations=40
        )


@pytest.mark.filterwarnings("ignore:Encountered NaN")
def test_a_log_prior_that_is_not_a_number_ends_the_fit():
    model = tabular(log_prior=lambda hmm: hmm.log_initial.sum() * float("nan"))
    with pyro.validation_enabled(False), pytest.raises(FloatingPointError, match="loss is nan"):
        fit_map(model, symbols(), num_iterations=10)


@pytest.mark.parametrize("apart", [True, False])
def test_svi_tells_before_its_first_step_that_samples_will_not_lie_side_by_side(apart):
    """A variable beside what has steps needs a dimension of them, and fits without it."""

    def model(data):
        level = pyro.sample("level", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        level = level.unsqueeze(-2) if apart else level
        loc, even = level + data.covariates, torch.full((2, 2), 0.5).log()
        hmm = HMM(even[0], even, dist.Normal(loc, 1.0), data.lengths, emission_per_step=True)
        with pyro.plate("sequences", len(data)):
            pyro.sample("x", hmm, obs=data.values)
        return hmm

    data = Sequences(torch.randn(3, 4), covariates=torch.randn(3, 4, 1))
    guide = AutoNormal(model)
    told = pytest.warns(UserWarning, match=r"'level', \(2,\), as \(S")
    with nullcontext() if apart else told:
        fit = fit_svi(model, guide, data, num_iterations=1)
    assert len(fit.notes) == (not apart)
