"""Properties of the neural HMM: sizes, both Pyro forms, state dropout, and fits."""

import copy
import math
from contextlib import nullcontext
from functools import partial

import pyro
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from pyrohmm import (
    HMM,
    MarginalModel,
    NeuralHMM,
    Sequences,
    StatefulModel,
    blocks,
    fit_map,
)
from pyrohmm.data.batches import Batches
from pyrohmm.nn.neural import LinearDropout, sample_kept_states

RAGGED = blocks.from_clusters(torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([3, 1, 2]))
VARIANTS = {
    "no blocks": {},
    "one level": {"blocks": RAGGED},
    "two levels": {"blocks": RAGGED, "two_level": True},
    "factored": {"blocks": RAGGED, "factored": True},
    "apart": {"blocks": RAGGED, "tied": False, "factored": True},
}
DATA = Sequences(torch.tensor([[0, 3, 5, 1], [4, 4, 0, 0], [2, 5, 5, 0]]), torch.tensor([4, 1, 3]))


def make(variant, **options):
    pyro.set_rng_seed(0)
    return NeuralHMM(6, 6, 8, **(VARIANTS[variant] | options)).double()


@pytest.mark.parametrize(
    ("num_states", "num_symbols", "millions"),
    [(32_768, 10_001, 7.706), (16_384, 10_001, 5.609), (32_768, 33_279, 13.688)],
)
def test_sizes_are_those_of_the_paper(num_states, num_symbols, millions):
    """It prints 7.7, 5.6 and 13.7 million, of 10,000 and 33,278 words and one for padding."""
    each = blocks.from_clusters(torch.arange(num_symbols) % 128, num_states // 128)
    module = NeuralHMM(num_states, num_symbols, 256, blocks=each, factored=True)
    count = sum(parameter.numel() for parameter in module.parameters())
    states, words = (num_states + 128) * 128, num_symbols * 257
    assert count == states + words + 7 * (2 * 256 * 257 + 512) + 257
    assert round(count / 1e6, 3) == millions


@pytest.mark.parametrize("variant", VARIANTS)
def test_probabilities_are_the_softmaxes_of_the_paper(variant):
    """Computed slowly, with a mask in place of blocks."""
    module = make(variant).eval()
    with torch.no_grad():
        hmm = module(DATA.lengths)
        tables = [getattr(module, f"{use}_vectors")(None) for use in
                  ("start", "leave", "enter", "emit")]  # fmt: skip
        if "factored" in VARIANTS[variant]:
            joints = [getattr(module, f"{use}_joint") for use in
                      ("start", "leave", "enter", "emit")]  # fmt: skip
            tables = [joint(table) for joint, table in zip(joints, tables)]
        start, leave, enter, emit = tables
        initial = module.start_score(module.start_net(start)).squeeze(-1).softmax(-1)
        scores = module.leave_net(leave) @ enter.T
        if variant == "two levels":
            shares = module.block_score(module.leave_net(leave)).softmax(-1)
            parts = scores.exp().split(RAGGED.sizes.tolist(), -1)
            matrix = torch.cat(
                [p / p.sum(-1, keepdim=True) * shares[:, n : n + 1] for n, p in enumerate(parts)],
                -1,
            )
        else:
            matrix = scores.softmax(-1)
        logits = module.emit_net(emit) @ module.words().T + module.bias
        if "blocks" in VARIANTS[variant]:
            logits = logits.masked_fill(~VARIANTS[variant]["blocks"].allowed, -math.inf)
        torch.testing.assert_close(hmm.log_initial.exp(), initial)
        torch.testing.assert_close(hmm.log_transition.exp(), matrix)
        torch.testing.assert_close(hmm.emission.probs, logits.softmax(-1))
        plain = HMM(initial.log(), matrix.log(), hmm.emission, DATA.lengths)
        torch.testing.assert_close(hmm.log_prob(DATA.values), plain.log_prob(DATA.values))


@pytest.mark.parametrize("variant", VARIANTS)
def test_dropped_states_leave_the_probabilities_of_the_others(variant):
    """Transitions and starts are normalised again, within blocks on two levels; emissions not."""
    pyro.set_rng_seed(0)
    given = VARIANTS[variant].get("blocks")
    module = NeuralHMM(6, 6, **VARIANTS[variant], dropout=0.4).double()
    whole = module.eval()(DATA.lengths)
    module.train()
    for _ in range(5):
        with torch.random.fork_rng():
            kept = drawn(given or blocks.from_clusters(torch.tensor([0]), 6), 0.4)
        part = module(DATA.lengths)
        assert part.num_states == len(kept) < 6
        matrix = whole.log_transition[kept][:, kept]
        if variant == "two levels":
            sizes, chosen = given.sizes.tolist(), given.keep(0.4).sizes.tolist()
            shares = [p.logsumexp(-1) for p in whole.log_transition[kept].split(sizes, -1)]
            within = [p.log_softmax(-1) for p in matrix.split(chosen, -1)]
            wanted = torch.cat([p + q.unsqueeze(-1) for p, q in zip(within, shares)], -1)
        else:
            wanted = matrix.log_softmax(-1)
        torch.testing.assert_close(part.log_transition, wanted)
        torch.testing.assert_close(part.log_initial, whole.log_initial[kept].log_softmax(-1))
        torch.testing.assert_close(part.emission.probs, whole.emission.probs[kept])
        dense = HMM(part.log_initial, wanted, part.emission, DATA.lengths)
        torch.testing.assert_close(part.log_prob(DATA.values), dense.log_prob(DATA.values))


def drawn(partition, dropout):
    return sample_kept_states(partition, partition.keep(dropout), torch.device("cpu"))


def test_of_each_block_the_same_share_is_kept():
    torch.manual_seed(0)
    sizes = torch.tensor([8, 1, 5, 2])
    each = blocks.from_clusters(torch.arange(4), sizes)
    counts = torch.zeros(16)
    for _ in range(500):
        kept = drawn(each, 0.5)
        assert torch.equal(kept, kept.sort().values)
        assert each.owner[kept].bincount().tolist() == [4, 1, 3, 1]
        counts[kept] += 1
    share = torch.tensor([4, 1, 3, 1]) / sizes
    wanted = share.repeat_interleave(sizes)
    assert bool(((counts / 500 - wanted).abs() < 5 * (wanted * (1 - wanted) / 500).sqrt() + 1e-9)
                .all())  # fmt: skip
    assert len(drawn(blocks.from_clusters(torch.tensor([0]), 10), 0.25)) == 8  # half up


CHANGES = {
    "in place": lambda module: module.bias.add_(torch.arange(6.0)),
    "data in place": lambda module: module.bias.data.add_(torch.arange(6.0)),
    "another parameter": lambda module: setattr(module, "bias", nn.Parameter(torch.arange(6.0))),
    "another type": lambda module: module.float(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_between_evaluations_are_seen(change):
    module = make("one level").eval()
    with torch.no_grad():
        before = module(DATA.lengths).log_prob(DATA.values)
        change(module)
        after = module(DATA.lengths).log_prob(DATA.values)
    wanted = module(DATA.lengths).log_prob(DATA.values).detach()  # with gradients, all is computed
    assert wanted.dtype == module.bias.dtype
    torch.testing.assert_close(after, wanted)
    if module.bias.dtype == before.dtype:
        assert not torch.allclose(before, after)


@pytest.mark.parametrize("mode", [True, False])
def test_steps_of_a_fused_optimizer_are_seen(mode):
    """Fused ones change parameters without counting it as a change."""
    module = make("two levels").eval()
    optimizer = torch.optim.AdamW(module.parameters(), 0.1, fused=True)
    with torch.no_grad():
        before = module(DATA.lengths).log_prob(DATA.values)
    module.train(mode)
    (-module(DATA.lengths).log_prob(DATA.values).sum()).backward()
    optimizer.step()
    module.eval()
    with torch.no_grad():
        after = module(DATA.lengths).log_prob(DATA.values)
    wanted = make("two levels")
    wanted.load_state_dict(module.state_dict())
    torch.testing.assert_close(after, wanted(DATA.lengths).log_prob(DATA.values))
    assert not torch.allclose(before, after)


@pytest.mark.parametrize("variant", ["no blocks", "two levels"])
def test_under_autocast_probabilities_keep_their_precision(variant):
    pyro.set_rng_seed(0)
    module = NeuralHMM(6, 6, 8, **VARIANTS[variant]).float()
    full = module(DATA.lengths).log_prob(DATA.values)
    with torch.autocast("cpu", torch.bfloat16):
        half = module(DATA.lengths).log_prob(DATA.values)
    half.sum().backward()
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, full, rtol=0.05, atol=0.05)
    assert not torch.equal(half, full)  # the networks did run in half


class TensorFloat(TorchDispatchMode):
    """Products of float32 as by ``torch.set_float32_matmul_precision("high")`` on a GPU.

    Their inputs are rounded to 10 bits, sums are in float32.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in {"mm", "bmm", "addmm", "baddbmm"}:
            args = tree_map_only(torch.Tensor, self.rounded, args)
        return function(*args, **(kwargs or {}))

    @staticmethod
    def rounded(tensor):
        if tensor.dtype != torch.float32:
            return tensor
        return ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize(
    ("context", "nats", "share"),
    [
        (TensorFloat, 1e-3, 0.02),
        (partial(torch.autocast, "cpu", torch.bfloat16), 2e-2, 0.06),
    ],
    ids=["tf32", "bfloat16"],
)
def test_products_in_lower_precision_cost_few_nats_a_token(context, nats, share, two_level):
    """Of 10 bits less than .001, of 8 less than .02; and 2 and 6 % of the gradient."""
    torch.manual_seed(0)
    partition = blocks.from_clusters(torch.arange(96) % 8, torch.tensor([16, 9] * 4))
    module = NeuralHMM(100, 96, 64, blocks=partition, two_level=two_level).float()
    with torch.no_grad():  # as far apart as after training
        module.start_vectors.state.mul_(3.0)
        module.words.table.mul_(6.0)
    values, lengths, found = torch.randint(96, (8, 16)), torch.full((8,), 16), []
    for each, precision in ((copy.deepcopy(module).double(), nullcontext), (module, context)):
        with precision():
            evidence = each(lengths).log_prob(values)
            evidence.sum().backward()
        slopes = [parameter.grad.flatten() for parameter in each.parameters()]
        found.append((evidence.detach().double() / 16, torch.cat(slopes).double()))
    (wanted, gradient), (low, other) = found
    assert 1e-6 < (low - wanted).abs().max() < nats
    assert (other - gradient).norm() < share * gradient.norm()


@pytest.mark.parametrize(
    ("variant", "data"), [("one level", "sentences"), ("two levels", "windows")]
)
def test_fits_in_lower_precision_take_the_course_of_the_others(variant, data):
    """With a cache, which keeps the weights of the first step, it falls half as far."""

    def course(around=False, **options):
        pyro.set_rng_seed(0)
        module = NeuralHMM(6, 6, 64, **VARIANTS[variant]).float()
        pair = MarginalModel(module), {}
        if data == "windows":
            pair = StatefulModel(module, 2), {"windows": (2, 2)}
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            fit = fit_map(
                pair[0],
                DATA,
                num_iterations=40,
                learning_rate=0.003,
                tolerance=None,
                **pair[1],
                **options,
            )
        assert all(each.dtype == torch.float32 for each in module.parameters())
        return fit.losses

    full, half = course(), course(precision=torch.bfloat16)
    assert full[-1] < 0.6 * full[0]
    assert not torch.equal(half, full)
    assert (half - full).abs().mean() < 0.02 * (full[0] - full.min())  # bfloat16 has 8 bits
    assert torch.equal(course(around=True), half)


def test_a_fit_goes_on_with_dropout_that_falls_for_longer(tmp_path):
    def fit(num_steps, begin=0.5):
        pyro.set_rng_seed(0)
        module = NeuralHMM(12, 6, 8, dropout=LinearDropout(begin, 0.0, num_steps))
        fit_map(
            MarginalModel(module), DATA, num_iterations=num_steps, tolerance=None,
            checkpoint=tmp_path / "x",
        )  # fmt: skip
        return module.train()(torch.tensor(1)).num_states

    assert fit(4) == 12
    assert fit(12) == 12
    with pytest.raises(ValueError, match=r"belongs to another fit: its .*dropout.begin is 0.5"):
        fit(12, 0.4)


# Windows of long sequences ------------------------------------------------------------------------


def windowed(sequences, num_streams, num_steps, generator=None):
    """All windows of a round."""
    batches = Batches(sequences, generator=generator, windows=(num_streams, num_steps))
    found = [batches.take()]
    while not batches.at_end_of_round:
        found.append(batches.take())
    return found


@pytest.mark.parametrize("two_level", [False, True])
def test_windows_have_the_evidence_of_the_sequences_they_are_of(two_level):
    module = NeuralHMM(6, 6, 8, blocks=RAGGED, two_level=two_level).double().eval()
    data = Sequences(torch.randint(6, (4, 9)), torch.tensor([9, 1, 6, 3]))
    model = StatefulModel(module, 1).double()
    found = 0.0
    for window in windowed(data, 1, 4):
        with torch.no_grad():
            hmm = model(window)
            evidence = hmm.log_prob(window.values)
            dense = hmm.dense()
            torch.testing.assert_close(evidence, dense.log_prob(window.values))
            assert torch.equal(hmm.viterbi(window.values), dense.viterbi(window.values))
            torch.testing.assert_close(hmm.filtered(window.values), dense.filtered(window.values))
            same = hmm.replace(observed=torch.ones_like(window.values, dtype=torch.bool))
            torch.testing.assert_close(evidence, same.log_prob(window.values))
        found += evidence.sum().item()
    wanted = module(data.lengths).log_prob(data.values).sum().item()
    assert found == pytest.approx(wanted, rel=1e-12)


def test_windows_with_different_dropped_states_follow_the_paper(monkeypatch):
    """Sum over states kept before, of probability times transition to those kept now."""
    pyro.set_rng_seed(3)
    module = NeuralHMM(6, 6, 8, blocks=RAGGED, dropout=0.4).double()
    whole = module.eval()(torch.tensor([1]))
    module.train()
    data = Sequences(torch.tensor([[0, 5, 2, 1, 4, 0]]), torch.tensor([6]))
    model, before, seen = StatefulModel(module, 1).double(), None, []
    continue_from = module.continue_from
    monkeypatch.setattr(
        module, "continue_from", lambda *given: seen.append(continue_from(*given)) or seen[-1]
    )
    for window in windowed(data, 1, 2):
        hmm, kept = model(window), seen[-1][1]
        logits = whole.log_transition
        if before is not None:
            states, log_probs = before
            exist = states >= 0
            matrix = logits[states[exist]][:, kept].log_softmax(-1)
            first = (log_probs[exist].unsqueeze(-1) + matrix).logsumexp(0)
            plain = HMM(first, hmm.log_transition, hmm.emission, window.lengths)
            torch.testing.assert_close(hmm.log_prob(window.values), plain.log_prob(window.values))
        before = model.states[0].clone(), model.log_probs[0].clone()
        assert set(before[0][before[0] >= 0].tolist()) <= set(kept.tolist())
