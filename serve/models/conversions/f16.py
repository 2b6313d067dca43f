"""`@f16`: all weights in float16."""

from __future__ import annotations

import torch

from serve.models.conversions._cast import Cast

CONVERSION = Cast(torch.float16)
