"""Supervised fine-tuning of a small causal language model by the Trainer.

Packed sequences, losses of the completions alone, LoRA, gradient checkpointing, accumulation.
"""

import time
from statistics import median

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

LENGTH, WORDS = 32, 80


class Packed(Dataset):
    """Prompts and completions one after the other, cut into pieces of one length."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        words, labels = [], []
        while len(words) < count * LENGTH:
            prompt = torch.randint(2, WORDS, (5,), generator=generator).tolist()
            completion = [*prompt[::-1], 1]
            words += [*prompt, *completion]
            labels += [*[-100] * len(prompt), *completion]
        cut = [slice(i * LENGTH, (i + 1) * LENGTH) for i in range(count)]
        self.rows = [{"input_ids": words[s], "labels": labels[s]} for s in cut]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {name: torch.tensor(value) for name, value in self.rows[index].items()}


class Times(TrainerCallback):
    def __init__(self):
        self.seconds = []

    def on_step_begin(self, args, state, control, **_):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        self.seconds.append(time.perf_counter() - self.began)

    def on_log(self, args, state, control, logs, **_):
        names = [name for name in ("loss", "eval_loss") if name in logs]
        if state.is_world_process_zero and names:
            print(f"step {state.global_step} {names[0]} loss {float(logs[names[0]]):.4f}")


def main():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    model = get_peft_model(GPT2LMHeadModel(config), lora)
    model.enable_input_require_grads()
    arguments = TrainingArguments(
        output_dir="sft",
        max_steps=8,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        seed=5,
    )
    times = Times()
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Packed(40, 1),
        eval_dataset=Packed(8, 2),
        callbacks=[times],
    )
    trainer.train()
    trainer.save_model("sft/last")
    if trainer.is_world_process_zero():
        print(f"seconds {median(times.seconds):.4f}")


main()
