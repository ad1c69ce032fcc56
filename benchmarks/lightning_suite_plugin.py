"""A pytest plugin for Lightning's own suite: our strategy where a test asked for none, and a record
of how every test ended.

``benchmarks.lightning_suite`` runs pytest with ``-p`` and this module, in an environment that says
what to do:

- ``PIPESHIFT_SUITE_STRATEGY``: ``pipeshift`` puts it in the place of ``SingleDeviceStrategy``
  where the Trainer would choose that by itself; anything else changes nothing.
- ``PIPESHIFT_SUITE_RECORD``: a file; a line of JSON is added when a test begins, and when it ends.
- ``PIPESHIFT_SUITE_LIMIT_SECONDS``: a test that takes longer has failed.
- ``PIPESHIFT_SUITE_MICROBATCHES``: of the strategy.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Generator
from typing import Any

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

_LIMIT_SECONDS = float(os.environ.get("PIPESHIFT_SUITE_LIMIT_SECONDS", 60))


def pytest_configure(config: pytest.Config) -> None:
    # Of a plugin that reruns tests, which nobody needs here.
    config.addinivalue_line("markers", "flaky: may fail now and then")
    if os.environ.get("PIPESHIFT_SUITE_STRATEGY") == "pipeshift":
        _put_ours_in()


def _put_ours_in() -> None:
    from lightning_pipeshift import PipeShiftStrategy

    choose: Any = _AcceleratorConnector._choose_strategy

    def choose_ours(connector: Any) -> Any:
        chosen = choose(connector)
        if type(chosen) is not SingleDeviceStrategy or not connector._parallel_devices:
            return chosen
        return PipeShiftStrategy(microbatches=int(os.environ["PIPESHIFT_SUITE_MICROBATCHES"]))

    connector_class: Any = _AcceleratorConnector
    connector_class._choose_strategy = choose_ours


def _note(**what: Any) -> None:
    with open(os.environ["PIPESHIFT_SUITE_RECORD"], "a") as record:
        record.write(json.dumps(what) + "\n")


class _TooLongError(Exception):
    pass


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _note(test=item.nodeid, begins=True)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    def stop(*_: Any) -> None:
        raise _TooLongError(f"still running after {_LIMIT_SECONDS:g} s")

    # Lightning's suite puts handlers back that it found; what it finds must not be ours.
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _LIMIT_SECONDS)
    try:
        return (yield)
    except _TooLongError:
        # Ranks that the test has started wait for what nobody sends.
        for child in multiprocessing.active_children():
            child.kill()
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    _note(
        test=report.nodeid,
        when=report.when,
        outcome=report.outcome,
        seconds=report.duration,
        reason=_reason_of(report),
    )


def _reason_of(report: pytest.TestReport) -> str:
    """The exception's own line."""
    if report.outcome != "failed":
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:400] if lines else ""
