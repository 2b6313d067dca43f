"""Traces: a recorded reference that later candidates are compared with, without the reference's weights."""

from evalgate.traces.batch import PositionBatch, concatenate
from evalgate.traces.bounds import Bounds, Shared, js_interval, kl_lower, tv_interval
from evalgate.traces.compare import NeededIds, TracePair, compare, needed_ids
from evalgate.traces.condense import condense
from evalgate.traces.edit import cut, merge
from evalgate.traces.estimate import (
    KlEstimate,
    Settled,
    chosen_token_terms,
    estimate_kl,
    mean_standard_error,
    settled,
)
from evalgate.traces.full import FullPair, compare_full
from evalgate.traces.layout import Manifest, TraceMeta
from evalgate.traces.llamacpp_kl import llamacpp_kl, llamacpp_kl_interval
from evalgate.traces.llamacpp_logits import LogitsFile, LogitsRows, read_logits_file, write_logits_file
from evalgate.traces.reader import Trace, read_trace
from evalgate.traces.toplists import Known, TopList, TopOne, agreement, shared_ids, top1, topk_overlap
from evalgate.traces.verify import Problem, verify
from evalgate.traces.writer import TraceWriter

__all__ = [
    "Bounds",
    "FullPair",
    "KlEstimate",
    "Known",
    "LogitsFile",
    "LogitsRows",
    "Manifest",
    "NeededIds",
    "PositionBatch",
    "Problem",
    "Settled",
    "Shared",
    "TopList",
    "TopOne",
    "Trace",
    "TraceMeta",
    "TracePair",
    "TraceWriter",
    "agreement",
    "chosen_token_terms",
    "compare",
    "compare_full",
    "concatenate",
    "condense",
    "cut",
    "estimate_kl",
    "js_interval",
    "kl_lower",
    "llamacpp_kl",
    "llamacpp_kl_interval",
    "mean_standard_error",
    "merge",
    "needed_ids",
    "read_logits_file",
    "read_trace",
    "settled",
    "shared_ids",
    "top1",
    "topk_overlap",
    "tv_interval",
    "verify",
    "write_logits_file",
]
