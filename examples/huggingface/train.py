"""Train a small GPT-2 with Hugging Face's Trainer. The script knows nothing of Poseidon.

poseidon run --ddp --hostfile=machinefiles/localserver examples/huggingface/train.py
torchrun --nproc_per_node=2 examples/huggingface/train.py --lora
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, set_seed

LETTERS, LENGTH = 32, 24


class Walks(Dataset[dict[str, Tensor]]):
    """Sequences in which each letter is the last one plus a step of its own sequence."""

    def __init__(self, count: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        start, step = torch.randint(LETTERS, (2, count, 1), generator=random)
        self._sequences = (start + step * torch.arange(LENGTH)) % LETTERS

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._sequences[index], "labels": self._sequences[index]}


class PrintLosses(TrainerCallback):  # type: ignore[misc]
    """Prints losses with all their digits."""

    def on_log(self, arguments: object, state: object, control: object, **more: object) -> None:
        logs = more["logs"]
        assert isinstance(logs, dict) and isinstance(arguments, TrainingArguments)
        losses = {name: logs[name] for name in ("loss", "eval_loss", "train_loss") if name in logs}
        if arguments.process_index == 0 and losses:
            print(f"step {state.global_step}: {losses}", flush=True)  # type: ignore[attr-defined]


def build_model(*, lora: bool) -> torch.nn.Module:
    config = GPT2Config(
        vocab_size=LETTERS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model: torch.nn.Module = GPT2LMHeadModel(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        )
    return model


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lora", action="store_true", help="train small adapters by PEFT")
    parser.add_argument("--folder", default="output/huggingface", help="of checkpoints")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint, if any")
    flags = parser.parse_args(words)
    set_seed(1)
    trainer = Trainer(
        model=build_model(lora=flags.lora),
        args=TrainingArguments(
            flags.folder,
            num_train_epochs=flags.epochs,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            logging_steps=5,
            eval_strategy="epoch",
            save_strategy="epoch",
            disable_tqdm=True,
            report_to=[],
        ),
        train_dataset=Walks(320, seed=1),
        eval_dataset=Walks(60, seed=2),
        callbacks=[PrintLosses()],
    )
    is_there = flags.resume and Path(flags.folder).is_dir()
    trainer.train(resume_from_checkpoint=get_last_checkpoint(flags.folder) if is_there else None)


if __name__ == "__main__":
    main()
