"""Train or fine-tune a causal language model of Hugging Face's transformers, unmodified.

    pip install -c constraints.txt transformers peft
    python examples/huggingface.py                             # a small GPT-2 with random weights
    python examples/huggingface.py --model folder/of/a/model   # weights that you have on disk
    python examples/huggingface.py --lora true                 # with LoRA

The LightningModule below is all that there is. Each of the two stages holds its own blocks, their
gradients and their optimizer state.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config

from lightning_pipeshift import PipeShiftStrategy


class FineTuned(L.LightningModule):
    """A model of transformers, with the loss that it computes itself."""

    def __init__(self, model: Any, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate)


def with_lora(model: Any) -> Any:
    """Freezes a GPT-2 and adds low-rank matrices to its attention, which are trained.

    Other models name their attention otherwise: leave `target_modules` out for one that PEFT knows.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def small_gpt2() -> Any:
    """A GPT-2 of six blocks with random weights, whose tokens are bytes."""
    sizes = {"n_positions": 64, "n_embd": 128, "n_layer": 6, "n_head": 4}
    config = GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes)
    return AutoModelForCausalLM.from_config(config)


def text(length: int, batches: int, batch_size: int) -> list[Tensor]:
    """Bytes of Python's own source files, as windows of `length`."""
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
    windows = torch.tensor(list(source[: batches * batch_size * length])).view(-1, length)
    return list(windows)


def main(model: str | None = None, lora: bool = False, steps: int = 15, stages: int = 2) -> None:
    """Train on two stages and print the loss.

    Args:
        model: a folder with a causal language model, as `save_pretrained` writes it. Its
            vocabulary has to have 256 tokens or more, as tokens are bytes here.
        lora: whether to train LoRA's matrices only (of a GPT-2).
        steps: the number of optimizer steps.
        stages: the number of processes.
    """
    L.seed_everything(1, verbose=False)
    made = small_gpt2() if model is None else AutoModelForCausalLM.from_pretrained(model)
    module = FineTuned(with_lora(made) if lora else made)
    strategy = PipeShiftStrategy(microbatches=4)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=stages,
        strategy=strategy,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    losses: list[float] = []

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            losses.append(float(trainer.callback_metrics["train_loss"]))

    trainer.callbacks.append(Losses())  # type: ignore[attr-defined]
    trainer.fit(module, DataLoader(text(32, steps, 8), batch_size=8))  # type: ignore[arg-type]
    if trainer.is_global_zero:
        print(f"\n{strategy.plan}\n\nloss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main)
