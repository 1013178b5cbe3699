"""Parameters that are NaN, without validation: no query gives a number that depends on one.

An answer may keep a number where it does not depend on the parameter: then it is that of any value
of it. States are whole numbers, which cannot be NaN: queries for them raise.
"""

import pytest
import torch
from pyro.distributions import Categorical, Normal

from pyrohmm import HMM, HSMM, BlockHMM, blocks
from pyrohmm.ops.blocks.inner_products import InnerProductTransition

K, V, D = 4, 5, 3
LENGTHS = torch.tensor([3, 2])
SYMBOLS = torch.tensor([[0, 3, 1], [4, 2, 0]])
CLUSTERS = blocks.from_clusters(torch.tensor([0, 0, 0, 1, 1]), 2)


def rows(*shape):
    return torch.randn(*shape).log_softmax(-1)


def parameters(kind):
    torch.manual_seed(0)
    found = {"initial": rows(K), "transition": rows(K, K)}
    if kind == "symbols":
        return found | {"emission": rows(K, V)}
    if kind == "normal":
        return found | {"loc": torch.randn(K), "scale": torch.rand(K) + 0.5}
    if kind == "durations":  # longer than a sequence, so that one segment may cover it
        found["transition"] = found["transition"].fill_diagonal_(-torch.inf).log_softmax(-1)
        return found | {"emission": rows(K, V), "duration": rows(K, 5)}
    table = rows(K, V).mT[:, :2].contiguous()
    found |= {"emission": table}
    if kind == "blocks":
        return found
    del found["transition"]
    found |= {"leave": torch.randn(K, D), "enter": torch.randn(K, D)}
    return found | {"block_logits": torch.randn(K, 2)} if kind == "two levels" else found


def build(kind, found):
    first = found["initial"]
    if kind == "symbols":
        emission = Categorical(logits=found["emission"], validate_args=False)
        return HMM(first, found["transition"], emission, LENGTHS, validate_args=False)
    if kind == "normal":
        emission = Normal(found["loc"], found["scale"], validate_args=False)
        return HMM(first, found["transition"], emission, LENGTHS, validate_args=False)
    if kind == "durations":
        emission = Categorical(logits=found["emission"], validate_args=False)
        tables = found["transition"], found["duration"]
        return HSMM(first, *tables, emission, LENGTHS, validate_args=False)
    transition = found.get("transition")
    if transition is None:
        transition = InnerProductTransition(
            found["leave"], found["enter"], CLUSTERS, found.get("block_logits")
        )
    return BlockHMM(first, transition, found["emission"], CLUSTERS, LENGTHS, validate_args=False)


def values_of(kind):
    return torch.tensor([[0.3, -1.0, 0.2], [1.0, 0.5, 0.0]]) if kind == "normal" else SYMBOLS


def dense(hmm):
    return hmm.dense() if isinstance(hmm, BlockHMM) else hmm


def counted(found):
    parts = found.log_evidence, found.state_probs, *found.counts.values()
    return torch.cat([part.flatten() for part in parts])


PATH = torch.tensor([[0, 3, 1], [3, 0, 0]])
QUERIES = {
    "log_prob": lambda hmm, x: hmm.log_prob(x),
    "log_prob of dense": lambda hmm, x: dense(hmm).log_prob(x),
    "log_joint": lambda hmm, x: hmm.log_joint(x, PATH),
    "posterior": lambda hmm, x: torch.cat([part.flatten() for part in hmm.posterior(x)]),
    "expected_counts": lambda hmm, x: counted(hmm.expected_counts(x)),
    "filtered": lambda hmm, x: hmm.filtered(x),
    "filtered of dense": lambda hmm, x: dense(hmm).filtered(x),
    "forecast": lambda hmm, x: hmm.forecast(x, 2).log_prob(torch.zeros(2, 2).to(x)),
    "stationary": lambda hmm, x: hmm.stationary(),
}
OF_BLOCKS = {
    "block_posterior": lambda hmm, x: torch.cat(
        [hmm.block_posterior(x).log_evidence, hmm.block_posterior(x).probs.flatten()]
    ),
    "final_state": lambda hmm, x: hmm.final_state(x).log_probs,
}
STATES = {
    "viterbi": lambda hmm, x: hmm.viterbi(x),
    "viterbi of dense": lambda hmm, x: dense(hmm).viterbi(x),
    "sample_states": lambda hmm, x: hmm.sample_states(x),
    "sample_states of dense": lambda hmm, x: dense(hmm).sample_states(x),
}
KINDS = ["symbols", "normal", "durations", "blocks", "one level", "two levels"]
PLAIN = KINDS[:3]  # whose emission is a distribution
CASES = [(kind, name) for kind in KINDS for name in parameters(kind)]


def with_number(kind, name, place, number):
    found = parameters(kind)
    found[name].view(-1)[place] = number
    return build(kind, found)


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_no_answer_depends_on_a_parameter_that_is_nan(kind, name, place):
    values = values_of(kind)
    broken = with_number(kind, name, place, torch.nan)
    others = [with_number(kind, name, place, number) for number in (0.7, 2.0)]
    queries = QUERIES | (OF_BLOCKS if kind not in PLAIN else {})
    for query, ask in queries.items():
        found = ask(broken, values)
        said = ~found.isnan()
        for other in others:
            try:
                wanted = ask(other, values)
            except ValueError:  # rows that do not sum to one have no stationary distribution
                assert query == "stationary"
                assert not bool(said.any())
                continue
            torch.testing.assert_close(found[said], wanted[said], msg=lambda m: f"{query}: {m}")  # noqa: B023


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_states_are_refused_where_the_evidence_is_nan(kind, name, place):
    values = values_of(kind)
    broken = with_number(kind, name, place, torch.nan)
    for query, ask in STATES.items():
        hmm = dense(broken) if "dense" in query else broken
        if bool(hmm.log_prob(values).isnan().any()):
            with pytest.raises(ValueError, match="NaN"):
                ask(broken, values)
