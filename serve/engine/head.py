"""The output head: hidden rows -> float32 logits, a tile of rows at a time.

`Head` multiplies by the head's weights itself, so that logits come out in float32 whatever the compute
dtype, and applies the model's own scaling or soft-capping. Whether it reproduces the model's own head is
checked at load; where it does not (a quantized head, an unknown step between body and head), `OwnHead`
runs the model's own code on the hidden rows, and the logits have the dtype that the model gives them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from serve.models.body import body_of


class AnyHead(Protocol):
    """hidden [rows, size] -> logits [rows, vocabulary], float32. parallel: several threads may use it at once."""

    vocab_size: int
    dtype: str
    parallel: bool

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Float32 logits; written into `out` where it is given."""
        ...


class Head:
    """Plain linear head with float32 logits."""

    dtype = "float32"
    parallel = True

    def __init__(self, model: Any) -> None:
        linear = model.get_output_embeddings()
        weight = getattr(linear, "weight", None)
        if type(linear) is not torch.nn.Linear or type(weight) not in (torch.nn.Parameter, torch.Tensor):
            raise ValueError("the output head is not a plain linear layer")
        self._weight: torch.Tensor = linear.weight.detach()
        self._bias: torch.Tensor | None = None if linear.bias is None else linear.bias.detach()
        config = model.config.get_text_config()
        # Cohere multiplies by logit_scale, Granite divides by logits_scaling
        self._scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        cap = getattr(config, "final_logit_softcapping", None)
        self._softcap = float(cap) if cap else None
        self.vocab_size = int(self._weight.shape[0])

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Float32 logits [rows, vocabulary]."""
        rows = hidden.shape[0]
        if out is None:
            out = torch.empty((rows, self.vocab_size), dtype=torch.float32, device=hidden.device)
        self._multiply(hidden, out)
        if self._bias is not None:
            out += self._bias.float()
        if self._scale != 1.0:
            out *= self._scale
        if self._softcap is not None:
            out.div_(self._softcap).tanh_().mul_(self._softcap)
        return out

    def _multiply(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        self._product(self._weight, hidden, out)

    def _product(self, weight: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor) -> None:
        if weight.dtype == torch.float32:
            torch.mm(hidden.float(), weight.t(), out=out)
        elif weight.device.type == "cuda" and hidden.dtype == weight.dtype:
            torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=out)
        else:  # widen the weights a block of rows at a time: at most 64 MiB of float32 beside them
            step = max(1, (64 << 20) // (4 * weight.shape[1]))
            wide = hidden.float()
            for low in range(0, self.vocab_size, step):
                block = weight[low : low + step].float()
                out[:, low : low + step] = wide @ block.t()


class OwnHead:
    """The model's own head code, run on hidden rows with the body replaced by them for the call."""

    parallel = False

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        probe = torch.zeros((1, self.hidden_size(model)), dtype=model.dtype, device=self._device)
        logits = self.raw(probe)
        self.vocab_size = int(logits.shape[-1])
        self.dtype = str(logits.dtype).removeprefix("torch.")

    @staticmethod
    def hidden_size(model: Any) -> int:
        """Width of the rows that the head takes (OPT's differs from hidden_size)."""
        weight = getattr(model.get_output_embeddings(), "weight", None)
        if isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.is_floating_point():
            return int(weight.shape[1])
        return int(model.config.get_text_config().hidden_size)

    def raw(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits as the model gives them, [rows, vocabulary]."""
        body = body_of(self._model)
        before = body.__dict__.get("forward")
        body.forward = lambda *_, **__: _BodyOutput(hidden[None])
        try:
            ids = torch.zeros((1, hidden.shape[0]), dtype=torch.long, device=hidden.device)
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            if before is None:
                del body.forward
            else:
                body.forward = before
        return logits

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The model's own logits, widened to float32."""
        got = self.raw(hidden)
        if out is None:
            return got.float()
        return out.copy_(got)


class _BodyOutput:
    """What a model's body returns, reduced to its last hidden state; every other field reads as None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        if index != 0:
            raise IndexError(index)
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None
