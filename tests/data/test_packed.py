"""Packed rows: selections and buckets are those of padded tensors; too much padding is refused."""

import pytest
import torch

from pyrohmm import MarginalModel, Sequences, TabularHMM, categorical, fit_em, fit_map

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
