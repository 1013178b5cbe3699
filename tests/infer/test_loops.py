"""Loops of other packages train the modules, as the page on scale shows."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch import distributed

from pyrohmm import NeuralHMM, Sequences, blocks

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "scale.md"
LOOPS = re.findall(r"^:name: (\w+)\n\n(.*?)^```", PAGE.read_text(), re.S | re.M)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # their own
@pytest.mark.parametrize(("name", "code"), LOOPS, ids=[name for name, _ in LOOPS])
def test_a_loop_of_the_page_learns(name, code, tmp_path, monkeypatch):
    if name != "fsdp":
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    if name == "fsdp":
        monkeypatch.setattr(os, "environ", os.environ | place)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    data = Sequences(torch.tensor([[0, 1, 2, 3] * 3] * 64))
    module = NeuralHMM(8, 4, 16, blocks=blocks.from_clusters(torch.arange(4) % 2, 4))
    before = -module(data.lengths).log_prob(data.values).mean().item()
    names = {"torch": torch, "data": data, "module": module}
    exec(compile(code, name, "exec"), names)
    if name == "fsdp":  # parameters are there within its own call alone
        assert names["model"](data).item() * 12 < 0.9 * before
        distributed.destroy_process_group()
        return
    assert -module(data.lengths).log_prob(data.values).mean().item() < 0.9 * before
