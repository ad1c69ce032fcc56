"""The main job as a user runs it: the script, and the same as a config file."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from peft import PeftModel
from torch.utils.data import DataLoader

from examples.train_gpt import GPT, TextDataModule
from lightning_pipeshift import Communication, PipeShiftStrategy
from lightning_pipeshift.commands.cli import main
from lightning_pipeshift.testing import sleeping
from lightning_pipeshift.testing.processes import free_port
from lightning_pipeshift.testing.ranks import launch_script, run_ranks
from tests import ROOT
from tests.end_to_end.test_changing_plans import go_by_sleep, sleep
from tests.features_models import differences, on_one_device, on_rank, plain, quiet_trainer


def test_the_script_trains_shows_its_plan_and_loads_its_checkpoint_in_plain_pytorch() -> None:
    launched = launch_script(ROOT / "examples" / "train_gpt.py", "--steps", "40", "--width", "64")
    output = launched.output
    assert "PipeShift plan: 7 layers, schedule 1f1b, 8 microbatches" in output
    assert re.search(r"^ +0 │0─*1", output, re.MULTILINE), "the plan's drawing"
    assert "train_loss=" in output, "the progress bar"
    losses = re.findall(r"^(?:validation loss|byte-frequency model) +(\d\.\d+) nats", output, re.M)
    trained, frequencies = map(float, losses)
    assert trained < frequencies, "40 steps are enough to know more than how often bytes occur"
    assert "loaded in plain PyTorch, writes:\n\ndef " in output


def trained_gpt(how: Any, batch_size: int, precision: Any) -> Any:
    L.seed_everything(1)
    data = TextDataModule(batch_size=batch_size)
    model = GPT(num_layers=3, width=32)
    trainer = quiet_trainer(how, max_steps=20, gradient_clip_val=1.0, precision=precision)
    data.setup()
    trainer.fit(model, data.train_dataloader())
    return plain(dict(model.state_dict()))


def test_two_virtual_machines_of_two_stages_train_as_one_device() -> None:
    strategy = {"virtual_machines": 2, "microbatches": 2}

    def over_ranks(precision: str) -> list[Any]:
        ranks = run_ranks(on_rank, 4, trained_gpt, strategy, (8, precision), {})
        for rank in ranks[1:]:
            assert not differences(rank, ranks[0], 0, 0), "the same bits everywhere"
        return ranks

    # Adam makes a whole step of a gradient that is nothing but rounding: more digits tell apart
    # what is rounding and what is not.
    expected = on_one_device(trained_gpt, 16, "64-true")
    assert not differences(over_ranks("64-true")[0], expected, 1e-5, 1e-7)
    first, again = over_ranks("32-true"), over_ranks("32-true")
    assert not differences(first[0], again[0], 0, 0), "the same bits in every run"


def test_the_command_trains_from_the_config_file(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    short = [f"--trainer.{name}=2" for name in ("max_steps", "val_check_interval")]
    short += ["--trainer.limit_val_batches=2", "--model.init_args.width=32"]
    command = "from lightning_pipeshift.commands.cli import main; main()"
    script = tmp_path / "pipeshift.py"
    script.write_text(command)
    config = ["fit", "--config", "examples/gpt.yaml"]
    launched = launch_script(
        script, *config, *short, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}
    )
    assert "PipeShift plan: 7 layers" in launched.output
    (checkpoint,) = tmp_path.glob("lightning_logs/version_0/checkpoints/*.ckpt")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert not any(tensor.is_meta for tensor in state.values())
    assert state["token_embedding.weight"].shape == (256, 32)


def test_the_command_has_every_argument_of_the_strategy_with_its_type_and_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["pipeshift", "fit", "--trainer.strategy.help=PipeShiftStrategy"]
    )
    with pytest.raises(SystemExit):
        main()
    helped = capsys.readouterr().out
    names = PipeShiftStrategy.__init__.__annotations__.keys() - {"return", "communication"}
    names |= {f"communication.{field.name}" for field in fields(Communication)}
    assert len(names) == 13 + 7
    for name in names:
        section = re.search(
            rf"^  --trainer\.strategy\.{re.escape(name)} .*\n(( {{24}}.*\n)+)", helped, re.M
        )
        assert section, name
        assert "type:" in section.group(1), name
        assert len(section.group(1).split("(type:")[0].split()) >= 3, f"{name} has no help"


# --- the other examples ---


def printed_by(name: str, *arguments: str) -> str:
    """What an example prints on this rank, run as a script is."""
    sys.argv = [name, *arguments]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return said.getvalue()


def printed_by_sleepers(name: str) -> str:
    """The same, where layers take as long as they ask to sleep, whatever else runs here."""
    go_by_sleep()
    sleeping.time = SimpleNamespace(sleep=sleep)  # type: ignore[assignment,attr-defined]
    return printed_by(name)


def first_rank(num_ranks: int, name: str, *arguments: str) -> str:
    """What an example prints on the first of its ranks, which are forked rather than started."""
    said: str = run_ranks(printed_by, num_ranks, name, *arguments)[0]
    return said


def numbers(pattern: str, said: str) -> list[float]:
    found = re.findall(pattern, said, re.MULTILINE)
    assert found, said
    return [float(number) for number in found]


def test_every_example_is_run() -> None:
    source = Path(__file__).read_text()
    for path in (ROOT / "examples").iterdir():
        if path.suffix in (".py", ".sh", ".yaml"):
            assert f'{path.name}"' in source, f"no test runs {path.name}"


def test_uneven_machines_are_cut_by_their_speeds() -> None:
    said = run_ranks(printed_by_sleepers, 3, "uneven_machines.py")[0]
    assert len(numbers(r"^a step, .* ([\d.]+) s$", said)) == 2
    fast, medium, slow = numbers(r"\((\d+) layers\)", said.split("partition='auto'")[1])
    assert fast > medium > slow


def test_layers_leave_a_machine_that_gets_slow() -> None:
    said = run_ranks(printed_by_sleepers, 3, "watch_a_migration.py")[0]
    before, after = said.split("after\n")
    counts = re.findall(r"layers (\d+), (\d+), (\d+)$", before, re.MULTILINE)
    assert counts[0] == ("4", "4", "4")
    assert int(counts[-1][1]) < 4, said
    assert "PipeShift plan: 12 layers" in after


def test_a_model_of_transformers_learns() -> None:
    said = first_rank(2, "huggingface.py")
    first, last = numbers(r"([\d.]+) at ", said)
    assert last < first


def fine_tuned_with_lora(how: Any, folder: Path) -> Any:
    from examples.huggingface import FineTuned, small_gpt2, text, with_lora

    L.seed_everything(1, verbose=False)
    module = FineTuned(with_lora(small_gpt2()))
    before = plain(dict(module.state_dict()))
    trainer = quiet_trainer(how, max_steps=3)
    trainer.fit(module, DataLoader(text(16, 3, 8), batch_size=8))  # type: ignore[arg-type]
    module.model.save_pretrained(folder / f"{trainer.world_size}-{trainer.global_rank}")
    return before, plain(dict(module.state_dict()))


def test_lora_trains_the_bits_of_one_stage_and_nothing_else(tmp_path: Path) -> None:
    from examples.huggingface import small_gpt2

    one, *two = (
        found
        for stages in (1, 2)
        for found in run_ranks(
            on_rank, stages, fine_tuned_with_lora, {"microbatches": 4}, (tmp_path,), {}
        )
    )
    for before, after in two:
        assert not differences(after, one[1], 0, 0)
        trained = {name for name, value in after.items() if not torch.equal(value, before[name])}
        assert trained
        assert all("lora_" in name for name in trained)
    loaded = PeftModel.from_pretrained(small_gpt2(), str(tmp_path / "2-1")).state_dict()
    for name in trained:
        assert torch.equal(loaded[name.removeprefix("model.")], after[name])


def test_the_asynchronous_example_trains_with_both_schedules() -> None:
    said = first_rank(4, "asynchronous.py")
    assert "schedule 1f1b, 4 microbatches" in said
    assert "schedule async-2bw" in said
    assert len(numbers(r"^an update of 4 samples, .* ([\d.]+) s$", said)) == 2


def test_the_budget_of_the_memory_example_is_kept() -> None:
    # Otherwise the measured times decide whether tensors are moved or computed again.
    said = first_rank(2, "memory.py", "--recompute", "none")
    peak, budget, moved = numbers(r"([\d.]+) MB", said)
    assert peak <= budget
    assert moved > 0
    assert re.search(r"^the same bits +True$", said, re.MULTILINE)


def test_a_cluster_is_planned_without_its_machines() -> None:
    said = first_rank(1, "plan_a_cluster.py", "--hosts", "4")
    assert "PipeShift plan: 24 layers" in said
    assert "virtual machines 0 to 3" in said, "each GPU holds the model"


def test_a_network_too_slow_for_two_workstations_is_seen() -> None:
    from examples.plan_a_cluster import MEGABITS, step_seconds

    slow, fast = step_seconds(MEGABITS[0]), step_seconds(MEGABITS[-1])
    assert slow[0] > fast[0]
    assert min(slow[1]) > 0, "neither holds the model alone"


def test_two_hosts_find_each_other(tmp_path: Path) -> None:
    environment = os.environ | {
        "PORT": str(free_port()),
        "STEPS": "4",
        "LOGS": str(tmp_path),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *sys.path])),
    }
    script = ROOT / "examples" / "two_hosts.sh"
    done = subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, check=False,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PipeShift plan: 7 layers" in done.stdout
    assert list(tmp_path.glob("lightning_logs/*/checkpoints/*.ckpt"))
