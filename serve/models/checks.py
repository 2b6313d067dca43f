"""What must hold before a loaded model is trusted: every weight was in the file, and every number is finite."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from serve.errors import LoadFailed
from serve.models.weights import StoredTensor

if TYPE_CHECKING:
    pass

SHOWN = 3
OTHER_TASKS = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
)


def check_loading(info: Mapping[str, Any], *, name: str) -> None:
    """Refuse a load in which a weight was missing, had another shape or was left over.

    `info` is transformers' output_loading_info: tied weights and keys that the architecture ignores are
    already taken out of it. Raises LoadFailed naming the first keys and their count.
    """
    if info["error_msgs"]:
        raise LoadFailed(f"'{name}' cannot be loaded: {'; '.join(map(str, info['error_msgs']))}")
    if info["missing_keys"]:
        raise LoadFailed(
            f"'{name}' lacks {_some(info['missing_keys'])}, which would be filled with random numbers: "
            "get the complete checkpoint"
        )
    if info["mismatched_keys"]:
        shapes = [f"{key} {list(found)} for {list(wanted)}" for key, found, wanted in info["mismatched_keys"]]
        raise LoadFailed(f"'{name}' has weights of another shape than its config.json asks for: {_some(shapes)}")
    if info["unexpected_keys"]:
        raise LoadFailed(
            f"'{name}' has weights that its architecture does not use: {_some(info['unexpected_keys'])}; "
            "check config.json (architecture, quantization_config)"
        )


def check_tied(model: Any, tensors: Iterable[StoredTensor], *, name: str) -> None:
    """Refuse a checkpoint that says that head and embedding are one tensor, and holds tensors of both.

    tensors: of its files. Which of the two is meant is a guess: transformers takes the one, other engines the other.
    Two that are equal are one. Raises LoadFailed.
    """
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return
    ends = model.get_output_embeddings(), model.get_input_embeddings()
    paths = {id(module): path for path, module in model.named_modules()}
    head, embedding = (paths.get(id(module), "") for module in ends)
    stored = {tensor.name: tensor for tensor in tensors}
    of_head = [key for key in stored if head and key.startswith(f"{head}.")]
    if not of_head or not any(key.startswith(f"{embedding}.") for key in stored):
        return
    if of_head == [f"{head}.weight"] and _same(stored[of_head[0]], stored.get(f"{embedding}.weight")):
        return
    raise LoadFailed(
        f"'{name}' says that its head and its embedding are one (tie_word_embeddings) and holds both, which differ "
        f"({of_head[0]}): set tie_word_embeddings to false in its config.json if the head is its own, or leave the "
        "head out of the files"
    )


def _same(left: StoredTensor, right: StoredTensor | None) -> bool:
    """Whether two stored tensors hold the same numbers."""
    if right is None or (left.type, left.elements) != (right.type, right.elements):
        return False
    return left.data() == right.data()


def check_task(config: Any, *, name: str) -> None:
    """Refuse a checkpoint that was saved for another task than predicting the next token."""
    saved_as = [str(architecture) for architecture in getattr(config, "architectures", None) or ()]
    if saved_as and all(architecture.endswith(OTHER_TASKS) for architecture in saved_as):
        raise LoadFailed(f"'{name}' is not a causal language model ({', '.join(saved_as)}): give one that is")


def check_code(config: Mapping[str, Any], *, name: str, trusted: bool) -> None:
    """Refuse a checkpoint that brings code which transformers needs to read it, unless it is trusted.

    config: its config.json. Raises LoadFailed.
    """
    from transformers import CONFIG_MAPPING

    brought = config.get("auto_map")
    if trusted or not isinstance(brought, Mapping) or config.get("model_type") in CONFIG_MAPPING:
        return
    files = sorted({f"{str(one).rpartition('--')[2].rpartition('.')[0]}.py" for one in brought.values() if one})
    raise LoadFailed(
        f"'{name}' brings its own code ({', '.join(files[:SHOWN])}), which is not run: read it, and pass "
        "--trust-remote-code if you trust it"
    )


def check_method(config: Any, *, name: str) -> None:
    """Refuse a quantization that transformers does not know: it would read the packed weights as plain ones."""
    from transformers.quantizers.auto import AutoHfQuantizer

    for holder in (config, config.get_text_config()):
        stored = getattr(holder, "quantization_config", None)
        stored = stored if stored is None or isinstance(stored, Mapping) else stored.to_dict()
        if stored and stored.get("quant_method") and not AutoHfQuantizer.supports_quant_method(dict(stored)):
            raise LoadFailed(
                f"'{name}' is quantized with '{stored['quant_method']}', which this version of "
                "transformers cannot load: give the unquantized checkpoint or another quantization"
            )


def check_finite(model: torch.nn.Module, *, name: str, known: Collection[int] = ()) -> None:
    """Refuse NaN and infinity in any floating parameter or buffer; ids in `known` were checked before.

    Raises LoadFailed naming the tensor, also for one that holds no data (meta device).
    """
    for key, tensor in named_tensors(model):
        if id(tensor) in known or not tensor.is_floating_point() or not tensor.numel():
            continue
        if tensor.is_meta:
            raise LoadFailed(f"'{name}' did not fit on the device: '{key}' was left without data; use a larger one")
        low, high = torch.aminmax(tensor.detach() if tensor.element_size() > 1 else tensor.detach().float())
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise LoadFailed(f"'{name}' has NaN or infinity in '{key}': the checkpoint or its conversion is broken")


def named_tensors(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Parameters and buffers, non-persistent ones too, each once; one that wraps others (torchao's) as those."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        yield from plain_tensors(name, tensor)


def plain_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor itself, or all that a wrapper subclass holds, by torch's protocol for those, as NAME.PART."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from plain_tensors(f"{name}.{part}", getattr(tensor, part))


def root_cause(error: BaseException) -> str:
    """One line that names an error and, where it only wraps another, the cause beneath it."""
    deepest = error
    while (inner := deepest.__cause__ or deepest.__context__) is not None:
        deepest = inner
    lines = [_line(error)] if deepest is error else [_line(error), _line(deepest)]
    return ", because of ".join(dict.fromkeys(lines))


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


def _some(keys: Iterable[object]) -> str:
    ordered = sorted(map(str, keys))
    shown = ", ".join(ordered[:SHOWN])
    return shown if len(ordered) <= SHOWN else f"{shown} and {len(ordered) - SHOWN} more ({len(ordered)} in all)"
