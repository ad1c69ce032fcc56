"""The main job as a user runs it: the script, and the same as a config file."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from examples.train_gpt import GPT, TextDataModule
from lightning_pipeshift import PipeShiftStrategy
from lightning_pipeshift.commands.cli import main
from lightning_pipeshift.testing.ranks import launch_script, run_ranks
from tests import ROOT
from tests.features_models import differences, on_one_device, on_rank, plain, quiet_trainer


def test_the_script_trains_shows_its_plan_and_loads_its_checkpoint_in_plain_pytorch() -> None:
    launched = launch_script(ROOT / "examples" / "train_gpt.py", "--steps", "40", "--width", "64")
    output = launched.output
    assert "PipeShift plan: 7 layers, 1 virtual machine, schedule 1f1b, 8 microbatches" in output
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
    names = PipeShiftStrategy.__init__.__annotations__.keys() - {"return"}
    assert len(names) > 10
    for name in names:
        section = re.search(rf"^  --trainer\.strategy\.{name} .*\n(( {{24}}.*\n)+)", helped, re.M)
        assert section, name
        assert "type:" in section.group(1), name
        assert len(section.group(1).split("(type:")[0].split()) >= 3, f"{name} has no help"
