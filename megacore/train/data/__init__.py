"""Data: text to Megatron's .bin/.idx, samples from it, and the order in which training consumes them.

sources.py, tokenizer.py, prepare.py   text -> tokens      indexed.py, writer.py   the files
dataset.py   samples      order.py   their order      batches.py   the micro-batches of a step
"""

from .batches import check_split, micro_batches, stack, valid_tokens
from .dataset import Dataset, GPTDataset, check_vocabulary
from .indexed import IndexedDataset, token_dtype
from .order import Order, consumed_after, global_batch_size
from .prepare import Report, prepare
from .writer import IndexedWriter, merge

__all__ = [
    "Dataset",
    "GPTDataset",
    "IndexedDataset",
    "IndexedWriter",
    "Order",
    "Report",
    "check_split",
    "check_vocabulary",
    "consumed_after",
    "global_batch_size",
    "merge",
    "micro_batches",
    "prepare",
    "stack",
    "token_dtype",
    "valid_tokens",
]
