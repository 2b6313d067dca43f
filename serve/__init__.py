"""The embedded scoring server: OpenAI-compatible, torch and transformers, exact logprobs."""
