"""Samples that carry their own index in every token."""

import numpy as np


class Numbered:
    seq_length = 3

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def pair(self, index):
        return np.full(3, index), np.full(3, index)

    def valid(self, index):
        return 3
