"""Posterior samples: batched they are what they are one by one, whatever the order of states."""

import itertools

import pyro
import pytest
import torch
from pyro import poutine
from pyro.distributions import Categorical, Dirichlet, Normal
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoNormal
from torch.distributions import constraints

from pyrohmm import (
    HMM,
    DenseHMM,
    MarginalModel,
    PosteriorDraws,
    Sequences,
    TabularHMM,
    categorical,
    draws,
    fit_svi,
    load_draws,
    load_hmm,
    normal_tied,
    save,
    tied,
)
from pyrohmm.infer.sampled import summary_of

LENGTHS = torch.tensor([6, 4, 1])
DATA = Sequences(torch.randint(3, (3, 6), generator=torch.Generator().manual_seed(0)), LENGTHS)
MODULES = {
    "tabular": lambda: TabularHMM(3, categorical(3, 2.0), 2.0, 3.0),
    "dense": lambda: DenseHMM(3, 3, 3),  # K, V and D alike: nothing can be told from sizes
    "shared": lambda: DenseHMM(3, 3, 2, tied=True),
    "stationary": lambda: DenseHMM(3, 3, 2, stationary=True),
}


def from_prior(model, chains, count, data=DATA):
    """Draws of the prior, ``(C, S, ...)``."""
    rows = []
    for _ in range(chains * count):
        trace = poutine.trace(model).get_trace(data)
        rows.append({name: trace.nodes[name]["value"] for name in trace.stochastic_nodes})
    names = [name for name in rows[0] if name != "sequences"]
    stacked = {name: torch.stack([row[name] for row in rows]) for name in names}
    return PosteriorDraws(
        model, {n: v.detach().unflatten(0, (chains, count)) for n, v in stacked.items()}
    )


def single(model, values, c, s, data=DATA):
    """The HMM of one draw, with nothing beside it."""
    return poutine.condition(model, {name: each[c, s] for name, each in values.items()})(data)


@pytest.mark.parametrize("name", MODULES)
def test_draws_side_by_side_are_draws_one_by_one(name):
    some = from_prior(MarginalModel(MODULES[name]()), 2, 4)
    hmm = some.hmm(DATA)
    assert hmm.batch_shape == (2, 4, 3)
    together = some.map(DATA, lambda hmm: hmm.log_prob(DATA.values))
    for c, s in itertools.product(range(2), range(4)):
        own = single(some.model, some.parameters, c, s)
        wanted = own.log_prob(DATA.values)
        torch.testing.assert_close(hmm.log_prob(DATA.values)[c, s], wanted)
        torch.testing.assert_close(together[c, s], wanted)


@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
def test_the_size_of_batches_changes_nothing(batch_size):
    some = from_prior(MarginalModel(MODULES["tabular"]()), 2, 4)

    def both(hmm):
        return {"first": hmm.log_prob(DATA.values), "second": hmm.log_initial[:, 0]}

    found, wanted = some.map(DATA, both, batch_size), some.map(DATA, both)
    assert found["second"].shape == (2, 4, 3)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])


def test_labels_count_as_observed():
    labels = torch.full((3, 6), -1)
    labels[0, 2], labels[1, 0] = 1, 2
    known = Sequences(DATA.values, LENGTHS, labels=labels)
    some = from_prior(MarginalModel(MODULES["tabular"]()), 1, 2)
    found = some.map(known, lambda hmm: hmm.log_prob(known.values))
    for s in range(2):
        wanted = single(some.model, some.parameters, 0, s).restrict(labels).log_prob(DATA.values)
        torch.testing.assert_close(found[0, s], wanted)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    "log_prior", [None, lambda hmm: hmm.log_transition.exp().square().sum((-1, -2))]
)
def test_the_log_prior_and_the_evidence_are_the_log_joint_density(name, log_prior):
    some = from_prior(MarginalModel(MODULES[name](), log_prior), 2, 2)
    found = some.log_prior(DATA) + some.map(DATA, lambda hmm: hmm.log_prob(DATA.values).sum(-1))
    for c, s in itertools.product(range(2), range(2)):
        values = {name: each[c, s] for name, each in some.parameters.items()}
        trace = poutine.trace(poutine.condition(some.model, values)).get_trace(DATA)
        torch.testing.assert_close(found[c, s], trace.log_prob_sum())


def written_out(first_row):
    """A user's model, whose first state is distributed as the first row of a matrix."""

    def model(data):
        matrix = pyro.sample("matrix", Dirichlet(torch.full((2, 2), 3.0)).to_event(1))
        face = pyro.sample("face", Dirichlet(torch.ones(2, 3)).to_event(1))
        emission = Categorical(face)
        hmm = HMM(first_row(matrix).log(), matrix.log(), emission, data.lengths, data.observed)
        with pyro.plate("sequences", len(data)):
            pyro.sample("x", hmm, obs=data.values)
        return hmm

    return model


# Names of states ----------------------------------------------------------------------------------


def shuffled(value, places, orders):
    """``value`` with the dimensions ``places`` of each draw permuted, one draw at a time."""
    out = value.clone()
    for c, s in itertools.product(range(value.size(0)), range(value.size(1))):
        one = value[c, s]
        for place in places:
            one = one.index_select(place, orders[c, s])
        out[c, s] = one
    return out


PLACES = {
    "initial": (0,), "transition": (0, 1), "probs": (0,), "loc": (0,), "variance": (0,),
    "leave": (0,), "enter": (0,), "emit": (0,), "start": (), "symbol": (), "covariance": (),
}  # fmt: skip


def separate(seed=0):
    """An HMM whose three states differ, and sequences that show it."""
    torch.manual_seed(seed)
    module = TabularHMM(3, categorical(3, 2.0), 2.0, 2.0)
    values = {
        "module.initial": torch.tensor([0.5, 0.3, 0.2]),
        "module.transition": torch.tensor([[0.8, 0.15, 0.05], [0.1, 0.7, 0.2], [0.3, 0.1, 0.6]]),
        "module.emission.probs": torch.tensor(
            [[0.9, 0.05, 0.05], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]]
        ),
    }
    model = MarginalModel(module)
    lengths = torch.tensor([30, 25, 12, 1])
    hmm = poutine.condition(model, values)(Sequences(torch.zeros(4, 30).long(), lengths))
    return model, values, Sequences(hmm.sample(), lengths)


def jittered(values, chains, count):
    """Draws about one point."""
    wide = {}
    for name, value in values.items():
        noise = 1 + 0.1 * torch.rand(chains, count, *value.shape)
        wide[name] = value * noise / (value * noise).sum(-1, keepdim=True)
    return wide


def test_alignment_finds_the_names_that_were_shuffled():
    model, values, data = separate()
    straight = jittered(values, 2, 10)
    orders = torch.stack([torch.randperm(3) for _ in range(20)]).unflatten(0, (2, 10))
    mixed = {n: shuffled(v, PLACES[n.split(".")[-1]], orders) for n, v in straight.items()}
    some = PosteriorDraws(model, mixed)
    names = some.align(data)
    # a shuffled state k was state orders[k]; all draws must agree on what that is called
    common = names[0, 0].gather(0, orders[0, 0].argsort())
    assert torch.equal(names, common[orders])
    aligned = some.aligned(data)
    for name, value in straight.items():
        back = shuffled(value, PLACES[name.split(".")[-1]], common.argsort().expand(2, 10, 3))
        torch.testing.assert_close(aligned.parameters[name], back)


@pytest.mark.parametrize("name", MODULES)
def test_renaming_states_changes_neither_evidence_nor_prior(name):
    some = from_prior(MarginalModel(MODULES[name]()), 2, 3)
    names = torch.stack([torch.randperm(3) for _ in range(6)]).unflatten(0, (2, 3))
    new = some.permute_states(names, DATA)
    for each in (
        lambda found: found.map(DATA, lambda hmm: hmm.log_prob(DATA.values)),
        lambda found: found.log_prior(DATA),
    ):
        torch.testing.assert_close(each(new), each(some))
    before, after = (
        found.map(DATA, lambda hmm: hmm.posterior(DATA.values).state_probs) for found in (some, new)
    )
    for c, s, k in itertools.product(range(2), range(3), range(3)):
        torch.testing.assert_close(after[c, s, ..., names[c, s, k]], before[c, s, ..., k])
    for site, value in some.parameters.items():
        wanted = shuffled(value, PLACES[site.split(".")[-1]], names.argsort(-1))
        assert torch.equal(new.parameters[site], wanted)


def test_a_covariance_of_all_states_is_not_taken_for_theirs_unless_sizes_say_so():
    data = Sequences(torch.randn(2, 4, 2), torch.tensor([4, 3]))
    model = MarginalModel(TabularHMM(3, normal_tied(2)))
    some = from_prior(model, 1, 2, data)
    names = torch.tensor([[[1, 2, 0], [0, 1, 2]]])
    torch.testing.assert_close(
        some.permute_states(names, data).hmm(data).log_prob(data.values),
        some.hmm(data).log_prob(data.values),
    )
    square = from_prior(MarginalModel(TabularHMM(2, normal_tied(2))), 1, 1, data)
    names = torch.tensor([[[1, 0]]])
    with pytest.raises(ValueError, match="dims="):
        square.permute_states(names, data)
    told = PosteriorDraws.of(square, dims={"module.emission.covariance": ("row", "column")})
    torch.testing.assert_close(
        told.permute_states(names, data).hmm(data).log_prob(data.values),
        square.hmm(data).log_prob(data.values),
    )


def test_states_that_share_an_emission_keep_their_names():
    model = MarginalModel(TabularHMM(3, tied(categorical(3), [0, 0, 1])))
    with pytest.raises(ValueError, match="share"):
        from_prior(model, 1, 2).aligned(DATA)


def test_states_that_their_priors_tell_apart_keep_their_names():
    prior = torch.tensor([[5.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    model = MarginalModel(TabularHMM(3, categorical(3, prior)))
    with pytest.raises(ValueError, match=r"priors must be alike for all .* give start="):
        from_prior(model, 1, 2).aligned(DATA)


def test_dimensions_have_names():
    some = from_prior(MarginalModel(MODULES["dense"]()), 1, 2)
    assert some.named_dims(DATA) == {
        "module.leave": ("state", "embedding"),
        "module.enter": ("state", "embedding"),
        "module.start": ("embedding",),
        "module.emit": ("state", "symbol_embedding"),
        "module.symbol": ("symbol", "symbol_embedding"),
    }
    assert from_prior(written_out(lambda matrix: matrix[..., 0, :]), 1, 2).named_dims(DATA) == {
        "matrix": ("state", "next_state"),
        "face": ("state", "symbol"),
    }


# What needs no names ------------------------------------------------------------------------------


def test_invariants_are_those_of_a_table_of_all_paths():
    some = from_prior(MarginalModel(MODULES["tabular"]()), 1, 3)
    found = some.map(DATA, lambda hmm: draws.invariants(hmm, DATA.values))
    for s in range(3):
        hmm = single(some.model, some.parameters, 0, s)
        visits, evidence = torch.zeros(3), 0.0
        for n, length in enumerate(LENGTHS.tolist()):
            paths = torch.tensor(list(itertools.product(range(3), repeat=length)))
            own = single(some.model, some.parameters, 0, s, DATA[n : n + 1])
            scores = own.log_joint(DATA.values[n, :length], paths)
            evidence = evidence + scores.logsumexp(0)
            shares = scores.softmax(0)
            for k in range(3):
                visits[k] += (shares.unsqueeze(-1) * (paths == k)).sum()
        occupancy = visits / visits.sum()
        entropy = torch.distributions.Categorical(logits=hmm.log_transition).entropy()
        spread = torch.distributions.Categorical(probs=occupancy).entropy()
        torch.testing.assert_close(found["log_evidence"][0, s], evidence)
        torch.testing.assert_close(found["occupancy"][0, s], occupancy.sort(descending=True).values)
        torch.testing.assert_close(found["effective_states"][0, s], spread.exp())
        torch.testing.assert_close(found["transition_entropy"][0, s], (occupancy * entropy).sum())


# Where draws come from ----------------------------------------------------------------------------


def test_a_guide_gives_its_draws_and_their_density():
    shapes = {"initial": (2,), "transition": (2, 2), "emission.probs": (2, 3)}

    def guide(data):
        for name, shape in shapes.items():
            prior = pyro.param(name, 2 * torch.ones(shape), constraint=constraints.positive)
            pyro.sample(f"module.{name}", Dirichlet(prior).to_event(len(shape) - 1))

    model = MarginalModel(TabularHMM(2, categorical(3)))
    fit = fit_svi(model, guide, DATA, num_iterations=3, progress=False)
    some = PosteriorDraws.of(fit, num_draws=5)
    assert some.shape == (1, 5)
    total = torch.zeros(1, 5)
    for name in shapes:
        prior = fit.params["params"][name].detach().exp()  # kept as its logarithm
        scores = torch.distributions.Dirichlet(prior).log_prob(some.parameters[f"module.{name}"])
        total += scores.reshape(1, 5, -1).sum(-1)
    torch.testing.assert_close(some.stats["log_guide"], total)


@pytest.mark.parametrize("shape", [(1, 40), (1, 1000), (4, 10), (4, 500)])
def test_chains_of_one_distribution_are_not_said_to_disagree(shape):
    """Of 60 runs with 50 variables, at most one by chance: one in a thousand is expected."""
    torch.manual_seed(0)
    chains, own = shape[0], "halves of the chain" if shape[0] == 1 else "chains"
    said = [summary_of({"x": torch.randn(*shape, 50)})[0] for _ in range(60)]
    assert sum("DISAGREE" in line for line in said) <= 1
    away = torch.randn(*shape, 50)
    if chains == 1:
        away[:, shape[1] // 2 :] += 5.0
    else:
        away[chains // 2 :] += 5.0
    assert summary_of({"x": away})[0].startswith(f"{own.upper()} DISAGREE")


@pytest.mark.filterwarnings("ignore:num_chains=2 is more than available_cpu")
def test_chains_of_a_sampler(monkeypatch):
    monkeypatch.setattr("torch.multiprocessing.cpu_count", lambda: 1)  # one after the other
    model = MarginalModel(TabularHMM(2, categorical(3)))
    mcmc = MCMC(NUTS(model), 5, 2, num_chains=2, disable_progbar=True)
    mcmc.run(DATA)
    some = PosteriorDraws.of(mcmc)
    assert some.model is model
    assert some.shape == (2, 5)
    for name, value in mcmc.get_samples(group_by_chain=True).items():
        assert torch.equal(some.parameters[name], value)
    wanted = torch.zeros(2, 5, dtype=torch.bool)
    for chain in range(2):
        wanted[chain, mcmc.diagnostics()["divergences"][f"chain {chain}"]] = True
    assert torch.equal(some.stats["diverging"], wanted)


def own_level(data):
    """A level for each sequence, around one of all."""
    centre, zero = pyro.sample("centre", Normal(0.0, 1.0)), torch.zeros(1, 1)
    with pyro.plate("subjects", data.total, subsample=data.indices):
        level = pyro.sample("level", Normal(centre, 1.0))
        hmm = HMM(zero[0], zero, Normal(level.unsqueeze(-1), 1.0), data.lengths, data.observed)
        pyro.sample("x", hmm, obs=data.values)
    return hmm


def test_new_sequences_are_conditioned_on_their_data():
    """Of normal numbers the posterior is known: its precision is that of the prior and T more."""
    new = Sequences.from_list([[1.0, 2.0]] * 300 + [[-1.5]] * 300)
    draws = PosteriorDraws.of(
        {"centre": torch.full((1, 4), 0.5), "level": torch.zeros(1, 4, 2)}, own_level
    )
    levels = draws.for_new(new, num_candidates=200).parameters["level"].reshape(4, 2, 300)
    for group, (total, count) in enumerate([(3.0, 2), (-1.5, 1)]):
        some = levels[:, group].flatten()
        assert some.mean().item() == pytest.approx((0.5 + total) / (count + 1), abs=0.08)
        assert some.var().item() == pytest.approx(1 / (count + 1), rel=0.15)
    prior = draws.for_new(new).parameters["level"]
    assert prior.mean().item() == pytest.approx(0.5, abs=0.1)


def test_draws_are_saved_with_what_belongs_to_each_sequence(tmp_path):
    data = Sequences.from_list([[1.0, 2.0], [0.5]])
    fit = fit_svi(own_level, AutoNormal(own_level), data, num_iterations=2)
    draws = PosteriorDraws.of(fit, num_draws=7, dims={"centre": ()})
    save(draws, tmp_path / "draws")
    loaded = load_draws(tmp_path / "draws", own_level)
    assert loaded.parameters.keys() == draws.parameters.keys()
    for name, value in {**draws.parameters, **draws.stats}.items():
        assert torch.equal({**loaded.parameters, **loaded.stats}[name], value)
    assert (loaded.dims, loaded.shape) == ({"centre": []}, (1, 7))
    both = [each.map(data, lambda hmm: hmm.log_prob(data.values)) for each in (draws, loaded)]
    assert torch.equal(*both)
    with pytest.raises(ValueError, match="variables of its own"):  # recognised by their marks
        loaded.hmm(Sequences.from_list([[9.0, 2.0], [0.5]]))
    with pytest.raises(ValueError, match="load_draws"):
        load_hmm(tmp_path / "draws")


def test_draws_of_a_guide_for_new_sequences_are_not_judged_as_a_chain():
    def model(data):
        even = torch.full((2, 2), 0.5).log()
        mean = pyro.sample("mean", Normal(0.0, 1.0))
        with pyro.plate("subjects", data.total, subsample=data.indices):
            level = pyro.sample("level", Normal(mean, 1.0))
            loc = torch.stack([level, level + 1], -1)
            hmm = HMM(even[0], even, Normal(loc, 1.0), data.lengths)
            pyro.sample("x", hmm, obs=data.values)
        return hmm

    data = Sequences(torch.randn(3, 5))
    guide = AutoNormal(model)
    draws = PosteriorDraws.of(fit_svi(model, guide, data, num_iterations=5), num_draws=20)
    for each in (draws, draws.thin(10), draws.thin(10).for_new(Sequences(torch.randn(2, 5)))):
        first, head, row, *_ = each.summary().split("\n")
        assert "independent" in first
        assert head.split() == ["mean", "sd", "5%", "50%", "95%"]
        values, row = each.parameters["mean"][0], [float(x) for x in row.split()[1:]]
        assert row[:2] == pytest.approx([values.mean().item(), values.std().item()], rel=1e-3)
        assert row[2] < row[3] < row[4]
        below = [(values <= limit + 1e-3).double().mean().item() for limit in row[2:]]
        assert below == pytest.approx([0.05, 0.5, 0.95], abs=0.11)
