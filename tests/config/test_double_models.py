from __future__ import annotations

import pytest
import torch

from hansa import HansaError
from hansa.config import build, from_yaml

CODE = """
import hansa
from torch import nn
@hansa.component
def double():
    return nn.Sequential(nn.Flatten(), nn.Linear(60, 10)).double()
@hansa.component
def single():
    return nn.Sequential(nn.Flatten(), nn.Linear(60, 10))
"""
FILE = "data: {name: synthetic, clients: 3, options: {largest: 60}}\n"


def test_a_double_model_asks_for_double_arithmetic(tmp_path, monkeypatch):
    (tmp_path / "made_of_doubles.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def made(name, dtype):
        config = from_yaml(f"{FILE}dtype: {dtype}\nmodel: {{factory: made_of_doubles:{name}}}")
        return build.build_task(config, build.load_data(config))

    with pytest.raises(HansaError, match=r"float64 parameters.*Set dtype: float64, or leave \.double\(\) out"):
        made("double", "float32")
    assert made("double", "float64").dtype == torch.float64
    assert made("single", "float64").dtype == torch.float32
