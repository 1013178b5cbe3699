"""Each picture shows the numbers that it was given, on the axes that it was given."""

import matplotlib
import pytest
import torch
from pyro import distributions as dist

from pyrohmm import HMM, Fit, plots

matplotlib.use("Agg")

from matplotlib import pyplot


@pytest.fixture
def axes():
    """Drawn at the end, which is when layouts and fonts would warn."""
    figure, axes = pyplot.subplots()
    yield axes
    figure.canvas.draw()
    pyplot.close("all")


def chain(num_states=3, num_symbols=4, batch=()):
    return HMM(
        torch.randn(*batch, num_states).log_softmax(-1),
        torch.randn(*batch, num_states, num_states).log_softmax(-1),
        dist.Categorical(logits=torch.randn(*batch, num_states, num_symbols)),
        torch.tensor([5]),
    )


def texts(labels):
    return [label.get_text() for label in labels]


@pytest.mark.parametrize("num_states", [1, 3, 12])
def test_transition_shows_every_probability(axes, num_states):
    hmm = chain(num_states)
    assert plots.transition(hmm, axes=axes) is axes
    (image,) = axes.images
    shown = torch.as_tensor(image.get_array().data)
    torch.testing.assert_close(shown, hmm.log_transition.exp())
    written = [float(text.get_text()) for text in axes.texts]
    expected = hmm.log_transition.exp().flatten().tolist()
    assert written == pytest.approx(expected, abs=0.006)
    assert texts(axes.get_xticklabels()) == [str(k) for k in range(num_states)]
    assert axes.get_ylabel() == "from"
    assert axes.get_xlabel() == "to"


def test_row_is_from_and_column_is_to(axes):
    matrix = torch.tensor([[0.1, 0.9], [0.6, 0.4]])
    hmm = HMM(matrix[0].log(), matrix.log(), dist.Categorical(torch.ones(2, 2)), torch.tensor([2]))
    plots.transition(hmm, ["rain", "sun"], axes)
    at = {(t.get_position()[1], t.get_position()[0]): t.get_text() for t in axes.texts}
    assert at == {(0, 0): "0.10", (0, 1): "0.90", (1, 0): "0.60", (1, 1): "0.40"}
    assert texts(axes.get_xticklabels()) == texts(axes.get_yticklabels()) == ["rain", "sun"]


def test_a_large_matrix_is_shown_without_numbers(axes):
    plots.transition(chain(40), axes=axes)
    assert not axes.texts
    assert axes.images[0].get_array().shape == (40, 40)


@pytest.mark.parametrize(("num_states", "num_symbols"), [(1, 1), (2, 3), (11, 2)])
def test_emission_has_a_bar_for_each_state_and_symbol(axes, num_states, num_symbols):
    hmm = chain(num_states, num_symbols)
    symbols = [f"s{v}" for v in range(num_symbols)]
    assert plots.emission(hmm, symbols, axes=axes) is axes
    probs = hmm.emission.probs
    heights = torch.tensor([bar.get_height() for bar in axes.patches])
    heights = heights.reshape(num_states, num_symbols)
    torch.testing.assert_close(heights / heights.max(), probs / probs.max())
    assert heights.max() < 1  # a row of bars does not touch the row above
    bases = torch.tensor([bar.get_y() for bar in axes.patches]).reshape(num_states, num_symbols)
    assert bases[:, 0].tolist() == list(range(num_states))[::-1]  # the first state on top
    assert texts(axes.get_xticklabels()) == symbols
    assert texts(axes.get_yticklabels()) == [f"state {k}" for k in range(num_states)]


def test_emission_uses_the_names_of_states(axes):
    plots.emission(chain(2, 2), ["a", "b"], ["vowel", "other"], axes)
    assert texts(axes.get_yticklabels()) == ["vowel", "other"]


@pytest.mark.parametrize(("num_steps", "num_states"), [(1, 1), (1, 2), (6, 3)])
def test_states_are_stacked_shares_that_fill_the_axes(axes, num_steps, num_states):
    probs = torch.rand(num_steps, num_states).softmax(-1).requires_grad_()
    assert plots.states(probs, axes=axes) is axes
    assert len(axes.collections) == num_states
    assert axes.get_ylim() == (0, 1)
    assert texts(axes.get_legend().get_texts()) == [f"state {k}" for k in range(num_states)]
    top = max(path.vertices[:, 1].max() for path in axes.collections[-1].get_paths())
    assert top == pytest.approx(1.0)
    first = axes.collections[0].get_paths()[0].vertices[:, 1].max()
    assert first == pytest.approx(probs[:, 0].max().item())


def test_states_uses_the_names_of_states(axes):
    plots.states(torch.tensor([[0.2, 0.8]]), ["rain", "sun"], axes)
    assert texts(axes.get_legend().get_texts()) == ["rain", "sun"]


def test_losses_are_shown_per_observed_step(axes):
    fit = Fit(None, None, torch.tensor([8.0, 4.0, 2.0]), False, "", 0.0, num_observed=4)
    assert plots.losses(fit, axes) is axes
    (line,) = axes.lines
    assert line.get_ydata().tolist() == [2.0, 1.0, 0.5]
    assert "nats" in axes.get_ylabel()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plots.transition(chain()),
        lambda: plots.emission(chain(2, 2), ["a", "b"]),
        lambda: plots.states(torch.tensor([[0.2, 0.8]])),
        lambda: plots.losses(Fit(None, None, torch.ones(2), False, "", 0.0, 1)),
    ],
)
def test_new_axes_are_made_where_none_are_given(draw):
    made = [draw(), draw()]
    assert made[0] is not made[1]
    made[0].figure.canvas.draw()
    pyplot.close("all")


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda axes: plots.transition(chain(batch=(2,)), axes=axes), r"hmm must .*\(2, 3, 3\)"),
        (lambda axes: plots.transition(chain(2), ["one"], axes), "names must"),
        (lambda axes: plots.emission(chain(2, 3), ["a"], axes=axes), "symbols must have V = 3"),
        (lambda axes: plots.emission(chain(2, 1), ["a"], ["b"], axes), "names must"),
        (lambda axes: plots.emission(chain(batch=(2,)), "abcd", axes=axes), "hmm must"),
        (lambda axes: plots.emission(normals(), "abcd", axes=axes), "hmm must .*categorical"),
        (lambda axes: plots.states(torch.ones(2, 3, 1), axes=axes), r"probs must .*\(2, 3, 1\)"),
        (lambda axes: plots.states(torch.ones(4, 2) / 2, ["one"], axes), "names must"),
    ],
)
def test_bad_input_is_named(axes, draw, message):
    with pytest.raises(ValueError, match=message):
        draw(axes)


def normals():
    half = torch.full((2, 2), 0.5).log()
    return HMM(half[0], half, dist.Normal(torch.zeros(2), 1.0), torch.tensor([3]))
