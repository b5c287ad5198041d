"""Trains a tiny Llama with Hugging Face's Trainer in bf16; ``OverflowCallback`` names a fault."""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from apex.integrations.transformers import OverflowCallback

LENGTH = 64


class Text(torch.utils.data.Dataset):
    """Pieces of Python's own documentation, as bytes."""

    def __init__(self, pieces):
        text = "\n".join(topics.values()).encode()[: pieces * LENGTH]
        self.ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, LENGTH)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class LogOfSilu(nn.Module):
    """An activation with a fault: the logarithm of a number that may be negative."""

    def forward(self, x):
        return nn.functional.silu(x).log()


def main():
    options = parse()
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    if options.fault:
        model.model.layers[1].mlp.act_fn = LogOfSilu()
    on_gpu = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=str(options.work_dir), bf16=True, use_cpu=not on_gpu, max_steps=options.steps,
        learning_rate=3e-3, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        logging_steps=10, save_strategy="no", report_to=[], disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
    )  # fmt: skip
    callback = OverflowCallback()
    Trainer(model, arguments, train_dataset=Text(1024), callbacks=[callback]).train()
    if callback.path is not None:
        print(callback.path.read_text())


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fault", action="store_true", help="put an operator that fails into it")
    parser.add_argument("--work-dir", type=Path, default=Path("work_dirs/transformers"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
