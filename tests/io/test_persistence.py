"""Saving and loading: the same bits come back, or there is an error and nothing has changed."""

import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pyro.distributions as dist
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyro.nn import PyroParam
from torch import nn

from pyrohmm import (
    HMM,
    BlockHMM,
    HMMModule,
    LanguageModel,
    MarginalModel,
    TabularHMM,
    blocks,
    categorical,
    datasets,
    fit_em,
    fit_map,
    load_hmm,
    load_into,
    normal,
    save,
)
from pyrohmm.distributions import AutoregressiveCategorical, AutoregressiveNormal
from pyrohmm.distributions.modified import (
    Angle,
    BetaWithCdf,
    Censored,
    StableWeibull,
    StudentTWithCdf,
    Truncated,
    WrappedCauchy,
    ZeroInflated,
)
from pyrohmm.distributions.observation import Streams, Tied
from pyrohmm.io import persistence
from pyrohmm.io.files import Checkpoint, read_tensors, write_tensors
from pyrohmm.ops.blocks.inner_products import InnerProductTransition

FILE = "tensors.safetensors"
K = 3


def bits(tensor):
    """The dtype, the shape and every byte: NaN and minus zero count as they are."""
    return tensor.dtype, tuple(tensor.shape), bytes(tensor.contiguous().flatten().view(torch.uint8))


def all_bits(tensors):
    return {name: bits(tensor) for name, tensor in tensors.items()}


def temporaries(directory):
    return [path.name for path in Path(directory).rglob("*.tmp")]


# One file ---------------------------------------------------------------------------------------


def test_views_and_shared_memory_come_back(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    complex_base = torch.complex(base, base + 1).to(torch.complex64)
    tensors = {
        "base": base,
        "same": base,
        "transposed": base.mT,
        "column": base[:, 1],
        "row": base[1],
        "expanded": base[0, 1].expand(5),
        "parameter": nn.Parameter(base),
        "conjugate": complex_base.conj(),
        "negative": complex_base.conj().imag,
    }
    write_tensors(tmp_path / "x", tensors, {})
    found, _ = read_tensors(tmp_path / "x")
    expected = {n: t.detach().resolve_conj().resolve_neg() for n, t in tensors.items()}
    assert all_bits(found) == all_bits(expected)
    assert not any(tensor.requires_grad for tensor in found.values())


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@st.composite
def any_tensor(draw):
    dtype = draw(st.sampled_from([torch.bool, torch.int16, torch.int64, torch.float32,
                                  torch.float64, torch.bfloat16]))  # fmt: skip
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = int(np.prod(shape)) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        data = bytes(byte % 2 for byte in data)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


names = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda n: n != "__metadata__")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tensors=st.dictionaries(names, any_tensor(), max_size=4),
    meta=st.dictionaries(st.text(), plain, max_size=3),
)
def test_anything_comes_back_as_it_was(tmp_path_factory, tensors, meta):
    path = tmp_path_factory.getbasetemp() / "anything"
    write_tensors(path, tensors, meta)
    found, also = read_tensors(path)
    assert all_bits(found) == all_bits(tensors)
    assert json.dumps(also, sort_keys=True) == json.dumps(meta, sort_keys=True)


def test_a_changed_byte_never_changes_what_is_read(tmp_path):
    path = tmp_path / "x"
    write_tensors(path, {"a": torch.arange(3), "bc": torch.tensor([0.5, -0.0])}, {"step": [1, "x"]})
    data = path.read_bytes()
    tensors, meta = read_tensors(path)
    refused = 0
    for position in range(len(data)):
        for flip in (1, 32):
            path.write_bytes(
                data[:position] + bytes([data[position] ^ flip]) + data[position + 1 :]
            )
            try:
                found, also = read_tensors(path)
            except ValueError:
                refused += 1
            else:
                assert all_bits(found) == all_bits(tensors)
                assert also == meta
    assert refused > 1.9 * len(data)


HEAD = {"format": "pyrohmm", "version": 1, "checksum": "0", "meta": {}}
NESTED = json.dumps(HEAD).replace('"meta": {}', '"meta": ' + '{"a": ' * 3000 + "1" + "}" * 3000)
DOCUMENTS = [  # in the place of ours, in a valid safetensors file
    "{", "[" * 100_000, "1" * 10_000, NESTED, "[]", "null", "{}",
    *(json.dumps(HEAD | change) for change in (
        {"version": None}, {"version": "1"}, {"version": 2}, {"meta": []}, {"checksum": 1}, {}
    )),
]  # fmt: skip
HEADERS = [
    b"[]", b"null", b'{"__metadata__": null}', b'{"__metadata__": {"pyrohmm": 3}}',
    b'{"a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}',
    b'{"a": {"dtype": "F64", "shape": [4294967296, 4294967296], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": {}}',
]  # fmt: skip
FOREIGN = [
    b"", b"\0" * 100, b'{"format": "pyrohmm"}', b"PK\3\4" * 20,
    *(struct.pack("<Q", size) + b"{}" for size in (0, 1, 10**9, 2**62, 2**64 - 1)),
    *(struct.pack("<Q", len(header)) + header + b"\0\0\0\0" for header in HEADERS),
    safetensors.torch.save({"a": torch.ones(1)}),
    *(safetensors.torch.save({"a": torch.ones(1)}, {"pyrohmm": text}) for text in DOCUMENTS),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FOREIGN)))
def test_files_that_are_damaged_or_not_ours_are_refused(tmp_path, number):
    (tmp_path / "x").write_bytes(FOREIGN[number])
    with pytest.raises(ValueError, match=r"not a whole file|has version|damaged"):
        read_tensors(tmp_path / "x")


@pytest.mark.parametrize(
    ("tensors", "meta"),
    [
        ({"a": [1.0]}, {}),
        ({"a": torch.ones(2, dtype=torch.complex128)}, {}),
        ({"a": torch.eye(2).to_sparse()}, {}),
        ({"a": torch.ones(2, device="meta")}, {}),
        ({}, {"a": (1, 2)}),
        ({}, {1: 2}),
        ({}, {"a": {1, 2}}),
        ({}, {"loss": float("nan")}),
    ],
)
def test_what_cannot_be_written_exactly_is_refused(tmp_path, tensors, meta):
    path = tmp_path / "x"
    path.write_bytes(b"before")
    with pytest.raises((TypeError, ValueError, NotImplementedError, KeyError, RuntimeError)):
        write_tensors(path, tensors, meta)
    assert path.read_bytes() == b"before"
    assert temporaries(tmp_path) == []


class Trap:
    def __reduce__(self):
        return os.mkdir, (os.environ["PYROHMM_TRAP"],)


def test_a_pickle_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYROHMM_TRAP", str(tmp_path / "sprung"))
    (tmp_path / "one").write_bytes(pickle.dumps(Trap()))
    torch.save(Trap(), tmp_path / "two")
    for name in ("one", "two"):
        with pytest.raises(ValueError, match="not a whole file"):
            read_tensors(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


class Failure(Exception):
    pass


# An HMM -----------------------------------------------------------------------------------------


def positive(*shape):
    return torch.rand(shape) + 0.5


def simplex(*shape):
    probs = torch.rand(shape)
    probs[..., 0] = 0.0
    return probs / probs.sum(-1, keepdim=True)


def logits_with_zeros(*shape):
    return simplex(*shape).log()


def triangle(*batch):
    return torch.randn(*batch, 2, 2).tril() + 3 * torch.eye(2)


def mixture():
    return dist.MixtureSameFamily(
        dist.Categorical(logits=logits_with_zeros(K, 2)),
        dist.Normal(torch.randn(K, 2, 4), positive(K, 2, 4)).to_event(1),
    )


def cached(distribution):
    """The same after both ``probs`` and ``logits`` have been read, which keeps them."""
    distribution.probs, distribution.logits  # noqa: B018
    return distribution


EMISSIONS = {
    "stable weibull": lambda: StableWeibull(positive(K), positive(K)),
    "asymmetric laplace": lambda: dist.AsymmetricLaplace(torch.randn(K), positive(K), positive(K)),
    "bernoulli probs": lambda: dist.Bernoulli(simplex(K)),
    "bernoulli logits": lambda: dist.Bernoulli(logits=torch.randn(K)),
    "beta binomial": lambda: dist.BetaBinomial(positive(K), positive(K), 7),
    "binomial probs": lambda: dist.Binomial(torch.tensor([3, 4, 5]), simplex(K)),
    "binomial logits": lambda: dist.Binomial(6, logits=torch.randn(K)),
    "categorical probs": lambda: dist.Categorical(simplex(K, 7)),
    "categorical logits": lambda: dist.Categorical(logits=logits_with_zeros(K, 7)),
    "categorical both": lambda: cached(dist.Categorical(simplex(K, 7))),
    "categorical expanded": lambda: cached(dist.Categorical(simplex(1, 7))).expand((K,)),
    "delta": lambda: dist.Delta(torch.arange(3.0)),
    "delta of vectors": lambda: dist.Delta(torch.randn(K, 2), event_dim=1),
    "dirichlet": lambda: dist.Dirichlet(positive(K, 4)),
    "dirichlet multinomial": lambda: dist.DirichletMultinomial(
        positive(K, 4), torch.full((K,), 5.0)
    ),
    "exponential of vectors": lambda: dist.Exponential(positive(K, 2)).to_event(1),
    "geometric": lambda: dist.Geometric(simplex(4)[1:]),
    "low rank": lambda: dist.LowRankMultivariateNormal(
        torch.randn(K, 3), torch.randn(K, 3, 1), positive(K, 3)
    ),
    "mixture": mixture,
    "multinomial": lambda: dist.Multinomial(5, simplex(K, 4)),
    "multinomial logits": lambda: dist.Multinomial(5, logits=torch.randn(K, 4)),
    "covariance": lambda: dist.MultivariateNormal(
        torch.randn(K, 2), triangle(K) @ torch.eye(2) * torch.eye(2)
    ),
    "triangle": lambda: dist.MultivariateNormal(torch.randn(K, 2), scale_tril=triangle().abs()),
    "student vectors": lambda: dist.MultivariateStudentT(
        positive(K), torch.randn(K, 2), triangle(K).abs()
    ),
    "masked vectors": lambda: dist.NanMaskedMultivariateNormal(
        torch.randn(K, 2), scale_tril=triangle(K).abs()
    ),
    "negative binomial": lambda: dist.NegativeBinomial(positive(K), logits=torch.randn(K)),
    "normal numbers": lambda: dist.Normal(0.25, 2.0).expand((K,)),
    "normal single": lambda: dist.Normal(torch.randn(K).float(), positive(K).float()),
    "normal vectors": lambda: dist.Normal(torch.randn(K, 2), torch.ones(())).to_event(1),
    "normal nested": lambda: dist.Independent(
        dist.Independent(dist.Normal(torch.randn(K, 2, 2), 1.0), 1), 1
    ),
    "one hot": lambda: dist.OneHotCategorical(simplex(K, 4)),
    "poisson sparse": lambda: dist.Poisson(positive(K, 2), is_sparse=True).to_event(1),
    "projected normal": lambda: dist.ProjectedNormal(torch.randn(K, 3)),
    "streams": lambda: Streams(
        [dist.Categorical(simplex(K, 7)), dist.Normal(torch.randn(K, 2), 1.0).to_event(1)]
    ),
    "student": lambda: dist.StudentT(positive(K), torch.randn(K), positive(K)),
    "tied": lambda: Tied(dist.Categorical(simplex(2, 7)), torch.tensor([1, 0, 1])),
    "tied mixture": lambda: Tied(mixture().expand((K,)), torch.tensor([2, 0, 0])),
    "uniform": lambda: dist.Uniform(-torch.arange(1.0, 4.0), torch.arange(1.0, 4.0)),
    "wrapped Cauchy": lambda: WrappedCauchy(torch.randn(K), torch.rand(K)),
    "zero-inflated": lambda: ZeroInflated(dist.Poisson(positive(K)), gate=torch.rand(K)),
    "student with a cdf": lambda: StudentTWithCdf(positive(K), torch.randn(K), positive(K)),
    "beta with a cdf": lambda: BetaWithCdf(positive(K), positive(K)),
    "censored": lambda: Censored(dist.Normal(torch.randn(K), positive(K)), lower=-0.3),
    "truncated": lambda: Truncated(dist.Poisson(positive(K, 2)), 1, 9.5).to_event(1),
    "angles": lambda: Angle(torch.randn(K), positive(K)),
}


# They have no density of a single value.
IN_TIME = {
    "autoregressive symbols": lambda: AutoregressiveCategorical(
        dist.Categorical(simplex(K, 2)), dist.Categorical(simplex(K, 4, 2))
    ),
    "autoregressive vectors": lambda: AutoregressiveNormal(
        dist.Normal(torch.randn(K, 2), 1.0).to_event(1),
        dist.MultivariateNormal(torch.randn(K, 2), torch.eye(2)),
        torch.randn(K, 3, 2, 2),
        torch.randn(2),
    ),
}


for kind in "Exponential HalfCauchy HalfNormal Poisson".split():
    EMISSIONS[kind] = lambda kind=kind: getattr(dist, kind)(positive(K))
for kind in "Beta Gamma GammaPoisson InverseGamma Pareto Weibull".split():
    EMISSIONS[kind] = lambda kind=kind: getattr(dist, kind)(positive(K), positive(K))
for kind in (
    "Cauchy Gumbel Laplace LogNormal Logistic NanMaskedNormal Normal SoftLaplace VonMises"
).split():
    EMISSIONS[kind] = lambda kind=kind: getattr(dist, kind)(torch.randn(K), positive(K))


def hmm_with(emission, dtype=torch.float64):
    matrix = simplex(K, K).to(dtype).log()
    lengths = torch.tensor([4, 1, 2])
    return HMM(simplex(K).to(dtype).log(), matrix, emission, lengths)


def classes(emission):
    """Every class that an emission is built of."""
    parts = {
        dist.Independent: lambda: [emission.base_dist],
        dist.MixtureSameFamily: lambda: [
            emission.mixture_distribution, emission.component_distribution
        ],
        AutoregressiveCategorical: lambda: [emission.initial, emission.tables],
        AutoregressiveNormal: lambda: [emission.initial, emission.base],
        Streams: lambda: emission.parts,
        Tied: lambda: [emission.base],
        ZeroInflated: lambda: [emission.base_dist],
        Censored: lambda: [emission.base],
        Truncated: lambda: [emission.base],
    }.get(type(emission), list)()  # fmt: skip
    return {type(emission)}.union(*(classes(part) for part in parts))


def test_every_class_that_can_be_saved_is_tested():
    every = [*EMISSIONS.values(), *IN_TIME.values()]
    assert {c for make in every for c in classes(make())} == {*persistence._classes().values()}


@pytest.mark.parametrize("name", IN_TIME)
def test_an_emission_that_depends_on_the_past_comes_back_with_the_same_bits(tmp_path, name):
    hmm = hmm_with(IN_TIME[name]())
    values = hmm.sample()
    save(hmm, tmp_path / "x")
    again = load_hmm(tmp_path / "x")
    assert type(again.emission) is type(hmm.emission)
    assert bits(again.log_prob(values)) == bits(hmm.log_prob(values))
    first, second = persistence.describe(hmm), persistence.describe(again)
    assert all_bits(first[0]) == all_bits(second[0])
    assert first[1] == second[1]
    torch.manual_seed(1)
    drawn = hmm.sample()
    torch.manual_seed(1)
    assert bits(again.sample()) == bits(drawn)


@pytest.mark.parametrize("name", EMISSIONS | IN_TIME)
def test_every_emission_comes_back_with_the_same_bits(tmp_path, name):
    hmm = hmm_with((EMISSIONS | IN_TIME)[name]())
    if name in IN_TIME:
        values = hmm.sample()
    else:  # some that only the first state may be able to emit
        values = torch.stack([hmm.emission.sample()[0] for _ in range(12)])
        values = values.reshape(3, 4, *hmm.emission.event_shape)
    save(hmm, tmp_path / "x")
    again = load_hmm(tmp_path / "x")
    assert type(again.emission) is type(hmm.emission)
    assert again.emission.batch_shape == hmm.emission.batch_shape
    assert again.event_shape == hmm.event_shape
    for attribute in ("log_initial", "log_transition", "lengths"):
        assert bits(getattr(again, attribute)) == bits(getattr(hmm, attribute))
    assert bits(again.log_likelihood(values)) == bits(hmm.log_likelihood(values))
    assert bits(again.log_prob(values)) == bits(hmm.log_prob(values))
    first, second = persistence.describe(hmm), persistence.describe(again)
    assert all_bits(first[0]) == all_bits(second[0])
    assert first[1] == second[1]
    if name != "projected normal":
        torch.manual_seed(1)
        drawn = hmm.sample()
        torch.manual_seed(1)
        assert bits(again.sample()) == bits(drawn)


@pytest.mark.parametrize("seed", range(4))
def test_probabilities_come_back_bit_for_bit_however_they_were_given(tmp_path, seed):
    torch.manual_seed(seed)
    dtype = [torch.float32, torch.float64][seed % 2]
    probs, loc = torch.rand(K, 5, dtype=dtype), torch.zeros(K, 2, dtype=dtype)
    root = torch.randn(K, 2, 2, dtype=dtype).tril() + 3 * torch.eye(2, dtype=dtype)
    emissions = [
        dist.Categorical(probs=probs),
        dist.Categorical(logits=probs),
        cached(dist.Categorical(logits=5 * probs)),
        cached(dist.Categorical(probs=probs)),
        cached(dist.Bernoulli(probs=probs[:, 0])),
        cached(dist.Geometric(logits=probs[:, 0])),
        dist.MultivariateNormal(loc, covariance_matrix=root @ root.mT),
        dist.MultivariateNormal(loc, precision_matrix=root @ root.mT),
    ]
    for emission in emissions:
        hmm = hmm_with(emission, dtype)
        save(hmm, tmp_path / "x")
        again = load_hmm(tmp_path / "x").emission
        values = hmm.sample()
        assert bits(load_hmm(tmp_path / "x").log_prob(values)) == bits(hmm.log_prob(values))
        for name in (name for name in ("probs", "logits") if hasattr(emission, name)):
            assert bits(getattr(again, name)) == bits(getattr(emission, name))


def test_steps_batches_and_missing_values_come_back(tmp_path):
    """Parameters per step, restarts (R, 1, K, K) for N sequences, and marks of what is missing."""
    lengths, observed = torch.tensor([4, 1]), torch.rand(2, 4) < 0.5
    allowed = torch.tensor([True, False, True]).expand(2, 4, K)
    emission = dist.Normal(torch.randn(5, 1, 4, K), 1.0)
    matrices = logits_with_zeros(5, 1, 3, K, K)
    hmm = HMM(
        logits_with_zeros(5, 1, K), matrices, emission, lengths, observed,
        transition_per_step=True, emission_per_step=True, allowed=allowed,
    )  # fmt: skip
    save(hmm, tmp_path / "x")
    again = load_hmm(tmp_path / "x")
    assert again.batch_shape == (5, 2)
    assert (again.transition_per_step, again.emission_per_step) == (True, True)
    assert bits(again.observed) == bits(observed)
    assert bits(again.allowed) == bits(allowed)
    assert bits(again.log_transition) == bits(matrices)
    values = torch.randn(2, 4)
    assert bits(again.log_prob(values)) == bits(hmm.log_prob(values))


class Own(dist.Normal):
    pass


@pytest.mark.parametrize(
    "emission",
    [
        Own(torch.zeros(K), torch.ones(K)),
        torch.distributions.Normal(torch.zeros(K), torch.ones(K)),
        dist.Normal(torch.zeros(K), torch.ones(K)).mask(torch.tensor(True)),
        dist.MixtureSameFamily(
            dist.Categorical(torch.ones(K, 2)), Own(torch.zeros(K, 2), torch.ones(K, 2))
        ),
    ],
)
def test_an_emission_that_cannot_be_rebuilt_is_refused_and_nothing_is_written(tmp_path, emission):
    with pytest.raises(TypeError, match="cannot be saved"):
        save(hmm_with(emission), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def described():
    """Tensors and description of a small HMM, to be spoilt."""
    emission = dist.Poisson(torch.ones(K, 2)).to_event(1)
    return persistence.describe(hmm_with(emission))


def spoil(meta, path, value):
    node = meta
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("emission",), None),
        (("emission", "class"), "os.system"),
        (("emission", "class"), "Normal"),
        (("emission", "options"), {"reinterpreted_batch_ndims": 7}),
        (("emission", "options"), {"reinterpreted_batch_ndims": 1, "__class__": 1}),
        (("emission", "parts"), ["os.system"]),
        (("emission", "parts", 0, "class"), "Gamma"),
        (("emission", "parts", 0, "options"), {"is_sparse": True, "probs": 1}),
        (("transition_per_step",), True),
    ],
)
def test_descriptions_that_are_not_of_an_hmm_are_refused_and_run_nothing(tmp_path, path, value):
    tensors, meta = described()
    spoil(meta, path, value)
    write_tensors(tmp_path / FILE, tensors, meta)
    with pytest.raises(ValueError, match="does not describe an HMM"):
        load_hmm(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("log_initial", None),
        ("lengths", torch.tensor([0, 1, 2])),
        ("log_initial", torch.zeros(K)),
        ("log_initial", torch.full((K,), torch.nan)),
        ("emission.base_dist.rate", None),
        ("emission.base_dist.rate", -torch.ones(K, 2)),
        ("observed", torch.ones(3, 4)),
        ("other", torch.ones(1)),
    ],
)
def test_tensors_that_are_not_of_an_hmm_are_refused(tmp_path, name, value):
    tensors, meta = described()
    tensors[name] = value
    if value is None:
        del tensors[name]
    write_tensors(tmp_path / FILE, tensors, meta)
    with pytest.raises(ValueError, match="does not describe an HMM"):
        load_hmm(tmp_path)


@pytest.mark.parametrize("emission", ["categorical probs", "categorical logits", "bernoulli probs"])
@pytest.mark.parametrize("number", [-1.5, 2.0, torch.nan])
def test_forged_probabilities_are_refused(tmp_path, emission, number):
    tensors, meta = persistence.describe(hmm_with(EMISSIONS[emission]()))
    probs = [name for name in tensors if name.startswith(("emission.", "log_"))]
    assert len(probs) == 3
    for name in probs:
        forged = tensors | {name: torch.full_like(tensors[name], number)}
        write_tensors(tmp_path / FILE, forged, meta)
        with pytest.raises(ValueError, match="does not describe an HMM"):
            load_hmm(tmp_path)


def block_hmm(kind, dtype=torch.float32):
    """Three blocks of 2, 1 and 3 states; sequences of lengths 4, 1 and 2, with missing steps."""
    torch.manual_seed(0)
    two = blocks.from_clusters(torch.tensor([0, 0, 1, 2, 2]), torch.tensor([2, 1, 3]))
    words = torch.full((5, 3), -torch.inf, dtype=dtype)
    for members, size in (([0, 1], 2), ([2], 1), ([3, 4], 3)):
        words[members, :size] = torch.randn(len(members), size, dtype=dtype).log_softmax(0)
    vectors = torch.randn(2, 6, 4, dtype=dtype)
    transition = {
        "matrix": torch.randn(6, 6, dtype=dtype).log_softmax(-1),
        "one level": InnerProductTransition(*vectors, two),
        "two levels": InnerProductTransition(*vectors, two, torch.randn(6, 3, dtype=dtype)),
    }[kind]
    start, lengths = torch.full((6,), 1 / 6, dtype=dtype).log(), torch.tensor([4, 1, 2])
    return BlockHMM(start, transition, words, two, lengths, torch.rand(3, 4) < 0.7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["matrix", "one level", "two levels"])
def test_an_hmm_in_blocks_comes_back(tmp_path, kind, dtype):
    hmm = block_hmm(kind, dtype)
    save(hmm, tmp_path / "hmm")
    found = load_hmm(tmp_path / "hmm")
    assert type(found) is BlockHMM
    assert all_bits(persistence.describe(found)[0]) == all_bits(persistence.describe(hmm)[0])
    values = hmm.sample()
    assert bits(found.log_prob(values)) == bits(hmm.log_prob(values))
    longer = found.with_lengths(torch.tensor([4, 4, 4]))
    assert longer.log_prob(values).dtype == dtype


# A directory ------------------------------------------------------------------------------------


def test_a_directory_that_was_not_saved_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="did not write"):
        save(nn.Linear(2, 1), tmp_path)
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / FILE)
    with pytest.raises(ValueError, match="did not write"):
        save(nn.Linear(2, 1), tmp_path)
    write_tensors(tmp_path / FILE, {}, {"kind": "checkpoint"})
    with pytest.raises(ValueError, match="did not write"):
        save(nn.Linear(2, 1), tmp_path)
    with pytest.raises(FileExistsError):
        save(nn.Linear(2, 1), tmp_path / "thesis.tex")
    assert sorted(p.name for p in tmp_path.iterdir()) == [FILE, "thesis.tex"]
    with pytest.raises(ValueError, match="must hold one of kind hmm; it is of kind checkpoint"):
        load_hmm(tmp_path)


@pytest.mark.parametrize("name", [FILE, "pyrohmm.json"])
def test_links_in_a_directory_are_replaced_and_not_followed(tmp_path, name):
    """A link to the directory, and one that is named as the file itself, stay links."""
    other, target, link = tmp_path / "other", tmp_path / "m", tmp_path / "link"
    save(hmm_with(dist.Poisson(torch.ones(K))), target)
    other.write_bytes((target / name).read_bytes())
    before = other.read_bytes()
    (target / name).unlink()
    (target / name).symlink_to(other)
    link.symlink_to(target, target_is_directory=True)
    save(hmm_with(dist.Poisson(positive(K))), link)
    assert link.is_symlink()
    assert other.read_bytes() == before
    assert not (target / name).is_symlink()
    assert load_hmm(link).emission.rate.shape == (K,)
    named = tmp_path / "named"
    named.symlink_to(tmp_path / "tensors")
    write_tensors(named, {"x": torch.ones(1)}, {})
    assert named.is_symlink()
    assert read_tensors(tmp_path / "tensors")[0]["x"].item() == 1.0


@pytest.mark.parametrize("read", [
    lambda path: load_hmm(path.parent), lambda path: LanguageModel.load(path.parent), read_tensors,
    lambda path: Checkpoint(path, {}).resume(lambda fields: None, []),
], ids=["hmm", "language model", "tensors", "checkpoint"])  # fmt: skip
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(ValueError, match="must be a regular file"):
        read(tmp_path / FILE)


@pytest.mark.parametrize("existing", [False, True])
def test_what_was_saved_survives_a_failure_at_every_moment(tmp_path, monkeypatch, existing):
    """The n-th call to the disk fails: what can be read is the old, the new or nothing."""
    target = tmp_path / "x"
    for count in range(20):
        if existing:
            save(hmm_with(dist.Poisson(torch.full((K,), 1.0))), target)
        calls = {"left": count}

        def guarded(real, calls=calls):
            def call(*arguments):
                calls["left"] -= 1
                if calls["left"] < 0:
                    raise Failure
                return real(*arguments)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", guarded(os.replace))
            patch.setattr(os, "fsync", guarded(os.fsync))
            try:
                save(hmm_with(dist.Poisson(torch.full((K,), 2.0))), target)
            except Failure:
                finished = False
            else:
                finished = True
        assert temporaries(tmp_path) == []
        if (target / FILE).exists():
            assert load_hmm(target).emission.rate[0] in ([1.0, 2.0] if existing else [2.0])
        else:
            assert not existing
        if finished:
            break
        if not existing and target.exists():
            assert calls["left"] < 0
            for path in target.iterdir():
                path.unlink()
            target.rmdir()
    assert finished
    assert count > 4
    assert (load_hmm(target).emission.rate == 2.0).all()


# A module ---------------------------------------------------------------------------------------


class Point(HMMModule):
    def __init__(self, num_states=K, extra=False):
        super().__init__()
        self.scores = nn.Parameter(torch.randn(num_states))
        self.rate = PyroParam(positive(num_states), dist.constraints.positive)
        self.register_buffer("count", torch.tensor(3))
        if extra:
            self.extra = nn.Parameter(torch.ones(1))

    def forward(self, lengths, observed=None):
        initial = self.scores.log_softmax(-1)
        matrix = initial.expand(len(initial), -1)
        return HMM(initial, matrix, dist.Poisson(self.rate), lengths, observed)


class Other(Point):
    pass


def state(module):
    return all_bits(module.state_dict())


@pytest.mark.parametrize(
    "make",
    [
        Point,
        lambda: TabularHMM(K, categorical(4, torch.rand(K, 4) + 1)),
        lambda: TabularHMM(K, normal(2, loc=torch.randn(2))),
        lambda: TabularHMM.from_hmm(hmm_with(dist.Poisson(positive(K)))),
        lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)),
        lambda: nn.Identity(),
    ],
)
def test_modules_come_back_with_the_same_bits(tmp_path, make):
    first, second = make(), make()
    save(first, tmp_path / "x")
    parameters = [id(each) for each in second.parameters()]
    load_into(second, tmp_path / "x")
    assert state(second) == state(first)
    assert [id(each) for each in second.parameters()] == parameters
    assert all(each.requires_grad for each in second.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Other(), "its class is Point in the file, Other in module"),
        (lambda: Point(extra=True), "extra is not in the file"),
        (lambda: Point(K + 1), r"scores is \(3,\) torch.float64 in the file, \(4,\)"),
        (lambda: Point().float(), "torch.float32 in module"),
        (lambda: nn.Linear(1, 1), r"scores is \(3,\) torch.float64 in the file, not in module"),
    ],
)
def test_a_module_that_differs_is_refused_and_unchanged(tmp_path, make, message):
    save(Point(), tmp_path / "x")
    module = make()
    before = state(module)
    with pytest.raises(ValueError, match=message):
        load_into(module, tmp_path / "x")
    assert state(module) == before


def test_the_kinds_are_not_mixed_up(tmp_path):
    save(Point(), tmp_path / "module")
    save(hmm_with(dist.Poisson(positive(K))), tmp_path / "hmm")
    with pytest.raises(ValueError, match="load_into"):
        load_hmm(tmp_path / "module")
    with pytest.raises(ValueError, match="load_hmm"):
        load_into(Point(), tmp_path / "hmm")
    with pytest.raises(TypeError, match="module must be"):
        load_into(load_hmm(tmp_path / "hmm"), tmp_path / "module")


@pytest.mark.parametrize("method", ["EM", "MAP"])
def test_a_fit_is_saved_as_its_hmm_for_other_data(tmp_path, method):
    data = datasets.casino(num_sequences=3, num_steps=10).without_labels()
    new = datasets.casino(num_sequences=2, num_steps=5)
    module = TabularHMM(2, categorical(6))
    if method == "EM":
        fit = fit_em(module, data, num_iterations=3)
    else:
        fit = fit_map(MarginalModel(module), data, num_iterations=3)
    save(fit, tmp_path / "fit")
    hmm = load_hmm(tmp_path / "fit").with_lengths(new.lengths)
    assert bits(hmm.log_prob(new.values)) == bits(fit.hmm(new).log_prob(new.values))
