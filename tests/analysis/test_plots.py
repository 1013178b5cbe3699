"""Each picture shows the numbers that it was given, on the axes that it was given."""

import matplotlib
import numpy as np
import pandas as pd
import polars
import pytest
import torch
from pyro import distributions as dist

from pyrohmm import (
    HMM,
    HSMM,
    Sequences,
    TabularHMM,
    categorical,
    datasets,
    fit_em,
    normal,
    plots,
    queries,
)
from pyrohmm.distributions import (
    Censored,
    Truncated,
    WrappedCauchy,
    ZeroInflated,
)

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.dates import date2num

NEVER = -torch.inf


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


@pytest.mark.parametrize(("num_states", "num_symbols"), [(1, 1), (2, 3), (11, 2)])
def test_emission_has_a_bar_for_each_state_and_symbol(axes, num_states, num_symbols):
    hmm = chain(num_states, num_symbols)
    symbols = [f"s{v}" for v in range(num_symbols)]
    assert plots.emission(hmm, symbols=symbols, axes=axes) is axes
    probs = hmm.emission.probs
    heights = torch.tensor([bar.get_height() for bar in axes.patches])
    heights = heights.reshape(num_states, num_symbols)
    torch.testing.assert_close(heights / heights.max(), probs / probs.max())
    assert heights.max() < 1  # a row of bars does not touch the row above
    bases = torch.tensor([bar.get_y() for bar in axes.patches]).reshape(num_states, num_symbols)
    assert bases[:, 0].tolist() == list(range(num_states))[::-1]  # the first state on top
    assert texts(axes.get_xticklabels()) == symbols
    assert texts(axes.get_yticklabels()) == [f"state {k}" for k in range(num_states)]


@pytest.mark.parametrize(("num_steps", "num_states"), [(1, 1), (1, 2), (6, 3)])
def test_states_are_stacked_shares_that_fill_the_axes(axes, num_steps, num_states):
    probs = torch.rand(num_steps, num_states).softmax(-1).requires_grad_()
    assert plots.state_probs(probs, axes=axes) is axes
    assert len(axes.collections) == num_states
    assert axes.get_ylim() == (0, 1)
    assert texts(axes.get_legend().get_texts()) == [f"state {k}" for k in range(num_states)]
    top = max(path.vertices[:, 1].max() for path in axes.collections[-1].get_paths())
    assert top == pytest.approx(1.0)
    first = axes.collections[0].get_paths()[0].vertices[:, 1].max()
    assert first == pytest.approx(probs[:, 0].max().item())


def of(emission, num_steps=3):
    """An HMM of this emission that stays and changes alike."""
    size = emission.batch_shape[0]
    matrix = torch.full((size, size), 1 / size).log()
    return HMM(matrix[0], matrix, emission, torch.tensor([num_steps]))


@pytest.mark.parametrize("event", [0, 1])
@pytest.mark.parametrize("name", ["normal", "gamma", "poisson"])
def test_numbers_have_a_curve_for_each_state(axes, name, event):
    """Of the right height, over all that a state emits and nothing that it cannot."""
    one = {
        "normal": lambda: dist.Normal(torch.tensor([-1.0, 3.0]), torch.tensor([0.5, 2.0])),
        "gamma": lambda: dist.Gamma(torch.tensor([2.0, 5.0]), torch.tensor([1.0, 3.0])),
        "poisson": lambda: dist.Poisson(torch.tensor([1.5, 12.0])),
    }[name]()
    vectors = type(one)(*[getattr(one, n)[:, None] for n in one.arg_constraints]).to_event(1)
    hmm = of(vectors if event else one)
    assert plots.emission(hmm, names=["low", "high"], axes=axes) is axes
    assert texts(axes.get_legend().get_texts()) == ["low", "high"]
    for k, line in enumerate(axes.lines):
        x, y = (torch.as_tensor(each) for each in line.get_data())
        expected = one.log_prob(x[:, None])[:, k].exp()
        torch.testing.assert_close(y, expected)
        width = 1.0 if name == "poisson" else (x[1] - x[0]).item()
        tail = 6e-3 if name == "gamma" else 2e-3  # beyond four deviations, of a skewed density
        assert y.sum().item() * width == pytest.approx(1.0, abs=tail)


NUMBERS = {
    "weibull": lambda: dist.Weibull(torch.tensor([1.0, 6.0]), 2.0),
    "log-normal": lambda: dist.LogNormal(torch.tensor([0.0, 1.5]), 0.4),
    "beta": lambda: dist.Beta(torch.tensor([2.0, 9.0]), torch.tensor([9.0, 2.0])),
    "von Mises": lambda: dist.VonMises(torch.tensor([0.0, 2.5]), 4.0),
    "wrapped Cauchy": lambda: WrappedCauchy(torch.tensor([0.0, 2.5]), torch.tensor(0.6)),
    "student t": lambda: dist.StudentT(torch.tensor([4.0, 1.2]), torch.tensor([0.0, 9.0])),
    "negative binomial": lambda: dist.NegativeBinomial(torch.tensor([2.0, 9.0]), torch.tensor(0.6)),
    "zero-inflated": lambda: ZeroInflated(
        dist.Gamma(torch.tensor([2.0, 9.0]), 1.0), gate=torch.tensor([0.3, 0.1])
    ),
    "censored": lambda: Censored(dist.Normal(torch.tensor([0.5, 4.0]), 1.0), lower=0.0),
    "truncated": lambda: Truncated(dist.Poisson(torch.tensor([1.0, 6.0])), lower=1),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_densities_over_the_histogram_are_weighted_by_the_states(axes, name):
    """The chain of ``of`` forgets, so that posteriors are those of single steps."""
    torch.manual_seed(0)
    hmm = of(NUMBERS[name](), 400)
    values = hmm.sample()
    shares = hmm.emission.log_prob(values[0, :, None]).softmax(-1).mean(0)  # independent steps
    plots.emission(hmm, values=values, axes=axes)
    *curves, total = axes.lines
    for k, line in enumerate(curves):
        x, y = (torch.as_tensor(each) for each in line.get_data())
        torch.testing.assert_close(y, shares[k] * hmm.emission.log_prob(x[:, None])[:, k].exp())
    x, y = (torch.as_tensor(each) for each in total.get_data())
    heights = sum(bar.get_height() * bar.get_width() for bar in axes.patches)
    assert heights == pytest.approx(1.0, abs=1e-5)  # one histogram, of all the data
    assert values.min() <= x.min() and x.max() <= values.max()  # noqa: PT018
    if not hmm.emission.support.is_discrete:
        area = torch.trapezoid(y, x).item()
        mass = {
            "zero-inflated": shares @ torch.tensor([0.7, 0.9]),
            "censored": 1 - shares @ dist.Normal(torch.tensor([0.5, 4.0]), 1).cdf(torch.zeros(())),
        }
        assert area == pytest.approx(float(mass.get(name, 1.0)), abs=0.03)
    axes.clear()
    assert len(plots.emission(hmm, axes=axes).lines) == 2


def test_vectors_of_two_are_ellipses_of_one_and_two_deviations(axes):
    mean = torch.tensor([[0.0, 1.0], [4.0, -2.0]])
    scale = torch.linalg.cholesky(
        torch.tensor([[[1.0, 0.8], [0.8, 1.0]], [[9.0, 0.0], [0.0, 4.0]]])
    )
    plots.emission(
        of(dist.MultivariateNormal(mean, scale_tril=scale)), symbols=["x", "y"], axes=axes
    )
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("x", "y")
    assert [line.get_xydata().tolist()[0] for line in axes.lines] == mean.tolist()
    precision = torch.cholesky_inverse(scale)
    for number, ellipse in enumerate(axes.patches):
        k, deviations = number // 2, number % 2 + 1
        edge = ellipse.get_patch_transform().transform(ellipse.get_path().vertices[:-1])
        away = torch.as_tensor(edge)[::3] - mean[k]  # ends of Bezier curves
        distance = torch.einsum("pi,ij,pj->p", away, precision[k], away).sqrt()
        torch.testing.assert_close(
            distance, torch.full_like(distance, deviations), rtol=1e-3, atol=0
        )


def test_a_timeline_has_a_bar_for_each_segment(axes):
    paths = torch.tensor([[0, 0, 2, 2], [2, 0, 0, 0]])
    plots.timeline(paths, ["a", "b", "c"], lengths=torch.tensor([4, 2]), axes=axes)
    bars = {tuple(box.round(2).ravel()) for part in axes.collections for box in boxes(part)}
    assert bars == {(-0.5, -0.45, 1.5, 0.45), (1.5, -0.45, 3.5, 0.45),
                    (-0.5, 0.55, 0.5, 1.45), (0.5, 0.55, 1.5, 1.45)}  # fmt: skip
    assert texts(axes.get_legend().get_texts()) == ["a", "c"]  # those that occur
    assert axes.collections[1].get_facecolor().tolist() == [list(matplotlib.colors.to_rgba("C2"))]
    axes.clear()
    plots.timeline(paths, lengths=torch.tensor([4, 2]), keys=["Elm", 7], axes=axes)
    assert texts(axes.get_yticklabels()) == ["Elm", "7"]
    with pytest.raises(ValueError, match="keys must have N = 2 names"):
        plots.timeline(paths, lengths=torch.tensor([4, 2]), keys=["Elm"])


def boxes(bars):
    return [path.get_extents().get_points() for path in bars.get_paths()]


def test_a_timeline_of_many_sequences_draws_some_and_says_so(axes):
    states = torch.arange(2001).unsqueeze(-1).expand(-1, 3) % 2
    plots.timeline(states, lengths=torch.full((2001,), 3), axes=axes)
    assert axes.get_ylabel() == "sequence, one in 5 drawn"
    places = sorted(box[0, 1] for part in axes.collections for box in boxes(part))
    np.testing.assert_allclose(places, np.arange(0, 2001, 5) - 0.45)


def test_a_track_has_the_colour_of_the_state_where_each_step_begins(axes):
    nan = torch.nan
    places = torch.tensor(
        [[[0.0, 60], [2, 60], [2, 61], [nan, nan]], [[5.0, 60], *[[nan, nan]] * 3]]
    )
    states = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]])
    assert plots.track(places, states, ["rest", "run"], axes=axes) is axes
    rest, run = ([row for row in line.get_xydata().tolist() if row[0] == row[0]]
                 for line in axes.lines)  # fmt: skip
    assert rest[:2] == [[0, 60], [2, 60]]
    assert run == [[2, 60], [2, 61], [2, 61], [5, 60]]  # no line is drawn to what is missing
    assert axes.get_aspect() == pytest.approx(2.0, rel=0.02)  # a degree of longitude is half as far
    with pytest.raises(ValueError, match="locations must have the shape of states"):
        plots.track(places[0], states)
    with pytest.raises(ValueError, match="names must have one for each state, 0 to 1"):
        plots.track(places, states, ["rest"])


@pytest.mark.parametrize("event", [(), (1,)])
def test_a_series_is_coloured_by_state_over_its_band(axes, event):
    values = torch.tensor([-2.0, -2.5, 3.0, 2.0, torch.nan, -1.0])
    emission = dist.Normal(torch.tensor([-2.0, 2.5]).reshape(2, *event), 1.0).to_event(len(event))
    hmm = HMM(
        torch.tensor([0.5, 0.5]).log(),
        torch.tensor([[0.8, 0.2], [0.3, 0.7]]).log(),
        emission,
        torch.tensor([6]),
        observed=torch.tensor([[True, True, True, True, False, True]]),
    )
    shaped = values.nan_to_num(9.0).reshape(1, 6, *event)
    assert plots.series(hmm, shaped, ["low", "high"], axes=axes) is axes
    whole, low, high = axes.lines
    assert low.get_xdata().tolist() == [0, 1, 5]
    assert high.get_xdata().tolist() == [2, 3]
    assert high.get_ydata().tolist() == [3.0, 2.0]
    assert torch.as_tensor(whole.get_ydata()).isnan().tolist() == values.isnan().tolist()
    mixture = hmm.posterior(shaped).state_probs[0]
    ends = queries.observation_marginals(hmm, shaped).interval(0.9)
    edge = torch.as_tensor(axes.collections[0].get_paths()[0].vertices[:, 1])
    for end in ends:
        below = mixture @ dist.Normal(torch.tensor([-2.0, 2.5]), 1.0).cdf(end.reshape(6, 1)).T
        assert below.diagonal().min() > 0.04
        assert all((edge - value).abs().min() < 1e-4 for value in end.flatten())


def test_a_series_of_vectors_has_a_panel_for_each_component(axes):
    even, values = torch.full((2, 2), 0.5).log(), torch.tensor([[[0.0, 5.0], [9.0, torch.nan]]])
    emission = dist.Normal(torch.tensor([[0.0, 5.0], [9.0, 7.0]]), 1.0).to_event(1)
    hmm = HMM(even[0], even, emission, torch.tensor([2]))
    panels = plots.series(hmm, values)
    drawn = [[line.get_xydata().tolist() for line in panel.lines[1:]] for panel in panels]
    assert drawn == [[[[0, 0]], [[1, 9]]], [[[0, 5]], []]]  # by component and state
    for panel, means in zip(panels, emission.mean.mT):
        ends = panel.collections[0].get_paths()[0].get_extents().intervaly
        np.testing.assert_allclose(ends, (means.min() - 1.645, means.max() + 1.645), atol=0.05)
    assert [panel.get_ylabel() for panel in panels] == ["component 0", "component 1"]
    with pytest.raises(ValueError, match="axes must be D = 2"):
        plots.series(hmm, values, axes=axes)


@pytest.mark.parametrize("name", ["durations", "survival", "hazard"])
@pytest.mark.parametrize("explicit", [False, True])
def test_how_long_states_last_is_a_curve_with_dots_of_decoded_visits(axes, name, explicit):
    probs = torch.tensor([[0.1, 0.2, 0.7, 0.0], [0.0, 0.5, 0.25, 0.25]])
    if explicit:
        swap = torch.tensor([[NEVER, 0.0], [0.0, NEVER]])
        emission = dist.Normal(torch.arange(2.0), 1.0)
        hmm = HSMM(torch.full((2,), 0.5).log(), swap, probs.log(), emission, torch.tensor([5]))
    else:
        hmm = chain(2)
        leave = 1 - hmm.log_transition.exp().diagonal().unsqueeze(-1)
        probs = leave * (1 - leave) ** torch.arange(4)
    path = torch.tensor([[0, 0, 1, 0, 0, 0, 1, 1]]).repeat(5, 1)  # each visit five times
    paths = {"states": path, "lengths": torch.full((5,), 8)}
    drawn = getattr(plots, name)(hmm, num_steps=4, **paths, names=["a", "b"], axes=axes)
    assert drawn is axes
    lasting = 1 - probs.cumsum(-1) + probs
    wanted = {"durations": probs, "survival": lasting, "hazard": probs / lasting}[name]
    curves = [torch.as_tensor(line.get_ydata()) for line in axes.lines[::2]]
    torch.testing.assert_close(torch.stack(curves), wanted, equal_nan=True)
    # of state 0 half end at 2 and the rest at 3; of state 1 half at 1, and half are cut at 2
    shares = {
        "hazard": [[0.0, 0.5, 1.0], [0.5, 0.0]],
        "survival": [[1.0, 1.0, 0.5], [1.0, 0.5]],
        "durations": [[0.0, 0.5, 0.5], [0.5, 0.0]],
    }[name]
    for line, wanted in zip(axes.lines[1::2], shares):
        dots = torch.as_tensor(line.get_ydata())
        assert dots[: len(wanted)].tolist() == wanted
        assert dots[len(wanted) :].isnan().all()
    assert texts(axes.get_legend().get_texts()) == ["a", "b"]


def test_a_timeline_has_no_bar_where_there_is_no_step(axes):
    """Of packed states with lengths, or of padded ones with -1."""
    packed, lengths = torch.tensor([1, 1, 0, 1]), torch.tensor([3, 1])
    padded = torch.tensor([[1, 1, 0], [1, -1, -1]])
    assert queries.segments(packed, lengths) == queries.segments(padded)
    plots.timeline(packed, lengths=lengths, axes=axes)
    assert [len(bars.get_paths()) for bars in axes.collections] == [1, 2]
    axes.clear()
    plots.timeline(padded, axes=axes)
    assert [len(bars.get_paths()) for bars in axes.collections] == [1, 2]
    with pytest.raises(ValueError, match="lengths must be given"):  # as of hmm.viterbi
        plots.timeline(padded.clamp(min=0))


def test_steps_without_a_row_have_a_place_in_time(axes):
    """Of the longer of two sequences, two steps of which have no row, and of a forecast."""
    hours = pd.date_range("2026-03-29", periods=9, freq="h", tz="Europe/Berlin")
    local = date2num(hours.tz_localize(None))
    frame = pd.DataFrame({"who": "a", "time": hours[[0, 1, 4, 5]], "x": [0.0, 9.0, 1.0, 8.0]})
    frame = pd.concat([frame, frame[:2].assign(who="b")])
    data = Sequences.from_dataframe(frame, columns="x", by="who", time="time", gaps="missing")
    fit = fit_em(TabularHMM(2, normal(0)), data, num_iterations=2)
    one = data[:1]
    plots.series(fit.hmm(one), one.values, x=one.time_index(), axes=axes)
    drawn = np.concatenate([line.get_xdata(orig=False) for line in axes.lines[1:]])
    assert sorted(drawn) == local[[0, 1, 4, 5]].tolist()
    axes.clear()
    plots.forecast(fit.forecast(one, 3), one.values, x=one.time_index(3), axes=axes)
    assert axes.lines[-1].get_xdata(orig=False).tolist() == local[6:].tolist()
    axes.clear()
    with pytest.raises(ValueError, match=r"each of the 6 steps.*time_index\(\)"):
        plots.state_probs(fit.predict_proba(one), x=frame["time"][:4])


@pytest.mark.parametrize("kind", ["polars", "list", "datetimes", "index", "periods"])
def test_dates_of_every_kind_lie_at_their_local_times(axes, kind):
    index = pd.date_range("2026-01-01", periods=4, freq="MS", tz="Asia/Tokyo", name="when")
    stamps = [stamp.to_pydatetime() for stamp in index]
    x = {
        "polars": lambda: polars.Series(stamps).dt.convert_time_zone("Asia/Tokyo"),
        "list": lambda: list(index),
        "datetimes": lambda: stamps,
        "index": lambda: index,
        "periods": lambda: pd.period_range("2026-01", periods=4, freq="M"),
    }[kind]()
    plots.state_probs(torch.full((4, 2), 0.5), x=x, axes=axes)
    assert axes.get_xlim() == tuple(date2num(index.tz_localize(None))[[0, -1]])


def test_steps_lie_at_their_times_in_local_hours(axes):
    """Of the column of a table, whose name the axis has; numbers of steps without one."""
    when = pd.Series(pd.date_range("2026-03-29", periods=4, freq="h", tz="Europe/Berlin"))
    local = date2num(when.dt.tz_localize(None))
    even = torch.full((2, 2), 0.5).log()
    hmm = HMM(even[0], even, dist.Normal(torch.tensor([0.0, 9.0]), 1.0), torch.tensor([4]))
    values = torch.tensor([[0.0, 9.0, torch.nan, 9.0]])
    hmm = hmm.with_lengths(hmm.lengths, ~values.isnan())
    plots.series(hmm, values, x=when.rename("hour"), axes=axes)
    assert axes.get_xlabel() == "hour"
    assert [line.get_xdata(orig=False).tolist() for line in axes.lines[1:]] == [
        [local[0]], [local[1], local[3]],
    ]  # fmt: skip
    axes.clear()
    plots.state_probs(torch.full((4, 2), 0.5), x=when, axes=axes)
    assert axes.get_xlim() == (local[0], local[-1])
    assert axes.xaxis.get_major_formatter().format_ticks(local)[1:] == ["01:00", "03:00", "04:00"]
    axes.clear()
    plots.forecast(hmm.forecast(values, 2), values, x=np.arange(6) + 10.0, axes=axes)
    assert axes.lines[-1].get_xdata().tolist() == [14.0, 15.0]
    with pytest.raises(ValueError, match="x must have a time for each of the 4 steps"):
        plots.state_probs(torch.full((4, 2), 0.5), x=when[1:], axes=axes)


def test_losses_of_restarts_are_grey_and_named_once(axes):
    rolls = datasets.casino(num_sequences=4, num_steps=20).without_labels()
    fit = fit_em(TabularHMM(2, categorical(6)), rolls, num_iterations=4, restarts=3)
    plots.losses(fit, axes=axes)
    best = fit.losses / rolls.num_observed
    np.testing.assert_allclose(axes.lines[0].get_ydata(), best)
    assert [line.get_color() for line in axes.lines] == ["C0", "0.75", "0.75"]
    assert texts(axes.get_legend().get_texts()) == ["best restart", "the others"]
