"""Plain single-device models, each with the plan table that makes it parallel."""
