"""Training: data, optimizer, precision, checkpoints and the loop that joins them. Config objects begin here."""
