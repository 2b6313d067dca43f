"""The engine: schedule, forward, reduce, reply."""
