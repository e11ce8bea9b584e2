"""Training: data, optimizer, precision, checkpoints and the loop that joins them (config objects begin at this floor)."""
