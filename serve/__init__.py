"""The embedded scoring server: OpenAI-compatible, torch and transformers, exact logprobs."""

VERSION = "0.2.0"  # as in evalgate/core.py
