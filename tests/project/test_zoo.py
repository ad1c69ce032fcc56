"""The sweep over other people's models: what it counts, and how it makes them comparable."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.zoo import summary, verdict
from benchmarks.zoo_models import loss_of, turn_drops_off
from benchmarks.zoo_page import BEGIN, END, PAGE, filled, results


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


# --- the page ---


def test_the_page_is_that_of_the_committed_results() -> None:
    page = PAGE.read_text()
    assert filled(page, results()) == page, "run `python -m benchmarks.zoo_page`"


def test_what_the_page_says() -> None:
    one = {"stages": 1, "cut": "all", "schedule": "1f1b", "trains": True, "ranks_agree": True}
    two = one | {"stages": 2, "cut": "random"}
    same = two | {"same_bits": True, "same_losses": True, "differing": {}}
    off = two | {"same_bits": False, "same_losses": True, "differing": {"w": 2e-7}}
    refused = two | {"trains": False, "error": "LayerError: a", "message": "a layer\nthat | is"}
    hung = two | {"trains": False, "error": "hang: still running after 90 s"}
    models = [
        {"name": name, "family": "f", "built": True, "num_layers": 3, "runs": [one, run]}
        for name, run in (("good", same), ("near", off), ("no", refused), ("slow", hung))
    ]
    models[0]["plain"] = {"same": True}
    models.append({"name": "large", "family": "f", "built": False, "error": "too large"})
    machine = {"cores": 2, "cpu": "C", "python": "3", "torch": "2", "lightning": "2"}
    result = {"command": "sweep", "date": "2026-11-22T11:00", "machine": machine}
    page = filled(
        f"above\n{BEGIN}\nold\n{END}\nbelow\n",
        {"timm": result | {"figures": {"models": models}}},
    )
    assert page.startswith(f"above\n{BEGIN}\n")
    assert page.endswith(f"{END}\nbelow\n")
    assert "old" not in page
    for line in (
        "| timm | 4 | 1 | 4 | 2 | 1 | 1 | 1 of 1 | 0 |",
        "| family | model | layers | 1 stage | 2 stages, random, 1f1b | plain loop |",
        "| f | `good` | 3 | trains | same bits | same |",
        "| f | `near` | 3 | trains | off by 2e-07 | not tried |",
        "| f | `no` | 3 | trains | refused (LayerError) | not tried |",
        "| f | `slow` | 3 | trains | fails (hang) | not tried |",
        "- `no`: a layer that | is",
        "- `large`: too large",
    ):
        assert f"\n{line}\n" in page, line
    with pytest.raises(ValueError, match="put them back"):
        filled("no markers", {})
