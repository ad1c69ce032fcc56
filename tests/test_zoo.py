"""The sweep over other people's models: what it counts, and how it makes them comparable."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.zoo import summary, verdict
from benchmarks.zoo_models import loss_of, turn_drops_off


def test_what_is_counted() -> None:
    good = {"stages": 2, "cut": "random", "trains": True, "ranks_agree": True}
    same = good | {"same_bits": True, "same_losses": True, "differing": {}}
    off = good | {"same_bits": False, "same_losses": True, "differing": {"w": 2e-7}}
    hung = {"stages": 3, "cut": "random", "trains": False, "error": "hang: still running"}
    one = {"stages": 1, "cut": "all", "trains": True, "ranks_agree": True}
    assert [verdict(run) for run in (one, same, off, hung)] == [
        "trains",
        "same bits",
        "off by 2e-07",
        "hang!",
    ]
    counts = summary(
        [
            {"built": True, "runs": [one, same, same]},
            {"built": True, "runs": [one, same, off]},
            {"built": True, "runs": [one, same, hung]},
            {"built": False, "error": "no"},
        ]
    )
    assert counts["models"] == 3
    assert counts["train on one stage"] == 3
    assert counts["train on all splits"] == 2
    assert counts["same bits on all splits"] == 1
    assert counts["hang or die somewhere"] == 1


def test_drops_are_turned_off_wherever_a_rate_is() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.attn_dropout = 0.5
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.5)

    layer = Layer()
    turn_drops_off(layer)
    assert (layer.drop.p, layer.attn_dropout, layer.attention.dropout) == (0.0, 0.0, 0.0)


def test_a_loss_depends_on_all_that_a_model_returns() -> None:
    a, b = (torch.full((2, 3), 2.0, requires_grad=True) for _ in range(2))
    loss = loss_of({"first": a, "rest": [b, torch.ones(2, dtype=torch.int64)]})
    assert loss.item() == 8.0
    loss.backward()
    assert a.grad is not None
    assert b.grad is not None
    with pytest.raises(ValueError, match="gradient"):
        loss_of(torch.ones(3))
