"""What a call gives, found on tensors without data."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn import functional

from lightning_pipeshift.values.contract import ContractFinder


def test_an_operation_that_fake_tensors_refuse_is_not_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)
    try:
        # Fake tensors take it for bfloat16 only, and log a trace for each call.
        args = torch.randn(6, 8), torch.randn(2, 8, 4), torch.tensor([2, 6], dtype=torch.int32)
        finder = ContractFinder(torch.device("cpu"))
        contract = finder.find(lambda x, w, ends: functional.grouped_mm(x, w, offs=ends), args, {})
    finally:
        log.removeHandler(caplog.handler)
    assert contract is not None
    assert contract.specs[0].shape == (6, 4)
    assert not caplog.records
