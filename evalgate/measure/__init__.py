"""A request in, a run out."""
