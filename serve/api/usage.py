"""What a request used, in OpenAI's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Usage:
    """Tokens: each prompt counted once whatever n, every sampled token, and prompt tokens found in the cache."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def body(self) -> dict[str, Any]:
        """The reply's field."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
