"""Limits, and whether figures keep them."""
