"""``LinearChainCRF`` against the table of all paths, in the range of scores and at its edges."""

import numpy as np
import oracle
import pyro
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from torch.autograd import gradcheck, gradgradcheck

from pyrohmm import LinearChainCRF

LENGTHS = torch.tensor([4, 1, 3])
SIZES = [(1, 1), (1, 3), (4, 1), (4, 3), (2, 2)]  # T, K


def scores(num_sequences, steps, num_labels, spread=3.0, per_step=False, seed=0):
    """Emission, transition and initial scores of any sign."""
    generator = torch.Generator().manual_seed(seed)
    own = (steps - 1,) if per_step else ()
    shapes = [(num_sequences, steps, num_labels), (*own, num_labels, num_labels), (num_labels,)]
    return [spread * torch.randn(shape, generator=generator) + 1.0 for shape in shapes]


def table(crf, n):
    """What the oracle says of sequence ``n``."""
    transition = crf.transition_scores.numpy()
    transition = transition if crf.transition_per_step else transition[None]
    if not len(transition):  # one step
        transition = np.zeros((1, crf.num_labels, crf.num_labels))
    length = int(crf.lengths[n])
    arguments = crf.initial_scores.numpy(), transition, crf.emission_scores[n].numpy(), length
    paths = oracle.all_paths(crf.num_labels, length)
    return oracle.by_paths(*arguments), paths, oracle.joint(*arguments[:3], paths)


def padded(paths, steps, filler=0):
    wide = np.full((len(paths), steps), filler)
    wide[:, : paths.shape[1]] = paths
    return torch.from_numpy(wide)


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize(("steps", "num_labels"), SIZES)
def test_everything_is_that_of_the_table_of_all_paths(steps, num_labels, per_step):
    emission, transition, initial = scores(3, steps, num_labels, per_step=per_step)
    lengths = LENGTHS.clamp(max=steps)
    crf = LinearChainCRF(emission, transition, initial, lengths, transition_per_step=per_step)
    for n in range(3):
        truth, paths, joint = table(crf, n)
        assert crf.log_partition()[n].item() == pytest.approx(truth.evidence, rel=1e-12)
        assert np.allclose(crf.marginals()[n], truth.states, rtol=1e-10, atol=1e-14)
        labels = padded(paths, steps, filler=num_labels + 7)
        one = LinearChainCRF(emission[n], transition, initial, lengths[n],
                             transition_per_step=per_step)  # fmt: skip
        assert np.allclose(one.log_prob(labels), joint - truth.evidence, rtol=1e-10, atol=1e-12)
        best = padded(paths[joint.argmax()][None], steps)[0]
        assert torch.equal(crf.viterbi()[n], best)
        assert torch.equal(crf.mode[n], best)
        probs = np.exp(joint - truth.evidence)
        assert crf.path_entropy()[n].item() == pytest.approx(-(probs * np.log(probs)).sum())
        found, logs = crf.k_best(3)
        order = np.argsort(-joint)[:3]
        assert torch.equal(found[n, : len(order)], padded(paths[order], steps))
        assert np.allclose(logs[n, : len(order)], (joint - truth.evidence)[order], rtol=1e-10)
        assert bool(logs[n, len(order) :].isneginf().all())
        pairs = np.zeros((steps - 1, num_labels, num_labels))
        for path, prob in zip(paths, probs):
            pairs[np.arange(len(path) - 1), path[:-1], path[1:]] += prob
        assert np.allclose(crf.pairwise_marginals()[n], pairs, rtol=1e-10, atol=1e-14)


def test_labels_that_are_not_known_are_summed_out():
    emission, transition, initial = scores(1, 4, 3)
    crf = LinearChainCRF(emission, transition, initial)
    truth, paths, joint = table(crf, 0)
    for labels in ([2, -1, -1, 0], [-1, -1, -1, -1], [-1, 1, 1, -1]):
        keep = [all(known in (-1, label) for known, label in zip(labels, path)) for path in paths]
        expected = oracle.log_sum(joint[keep]) - truth.evidence
        found = crf.log_prob(torch.tensor([labels])).item()
        assert found == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("labels", [[[1, 0, 2, 1], [2, 0, 0, 0]], [[1, -1, 2, -1], [-1, 0, 0, 0]]])
def test_gradients_by_all_scores_are_right(labels):
    parts = [part.requires_grad_() for part in scores(2, 4, 3, spread=1.0)]

    def log_prob(emission, transition, initial):
        crf = LinearChainCRF(emission, transition, initial, torch.tensor([4, 1]))
        return crf.log_prob(torch.tensor(labels))

    assert gradcheck(log_prob, parts)
    assert gradgradcheck(log_prob, parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [-400.0, 0.0, 400.0])
def test_large_scores_leave_no_range(dtype, shift):
    """The exponential of 89 is not in float32; that of 710 not in float64."""
    parts = scores(2, 5, 3)
    parts = [(4 * part).to(dtype) for part in parts]
    emission, transition, initial = parts
    crf = LinearChainCRF(emission, transition, initial, torch.tensor([5, 2]))
    shifted = LinearChainCRF(emission + shift, transition + shift, initial - shift, crf.lengths)
    expected = crf.log_partition() + shift * (2 * crf.lengths - 2).to(dtype)
    assert torch.allclose(shifted.log_partition(), expected, rtol=20 * torch.finfo(dtype).eps)
    labels = torch.tensor([[0, 1, 2, 0, 1], [1, 1, 0, 0, 0]])
    # differences of numbers of the size of five thousand
    tolerance = 1e4 * torch.finfo(dtype).eps
    assert torch.allclose(shifted.log_prob(labels), crf.log_prob(labels), rtol=0, atol=tolerance)


def test_scores_that_are_worlds_apart_lose_no_path():
    emission = torch.tensor([[0.0, -900.0], [-900.0, 0.0], [-900.0, 0.0]], requires_grad=True)
    transition = torch.tensor([[0.0, -2000.0], [-3000.0, -1000.0]])
    crf = LinearChainCRF(emission, transition)
    truth, _, _ = table(LinearChainCRF(emission.detach()[None], transition), 0)
    assert crf.log_partition().item() == pytest.approx(truth.evidence)
    crf.log_partition().backward()
    assert np.allclose(emission.grad, truth.states)


def test_hard_zeros_are_exact():
    emission, transition, initial = scores(1, 4, 3)
    transition[0, 1] = transition[2, 2] = initial[1] = emission[0, 2, 0] = -torch.inf
    parts = [part.requires_grad_() for part in (emission, transition, initial)]
    crf = LinearChainCRF(*parts)
    truth, paths, joint = table(LinearChainCRF(*(part.detach() for part in parts)), 0)
    found = LinearChainCRF(emission[0], *parts[1:]).log_prob(torch.from_numpy(paths))
    assert np.allclose(found.detach(), joint - truth.evidence)
    assert np.allclose(crf.marginals().detach(), truth.states)
    possible = torch.from_numpy(np.isfinite(joint))
    for gradient in torch.autograd.grad(found[possible].sum(), parts):
        assert gradient.isfinite().all()
    every = crf.sample((500,))
    assert crf.log_prob(every).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.int64])
@pytest.mark.parametrize("name", ["emission_scores", "transition_scores", "initial_scores"])
def test_scores_that_are_no_floats_are_refused(name, dtype):
    scores = {
        "emission_scores": torch.zeros(3, 2), "transition_scores": torch.zeros(2, 2),
        "initial_scores": torch.zeros(2),
    }  # fmt: skip
    scores[name] = scores[name].to(dtype)
    with pytest.raises(TypeError, match=f"{name} must be floating point; got dtype {dtype}"):
        LinearChainCRF(**scores)


def test_no_path_at_all():
    crf = LinearChainCRF(torch.zeros(2, 3, 2), torch.full((2, 2), -torch.inf),
                         lengths=torch.tensor([3, 1]))  # fmt: skip
    assert crf.log_partition().tolist() == [-torch.inf, pytest.approx(np.log(2))]
    assert crf.log_prob(torch.zeros(2, 3).long()).tolist() == [
        -torch.inf, pytest.approx(-np.log(2)),
    ]  # fmt: skip
    assert not crf.marginals()[0].any()
    with pytest.raises(ValueError, match="leave a path"):
        crf.sample()


def test_padding_may_hold_anything():
    emission, transition, initial = scores(3, 4, 3)
    clean = LinearChainCRF(emission, transition, initial, LENGTHS)
    dirty = emission.masked_fill(~clean.exists.unsqueeze(-1), torch.nan).requires_grad_()
    crf = LinearChainCRF(dirty, transition, initial, LENGTHS)
    labels = torch.randint(3, (3, 4)).masked_fill(~clean.exists, -9)
    assert torch.equal(crf.log_prob(labels), clean.log_prob(labels))
    assert torch.equal(crf.viterbi(), clean.viterbi())
    crf.log_prob(labels).sum().backward()
    assert not dirty.grad[~crf.exists].any()
    assert dirty.grad.isfinite().all()


def test_samples_come_as_often_as_they_are_probable():
    emission, transition, initial = scores(2, 3, 2, spread=1.0)
    crf = LinearChainCRF(emission, transition, initial, torch.tensor([3, 2]))
    torch.manual_seed(0)
    paths = crf.sample((20_000,))
    assert paths.shape == (20_000, 2, 3)
    assert not paths[:, 1, 2].any()
    for n in range(2):
        truth, all_paths, joint = table(crf, n)
        place = 2 ** torch.arange(all_paths.shape[1] - 1, -1, -1)
        index = (paths[:, n, : all_paths.shape[1]] * place).sum(-1)
        found = np.bincount(index, minlength=len(all_paths))
        assert oracle.looks_drawn_from(found, np.exp(joint - truth.evidence))


def test_batches_of_transitions_broadcast():
    emission, _, initial = scores(3, 4, 2)
    transition = torch.randn(5, 1, 2, 2)
    crf = LinearChainCRF(emission, transition, initial, LENGTHS)
    assert crf.batch_shape == (5, 3)
    labels = torch.randint(2, (3, 4))
    each = [LinearChainCRF(emission, one[0], initial, LENGTHS) for one in transition]
    assert torch.allclose(crf.log_prob(labels), torch.stack([e.log_prob(labels) for e in each]))
    assert crf.viterbi().shape == crf.sample().shape == (5, 3, 4)
    wide = each[0].expand((5, 3))
    assert wide.batch_shape == (5, 3)
    assert torch.allclose(wide.log_prob(labels)[2], each[0].log_prob(labels))


def test_tags_in_a_pyro_model_are_fitted_and_sampled():
    emission, transition, _ = scores(3, 4, 2)

    def model(tags=None):
        scale = pyro.param("scale", torch.tensor(0.0))
        with pyro.plate("sentences", 3):
            crf = LinearChainCRF(scale * emission, transition, lengths=LENGTHS)
            return pyro.sample("tags", crf, obs=tags)

    tags = LinearChainCRF(emission, transition, lengths=LENGTHS).mode
    svi = SVI(model, lambda tags: None, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
    losses = [svi.step(tags) for _ in range(30)]
    even = LinearChainCRF(0 * emission, transition, lengths=LENGTHS)
    assert losses[0] == pytest.approx(-even.log_prob(tags).sum().item())
    assert losses[-1] < losses[0] - 1
    sampled = Predictive(model, num_samples=5)()["tags"]
    assert sampled.shape == (5, 3, 4)
    assert not sampled[:, ~even.exists].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("per_step", [False, True])
def test_large_scores_cost_probabilities_no_digits(dtype, per_step):
    """Of the differences of scores, as they are rounded: a constant at a step changes nothing."""
    large = 1e6 if dtype == torch.float32 else 1e15
    parts = scores(3, 4, 3, per_step=per_step)
    steps = torch.arange(1.0, 5)
    parts[0] += large * steps.unsqueeze(-1)
    parts[1] += -large * (steps[:3, None, None] if per_step else 1.0)
    parts[2] += 3 * large
    far = [part.to(dtype) for part in parts]
    exact = [part.double() for part in far]
    exact[0] -= large * steps.unsqueeze(-1)
    exact[1] += large * (steps[:3, None, None] if per_step else 1.0)
    exact[2] -= 3 * large
    crf, plain = (LinearChainCRF(*each, LENGTHS[:3], transition_per_step=per_step)
                  for each in (far, exact))  # fmt: skip
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {}
    for labels in (torch.tensor([[0, 1, 2, 0]] * 3), torch.tensor([[-1, 1, -1, 0]] * 3)):
        found = crf.log_prob(labels)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), plain.log_prob(labels), **tolerance)
    torch.testing.assert_close(crf.k_best(3)[1].double(), plain.k_best(3)[1], **tolerance)
    assert torch.equal(crf.viterbi(), plain.viterbi())
