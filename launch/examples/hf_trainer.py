"""A tiny Llama that learns to count, in Hugging Face's trainer: `Trainer(aotdist.compile(model), ...)`.

Run it as it is, or on several ranks, where the trainer wraps the model in DDP::

    python launch/examples/hf_trainer.py
    torchrun --nproc-per-node 2 launch/examples/hf_trainer.py

With `--eager` the same trainer runs uncompiled; the losses are the same, bit for bit.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import aotdist

VOCABULARY = 64


class Counting(Dataset[dict[str, Tensor]]):
    """Rows of numbers that go up by one."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = (torch.arange(16) + 7 * index) % VOCABULARY
        return {"input_ids": row, "labels": row}


def make_model() -> LlamaForCausalLM:
    """Two layers, with the same weights on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def main(*, eager: bool) -> None:
    """Train; the first rank prints."""
    model: Any = make_model()
    if not eager:
        aotdist.compile(model, backend="fx")
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=6,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=2,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            log_level="error",
        )
        trainer = Trainer(model, options, train_dataset=Counting())
        trainer.train()
    if int(os.environ.get("RANK", "0")) == 0:
        for entry in trainer.state.log_history[:-1]:
            print(f"step {entry['step']}: loss {entry['loss']}, norm {entry['grad_norm']}")
        if not eager:
            print(f"{len(model.graphs)} graphs")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # gloo's threads let go of their tensors: at exit they would abort
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(eager="--eager" in sys.argv[1:])
