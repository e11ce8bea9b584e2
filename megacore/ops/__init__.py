"""The operators. Each file holds one: formula, public function, plain-torch reference, fake and gradient."""

from megacore.ops.cross_entropy import cross_entropy
from megacore.ops.dispatch import implementations, use
from megacore.ops.dropout import dropout, dropout_key
from megacore.ops.linear_cross_entropy import linear_cross_entropy
from megacore.ops.linear_gelu import linear_gelu

__all__ = ["cross_entropy", "dropout", "dropout_key", "implementations", "linear_cross_entropy", "linear_gelu", "use"]
