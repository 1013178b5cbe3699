"""Packed rows: selections and buckets are those of padded tensors; too much padding is refused."""

import pyro
import pytest
import torch
from pyro.distributions import Normal

from pyrohmm import (
    HMM,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    fit_em,
    fit_map,
    normal,
    starts,
)
from pyrohmm.data import packed

NAMES = "values", "observed", "labels", "times"


def of(lengths, several):
    """Sequences, and their padded tensors."""
    random = torch.Generator().manual_seed(0)
    steps = int(lengths.max())
    exists = torch.arange(steps) < lengths.unsqueeze(-1)
    whole = {
        "values": torch.randint(4, (len(lengths), steps), generator=random),
        "observed": (torch.rand(len(lengths), steps, generator=random) < 0.8) | (not several),
        "labels": torch.randint(-1, 2, (len(lengths), steps), generator=random),
        "times": torch.rand(len(lengths), steps, generator=random).double().cumsum(-1) + 0.1,
    }
    blank = {"values": 0, "observed": False, "labels": -1, "times": 0.0}
    whole = {name: part.masked_fill(~exists, blank[name]) for name, part in whole.items()}
    return Sequences(lengths=lengths, **whole), whole


@pytest.mark.parametrize("lengths", [[3], [1, 1], [4, 4, 4], [2, 9, 1, 5]], ids=str)
@pytest.mark.parametrize("gaps", [True, False])
def test_selections_are_those_of_padded_tensors(lengths, gaps):
    data, whole = of(torch.tensor(lengths), gaps)
    last = torch.tensor([len(lengths) - 1, 0])
    for part, chosen, steps in (
        (data, slice(None), 99), (data[last], last, 99), (data.batch(last[:1]), last[:1], 99),
        (data.truncate(2), slice(None), 2), (data.with_total(9).to("cpu"), slice(None), 99),
    ):  # fmt: skip
        sizes = torch.tensor(lengths)[chosen].clamp(max=steps)
        assert part.lengths.equal(sizes)
        for name in NAMES:
            assert getattr(part, name).equal(whole[name][chosen][:, : int(sizes.max())]), name


def test_fits_of_buckets_are_those_of_all_sequences_at_once():
    data, _ = of(torch.tensor([5] * 60 + [7000, 40, 900]), True)
    data = data.without_labels()
    assert len(data.buckets) > 1
    one = data.with_total(data.total)
    one.__dict__["bucket_members"] = [torch.arange(len(data))]  # padded to the longest
    start = {
        "module.initial": torch.tensor([0.5, 0.5]),
        "module.transition": torch.tensor([[0.8, 0.2], [0.3, 0.7]]),
        "module.emission.probs": torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]),
    }
    for fit in (
        lambda data: fit_em(TabularHMM(2, categorical(4)), data, start=start, num_iterations=5),
        lambda data: fit_map(
            MarginalModel(TabularHMM(2, categorical(4))), data, start=start, num_iterations=5
        ),
    ):
        torch.testing.assert_close(fit(data).losses, fit(one).losses, rtol=1e-6, atol=0.0)
    found = data.map_steps(lambda part: part.values)
    assert found.equal(data.packed("values"))


def test_too_much_padding_is_refused_with_its_size():
    data = Sequences.from_concatenated(torch.zeros(200_100), [200_000] + [1] * 100)
    with pytest.raises(ValueError, match=r"20,200,000 steps, 101 times.*data.map_steps"):
        _ = data.values
    assert data.map_steps(lambda part: part.values + 1).equal(torch.ones(200_100))
    assert len(data[1:].values) == 100


def test_what_is_changed_in_place_is_changed_in_all_forms(monkeypatch):
    monkeypatch.setattr(packed, "LITTLE", 0)
    monkeypatch.setattr(packed, "SHORT", 0)
    data = Sequences.from_list([[0.0, 1, 2], [3.0]], labels=[[0, 1, 0], [1]])
    assert len(data.buckets) == 2
    data.values[0, 1], data.labels[1, 0], data.observed[0, 2] = 7.0, 0, False
    assert data.packed("values").tolist() == [0, 7, 2, 3]
    assert data.packed("labels").tolist() == [0, 1, 0, 0]
    assert data.has_gaps and data.exists.sum() == 4  # noqa: PT018
    assert data[:1].values.tolist() == [[0, 7, 2]]
    (single,) = (part for part in data.buckets if part.num_steps == 3)
    assert single.observed.tolist() == [[True, True, False]]
    data.total = 10
    assert [part.total for part in data.buckets] == [10, 10]


def test_a_function_of_steps_must_return_one_row_for_each():
    data = Sequences.from_list([[0, 1, 2], [3, 1, 1]])
    with pytest.raises(
        ValueError, match=r"must have shape \(N, T, \*\) = \(2, 3\); got shape \(2, 2\)"
    ):
        data.map_steps(lambda part: part.values[:, 1:])
    with pytest.raises(TypeError, match="got list"):
        data.map_steps(lambda part: part.values.tolist())


def test_standard_errors_of_a_sample_count_it_as_the_whole(monkeypatch):
    """Sequences with a ``total``, in buckets and as one."""
    pyro.set_rng_seed(0)
    lengths = torch.tensor([60, 3, 4, 30, 2, 5, 41])
    values = torch.randn(int(lengths.sum())).double() + 4 * (torch.arange(145) // 10 % 2)
    found = []
    for least in (1 << 16, 0):
        monkeypatch.setattr(packed, "LITTLE", least)
        monkeypatch.setattr(packed, "SHORT", least)
        data = Sequences.from_concatenated(values, lengths).with_total(70)
        assert (len(data.buckets) > 1) == (least == 0)
        start = starts.from_hmm(
            HMM(
                torch.full((2,), 0.5).log(),
                torch.full((2, 2), 0.5).log(),
                Normal(torch.tensor([0.0, 4.0]), 1.0),
                lengths,
            )
        )
        fit = fit_em(TabularHMM(2, normal(0)).double(), data, start=start, tolerance=1e-12)
        found.append(fit.std_errors(data)["module.emission.loc"])
    torch.testing.assert_close(*found, rtol=1e-6, atol=0)
