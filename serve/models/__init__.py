"""Loading models and tokenizers, with everything that would make a wrong number refused.

huggingface_hub reads its environment once, at its first import, so it is set here, before any module of
this package imports it: no telemetry, short timeouts.
"""

from __future__ import annotations

import os

os.environ.update({"HF_HUB_DISABLE_TELEMETRY": "1", "DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"})
os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "5")
os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "10")
