"""The toy GPT of the cases, with weights by formula, so that no generator enters."""

import torch

from megacore.models import gpt
from megacore.parallel.batch import IGNORE, MicroBatch

TOY = gpt.GPTConfig(layers=4, hidden=16, heads=4, ffn=32, vocab_size=48, seq_length=8)


def formula(config: gpt.GPTConfig):
    """W[i,j] = 0.05 sin(1 + i*cols + j + 37 k) for the k-th parameter; norms' weights 1 + 0.01 i; biases 0.1 cos(i)."""
    with torch.device("meta"):
        order = {name: k for k, (name, _) in enumerate(gpt.GPT(config).named_parameters())}

    def init(name, full, generator):
        n = torch.arange(full.numel(), dtype=torch.float64)
        if name.endswith("bias"):
            values = 0.1 * torch.cos(n)
        elif "norm" in name:
            values = 1 + 0.01 * n
        else:
            values = 0.05 * torch.sin(1 + n + 37 * order[name])
        full.copy_(values.view(full.shape))

    return init


def batch(samples: int, config=TOY, *, step: int = 0, masked=()) -> MicroBatch:
    """Consecutive numbers as tokens; `masked` lists (sample, number of targets that count)."""
    s = config.seq_length
    tokens = (torch.arange(samples * (s + 1)) * 7 + step * 5).view(samples, s + 1) % config.vocab_size
    targets = tokens[:, 1:].clone()
    for sample, counted in masked:
        targets[sample, counted:] = IGNORE
    return MicroBatch.of(tokens[:, :-1], targets, first_sample=step * samples, step=step)


def rows(whole: MicroBatch, start: int, stop: int, index: int = 0) -> MicroBatch:
    cut = slice(start, stop)
    return MicroBatch(whole.ids[cut], whole.targets[cut], whole.samples[cut], whole.positions, whole.step, index)
