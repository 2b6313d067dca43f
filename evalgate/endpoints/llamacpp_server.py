"""A real llama.cpp server as a child process: GGUF on its own kernels, gone with the run."""

from __future__ import annotations

from collections.abc import Callable

from evalgate.endpoints.settings import LlamaSettings
from evalgate.server.process import EmbeddedServer


class LlamaCppServer(EmbeddedServer):
    """A context manager like EmbeddedServer, around `python -m serve.llamacpp`.

    path: a GGUF file or "demo". context: tokens, 0 = what the model was trained with.
    Raises ServerError with llama.cpp's own sentence where the model cannot be loaded.
    """

    module = "serve.llamacpp"
    own_options = ()

    def __init__(
        self,
        path: str,
        settings: LlamaSettings,
        *,
        context: int = 0,
        on_stage: Callable[[str], None] | None = None,
    ) -> None:
        options = ["--context", str(context), "--gpu-layers", str(settings.gpu_layers)]
        if settings.threads is not None:
            options += ["--threads", str(settings.threads)]
        super().__init__([path], device=None, options=options, on_stage=on_stage)
