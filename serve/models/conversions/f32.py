"""`@f32`: all weights in float32."""

from __future__ import annotations

import torch

from serve.models.conversions._cast import Cast

CONVERSION = Cast(torch.float32)
