"""The order in which samples are consumed: a pure function of (seed, number of samples, shuffle, k).

The k-th sample ever consumed is sample  perm_{seed, k // n}(k % n)  of n: every epoch is a permutation, each its own.
There is no state but the number of consumed samples, so a resumed run, a run of another layout and a run with another
micro-batch see the same samples in the same order.

The permutation is a Feistel network on [0, 4^h) >= n with cycle walking (Black & Rogaway 2002, "Ciphers with Arbitrary
Finite Domains"): any element costs O(1) time and memory, where a stored permutation of 10^9 samples costs 8 GB a
rank; and it cannot change with the version of numpy, whose generators promise no stable stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROUNDS = 8  # four are pseudo-random for large domains; small domains (n of a few) need more to look shuffled
MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Order:
    """Endless order over `samples` samples. index(k) = the k-th sample consumed since the start of training."""

    samples: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(
                f"samples={self.samples}: an order needs at least one sample; give more data or a shorter seq_length"
            )

    def indices(self, start: int, count: int) -> np.ndarray:
        """Samples number start .. start + count - 1 of the order. int64 [count]; cost O(count)."""
        if start < 0 or count < 0:
            raise ValueError(f"start={start}, count={count}: consumed samples count from 0 and never run backwards")
        out = np.arange(start, start + count, dtype=np.int64) % self.samples
        at = 0
        while self.shuffle and at < count:  # one epoch after another: few, since a step is rarely longer than an epoch
            epoch, stop = (start + at) // self.samples, min(count, at + self.samples - int(out[at]))
            out[at:stop] = permute(out[at:stop], self.samples, key=mix(self.seed, epoch))
            at = stop
        return out

    def index(self, k: int) -> int:
        """The k-th sample consumed."""
        return int(self.indices(k, 1)[0])


def permute(x: np.ndarray, n: int, key: int) -> np.ndarray:
    """perm_key(x) for x in [0, n): int64, elementwise, a bijection of [0, n) for every key."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    out = _feistel(x.astype(np.uint64), half, key)
    outside = out >= n
    while outside.any():  # the domain is at most 4 n, so each walk ends after fewer than 4 steps on average
        out[outside] = _feistel(out[outside], half, key)
        outside = out >= n
    return out.astype(np.int64)


def _feistel(x: np.ndarray, half: int, key: int) -> np.ndarray:
    shift, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> shift, x & low
    for r in range(ROUNDS):
        left, right = right, left ^ (_splitmix(right ^ np.uint64(mix(key, r))) & low)
    return (left << shift) | right


def _splitmix(x: np.ndarray) -> np.ndarray:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014), elementwise on uint64; wraps by intent."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mix(key: int, counter: int) -> int:
    """SplitMix64 of two integers (of any size and sign) into 64 bits: the same in every process and version."""
    z = key & MASK
    for word in (key >> 64, counter):
        z = (z + 0x9E3779B97F4A7C15 * ((word & MASK) + 1)) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
    return z


# A ramp is a table of (until, size): batches have `size` samples while fewer than `until` samples are consumed.
Ramp = Sequence[tuple[int, int]]


def global_batch_size(consumed: int, global_batch: int, ramp: Ramp = ()) -> int:
    """Samples of the step that starts after `consumed` samples: the ramp's size while it lasts, then global_batch."""
    return next((size for until, size in ramp if consumed < until), global_batch)


def consumed_after(steps: int, global_batch: int, ramp: Ramp = ()) -> int:
    """Samples consumed by the first `steps` steps: the sum of their batch sizes. Cost O(len(ramp))."""
    consumed = 0
    for until, size in ramp:
        here = min(steps, max(0, -(-(until - consumed) // size)))
        consumed, steps = consumed + here * size, steps - here
    return consumed + steps * global_batch


def check_ramp(global_batch: int, ramp: Ramp = ()) -> None:
    """ValueError unless sizes are positive and the `until` of the table rise."""
    for size in (global_batch, *(s for _, s in ramp)):
        if size < 1:
            raise ValueError(
                f"global_batch={global_batch}, ramp={list(ramp)}: a batch of {size} samples; give sizes >= 1"
            )
    untils = [u for u, _ in ramp]
    if untils != sorted(set(untils)):
        raise ValueError(
            f"ramp={list(ramp)}: consumed samples {untils} do not rise; sort the (until, size) pairs by `until`"
        )
