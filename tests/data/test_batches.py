"""``Batches``: how many there are of a round, and what one of them costs."""

import torch
from largest import Largest

from pyrohmm import Sequences
from pyrohmm.data.batches import Batches, batches_in_round, cut_by_steps

LENGTHS = torch.randint(1, 80, (4000,), generator=torch.Generator().manual_seed(0))


def of_lengths(lengths):
    return Sequences(torch.zeros(len(lengths), int(lengths.max()), dtype=torch.long), lengths)


def rounds(batches, number):
    """How many batches each of some rounds has."""
    found = [0] * number
    for place in range(number):
        while not found[place] or not batches.at_end_of_round:
            batches.take()
            found[place] += 1
    return found


def test_the_number_of_batches_of_a_round_is_foretold():
    """Within one in two hundred; cut by length alone, there would be three in a hundred fewer."""
    found = rounds(Batches(of_lengths(LENGTHS), batch_tokens=300), 3)
    state = torch.get_rng_state()
    foretold = batches_in_round(LENGTHS, 300)
    assert torch.get_rng_state().equal(state)
    assert batches_in_round(LENGTHS, 300) == foretold
    assert all(abs(number - foretold) <= 0.005 * foretold for number in found)
    assert len(cut_by_steps(LENGTHS, LENGTHS.argsort(), 300)) < 0.97 * foretold


def test_a_window_does_not_go_through_all_sequences():
    """What is the same for all windows of a round is computed once."""
    batches = Batches(of_lengths(LENGTHS), windows=(2, 100))
    with Largest() as first:
        batches.take()
    with Largest() as later:
        for _ in range(20):
            batches.take()
    assert first.size >= len(LENGTHS)
    assert later.size < len(LENGTHS) / 4


def test_the_mean_loss_of_a_round_of_similar_lengths_is_that_of_the_whole_set():
    """Each sequence is scaled by the number of batches, whatever the size of its batch."""
    batches = Batches(of_lengths(LENGTHS[:50]), batch_tokens=300)
    taken = [batches.take()]
    while not batches.at_end_of_round:
        taken.append(batches.take())
    assert sum(len(batch) for batch in taken) == 50
    assert {batch.total / len(batch) for batch in taken} == {len(taken)}
