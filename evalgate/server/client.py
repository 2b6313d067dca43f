"""HTTP client of the embedded scoring server. Replies are checked before they are believed."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import httpx2

from evalgate.core import Document, LayerKind, SourceInfo, TokenizedDocument, Window, counted
from evalgate.errors import EvalgateError, MismatchError, ScoreError, ServerError
from evalgate.server.heartbeat import BEAT, SILENCE, Heartbeat
from evalgate.server.process import EmbeddedServer
from evalgate.store.alternatives import LIST_COLUMNS
from evalgate.table import score_columns

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]

_KEEP_ALIVE = 2.0  # seconds; the server closes idle connections later, so that no request crosses that
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts no one; reading the usual certificates takes 30 ms a client
_TEXTS_PER_REQUEST = 64
_ARROW = "application/vnd.apache.arrow.stream"
_CHARACTERS_PER_REQUEST = 1 << 20
_MISMATCH = "mismatch_error"  # the `type` of serve.errors.Mismatch


@dataclass(frozen=True)
class KeptRows:
    """A model's hidden states in the cache, since the server began: batches of windows that were found, written, and
    not believed and so computed anew. problem: why nothing more is kept, "" = none. stored: the body was not loaded.
    """

    found: int
    kept: int
    rebuilt: int
    problem: str
    stored: bool


@dataclass(frozen=True)
class HiddenRows:
    """Hidden rows as they travel: values [n, bytes of a row] uint8, of a dtype (float32, bfloat16, float16)."""

    values: NDArray[np.uint8]
    dtype: str

    @classmethod
    def of(cls, column: pa.Array, dtype: str) -> HiddenRows:
        """The rows of a column of bytes, as many in each."""
        import numpy as np

        width, count = column.type.byte_width, len(column)
        raw = np.frombuffer(column.buffers()[1], dtype=np.uint8) if count else np.zeros(0, np.uint8)
        start = column.offset * width
        return cls(raw[start : start + count * width].reshape(count, width), dtype)


class EmbeddedClient:
    """Requests to one running EmbeddedServer; thread-safe."""

    def __init__(self, server: EmbeddedServer, *, silence: float = SILENCE, beat: float = BEAT) -> None:
        self._server = server
        self._silence = silence
        self._before: dict[str, tuple[float, float]] = {}  # by name, what a kept server had scored before, and how long
        self._heart = Heartbeat(self._alive, server.stop, silence=silence, beat=beat)
        # No read timeout: a batch can take minutes on a slow machine. A child that died closes the connection, and the
        # heartbeat finds one that is stopped.
        self._http = httpx2.Client(
            base_url=server.url,
            headers={"Authorization": f"Bearer {server.key}"},
            timeout=httpx2.Timeout(None, connect=10),
            limits=httpx2.Limits(keepalive_expiry=_KEEP_ALIVE),
            verify=_NO_TLS,
            trust_env=False,  # loopback never goes through a proxy
        )

    def close(self) -> None:
        """Close the connections."""
        self._heart.close()
        self._http.close()

    def abandon(self) -> None:
        """End the requests under way by ending the server: closing the client does not wake a reading thread."""
        self._server.stop()

    def versions(self) -> dict[str, str]:
        """Package versions of the server."""
        found: dict[str, str] = self._call("GET", "/version").json()
        found.pop("version", None)
        return found

    def models(self) -> dict[str, SourceInfo]:
        """The resident models by name."""
        cards = self._call("GET", "/v1/models").json()["data"]
        for card in cards:
            facts = card["evalgate"]
            self._before.setdefault(card["id"], (facts["scored_tokens"], facts["scoring_seconds"]))
        return {card["id"]: _source_info(card) for card in cards}

    def kept_rows(self, model: str) -> KeptRows | None:
        """What the server has found of a model's kept hidden states; None where it keeps none of it."""
        cards = {card["id"]: card["evalgate"] for card in self._call("GET", "/v1/models").json()["data"]}
        found = cards[model].get("kept_rows") if model in cards else None
        return None if found is None else KeptRows(**found)

    def speeds(self) -> dict[str, float]:
        """By name, the tokens of scored windows a second: of each model's own forward and head. None scored: absent.

        Counted from the first time that the models were asked for.
        """
        found = {}
        for name, (all_tokens, all_seconds) in self.scored().items():
            tokens, seconds = self._before.get(name, (0, 0.0))
            if all_tokens > tokens and all_seconds > seconds:
                found[name] = (all_tokens - tokens) / (all_seconds - seconds)
        return found

    def passes(self) -> list[dict[str, Any]]:
        """The passes over streamed weights that are under way (GET /v1/streaming)."""
        found: list[dict[str, Any]] = self._call("GET", "/v1/streaming").json()["passes"]
        return found

    def scored(self) -> dict[str, tuple[int, float]]:
        """By name, the tokens of all windows that were scored, and the seconds of the model's own forward and head."""
        cards = {card["id"]: card["evalgate"] for card in self._call("GET", "/v1/models").json()["data"]}
        return {name: (facts["scored_tokens"], facts["scoring_seconds"]) for name, facts in cards.items()}

    def sources(self, specs: Collection[str]) -> dict[str, SourceInfo]:
        """The resident models by the spec or name that is asked for. Raises ServerError naming those there are."""
        models = self.models()
        by_name = {name: info for info in models.values() for name in (info.name, info.spec)}
        missing = next((spec for spec in specs if spec not in by_name), None)
        if missing is not None:
            raise ServerError(f"the embedded server did not load {missing}: it has {', '.join(models)}")
        return {spec: by_name[spec] for spec in specs}

    def vocabulary(self, model: str) -> list[bytes]:
        """The bytes of every token of a model's tokenizer, by id."""
        reply = self._call("GET", "/v1/vocabulary", params={"model": model}).json()
        return [base64.b64decode(token) for token in reply["tokens"]]

    def tokenize(self, model: str, documents: Sequence[Document]) -> list[TokenizedDocument]:
        """Token ids of documents under a model's tokenizer; what it puts first stands in TokenizedDocument.prefix.

        A chat that the model's template does not take is shown as its plain text, if it has one, and says why
        (TokenizedDocument.plain); else it has no ids and says why (TokenizedDocument.refusal).

        Raises ServerError for a chat without a plain text where the model has no template.
        """
        done: list[TokenizedDocument] = []
        for group in _groups(documents):
            if group[0].messages:
                done.append(self._chat(model, group[0]))
            else:
                done.extend(self._texts(model, group))
        return done

    def score(
        self,
        candidates: Sequence[str],
        windows: Sequence[Window],
        *,
        reference: str | None,
        overlap_k: int = 10,
        apart: bool = False,
        top_k: int = 0,
        hidden: HiddenRows | None = None,
        bits: bool = False,
        keep: bool = False,
    ) -> pa.Table:
        """Exact columns of every candidate at every scored position of the windows.

        hidden: of the reference, which is then an output head that the server holds (`--head`). bits: also `unequal`,
        how many logits of a row differ in any bit between reference and candidate. keep: take the reference's hidden
        states from where the server keeps them (`--keep-rows`), and keep what is computed.

        apart: run the candidates one window at a time, even where one is the reference. top_k: also each side's most
        likely ids, in `ref_top_ids` and `cand_top_ids`, with their logprobs (-inf = masked) in `ref_top_logprobs` and
        `cand_top_logprobs`: fixed-size lists of top_k, or as long as the vocabulary where that is less.

        Rows: candidate (index), then window (index in `windows`), then position; all of them, checked.
        Raises ScoreError where a row is missing or out of place.
        """
        body = {
            "candidates": list(candidates),
            "reference": reference,
            "overlap_k": overlap_k,
            "apart": apart,
            "top_k": top_k,
            "bits": bits,
            "keep": keep,
            "windows": [_wire_window(window) for window in windows],
        }
        if hidden is None:
            table = self._arrow("/v1/score", body)
        else:
            content = _with_request(hidden, body)
            (table,) = self._streams("/v1/score/rows", content=content, headers={"Content-Type": _ARROW})
        _check_rows(table, candidates, windows, pair=reference is not None, lists=top_k > 0)
        return table

    def hidden(self, model: str, windows: Sequence[Window], *, top_k: int) -> tuple[pa.Table, HiddenRows]:
        """One model's own columns with its top_k likeliest ids, as `score` gives them, and its hidden rows."""
        body = {
            "candidates": [model],
            "reference": None,
            "top_k": top_k,
            "hidden": True,
            "windows": [_wire_window(window) for window in windows],
        }
        table, rows = self._streams("/v1/score", json=body, streams=2)
        _check_rows(table, [model], windows, pair=False, lists=True)
        dtype = (rows.schema.metadata or {}).get(b"dtype", b"").decode()
        column = rows.column("hidden").combine_chunks() if "hidden" in rows.column_names else None
        if column is None or len(column) != table.num_rows or not dtype:
            raise ScoreError(f"hidden states did not come back for all of {counted(table.num_rows, 'position')}")
        return table, HiddenRows.of(column, dtype)

    def head(self, model: str) -> dict[str, Any]:
        """Write a model's output head to the server's folder of heads: `file`, `sha256`, `bytes`, and its `name` here.

        Raises ServerError where the head cannot be told apart from the model's code.
        """
        found: dict[str, Any] = self._call("GET", "/v1/head", params={"model": model}).json()
        return found

    def record(
        self, model: str, windows: Sequence[Window], *, top_k: int, tail_samples: int, seed: int, full: bool = False
    ) -> Arrays:
        """What a trace keeps of every scored position: logprob, rank, entropy, tail_mass [n]; top_ids, top_logprobs
        [n, top_k]; tail_ids, tail_logprobs [n, tail_samples]; with full also shifted [n, vocabulary] and lse [n].

        Rows in order of windows and positions, checked. Draws depend on seed, window index and position alone.
        Raises ScoreError where a row is missing or out of place.
        """
        body = {
            "model": model,
            "windows": [_wire_window(window) for window in windows],
            "indices": [window.index for window in windows],
            "top_k": top_k,
            "tail_samples": tail_samples,
            "seed": seed,
            "full": full,
        }
        return _in_place(self._arrow("/v1/record", body), windows)

    def gather(
        self, model: str, windows: Sequence[Window], wanted: Sequence[NDArray[np.int32]], *, top_k: int
    ) -> Arrays:
        """Logprobs [n, width] of exactly the wanted ids, and the model's own nll, entropy, top1, margin, rank [n], and
        top_ids and top_logprobs [n, top_k].

        wanted: [positions, width] of each window, padded with -1, where the logprob is -inf. Raises as `record`.
        """
        shown = [{**_wire_window(window), "wanted": ids.tolist()} for window, ids in zip(windows, wanted, strict=True)]
        return _in_place(self._arrow("/v1/gather", {"model": model, "windows": shown, "top_k": top_k}), windows)

    def rows(self, model: str, windows: Sequence[Window]) -> NDArray[np.float32]:
        """Whole rows of logits, [n, vocabulary]. Raises as `record`."""
        body = {"model": model, "windows": [_wire_window(window) for window in windows]}
        return _in_place(self._arrow("/v1/rows", body), windows)["logits"]

    def _arrow(self, path: str, body: dict[str, Any]) -> pa.Table:
        (table,) = self._streams(path, json=body)
        return table

    def _streams(self, path: str, *, streams: int = 1, **request: Any) -> list[pa.Table]:
        """The tables of a reply, each an Arrow stream of its own."""
        import pyarrow as pa

        reply = self._call("POST", path, **request)
        source = pa.BufferReader(reply.content)
        try:
            return [pa.ipc.open_stream(source).read_all() for _ in range(streams)]
        except pa.ArrowException as error:
            raise ScoreError(f"the embedded server's scores cannot be read ({error})") from None

    def _texts(self, model: str, documents: Sequence[Document]) -> list[TokenizedDocument]:
        body = {
            "model": model,
            "prompt": [d.text for d in documents],
            "add_special_tokens": False,
            "return_details": True,
        }
        reply = self._call("POST", "/tokenize", json=body).json()
        return [
            _tokenized(document, ids, sizes, reply["prefix_token_ids"])
            for document, ids, sizes in zip(documents, reply["tokens"], reply["bytes"], strict=True)
        ]

    def _chat(self, model: str, document: Document) -> TokenizedDocument:
        messages = [message.wire() for message in document.messages]
        body: dict[str, Any] = {"model": model, "messages": messages, "return_details": True}
        if document.tools:
            body["tools"] = json.loads(document.tools)
        try:
            reply = self._call("POST", "/tokenize", json=body).json()
        except ServerError as error:
            param = str(error.context.get("param") or "")
            if document.text and param.startswith(("messages", "tools", "chat_template")):
                reason = "the model has no chat template" if param == "chat_template" else error.message
                return replace(self._texts(model, [document])[0], plain=reason)
            if param.startswith(("messages", "tools")):
                return TokenizedDocument(document.name, document.domain, (), (), refusal=error.message)
            raise
        return TokenizedDocument(
            name=document.name,
            domain=document.domain,
            ids=tuple(reply["tokens"]),
            bytes_per_token=tuple(reply["bytes"]),
            scored=tuple(reply["assistant"]),
        )

    def _sent(self, method: str, path: str, **kwargs: Any) -> httpx2.Response:
        """The reply; asked once more where the connection was lost, for no request changes anything on the server."""
        try:
            return self._http.request(method, path, **kwargs)
        except (httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError):
            if self._heart.hung:
                raise
            return self._http.request(method, path, **kwargs)

    def _alive(self) -> bool:
        """Whether the server answers at all within a few seconds, on a connection of its own."""
        try:
            httpx2.get(f"{self._server.url}/health", timeout=self._silence / 2, verify=_NO_TLS, trust_env=False)
        except httpx2.HTTPError:
            return False
        return True

    def _call(self, method: str, path: str, **kwargs: Any) -> httpx2.Response:
        reply = self.reply(method, path, **kwargs)
        if reply.status_code != 200:
            raise _failure(reply, f"{method} {path}")
        return reply

    def reply(self, method: str, path: str, **kwargs: Any) -> httpx2.Response:
        """The server's reply, whatever its status. Raises ServerError where there is none."""
        try:
            with self._heart.request():
                return self._sent(method, path, **kwargs)
        except httpx2.HTTPError as error:
            if self._heart.hung:
                raise ServerError(
                    f"the embedded server has not answered for {self._silence:g} seconds, not even whether it is well: "
                    "it may have been stopped, or the machine be out of memory; it was ended, so run the command again"
                ) from None
            raise self._server.failure(f"{method} {path}: {error}") from error


def _with_request(hidden: HiddenRows, body: dict[str, Any]) -> bytes:
    """Hidden rows as an Arrow stream, with the request in its metadata."""
    import pyarrow as pa

    count, width = hidden.values.shape
    column = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(width), count, [None, pa.py_buffer(hidden.values.tobytes())]
    )
    table = pa.table({"hidden": column}).replace_schema_metadata({"request": json.dumps(body), "dtype": hidden.dtype})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _failure(reply: httpx2.Response, request: str) -> EvalgateError:
    """The error that a reply stands for; its context has the server's `type` and `param`."""
    try:
        error = reply.json()["error"]
        message, kind, param = str(error["message"]), error.get("type"), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        return ServerError(f"{request} gave status {reply.status_code}", status=reply.status_code)
    if kind == _MISMATCH:
        return MismatchError(message)
    return ServerError(message, status=reply.status_code, type=kind, param=param)


def _source_info(card: dict[str, Any]) -> SourceInfo:
    facts = card["evalgate"]
    names = (
        "weights_hash",
        "tokenizer_hash",
        "dtype",
        "compute_dtype",
        "compute_reason",
        "logits_dtype",
        "load_mode",
        "scheme",
        "backend",
        "template_hash",
    )
    return SourceInfo(
        spec=facts["spec"],
        name=card["id"],
        kind="embedded",
        vocab_size=facts["vocab_size"],
        context_length=card["max_model_len"],
        noise_floor=facts["noise_floor"],
        kl_floor=facts["kl_floor"],
        load_seconds=facts["load_seconds"],
        layers=tuple(LayerKind(**kind) for kind in facts["layers"]),
        extra={
            **{n: str(facts[n]) for n in ("device", "vocabulary_hash", "eos_token_id") if facts[n] is not None},
            **weights_facts(facts["weights"]),
            **streamed_facts(facts.get("streamed")),
        },
        **{name: facts[name] for name in names},
    )


def streamed_facts(streamed: Mapping[str, Any] | None) -> dict[str, str]:
    """How a source's weights were streamed, as the facts that its manifest records; empty where they were in memory."""
    if streamed is None:
        return {}
    names = {"memory": "streamed_within", "batch_tokens": "batch_tokens", "pass_tokens": "pass_tokens"}
    return {fact: str(streamed[name]) for name, fact in names.items()}


def weights_facts(weights: Mapping[str, Any] | None) -> dict[str, str]:
    """How large a source's weights are, as the facts that its manifest records; empty where that is not known."""
    if weights is None:
        return {}
    types = {kind: size for kind, size in weights["types"].items() if kind}
    return {
        "parameters": str(weights["parameters"]),
        "weights_bytes": str(weights["bytes"]),
        "weights_counted": str(weights["counted"]),
        **({"weights_types": ", ".join(f"{kind} {size}" for kind, size in types.items())} if types else {}),
    }


def _tokenized(document: Document, ids: list[int], sizes: list[int], prefix: list[int]) -> TokenizedDocument:
    if sum(sizes) != len(document.text.encode()):
        raise ScoreError(f"the tokens of {document.name} do not cover its text", document=document.name)
    return TokenizedDocument(document.name, document.domain, tuple(ids), tuple(sizes), prefix=tuple(prefix))


def _groups(documents: Sequence[Document]) -> list[list[Document]]:
    """Documents in order, texts in bounded groups, each chat by itself."""
    groups: list[list[Document]] = []
    characters = 0
    for document in documents:
        full = characters + len(document.text) > _CHARACTERS_PER_REQUEST
        last = groups[-1] if groups else None
        if document.messages or last is None or last[0].messages or full or len(last) >= _TEXTS_PER_REQUEST:
            groups.append([document])
            characters = len(document.text)
        else:
            last.append(document)
            characters += len(document.text)
    return groups


def _wire_window(window: Window) -> dict[str, Any]:
    body: dict[str, Any] = {"ids": window.ids, "score_from": window.score_from, "score_to": window.score_to}
    if window.mask:
        body["mask"] = window.mask
    return body


def _in_place(table: pa.Table, windows: Sequence[Window]) -> Arrays:
    """The columns as arrays, [n] or [n, width], after checking that every position is there and in its place."""
    import numpy as np
    import pyarrow as pa

    places = [(w, p) for w, window in enumerate(windows) for p in window.positions]
    arrays: Arrays = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if pa.types.is_fixed_size_list(column.type):
            arrays[name] = column.flatten().to_numpy().reshape(len(column), column.type.list_size)
        else:
            arrays[name] = column.to_numpy()
    if table.num_rows != len(places):
        raise ScoreError(f"{counted(table.num_rows, 'score')} came back for {counted(len(places), 'position')}")
    got = np.stack([arrays["window"], arrays["position"]], axis=1)
    wrong = np.flatnonzero((got != np.array(places).reshape(-1, 2)).any(axis=1))
    if len(wrong):
        raise ScoreError(f"score {int(wrong[0])} came back out of place (window and position {got[wrong[0]]})")
    return arrays


def _check_rows(
    table: pa.Table, candidates: Sequence[str], windows: Sequence[Window], *, pair: bool, lists: bool
) -> None:
    """Every expected column, and every expected row in its place."""
    import numpy as np

    names = set(score_columns(pair=pair))
    if lists:
        names |= {name for name in LIST_COLUMNS if pair or name.startswith("cand_")}
    missing = (names | {"candidate", "window", "position"}) - set(table.column_names)
    if missing:
        raise ScoreError(f"the embedded server's scores lack the column {min(missing)}")
    positions = [p for window in windows for p in window.positions]
    owners = [w for w, window in enumerate(windows) for _ in window.positions]
    each = len(positions)
    if table.num_rows != each * len(candidates):
        raise ScoreError(
            f"{counted(table.num_rows, 'score')} came back for {counted(each * len(candidates), 'position')}"
        )
    expected = {
        "candidate": np.repeat(np.arange(len(candidates)), each),
        "window": np.tile(owners, len(candidates)),
        "position": np.tile(positions, len(candidates)),
    }
    for name, values in expected.items():
        got = table.column(name).to_numpy()
        wrong = np.flatnonzero(got != values)
        if len(wrong):
            raise ScoreError(f"score {int(wrong[0])} came back out of place ({name} {got[wrong[0]]})")
