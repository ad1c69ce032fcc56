"""NCCL between stages: the same bits, groups that come and go, and failures that end in seconds.

With fewer GPUs than ranks, the ranks share the first one: NCCL refuses that within a host, so each
gives itself another host's name (``NCCL_HOSTID``), and data goes by sockets.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeshift import Communication, PipeShiftStrategy, StageFailedError
from lightning_pipeshift.devices.streams import side_stream
from lightning_pipeshift.lightning import connection
from lightning_pipeshift.plan.inputs.cluster import Device
from lightning_pipeshift.runtime.comm import mailbox
from lightning_pipeshift.runtime.comm.backends import payload_address
from lightning_pipeshift.runtime.comm.channels import Channels
from lightning_pipeshift.runtime.comm.frames import packed_for_host
from lightning_pipeshift.runtime.comm.groups import Lanes
from lightning_pipeshift.runtime.comm.process_groups import ProcessGroups
from lightning_pipeshift.runtime.gradients.aggregation import Aggregation, GradientGroup
from lightning_pipeshift.runtime.planning.probe import probe
from lightning_pipeshift.testing import Outcome, run_ranks
from tests.end_to_end.test_changing_plans import Adopts, Trains
from tests.end_to_end.test_cuda import assert_same
from tests.features_models import QUIET, built, parameters_of
from tests.models import ZOO, points
from tests.unit.runtime.stages import connect

pytestmark = pytest.mark.cuda


def own_device() -> torch.device:
    """This rank's GPU, prepared for NCCL."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_shared = torch.cuda.device_count() < world_size
    if is_shared:
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    device = torch.device("cuda", 0 if is_shared else rank)
    torch.cuda.set_device(device)
    return device


def trainer_on(backend: str, callbacks: Any = (), **settings: Any) -> L.Trainer:
    torch.use_deterministic_algorithms(True, warn_only=True)
    L.seed_everything(7, verbose=False)
    stages = int(os.environ["WORLD_SIZE"])
    # Only this rank's own is used.
    devices = [own_device()] * stages
    vars(connection)["backend_of_sums"] = lambda *_: backend
    strategy = PipeShiftStrategy(parallel_devices=devices, **settings)
    return L.Trainer(strategy=strategy, callbacks=list(callbacks), max_epochs=1, **QUIET)  # type: ignore[arg-type]


# --- the same bits ---


def train(name: str, backend: str, schedule: str, microbatches: int) -> dict[str, Tensor]:
    specimen = ZOO[name]
    module = built(specimen.make_module)
    trainer = trainer_on(backend, partition="uniform", schedule=schedule, microbatches=microbatches)
    trainer.fit(module, specimen.loader(4), specimen.loader(2))
    return parameters_of(module)


SCHEDULES = [("dropout", name, m) for name in ("gpipe", "1f1b", "eager_1f1b") for m in (1, 2, 4)]
SHARED = [("functional_tying", "1f1b", 2), ("loose_parameters", "eager_1f1b", 4)]


@pytest.mark.parametrize(("name", "schedule", "microbatches"), SCHEDULES + SHARED)
def test_every_schedule_gives_the_same_bits(name: str, schedule: str, microbatches: int) -> None:
    (alone,) = run_ranks(train, 1, name, "gloo", schedule, microbatches)
    for stages in (2, 3):
        for found in run_ranks(train, stages, name, "nccl", schedule, microbatches):
            assert_same(found, alone)


def move_back_and_forth(backend: str, aggregation: Any) -> tuple[dict[str, Tensor], list[int], int]:
    num_groups: list[int] = []
    early = 0
    finish = Aggregation.finish

    def noting(self: Aggregation, *arguments: Any, **named: Any) -> list[GradientGroup]:
        nonlocal early
        early += sum(group.is_started for group in self._groups)
        return finish(self, *arguments, **named)

    Aggregation.finish = noting  # type: ignore[method-assign]

    class Counts(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            num_groups.append(len(dist.distributed_c10d._world.pg_names))

    cuts = {batch: [[3, 4], [2 + batch % 3, 5 - batch % 3]] for batch in range(8)}
    module = built(lambda: Trains("adam"))
    trainer = trainer_on(
        backend,
        [Adopts(cuts), Counts()],
        virtual_machines=2,
        microbatches=2,
        partition=[[3, 4], [4, 3]],
        communication=Communication(gradient_aggregation=aggregation),
    )
    trainer.fit(module, points(20))
    return parameters_of(module), num_groups, early


@pytest.mark.parametrize("aggregation", ["ring", "allreduce"])
def test_plans_change_on_two_virtual_machines(aggregation: str) -> None:
    """With tied and loose parameters. Sums begin beside the backwards, and no group is left."""
    by_host = run_ranks(move_back_and_forth, 4, "gloo", aggregation)
    by_device = run_ranks(move_back_and_forth, 4, "nccl", aggregation)
    for (found, num_groups, early), (expected, _, _) in zip(by_device, by_host, strict=True):
        if aggregation == "ring":
            assert_same(found, expected)
        else:
            for name, value in expected.items():
                assert torch.allclose(found[name].cpu(), value.cpu(), 1e-3, 1e-4), name
        assert max(num_groups) <= min(num_groups) + 4
        assert early > 0


# --- single tensors and links ---


def channels_on_devices() -> Channels:
    device = own_device()
    by_host, board = connect()
    groups = Lanes().between_stages(by_host.ranks)
    channels = Channels(by_host.ranks, dist.get_rank(), device, board.watched, groups)
    channels.share_memory(payload_address(device))
    assert len(channels.shares_memory_with) == channels.num_stages - 1

    def refuse(content: Any, room_bytes: int) -> Any:
        assert not isinstance(content, Tensor), "a tensor travels by way of the host"
        return packed_for_host(content, room_bytes)

    vars(mailbox)["packed_for_host"] = refuse
    return channels


def pass_a_tensor_round() -> list[float]:
    channels = channels_on_devices()
    box = channels.mailbox()
    stage, last, shape = channels.stage, channels.num_stages - 1, (1 << 20,)
    total = torch.full(shape, float(stage), device=channels.device)
    rounds = []
    for _ in range(3):
        if stage:
            message = box.take_labelled(stage - 1, "a total")
            total = message.tensor(total.dtype, shape, channels.device) + stage
        if stage < last:
            box.send_labelled(stage + 1, "a total", total)
            # What runs on the device after the send may change what was sent.
            total.fill_(-1)
        rounds.append(total.clone())
    found = [float(total.mean()) for total in rounds]
    box.close()
    return found


def test_a_tensor_goes_from_device_to_device() -> None:
    *others, last = run_ranks(pass_a_tensor_round, 3)
    assert last == [3.0, 2.0, 2.0]
    assert others == [[-1.0, -1.0, -1.0]] * 2


def measure() -> tuple[float, float]:
    channels = channels_on_devices()
    device = channels.device
    measured = probe(channels, device, Device("a", torch.cuda.get_device_name(device)))
    link = measured.cluster.link(0, 1)
    return link.bandwidth, link.latency_seconds


def test_links_are_measured_between_devices() -> None:
    for bandwidth, latency in run_ranks(measure, 2):
        assert 1e7 < bandwidth < 1e13
        assert 0 < latency < 1


# --- how groups are made ---


def make_a_group() -> tuple[bool, bool, bool]:
    device = own_device()
    _, board = connect()
    groups = ProcessGroups("nccl", device, board.watched)
    groups.want([(0,)])
    dist.all_reduce(torch.ones(1, device=device), group=groups.group((0,)))
    backend = groups.group((0,))._get_backend(device)
    options = backend.options
    # Errors can be seen, and there are none.
    assert backend.get_error().name == "SUCCESS"
    assert groups.error() is None
    # All streams of the pool from which NCCL's come, and ours.
    theirs = {torch.cuda.Stream(device, priority=-5).cuda_stream for _ in range(64)}
    ours = set()
    for name in 2 * ("out", "back", "moves", "rings 0", "rings 1"):
        with side_stream(device, name):
            ours.add(torch.cuda.current_stream(device).cuda_stream)
    ours.discard(torch.cuda.default_stream(device).cuda_stream)
    is_apart = not theirs & ours and len(ours) == 5
    groups.end_all()
    return options.is_high_priority_stream, is_apart, dist.is_initialized()


def test_what_a_group_is_like_and_how_it_ends() -> None:
    assert run_ranks(make_a_group, 1) == [(True, True, False)]


# --- failures ---


def fail_in_a_step(how: str) -> str:
    class Fails(Trains):
        def training_step(self, batch: Any) -> Tensor:
            loss = super().training_step(batch)
            # The step has run on fake tensors, too.
            if type(loss) is Tensor and self.trainer.global_step == 2:
                if how == "raises":
                    raise ValueError("the user's own")
                os.kill(os.getpid(), signal.SIGKILL)
            # As a user's own code, behind receives that are posted.
            loss.detach().cpu()
            return loss

    trainer = trainer_on("nccl", partition="uniform", microbatches=4)
    with pytest.raises((ValueError, StageFailedError)) as caught:
        trainer.fit(built(lambda: Fails("adam")), points(8))
    # The device is free.
    torch.cuda.synchronize()
    assert not dist.is_initialized()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_rank_that_fails_ends_the_run_everywhere(how: str) -> None:
    """The harness kills what has not ended after a minute."""
    outcomes: list[Outcome] = run_ranks(fail_in_a_step, 3, how, timeout=60, expect_failure=True)
    *survivors, failed = sorted(outcomes, key=lambda outcome: outcome.rank)
    if how == "raises":
        assert failed.value == "ValueError: the user's own"
    for survivor in survivors:
        assert not survivor.failed, survivor
        assert survivor.value.startswith("StageFailedError: Stage 2")
