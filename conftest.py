"""What every test and every doctest starts from: a seed, and an empty parameter store."""

import math
import os
import sys

import pyro
import pytest
import torch

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # workers share the processors
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


@pytest.fixture(autouse=True)
def _fresh(doctest_namespace):
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    dtype = torch.get_default_dtype()
    torch.set_printoptions(precision=4, sci_mode=False)
    import pyrohmm

    doctest_namespace.update(vars(pyro.distributions))
    doctest_namespace.update({n: v for n, v in vars(pyrohmm).items() if not n.startswith("_")})
    doctest_namespace.update(torch=torch, pyro=pyro, math=math, poutine=pyro.poutine)
    yield
    torch.set_default_dtype(dtype)
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
