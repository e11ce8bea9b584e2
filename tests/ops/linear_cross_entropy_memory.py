"""Peak memory of linear_cross_entropy, forward and backward, in a process of its own:

    python -m tests.ops.linear_cross_entropy_memory ROWS INPUTS VOCABULARY [THREADS]

prints the bytes beyond arguments and their gradients as a share of all logits. Linux: the peak of resident memory,
which sees the buffers of the BLAS too; it is reset once the arguments are there and a tiny problem has run.
"""

import sys
from collections.abc import Iterator

import torch

from megacore.ops import linear_cross_entropy


def resident(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


def gradients(rows: int, inputs: int, vocab: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """First that the arguments are there, then their gradients."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inputs), torch.randn(vocab, inputs)
    target = torch.randint(vocab, (rows,))
    leaves = x.requires_grad_(), weight.requires_grad_()
    yield ()
    yield torch.autograd.grad(linear_cross_entropy(x, weight, target, vocab_size=vocab), leaves)


def extra_share(rows: int, inputs: int, vocab: int) -> float:
    list(gradients(2, 3, 5))  # what a first call loads
    run = gradients(rows, inputs, vocab)
    next(run)
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = resident("VmRSS")
    made = next(run)
    extra = resident("VmHWM") - before - sum(g.nbytes for g in made)
    return extra / (4 * rows * vocab)


if __name__ == "__main__":
    sizes = [int(argument) for argument in sys.argv[1:]]
    torch.set_num_threads(sizes[3] if len(sizes) > 3 else 1)
    print(extra_share(*sizes[:3]))
