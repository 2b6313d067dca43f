"""The load-time check: does what we run give what the model's own forward gives?

A short packed probe (three sequences side by side, one of them again in chunks through the KV pages) is compared, as
log-probabilities, with the model's own forward of each sequence by itself; so are sequences on both sides of every
length that the configuration names, where that is affordable, in one pack with the short ones and in chunks. On a
mismatch the padded runner is used, or where that differs too, because numbers depend on the batch, one sequence runs
at a time; the backend's text says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from serve.engine.head import AnyHead, Head, OwnHead
from serve.engine.interface import select
from serve.engine.lengths import forget, named_lengths, rotary_modules
from serve.engine.reduce import divergences, marginal
from serve.engine.runner import Runner, Segment, UnsupportedModel, make_runner
from serve.engine.tilecheck import check_places, run_alone, widen
from serve.engine.tiled import TiledRunner
from serve.errors import LoadFailed
from serve.models.body import body_of
from serve.models.load import LoadedModel
from serve.models.quiet import quiet

LENGTHS = (7, 33, 2)
_LONGEST_PROBE = 2048
_TAIL = 8  # rows compared at either end of a longer probe
# largest accepted |logprob difference| to the model's own forward. float32 differences are rounding
# (1e-6 .. 1e-4 seen); half precision rounds each layer anew, so that only its mean is telling.
_FLOAT32_LIMIT = 2e-3
_HALF_MEAN_LIMIT = 0.1
_BROKEN = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)  # what a model raises that cannot run so


@dataclass(frozen=True)
class Checked:
    """A model ready to run, and how much it differs from itself under other kernels and batch shapes.

    deviation: largest |logprob difference| among the ten likeliest tokens of a probe row (nats).
    kl_floor: mean KL over the probe rows (nats). Both compare the packed rows with the model's own forward,
    through the same head.
    """

    runner: Runner
    head: AnyHead
    backend: str
    deviation: float
    kl_floor: float


def prepare(loaded: LoadedModel, *, own_head: bool = False, deterministic: bool = False) -> Checked:
    """Choose the runner and the head for a model, and measure how far they are from its own forward.

    own_head: use the model's own head even where ours reproduces it (logits in the dtype the model gives).
    deterministic: take the tiled runner or none.

    Raises LoadFailed where even one sequence at a time does not reproduce the model, or gives non-finite logits.
    """
    probes = _probe_tokens(loaded)
    with quiet():  # some quantized layers unpack, and say so, in their first forward
        own = _OwnForward(loaded)
        logits = _probed(loaded, own, probes[: len(LENGTHS)])
        head = _choose_head(loaded, own.hidden(probes[0]), logits[0], own_head=own_head)
        expected = [torch.log_softmax(rows.float(), dim=-1) for rows in logits]
        with torch.inference_mode():
            alone = [torch.log_softmax(head.logits(own.hidden(ids)), dim=-1) for ids in probes[: len(LENGTHS)]]
            for ids in probes[len(LENGTHS) :]:
                expected.append(torch.log_softmax(head.logits(_ends(own.hidden(ids))), dim=-1))
    if deterministic:
        return _prepare_tiled(loaded, head, probes, expected, alone)
    before = loaded.model.config._attn_implementation
    try:
        runner = make_runner("packed", loaded)
        side_by_side, chunked = _check_packed(loaded, runner, head, probes, expected)
        return Checked(runner, head, "packed", *_noise([*side_by_side, chunked], [*alone, alone[1]]))
    except UnsupportedModel as error:
        reason = str(error)
    except _BROKEN as error:
        reason = f"the packed probe failed ({_line(error)})"
    select(loaded.model, before)
    for kind in ("padded", "alone"):
        unpacked = make_runner(kind, loaded)
        try:
            side_by_side = _rows(unpacked, head, probes[: len(LENGTHS)])
            _compare(loaded, side_by_side, expected[: len(LENGTHS)])
            if len(probes) > len(LENGTHS):
                _compare(loaded, _rows(unpacked, head, probes), expected)
        except UnsupportedModel as error:
            reason = f"{reason}; {unpacked.name}, {error}"
        except _BROKEN as error:
            reason = f"{reason}; {unpacked.name}, the probe failed ({_line(error)})"
        else:
            return Checked(unpacked, head, f"{unpacked.name} ({reason})", *_noise(side_by_side, alone))
    raise LoadFailed(f"{loaded.name} does not repeat its own numbers: {reason}")


def _probed(loaded: LoadedModel, own: _OwnForward, probes: list[list[int]]) -> list[torch.Tensor]:
    """The model's own logits of each short probe. Raises LoadFailed for logits that no working model gives."""
    try:
        logits = [own.logits(ids) for ids in probes]
        again = own.logits(probes[1])
    except _BROKEN as error:
        raise LoadFailed(
            f"{loaded.name} cannot run a probe of a few tokens in {loaded.compute_dtype} ({_line(error)}): its kernels "
            "do not work here or not in this dtype, try @bf16 or @dequantized"
        ) from error
    for ids, rows in zip(probes, logits, strict=True):
        if not bool(torch.isfinite(rows).all()):
            raise LoadFailed(
                f"{loaded.name} gives non-finite logits on a probe of {len(ids)} tokens in "
                f"{loaded.compute_dtype}: the weights or their kernels do not work in this dtype, try @bf16 or @f32"
            )
    rows = torch.cat(logits)
    if rows.shape[1] > 1 and bool((rows.amax(dim=1) == rows.amin(dim=1)).all()):
        raise LoadFailed(
            f"{loaded.name} gives every token the same logit, whatever it is shown: its head or its last norm is "
            "empty, quantize it again"
        )
    off = (torch.log_softmax(again.float(), -1) - torch.log_softmax(logits[1].float(), -1)).abs()
    exact = loaded.model.dtype == torch.float32
    if float(off.max() if exact else off.mean()) > (_FLOAT32_LIMIT if exact else _HALF_MEAN_LIMIT):
        raise LoadFailed(
            f"{loaded.name} gives other logits when it is shown the same tokens again (up to {float(off.max()):.2g} "
            "nats): something in it draws or keeps state, and no measurement of it could be repeated"
        )
    return logits


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"


def _prepare_tiled(
    loaded: LoadedModel,
    head: AnyHead,
    probes: list[list[int]],
    expected: list[torch.Tensor],
    alone: list[torch.Tensor],
) -> Checked:
    """The tiled runner, compared with the model's own forward and, bit for bit, with itself in every place of a tile.

    Raises LoadFailed where its numbers would depend on the batch.
    """
    try:
        runner = make_runner("tiled", loaded)
        got = []
        for ids, rows in zip(probes, expected, strict=True):
            hidden = run_alone(runner, ids)
            hidden = hidden if rows.shape[0] == len(ids) else _ends(hidden)
            with torch.inference_mode():
                got.append(torch.log_softmax(head.logits(hidden), dim=-1))
        _compare(loaded, got, expected)
        check_places(runner, head, probes[1])
        wide = isinstance(runner, TiledRunner) and widen(runner, probes[1])
    except (UnsupportedModel, *_BROKEN) as error:
        raise LoadFailed(f"--deterministic cannot be kept for {loaded.name}: {str(error).splitlines()[0]}") from error
    backend = "tiled" if wide else "tiled (one tile at a time: more side by side give other bits)"
    return Checked(runner, head, backend, *_noise(got[: len(LENGTHS)], alone))


def _probe_tokens(loaded: LoadedModel) -> list[list[int]]:
    """Seeded probe sequences of LENGTHS, one longer than the sliding window, and both sides of other named lengths."""
    generator = torch.Generator().manual_seed(20240229)
    lengths = [min(n, loaded.context_length) for n in LENGTHS]
    config = loaded.model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    further = [window + 9] if isinstance(window, int) else []
    further += [n for named in named_lengths(config) if named != window for n in (named, named + 1)]
    # a length whose other side is out of reach is on the same side as the short probes
    reach = min(_LONGEST_PROBE, loaded.context_length)
    lengths += [n for n in sorted(set(further)) if n <= reach and (n != reach or n - 1 in further)]
    top = min(loaded.vocab_size, len(loaded.tokenizer) or loaded.vocab_size)
    return [torch.randint(0, top, (n,), generator=generator).tolist() for n in lengths]


class _OwnForward:
    """The model's own forward, one sequence at a time, with the attention it was loaded with."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model: Any = loaded.model
        self._device = loaded.device

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits [len(ids), vocabulary] as the model gives them."""
        self._forget()
        with torch.inference_mode():
            out = self._model(input_ids=torch.tensor([ids], device=self._device), use_cache=False)
        return out.logits[0]  # type: ignore[no-any-return]

    def hidden(self, ids: list[int]) -> torch.Tensor:
        """Last hidden states [len(ids), size]."""
        self._forget()
        with torch.inference_mode():
            out = body_of(self._model)(input_ids=torch.tensor([ids], device=self._device), use_cache=False)
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    def _forget(self) -> None:
        for module in rotary_modules(self._model):
            forget(module)


def _choose_head(loaded: LoadedModel, hidden: torch.Tensor, logits: torch.Tensor, *, own_head: bool) -> AnyHead:
    """The float32 head if it turns the model's own hidden rows into its own logits, else the model's head code.

    Raises LoadFailed where neither does: then the body's last hidden state is not what the head takes.
    """
    makers: list[Callable[[Any], AnyHead]] = [OwnHead] if own_head else [Head, OwnHead]
    # rounding of the model's own head: a few units in the last place of its dtype, relative to the row
    limit = 64 * torch.finfo(logits.dtype).eps * logits.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-3)
    for make in makers:
        with torch.inference_mode():
            try:
                head = make(loaded.model)
                got = head.logits(hidden)
            except (ValueError, RuntimeError, TypeError, AttributeError):
                continue
        if got.shape == logits.shape and bool(((got - logits.float()).abs() <= limit).all()):
            return head
    raise LoadFailed(
        f"the output head of {loaded.name} ({type(loaded.model).__name__}) cannot be run apart from its body: "
        "this architecture is not supported" + (" with --logits model" if own_head else "")
    )


def _rows(runner: Runner, head: AnyHead, probes: list[list[int]]) -> list[torch.Tensor]:
    """Log-probabilities of every row of each short probe, and of the ends of longer ones, all in one forward."""
    flat = [token for ids in probes for token in ids]
    segments, at = [], 0
    for ids in probes:
        segments.append(Segment(at, len(ids)))
        at += len(ids)
    hidden = runner.forward(flat, segments)
    with torch.inference_mode():
        kept = [hidden[s.row : s.row + s.length] for s in segments]
        kept[len(LENGTHS) :] = map(_ends, kept[len(LENGTHS) :])
        return [torch.log_softmax(head.logits(rows), dim=-1) for rows in kept]


def _check_packed(
    loaded: LoadedModel,
    runner: Runner,
    head: AnyHead,
    probes: list[list[int]],
    expected: list[torch.Tensor],
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Compare the packed runner: side by side, through the pages, and past the sliding window.

    Returns the short probes' log-probabilities side by side, and the second one's in chunks.
    """
    short = len(LENGTHS)
    side_by_side = _rows(runner, head, probes[:short])
    _compare(loaded, side_by_side, expected[:short])
    ids = probes[1]
    runner.allocate(len(ids))
    pages = range(len(ids))
    chunked = []
    for low, high in ((0, len(ids) // 2), (len(ids) // 2, len(ids) - 1), (len(ids) - 1, len(ids))):
        segment = Segment(0, high - low, low, tuple(pages[:high]), total=len(ids))
        with torch.inference_mode():
            chunked.append(torch.log_softmax(head.logits(runner.forward(ids[low:high], [segment])), dim=-1))
    _compare(loaded, [torch.cat(chunked)], [expected[1]])
    if probes[short:]:
        _compare(loaded, _rows(runner, head, probes), expected)
    for ids, rows in zip(probes[short:], expected[short:], strict=True):
        runner.allocate(len(ids))
        middle = len(ids) // 2
        parts = [
            runner.forward(ids[low:high], [Segment(0, high - low, low, tuple(range(high)), total=len(ids))])
            for low, high in ((0, middle), (middle, len(ids)))
        ]
        with torch.inference_mode():
            got = torch.log_softmax(head.logits(_ends(torch.cat(parts))), dim=-1)
        _compare(loaded, [got], [rows])
    return side_by_side, torch.cat(chunked)


def _ends(hidden: torch.Tensor) -> torch.Tensor:
    """The first and last rows of a longer probe: wrong frequencies show in the first, wrong windows in the last."""
    return torch.cat([hidden[:_TAIL], hidden[-_TAIL:]])


def _noise(got: list[torch.Tensor], alone: list[torch.Tensor]) -> tuple[float, float]:
    """(deviation, kl_floor) of log-probabilities [rows, vocabulary] of the same rows, see Checked."""
    ours, theirs = torch.cat(got), torch.cat(alone)
    likely = theirs.topk(min(10, theirs.shape[1]), dim=1).indices
    deviation = float((ours - theirs).abs().gather(1, likely).max())
    one, two = marginal(theirs, 1), marginal(ours, 1)
    return deviation, float(divergences(theirs, ours, one.lse, two.lse).kl.mean())


def _compare(loaded: LoadedModel, got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Raise UnsupportedModel where log-probabilities are further apart than rounding can explain."""
    for ours, theirs in zip(got, expected, strict=True):
        difference = (ours - theirs).abs()
        if not bool(torch.isfinite(difference).all()):
            raise UnsupportedModel("the probe gives non-finite logits")
        largest, mean = float(difference.max()), float(difference.mean())
        if loaded.model.dtype == torch.float32:
            if largest > _FLOAT32_LIMIT:
                raise UnsupportedModel(f"the probe is {largest:.2g} nats off the model's own forward")
        elif mean > _HALF_MEAN_LIMIT:
            raise UnsupportedModel(f"the probe is {mean:.2g} nats off the model's own forward on average")
