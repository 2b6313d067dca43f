"""From logits to what leaves the device: log-sum-exp, top-k, ranks, entropy, and exact divergences.

Every function takes tiles of logits [rows, vocabulary] in float32 and sums in float64 across blocks of
columns, so that intermediate results stay small (on a CPU: in its cache). Ties are broken by token id
ascending everywhere. Definitions are in docs/semantics.md.

On a CPU the passes over the vocabulary are compiled loops (`kernels.py`); what stands here with torch is what they are
tested against, and what runs elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from serve.engine import kernels
from serve.wire import LEAST_LOGPROB

_CPU_BLOCK = 1 << 18  # elements of one block of columns on a CPU: 1 MiB in float32
_DEVICE_BLOCK = 1 << 25
_RANK_K = 32  # ranks up to this are read off the top-k list, deeper ones are counted


class TopK(NamedTuple):
    """ids [rows, k] int64 and values [rows, k] float32, by (value descending, id ascending)."""

    ids: torch.Tensor
    values: torch.Tensor


class Marginal(NamedTuple):
    """One side of a tile: its top-k (k >= 2 where the vocabulary has 2), log-sum-exp and entropy [rows] in float64."""

    top: TopK
    lse: torch.Tensor
    entropy: torch.Tensor


def top_k(logits: torch.Tensor, k: int) -> TopK:
    """The k largest of each row in the one order: value descending, then id ascending.

    k is cut to the vocabulary.
    """
    vocabulary = logits.shape[1]
    k = min(k, vocabulary)
    if kernels.lists(k, vocabulary) and kernels.usable(logits):
        return _compiled_top_k(logits, k)
    return torch_top_k(logits, k) if logits.device.type == "cpu" else keyed_top_k(logits, k)


def _compiled_top_k(logits: torch.Tensor, k: int) -> TopK:
    ids, values = _lists(logits, k)
    kernels.run("top", logits, k, ids, values)
    return _ordered(logits, ids, values)


def _lists(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], k)
    return torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.float32)


def _ordered(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> TopK:
    """Lists of the kernels, with those of rows that have a NaN, which is in nobody's order, as torch gives them."""
    odd = torch.nonzero(ids[:, 0] < 0)[:, 0]
    if len(odd):
        ids[odd], values[odd] = torch_top_k(logits[odd], ids.shape[1])
    return TopK(ids, values)


def torch_top_k(logits: torch.Tensor, k: int) -> TopK:
    """`top_k` by torch alone; k is at most the vocabulary.

    torch.topk leaves the order of equal values open, and the choice too where the cut falls inside a run of them. Equal
    values inside the list are put in id order; those at such a cut are looked for in the row.
    """
    vocabulary = logits.shape[1]
    # One more than asked for: where value k equals value k + 1, topk was free to choose which of the equal ids it
    # lists, so the list itself may be wrong, not only its order. Those rows are few and are put right below.
    values, ids = torch.topk(logits, min(k + 1, vocabulary), dim=1)
    split = torch.nonzero(values[:, k - 1] == values[:, k])[:, 0] if k < vocabulary else values.new_empty(0)
    values, ids = values[:, :k], ids[:, :k]
    # torch has no sort by two keys: sorting by id first and then, stably, by value gives (value desc, id asc)
    order = ids.argsort(dim=1)
    values, ids = values.gather(1, order), ids.gather(1, order)
    order = values.argsort(dim=1, descending=True, stable=True)
    values, ids = values.gather(1, order), ids.gather(1, order)
    for row in split.tolist():
        equal = values[row] == values[row, k - 1]
        ids[row, equal] = torch.nonzero(logits[row] == values[row, k - 1])[: int(equal.sum()), 0]
    return TopK(ids, values)


def keyed_top_k(logits: torch.Tensor, k: int) -> TopK:
    """`top_k` for devices, which looks at no value and so waits for none; k is at most the vocabulary.

    Value and id make one whole number each, so that no two are equal and torch.topk has no choice. A NaN comes first.
    """
    vocabulary = logits.shape[1]
    last = torch.arange(vocabulary - 1, -1, -1, device=logits.device)  # the smaller id is the larger number
    parts = []
    step = max(1, _DEVICE_BLOCK // vocabulary)
    for low in range(0, logits.shape[0], step):
        rows = logits[low : low + step]
        bits = (rows + 0.0).view(torch.int32)  # -0.0 equals 0.0
        ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill_(rows != rows, 0x7FFFFFFF)
        keys = torch.topk(ordered.long() * (1 << 32) + last, k, dim=1).values
        ids = vocabulary - 1 - (keys & 0xFFFFFFFF)
        parts.append(TopK(ids, rows.gather(1, ids)))
    return parts[0] if len(parts) == 1 else TopK(*map(torch.cat, zip(*parts, strict=True)))


def by_row(device: torch.device) -> bool:
    """Whether a row's sums have the same bits whatever other rows are reduced with it."""
    return device.type == "cpu" and kernels.kernels() is not None


def log_sum_exp(logits: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp [rows] of each row in float64, bit for bit as `marginal` gives it. peak [rows, 1]: the largest."""
    if kernels.usable(logits):
        return _compiled_side(logits, peak)[0]
    total = torch.zeros(logits.shape[0], dtype=torch.float64, device=logits.device)
    for block in _blocks(logits.shape, logits.device):
        total += (logits[:, block] - peak).clamp_(min=-1e4).exp_().sum(1).double()
    return peak[:, 0].double() + total.log()


def _compiled_marginal(logits: torch.Tensor, k: int) -> Marginal:
    ids, values = _lists(logits, k)
    out = torch.empty((logits.shape[0], 2), dtype=torch.float64)
    kernels.run("marginal", logits, k, ids, values, out)
    return Marginal(_ordered(logits, ids, values), out[:, 0], out[:, 1])


def _compiled_side(logits: torch.Tensor, peak: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp and entropy [rows]."""
    out = torch.empty((logits.shape[0], 2), dtype=torch.float64)
    kernels.run("side", logits, peak[:, 0], out)
    return out[:, 0], out[:, 1]


def marginal(logits: torch.Tensor, k: int) -> Marginal:
    """Top-k, log-sum-exp and entropy (nats) of each row, relative to the row's largest logit m.

    With s = sum exp(l - m) and t = sum exp(l - m) (l - m): lse = m + log s, entropy = log s - t / s.
    """
    k = min(max(2, k), logits.shape[1])
    if kernels.lists(k, logits.shape[1]) and kernels.usable(logits):
        return _compiled_marginal(logits, k)
    top = top_k(logits, k)
    if kernels.usable(logits):
        return Marginal(top, *_compiled_side(logits, top.values[:, :1]))
    peak = top.values[:, :1]
    total = torch.zeros(logits.shape[0], dtype=torch.float64, device=logits.device)
    weighted = torch.zeros_like(total)
    for block in _blocks(logits.shape, logits.device):
        below = (logits[:, block] - peak).clamp_(min=-1e4)
        mass = below.exp()
        total += mass.sum(1).double()
        weighted += mass.mul_(below).sum(1).double()
    log_total = total.log()
    return Marginal(top, peak[:, 0].double() + log_total, log_total - weighted / total)


def ranks(logits: torch.Tensor, tokens: torch.Tensor, top: TopK, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Rank of one token per row, [n] int64: 1 + larger logits + equal logits with a smaller id.

    rows [n]: which row of `logits` and `top` each token is looked up in; None = one token for each row in turn.
    """
    rows = torch.arange(logits.shape[0], device=logits.device) if rows is None else rows
    if logits.device.type != "cpu":  # which tokens are in the lists is not to be waited for: every row is counted
        step = max(1, _DEVICE_BLOCK // logits.shape[1])
        parts = [slice(low, low + step) for low in range(0, tokens.shape[0], step)]
        counts = [ahead(logits.index_select(0, rows[part]), tokens[part]) for part in parts]
        return 1 + (torch.cat(counts) if counts else torch.zeros_like(tokens))
    # A token in the top-k list has its place there as its rank, because the list is in the one order, ties included.
    # Only for the others is the whole row counted: that costs a pass over the vocabulary.
    hit = top.ids[rows] == tokens[:, None]
    rank = hit.to(torch.int64).argmax(1) + 1
    for i in torch.nonzero(~hit.any(1))[:, 0].tolist():
        rank[i] = 1 + ahead_in_row(logits[rows[i]], int(tokens[i]))
    return rank


def ahead_in_row(row: torch.Tensor, token: int) -> int:
    """How many ids come before `token` in one row of logits [vocabulary]."""
    if row.device.type == "cpu":  # numpy counts a row in its cache several times as fast
        values = row.numpy()
        return int(np.count_nonzero(values > values[token]) + np.count_nonzero(values[:token] == values[token]))
    return int(torch.count_nonzero(row > row[token]) + torch.count_nonzero(row[:token] == row[token]))


def ahead(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """How many ids come before one token per row, [rows] int64: all rows in one pass, for devices."""
    own = logits.gather(1, tokens[:, None])
    smaller_id = torch.arange(logits.shape[1], device=logits.device) < tokens[:, None]
    return (logits > own).sum(1) + ((logits == own) & smaller_id).sum(1)


def chosen_logprobs(logits: torch.Tensor, tokens: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Log-probability of one token per row (tokens [rows]) or several (tokens [rows, n]), float64."""
    many = tokens if tokens.ndim == 2 else tokens[:, None]
    out: torch.Tensor = logits.gather(1, many).double() - lse[:, None]
    return out if tokens.ndim == 2 else out[:, 0]


class Divergences(NamedTuple):
    """Sums over the vocabulary, [rows] float64 each: see `divergences`."""

    kl: torch.Tensor
    reverse_kl: torch.Tensor
    js: torch.Tensor
    tv: torch.Tensor


def divergences(p: torch.Tensor, q: torch.Tensor, p_lse: torch.Tensor, q_lse: torch.Tensor) -> Divergences:
    """KL(P||Q), KL(Q||P), Jensen-Shannon and total variation of each row. p, q: logits [rows, vocabulary].

    Each summand is written so that it is non-negative on its own (the Bregman form p log(p/q) - p + q) and
    keeps its relative precision where P and Q nearly agree: with a = max(p, q), x = |log p - log q| and
    e = expm1(-x), the smaller is b = a (1 + e) and

        KL(larger || smaller)   a (x + e)
        KL(smaller || larger)   -(b x) - a e
        JS                      -((a + b) log1p(e / 2) + b x) / 2
        TV                      -(a e) / 2

    log p - log q is taken from the logits' difference and the difference of the log-sum-exps (float64), not
    from two rounded log-probabilities. Equal logits give exactly 0.

    KL is infinite in a row where the second side rules out what the first does not: an id that has a probability on the
    first side, and a log-probability more than -LEAST_LOGPROB lower, which is -inf or a mask, on the second.
    """
    if not kernels.usable(p, q):
        return torch_divergences(p, q, p_lse, q_lse)
    out = torch.empty((p.shape[0], 5), dtype=torch.float64)
    kernels.run("pair", p, q, p_lse, q_lse, -LEAST_LOGPROB, out)
    odd = torch.nonzero(out[:, 4])[:, 0]  # an id that is ruled out on one side at least
    if len(odd):
        exact = torch_divergences(p[odd], q[odd], p_lse[odd], q_lse[odd])
        out[odd, :4] = torch.stack([exact.kl, exact.reverse_kl, exact.js * -2, exact.tv * -2], dim=1)
    return _scaled(*out[:, :4].unbind(1))


def torch_divergences(p: torch.Tensor, q: torch.Tensor, p_lse: torch.Tensor, q_lse: torch.Tensor) -> Divergences:
    """`divergences` by torch alone."""
    device = p.device
    sums = [torch.zeros(p.shape[0], dtype=torch.float64, device=device) for _ in range(4)]
    p_shift, q_shift = p_lse.float()[:, None], q_lse.float()[:, None]
    shift = (p_lse - q_lse).float()[:, None]
    apart = torch.zeros(p.shape[0], dtype=torch.float32, device=device)
    for block in _blocks(p.shape, device):
        pb, qb = p[:, block], q[:, block]
        d = (pb - qb).sub_(shift)
        a = torch.maximum(pb - p_shift, qb - q_shift).exp_()
        x = d.abs()
        apart = torch.maximum(apart, x.amax(1))  # NaN passes on
        e = torch.expm1(-x)
        b = torch.addcmul(a, a, e)
        ae, bx = a * e, b * x
        up = torch.addcmul(ae, a, x)  # KL(larger || smaller)
        down = (bx + ae).neg_()  # KL(smaller || larger)
        larger = (d > 0).to(d.dtype)  # lerp with weight 0 or 1 picks exactly, and faster than where
        sums[0] += torch.lerp(down, up, larger).sum(1).double()
        sums[1] += torch.lerp(up, down, larger).sum(1).double()
        sums[2] += (a + b).mul_(torch.log1p(e * 0.5)).add_(bx).sum(1).double()
        sums[3] += ae.sum(1).double()
    for row in torch.nonzero(~(apart <= -LEAST_LOGPROB))[:, 0].tolist():
        sums[0][row] += _ruled_out(p[row], q[row], p_lse[row], q_lse[row])
        sums[1][row] += _ruled_out(q[row], p[row], q_lse[row], p_lse[row])
    return _scaled(*sums)


def _scaled(kl: torch.Tensor, reverse_kl: torch.Tensor, js: torch.Tensor, tv: torch.Tensor) -> Divergences:
    return Divergences(kl.clamp_(min=0), reverse_kl.clamp_(min=0), (js * -0.5).clamp_(min=0), (tv * -0.5).clamp_(0, 1))


def _ruled_out(p: torch.Tensor, q: torch.Tensor, p_lse: torch.Tensor, q_lse: torch.Tensor) -> float:
    """Infinity where q [vocabulary] is -inf or a mask for an id that p finds possible, else 0."""
    log_p, log_q = p.double() - p_lse, q.double() - q_lse
    return float("inf") if bool(((log_p.exp() > 0) & ~(log_p - log_q <= -LEAST_LOGPROB)).any()) else 0.0


def unscorable(values: torch.Tensor) -> torch.Tensor:
    """Flags of values [n] that no log-probabilities can give: not finite, or beyond LEAST_LOGPROB. Integers pass."""
    if not values.is_floating_point():
        return torch.zeros_like(values, dtype=torch.bool)
    return ~(values.abs() <= -LEAST_LOGPROB)


class Side(NamedTuple):
    """One model's columns at the scored positions, [rows] each (float64, ids and ranks int64)."""

    nll: torch.Tensor
    entropy: torch.Tensor
    top1: torch.Tensor
    margin: torch.Tensor
    rank: torch.Tensor


class Reduced(NamedTuple):
    """A tile of one model, kept while candidates are compared with it."""

    logits: torch.Tensor
    marginal: Marginal
    side: Side


def reduce_side(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> Reduced:
    """The per-model columns of a tile; tokens [rows] are the actual next tokens."""
    of = marginal(logits, max(k, min(_RANK_K, logits.shape[1])))
    top = of.top
    side = Side(
        nll=-chosen_logprobs(logits, tokens, of.lse),
        entropy=of.entropy,
        top1=top.ids[:, 0],
        margin=(top.values[:, 0].double() - top.values[:, 1].double()),
        rank=ranks(logits, tokens, top),
    )
    return Reduced(logits, of, side)


class Pair(NamedTuple):
    """The columns that need both models, [rows] each."""

    kl: torch.Tensor
    reverse_kl: torch.Tensor
    js: torch.Tensor
    tv: torch.Tensor
    regret: torch.Tensor
    topk_overlap: torch.Tensor
    ref_rank_of_cand_top1: torch.Tensor
    cand_rank_of_ref_top1: torch.Tensor


def reduce_pair(reference: Reduced, candidate: Reduced, k: int) -> Pair:
    """The pair columns of a tile: both sides' logits of the same rows and vocabulary."""
    p, q = reference, candidate
    sums = divergences(p.logits, q.logits, p.marginal.lse, q.marginal.lse)
    at_q_top = p.logits.gather(1, q.side.top1[:, None])[:, 0].double()
    p_ids, q_ids = p.marginal.top.ids[:, :k], q.marginal.top.ids[:, :k]
    shared = (p_ids[:, :, None] == q_ids[:, None, :]).any(2).sum(1)
    return Pair(
        *sums,
        regret=p.marginal.top.values[:, 0].double() - at_q_top,
        topk_overlap=shared.double() / p_ids.shape[1],
        ref_rank_of_cand_top1=ranks(p.logits, q.side.top1, p.marginal.top),
        cand_rank_of_ref_top1=ranks(q.logits, p.side.top1, q.marginal.top),
    )


def _blocks(shape: torch.Size, device: torch.device) -> Iterator[slice]:
    """Column ranges of a tile that keep a block's elements bounded."""
    rows, columns = shape
    width = max(64, (_CPU_BLOCK if device.type == "cpu" else _DEVICE_BLOCK) // max(1, rows))
    for low in range(0, columns, width):
        yield slice(low, min(low + width, columns))
