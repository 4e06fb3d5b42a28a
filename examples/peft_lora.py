"""LoRA with `peft` on a `transformers` model (pip install 'hansa[peft]'): only adapters are trained and sent."""

import os

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import hansa

text = "the hansa was a league of towns that traded and helped each other without a king . " * 20
words = sorted(set(text.split()))
ids = torch.tensor([words.index(word) for word in text.split()])
rows = torch.stack([ids[start : start + 12] for start in range(0, len(ids) - 13, 4)])


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 12, "vocab_size": len(words)}
        ends = {"bos_token_id": None, "eos_token_id": None}
        no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        torch.manual_seed(7)  # in practice: GPT2LMHeadModel.from_pretrained(...)
        model = GPT2LMHeadModel(GPT2Config(**sizes, **ends, **no_dropout))
        self.model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits[:, :-1]


batch = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
data = hansa.data.from_arrays(batch, rows[:, 1:], clients=6, test=(batch, rows[:, 1:]))
task = hansa.Task(Adapted, hansa.losses.cross_entropy(class_axis="last"), data)
print(f"{task.layout.dim} of {sum(p.numel() for p in Adapted().parameters())} parameters are trained and sent")
method = hansa.presets.fedavg(local_lr=1.0, steps=5, batch_size=8)
print(hansa.run(method, task, rounds=int(os.environ.get("ROUNDS", "30"))).table("round", "test_loss", "up_bytes"))
