"""The operators. Each file holds one, or one family: formula, public function, plain-torch reference, fake and
gradient."""

from megacore.ops.cross_entropy import cross_entropy
from megacore.ops.dispatch import implementations, use
from megacore.ops.dropout import dropout, dropout_key
from megacore.ops.linear import linear, linear_gelu, linear_swiglu
from megacore.ops.linear_cross_entropy import linear_cross_entropy
from megacore.ops.weight_grads import WeightGrads

__all__ = [
    "WeightGrads",
    "cross_entropy",
    "dropout",
    "dropout_key",
    "implementations",
    "linear",
    "linear_cross_entropy",
    "linear_gelu",
    "linear_swiglu",
    "use",
]
