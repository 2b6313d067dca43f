"""llama.cpp's logits files (`llama-perplexity --save-all-logits`, read back by `--kl-divergence-base`).

Layout, little-endian: b"_logits_", int32 n_ctx, n_vocab, n_chunk, then int32 tokens [n_chunk, n_ctx] (as tokenized:
BOS is put over a chunk's first token only when it is shown to the model). Then per chunk n_ctx - 1 - n_ctx//2 rows:
row j is the distribution after token n_ctx//2 + j and predicts the next one. A row has nv = 2*((n_vocab + 1)//2) + 4
uint16: float32 scale, float32 min_log_prob, n_vocab codes (and one of padding for an odd vocabulary);
logprob = scale * code + min_log_prob. Logits more than 16 under the row's largest are stored as code 0: censored.
Source: tools/perplexity/perplexity.cpp of llama.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evalgate.core import Window
from evalgate.errors import InputError, ScoreError, UsageError
from evalgate.store.files import remove_abandoned, replacing
from evalgate.traces.batch import Bools, Float32

MAGIC = b"_logits_"
HEADER = struct.Struct("<8siii")
FLOOR = 16.0  # nats under the largest logit, where llama.cpp stops
CODES = 65535
EXP_SLACK = 1e-6  # relative: of exponentials in float32
CLAMP_SLACK = 1e-3  # nats: a row whose stored range is within this of the floor is taken as censored


@dataclass(frozen=True)
class LogitsRows:
    """n rows of a logits file.

    logprobs [n, V] float32, as llama.cpp decodes them (`scale * code + min_log_prob`). censored [n, V]: code 0 of a
    row that reached the floor; the true logprob is at most the stored one plus `rounding`. hidden [n] float64: the
    most probability that the censored ids may have together. rounding [n, V] float32: how far a stored logprob that
    is not censored may be from the true one, in nats (half a code; a largest code that one id alone has is exact).
    """

    logprobs: Float32
    censored: Bools
    hidden: NDArray[np.float64]
    rounding: Float32


@dataclass(frozen=True)
class LogitsFile:
    """A logits file, memory-mapped. tokens [n_chunk, n_ctx] int32; cells [n_chunk, rows, nv] uint16."""

    path: Path
    n_vocab: int
    tokens: NDArray[np.int32]
    cells: NDArray[np.uint16]

    @property
    def n_ctx(self) -> int:
        """Tokens of a chunk."""
        return int(self.tokens.shape[1])

    @property
    def first(self) -> int:
        """The first scored position of a chunk, as a Window counts."""
        return self.n_ctx // 2 + 1

    def windows(self, *, bos_id: int | None, document: str = "logits", domain: str = "") -> tuple[Window, ...]:
        """One window per chunk, scored in [n_ctx//2 + 1, n_ctx). The file does not know texts: bytes are 0.

        bos_id: put over each chunk's first token, as llama.cpp does for models that add BOS; None for others.
        The chunks are one joined text, so they are one document.
        """
        return tuple(
            Window(
                index=index,
                document=document,
                domain=domain,
                ids=tuple(chunk if bos_id is None else (bos_id, *chunk[1:])),
                score_from=self.first,
                score_to=self.n_ctx,
                bytes_per_token=(0,) * self.n_ctx,
            )
            for index, chunk in enumerate(self.tokens.tolist())
        )

    def rows(self, window: int, positions: Sequence[int] | None = None) -> LogitsRows:
        """The rows of one chunk, one per scored position, or those of some. Raises InputError naming a broken row."""
        keep = slice(None) if positions is None else [position - self.first for position in positions]
        cells = np.ascontiguousarray(self.cells[window][keep])
        header = cells[:, :4].copy().view("<f4")
        scale, least = header[:, :1], header[:, 1:2]
        codes = cells[:, 4 : 4 + self.n_vocab]
        scale64, least64 = header.T.astype(np.float64)
        largest = least64 + scale64 * CODES  # of V log-probabilities: in [-log V, 0]
        possible = (largest <= CLAMP_SLACK) & (largest >= -np.log(self.n_vocab) - CLAMP_SLACK)
        bad = ~np.isfinite(header).all(axis=1) | (scale[:, 0] < 0) | (least[:, 0] > 0) | ~possible
        if bad.any():
            raise InputError(
                f"{self.path}: window {window}, row {int(np.argmax(bad))} has no scale and minimum of "
                "log-probabilities: save the logits again",
                file=str(self.path),
                window=window,
            )
        return _decode(codes, scale, least)


def read_logits_file(path: Path | str) -> LogitsFile:
    """Map a logits file.

    Raises InputError naming a file that is missing, has another magic, impossible sizes, a token outside its
    vocabulary, or not exactly the bytes that its header asks for (a cut recording).
    """
    path = Path(path)
    n_ctx, n_vocab, n_chunk = _read_header(path)
    start = HEADER.size + 4 * n_chunk * n_ctx
    shape = (n_chunk, n_ctx - 1 - n_ctx // 2, _cells(n_vocab))
    wanted, size = start + 2 * shape[0] * shape[1] * shape[2], path.stat().st_size
    if size != wanted:
        what = "was cut" if size < wanted else "has something after its rows"
        raise _wrong(path, f"{what}: it has {size} bytes, and {n_chunk} chunks of {n_ctx} tokens need {wanted}")
    tokens = np.fromfile(path, dtype="<i4", count=n_chunk * n_ctx, offset=HEADER.size).reshape(n_chunk, n_ctx)
    stray = (tokens < 0) | (tokens >= n_vocab)
    if stray.any():
        at = np.argwhere(stray)[0].tolist()
        raise _wrong(path, f"has token {tokens[tuple(at)]} at chunk {at[0]}, place {at[1]}, outside its vocabulary")
    cells = np.memmap(path, dtype="<u2", mode="r", offset=start, shape=shape)
    return LogitsFile(path, n_vocab, tokens, cells)


def write_logits_file(path: Path | str, tokens: ArrayLike, chunks: Iterable[ArrayLike], *, n_vocab: int) -> None:
    """Write what llama.cpp would for these logits, bit for bit where its expf rounds correctly.

    tokens [n_chunk, n_ctx]: as tokenized. chunks: per chunk the float32 logits [n_ctx - 1 - n_ctx//2, n_vocab] after
    tokens n_ctx//2 .. n_ctx-2. One chunk is in memory at a time; the file appears only when it is whole.

    Raises UsageError for wrong shapes or tokens outside the vocabulary; ScoreError naming chunk and row of a NaN,
    infinite largest logit; InputError where the disk refuses.
    """
    path, ids = Path(path), np.asarray(tokens)
    if ids.ndim != 2 or ids.shape[1] < 3 or not len(ids) or ids.min() < 0 or ids.max() >= n_vocab:
        raise UsageError("tokens must be [chunks, n_ctx >= 3], each inside the vocabulary")
    shape = (ids.shape[1] - 1 - ids.shape[1] // 2, n_vocab)
    try:
        remove_abandoned(path.resolve().parent)
        with replacing(path) as file:
            file.write(HEADER.pack(MAGIC, ids.shape[1], n_vocab, len(ids)))
            file.write(ids.astype("<i4").tobytes())
            written = 0
            for number, chunk in enumerate(chunks):
                logits = np.asarray(chunk, dtype=np.float32)
                if logits.shape != shape or number >= len(ids):
                    raise UsageError(f"chunk {number} has logits {logits.shape}: give {len(ids)} chunks of {shape}")
                file.write(encode_rows(logits, chunk=number).tobytes())
                written += 1
            if written != len(ids):
                raise UsageError(f"{written} chunks of logits came for {len(ids)} chunks of tokens")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}", file=str(path)) from error


def encode_rows(logits: Float32, *, chunk: int = 0) -> NDArray[np.uint16]:
    """[n, nv] uint16 cells of float32 logits [n, V], in llama.cpp's float32 operations.

    Raises ScoreError naming chunk and row where a logit is NaN or the largest is infinite.
    """
    bad = np.isnan(logits).any(axis=1) | ~np.isfinite(logits.max(axis=1))
    if bad.any():
        row = int(np.argmax(bad))
        raise ScoreError(f"chunk {chunk}, row {row}: a logit is not finite: the model is broken there", row=row)
    cells = np.zeros((len(logits), _cells(logits.shape[1])), dtype="<u2")
    for row, into in zip(logits, cells, strict=True):
        _encode_row(row, into)
    return cells


def _encode_row(logits: Float32, into: NDArray[np.uint16]) -> None:
    largest = logits.max()
    smallest = max(logits.min(), largest - np.float32(FLOOR))
    least = smallest - largest - _log_sum_exp(logits - largest)
    scale = (largest - smallest) / np.float32(CODES)
    into[:4] = np.array([scale, least], dtype="<f4").view("<u2")
    if scale > 0:
        codes = np.rint(np.float32(1) / scale * np.maximum(logits - smallest, np.float32(0)))
        into[4 : 4 + len(logits)] = codes.astype(np.uint16)


def _log_sum_exp(shifted: Float32) -> np.float32:
    """Log of the float64 sum of float32 exponentials, each rounded from float64."""
    terms = np.exp(shifted.astype(np.float64)).astype(np.float32)
    return np.float32(np.log(terms.sum(dtype=np.float64)))


def _decode(codes: NDArray[np.uint16], scale: Float32, least: Float32) -> LogitsRows:
    """Row by row, so that the temporary arrays stay in the processor's cache."""
    logprobs = np.empty(codes.shape, dtype=np.float32)
    censored = np.zeros(codes.shape, dtype=np.bool_)
    rounding = np.empty(codes.shape, dtype=np.float32)
    hidden = np.zeros(len(codes))
    for row, own in enumerate(codes):
        logprobs[row] = scale[row] * own.astype(np.float32) + least[row]
        step, floor = float(scale[row, 0]), float(least[row, 0])
        # The float32 operations of writing and reading round numbers of up to the floor and the range, in nats.
        floats = 2 * np.finfo(np.float32).eps * (abs(floor) + step * CODES)
        top = own == CODES  # one of several may be the likeliest id, and the others near it
        rounding[row] = floats + (step / 2) * (~top if np.count_nonzero(top) == 1 else 1)
        if step * CODES >= FLOOR - CLAMP_SLACK:
            np.equal(own, 0, out=censored[row])
            count, most = np.count_nonzero(censored[row]), np.exp(floor + floats + step / 2)
            seen = np.exp(logprobs[row] - rounding[row]).sum(dtype=np.float64) - count * most
            hidden[row] = min(count * most, max(1 - seen * (1 - EXP_SLACK), 0.0))
    return LogitsRows(logprobs, censored, hidden, rounding)


def _cells(n_vocab: int) -> int:
    return 2 * ((n_vocab + 1) // 2) + 4


def _read_header(path: Path) -> tuple[int, int, int]:
    try:
        with path.open("rb") as file:
            data = file.read(HEADER.size)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}", file=str(path)) from error
    if not data.startswith(MAGIC):
        raise _wrong(path, "does not start with _logits_, so llama-perplexity did not save it")
    if len(data) < HEADER.size:
        raise _wrong(path, "was cut inside its header")
    _, n_ctx, n_vocab, n_chunk = HEADER.unpack(data)
    if n_ctx < 3 or n_vocab < 2 or n_chunk < 1:
        raise _wrong(path, f"has impossible sizes (n_ctx {n_ctx}, n_vocab {n_vocab}, n_chunk {n_chunk})")
    return n_ctx, n_vocab, n_chunk


def _wrong(path: Path, what: str) -> InputError:
    return InputError(f"{path} {what}: save the logits again with --save-all-logits", file=str(path))
