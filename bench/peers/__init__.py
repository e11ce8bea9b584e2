"""What it takes to run each rival on the same work, in the same processes."""
