"""A small language model on tokenizer output: dict inputs, an attention mask, ignored labels."""

import os

import torch
from torch import Tensor, nn

import hansa

text = "the hansa was a league of towns that traded and helped each other without a king . " * 40
words = sorted(set(text.split()))
ids = torch.tensor([words.index(word) for word in text.split()])
starts = torch.arange(0, len(ids) - 13, 3)
x, y = (torch.stack([ids[s + shift : s + shift + 12] for s in starts]) for shift in (0, 1))
mask = (torch.arange(12) < torch.randint(6, 13, (len(x), 1), generator=torch.Generator().manual_seed(0))).long()


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(len(words), 32), nn.Parameter(torch.zeros(12, 32))
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, len(words), bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        causal = torch.ones(12, 12, device=input_ids.device).triu(1).bool()
        h = self.layer(self.embed(input_ids) + self.position, src_mask=causal, src_key_padding_mask=attention_mask == 0)
        logits: Tensor = self.head(h)
        return logits


batch = {"input_ids": x, "attention_mask": mask}
labels = torch.where(mask == 1, y, -100)
data = hansa.data.from_arrays(batch, labels, clients=8, test=(batch, labels))
task = hansa.Task(LanguageModel, hansa.losses.cross_entropy(class_axis="last"), data)
method = hansa.presets.fedavg(local_lr=0.3, steps=5, batch_size=8, max_grad_norm=1.0)
print(hansa.run(method, task, rounds=int(os.environ.get("ROUNDS", "30"))).table("round", "test_loss", "test_accuracy"))
