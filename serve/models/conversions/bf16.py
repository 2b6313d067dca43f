"""`@bf16`: all weights in bfloat16."""

from __future__ import annotations

import torch

from serve.models.conversions._cast import Cast

CONVERSION = Cast(torch.bfloat16)
