"""`python -m serve SPEC...`: load models and listen.

With --announce-fd the server is somebody's child: it reports its progress as JSON lines on that descriptor
({"stage"}, then {"port"} or {"error"}), and ends when its standard input closes, so that it never outlives
its parent, however that died. With --outlive it stays, and ends after --idle-seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from serve.config import EngineConfig, ModelSpec, Reading, ServerConfig, check_device
from serve.errors import LoadFailed
from serve.models.quiet import quiet

if TYPE_CHECKING:
    from serve.engine.loop import Engine
    from serve.models.load import Failures

BAD_START = 2


def main(argv: list[str] | None = None) -> int:
    """Run the server; returns the exit code (0 after a clean stop, 2 when it could not start)."""
    options = _parser().parse_args(argv)
    announce = os.fdopen(options.announce_fd, "w", buffering=1) if options.announce_fd is not None else None
    if announce is not None and not options.outlive:
        threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        return _serve(options, announce)
    except LoadFailed as error:
        _tell(announce, {"error": error.message})
        _say(error.message)
        return BAD_START


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m serve", description="The embedded scoring server.")
    parser.add_argument(
        "specs", nargs="+", metavar="SPEC", help="checkpoint folder, hub id, GGUF file or demo; @bf16 ..."
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_port, default=8000, help="0 = a free port")
    parser.add_argument("--revision", default=None, help="branch, tag or commit of models of the hub")
    parser.add_argument(
        "--allow-pickle", action="store_true", help="read pickled weights (.bin, .pt), which can run code"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the Python code that a checkpoint brings")
    parser.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="what a model is called, instead of its spec; once for each SPEC, in order",
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="leave out models that cannot be loaded, and serve the others"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 ...")
    parser.add_argument("--api-key-env", default="EVALGATE_API_KEY", help="environment variable that holds the key")
    parser.add_argument("--max-model-len", type=_positive, default=None)
    parser.add_argument("--max-batch-tokens", type=_positive, default=EngineConfig.max_batch_tokens)
    parser.add_argument("--kv-memory", type=_bytes, default=EngineConfig.kv_memory, help="bytes, or 512M, 2G")
    parser.add_argument(
        "--memory",
        default=None,
        metavar="SIZE",
        help="what the models may take: 8GiB, 8GB, 80%% of what is free (the default: all that is free); where "
        "they need more, their weights are read from disk layer by layer",
    )
    parser.add_argument("--tile-bytes", type=_bytes, default=EngineConfig.tile_bytes, help="of one tile of logits")
    parser.add_argument(
        "--max-logprobs", type=_most_logprobs, default=EngineConfig.max_logprobs, help="-1 = whole vocabulary"
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="the same bits alone, in any batch, cold or cached"
    )
    parser.add_argument(
        "--logits",
        choices=("float32", "model"),
        default=EngineConfig.logits,
        help="float32: the head is computed in float32 whatever the weights; model: the model's own head and dtype",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="check that each model repeats its own forward, even where a check of the same weights, versions and "
        "machine is remembered",
    )
    parser.add_argument(
        "--head",
        action="append",
        type=_head,
        default=[],
        metavar="NAME=FILE",
        help="also serve an output head, whose hidden rows come with the requests (/v1/score/rows); repeatable",
    )
    parser.add_argument(
        "--heads-folder", default=None, metavar="FOLDER", help="where GET /v1/head writes the output heads of models"
    )
    parser.add_argument(
        "--keep-rows",
        action="append",
        default=[],
        metavar="SPEC",
        help="keep this model's hidden rows in the cache folder, and load its body only where some are missing",
    )
    parser.add_argument("--keep-bytes", type=_bytes, default=10 << 30, help="limit of all rows and heads that are kept")
    parser.add_argument("--max-concurrent-requests", type=_positive, default=ServerConfig.max_concurrent_requests)
    parser.add_argument(
        "--max-body-bytes", type=_bytes, default=ServerConfig.max_body_bytes, help="of a request; bytes, or 64M"
    )
    parser.add_argument("--reasoning-parser", default=ServerConfig.reasoning_parser, help="auto, none, or a name")
    parser.add_argument("--tool-parser", default=ServerConfig.tool_parser, help="auto, none, or a name")
    parser.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="let requests bring their own chat template, which is code; it runs in a process with limits",
    )
    parser.add_argument(
        "--long-texts", action="store_true", help="let /tokenize take texts that no context of the model holds"
    )
    parser.add_argument("--drain-seconds", type=_positive, default=30, help="time for running requests after SIGTERM")
    parser.add_argument(
        "--access-log", default=None, metavar="FILE", help="one JSON line a request; - = standard error (the default)"
    )
    parser.add_argument(
        "--idle-seconds", type=float, default=None, metavar="N", help="end after this long without a request"
    )
    parser.add_argument("--outlive", action="store_true", help=argparse.SUPPRESS)  # stay when standard input closes
    parser.add_argument("--announce-fd", type=int, default=None, help=argparse.SUPPRESS)
    return parser


def _bytes(text: str) -> int:
    units = {"K": 10, "M": 20, "G": 30, "T": 40}
    shift = units.get(text[-1:].upper(), 0)
    try:
        value = int(float(text[:-1] if shift else text) * (1 << shift))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 536870912, 512M or 2G") from None
    if value <= 0:
        raise argparse.ArgumentTypeError("the size must be positive")
    return value


def _head(text: str) -> tuple[str, str]:
    name, _, file = text.rpartition("=")
    if not name or not file:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=FILE")
    return name, file


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of at least 1")
    return int(text)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is not a port: give 1 to 65535, or 0 for a free one")
    return int(text)


def _most_logprobs(text: str) -> int:
    return int(text) if text in ("-1", "0") else _positive(text)


def _serve(options: argparse.Namespace, announce: IO[str] | None) -> int:
    key = os.environ.pop(options.api_key_env, None) or None
    if key is None and not _loopback(options.host):
        raise LoadFailed(
            f"listening on {options.host} without a key would be open to the network: "
            f"set {options.api_key_env}, or listen on 127.0.0.1"
        )
    specs = [ModelSpec.parse(text) for text in options.specs]
    names = _names(options)
    check_device(options.device)
    listener = _listen(options.host, options.port)
    if announce is None:
        _say(f"loading {', '.join(map(str, specs))}")
    with _installed():
        from serve.api.draining import DrainingServer, log_requests
        from serve.api.loading import Loading
    config = _server_config(options, key, port=listener.getsockname()[1])
    running: list[Engine] = []
    front = Loading()

    def stage(text: str) -> None:
        front.stage = text  # what /health says until the application is there
        _tell(announce, {"stage": text})

    def load() -> None:
        stage("importing torch and transformers")
        with _installed(), quiet():  # libraries of quantized checkpoints write a lot when they are imported
            from serve.app import create_app
            from serve.engine.loop import Engine
            from serve.engine.stored import HeadModel
            from serve.models.load import Failures
        stage(f"loading {', '.join(map(str, specs))}")
        failures = Failures() if options.keep_going else None
        reading = Reading(options.revision, options.allow_pickle, options.trust_remote_code)
        engine = Engine.load(specs, _engine_config(options), reading=reading, names=names, failures=failures)
        engine.heads |= {name: HeadModel(name, Path(file), engine.config) for name, file in engine.config.heads}
        if failures is not None:
            _report(failures, announce, loaded=bool(engine.models))
        app = create_app(engine, config)
        log_requests(options.access_log or ("-" if announce is None else None))
        engine.start()
        running.append(engine)
        front.ready(app)

    def on_exit() -> None:
        if front.app is None:
            os._exit(0)  # nothing is answered yet, and a load cannot be interrupted
        front.app.state.server.draining = True  # type: ignore[attr-defined]

    server = DrainingServer(front, drain_seconds=options.drain_seconds, on_exit=on_exit)

    async def end_when_idle(seconds: float) -> None:
        while front.idle_seconds() < seconds:
            await asyncio.sleep(max(0.05, min(5.0, seconds - front.idle_seconds())))
        on_exit()
        server.should_exit = True

    async def run() -> None:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await asyncio.to_thread(load)
            _tell(announce, {"port": config.port})
            if announce is None:
                _say(f"listening on http://{config.host}:{config.port}")
            if options.idle_seconds is not None:
                watching = asyncio.create_task(end_when_idle(options.idle_seconds))
                serving.add_done_callback(lambda _: watching.cancel())
            await serving
        except BaseException:
            server.should_exit = True
            await serving
            raise

    try:
        asyncio.run(run())
    finally:
        for engine in running:
            engine.stop()
    return 0


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    """Name the extra to install where an import fails for want of a package."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise LoadFailed(f"serving needs {error.name}: pip install 'evalgate-lm[serve]'") from error


def _report(failures: Failures, announce: IO[str] | None, *, loaded: bool) -> None:
    """Say which models were left out and why. Raises LoadFailed where none is left."""
    reasons = {**failures.reasons, **dict.fromkeys(failures.no_room, "there is no memory left for it")}
    if not loaded:
        raise LoadFailed(next(iter(reasons.values()), "there is no model to serve"))
    if announce is not None:
        _tell(announce, {"failed": failures.reasons, "no_room": failures.no_room})
        return
    for spec, reason in reasons.items():
        _say(f"left out {spec}: {reason}")


def _names(options: argparse.Namespace) -> list[str]:
    names: list[str] = options.served_model_name
    if names and options.keep_going:
        raise LoadFailed("--keep-going may leave models out, and names go by their order: leave out one of the two")
    if names and len(names) != len(options.specs):
        raise LoadFailed(f"{len(names)} --served-model-name for {len(options.specs)} models: give one for each")
    if len(set(names)) < len(names):
        raise LoadFailed("two models have one --served-model-name: give each its own")
    return names


def _engine_config(options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        device=options.device,
        max_batch_tokens=options.max_batch_tokens,
        kv_memory=options.kv_memory,
        max_logprobs=options.max_logprobs,
        max_model_len=options.max_model_len,
        logits=options.logits,
        deterministic=options.deterministic,
        remember_checks=not options.check,
        tile_bytes=options.tile_bytes,
        heads=tuple(options.head),
        heads_folder=options.heads_folder,
        memory=options.memory,
        keep_rows=tuple(options.keep_rows),
        keep_bytes=options.keep_bytes,
    )


def _server_config(options: argparse.Namespace, key: str | None, *, port: int) -> ServerConfig:
    return ServerConfig(
        host=options.host,
        port=port,
        api_key=key,
        max_body_bytes=options.max_body_bytes,
        max_concurrent_requests=options.max_concurrent_requests,
        reasoning_parser=options.reasoning_parser,
        tool_parser=options.tool_parser,
        trust_request_templates=options.trust_request_chat_template,
        long_texts=options.long_texts,
    )


def _loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it each reply waits 40 ms for an ACK
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise LoadFailed(f"cannot listen on {host}:{port} ({error.strerror}): choose another --port") from None
    listener.listen(128)
    return listener


def _say(text: str) -> None:
    """One line on standard error; what would move the cursor or hide text, in a file's names, is escaped."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    sys.stderr.write(f"serve: {shown}\n")


def _tell(announce: IO[str] | None, message: dict[str, object]) -> None:
    if announce is not None:
        print(json.dumps(message), file=announce, flush=True)


def _die_with_parent() -> None:
    """End the process when standard input reaches its end."""
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
