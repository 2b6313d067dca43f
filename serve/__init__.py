"""The embedded scoring server: OpenAI-compatible, torch and transformers, exact logprobs."""

VERSION = "0.2.0"  # of the distribution evalgate-lm: its server and its client are one
