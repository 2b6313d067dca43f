"""Embedded servers on the machines of a Ray cluster: one that cuts the text, then a pool of workers that score it.

Ray Data runs the pool, and with it everything that a scheduler does: which worker takes which batch, where workers
run, and what happens when one dies. A row of its data set is one batch of windows, and one batch is one request of
a server, which nothing else shares: so its numbers depend neither on how many workers there are nor on their order.

Ray Data's own checkpoints need rows that are read from files and written to files by Ray. Answers come back to this
process here, which keeps each as it arrives (evalgate.store.partial), with Ray or without.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2

from evalgate.core import SourceInfo, Window, counted
from evalgate.errors import EvalgateError, MismatchError, ServerError, UsageError
from evalgate.server.client import EmbeddedClient
from evalgate.server.process import EmbeddedServer

if TYPE_CHECKING:
    from types import TracebackType

    import pyarrow as pa

LOCAL = "local"
ATTEMPTS = 3  # of one batch, where the server that scores it is killed
MOST_BLOCKS = 4096  # tasks of one pool; with more batches a task has several
_STOP_SECONDS = 15.0
_QUIET = {  # nothing is reported to anybody, and standard output is ours
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
}
Ask = Callable[[EmbeddedClient, Sequence[Window]], "pa.Table"]


@dataclass(frozen=True)
class Cluster:
    """Where models are loaded and run, in the place of a child of this process.

    address: "local" (a cluster of this machine alone, which is started and ended with the measurement), "auto" or
    HOST:PORT of a running cluster that this machine is part of. workers: servers that score at once. cpus, gpus: of
    each of them, as Ray counts them (num_cpus, num_gpus); a server computes with as many threads as it has CPUs.
    """

    address: str
    workers: int = 1
    cpus: float = 1.0
    gpus: float = 0.0

    def check(self) -> None:
        """Raise UsageError for what no cluster can honour, or where Ray is not installed."""
        from importlib.util import find_spec

        if self.workers < 1:
            raise UsageError(f"--workers {self.workers} leaves nobody to score: give at least 1")
        if not (math.isfinite(self.cpus) and self.cpus > 0):
            raise UsageError(f"--num-cpus {self.cpus:g} is no share of a machine: give more than 0")
        if not (math.isfinite(self.gpus) and self.gpus >= 0) or (self.gpus > 1 and self.gpus != int(self.gpus)):
            raise UsageError(f"--num-gpus {self.gpus:g} cannot be given to a worker: give 0, a share of 1, or a number")
        if not self.address.strip():
            raise UsageError("--ray has no address: write `local`, `auto` or HOST:PORT of the cluster's head")
        if self.address.startswith("ray://"):
            raise UsageError(
                f"--ray {self.address} is a Ray client's address: run the command on a machine of the cluster, with "
                "--ray auto or HOST:6379"
            )
        if find_spec("ray") is None:
            raise UsageError("Ray is not installed: pip install 'evalgate-lm[ray]'")

    @property
    def threads(self) -> int:
        """Threads of a worker's server."""
        return max(1, int(self.cpus))


@dataclass(frozen=True)
class _Start:
    """How a server is started on another machine. folder: the working directory of relative paths."""

    specs: Sequence[str]
    device: str | None
    options: Sequence[str]
    threads: int
    folder: str
    python: str | None = None

    def server(self) -> EmbeddedServer:
        """The server, not started yet."""
        os.environ["OMP_NUM_THREADS"] = str(self.threads)
        with suppress(OSError):
            os.chdir(self.folder)
        return EmbeddedServer(self.specs, device=self.device, options=self.options, python=self.python)


class RayServer(EmbeddedServer):
    """An embedded server in a Ray actor. Its requests go through Ray (`RayClient`); `pool` scores with many at once.

    It is started again by the first request after a `stop`, so that its memory and GPU are free in between.
    """

    def __init__(
        self,
        cluster: Cluster,
        specs: Sequence[str],
        *,
        device: str | None = "auto",
        options: Sequence[str] = (),
        on_stage: Callable[[str], None] | None = None,
        python: str | None = None,
    ) -> None:
        super().__init__(specs, device=device, options=options, on_stage=on_stage, python=python)
        self.cluster = cluster
        self.counted: dict[str, tuple[int, float]] = {}  # by model, tokens that workers scored and the seconds of it
        self._begin = _Start(self._specs, device, tuple(options), cluster.threads, str(Path.cwd()), python)
        self._session = ExitStack()
        self._lead: Any = None

    def __enter__(self) -> RayServer:
        self._on_stage(f"connecting to Ray ({self.cluster.address})")
        with ExitStack() as stack:
            stack.enter_context(_connected(self.cluster))
            stack.callback(self.stop)
            self.start()
            self._session = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.close()

    def start(self) -> None:
        """Start the server on some machine of the cluster and wait until it listens. Raises ServerError."""
        import ray

        self._on_stage(f"loading models on the cluster: {', '.join(self._specs)}")
        resources = {"num_cpus": self.cluster.cpus, "num_gpus": self.cluster.gpus}
        self._lead = ray.remote(_Lead).options(**resources).remote(self._begin)
        try:
            self.failed, self.no_room = self._asked("start")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server, and give back what it held of the cluster."""
        lead, self._lead = self._lead, None
        if lead is None:
            return
        import ray

        with suppress(Exception):  # it may be gone already
            ray.get(lead.stop.remote(), timeout=_STOP_SECONDS)
        with suppress(Exception):
            ray.kill(lead)

    def request(self, method: str, path: str, options: Mapping[str, Any]) -> tuple[int, bytes]:
        """Status and content of a request to the server. Raises ServerError."""
        if self._lead is None:
            self.start()
        status, content = self._asked("request", method, path, dict(options))
        return status, content

    def _asked(self, name: str, *arguments: Any) -> Any:
        import ray

        try:
            whole, value = ray.get(getattr(self._lead, name).remote(*arguments))
        except ray.exceptions.RayError as error:
            raise _lost(error) from error
        if not whole:
            raise pickle.loads(value)
        return value

    def pool(self, ask: Ask, sources: Mapping[str, SourceInfo], versions: Mapping[str, str]) -> Pool:
        """Workers that answer batches with `ask`, which is sent to them.

        sources, versions: of this server, which every worker's must equal.
        """
        start = replace(self._begin, specs=tuple(sources), options=_strict(self._begin.options))
        return Pool(self, start, ask, sources, versions)


class RayClient(EmbeddedClient):
    """Requests to a RayServer. What it says of itself is remembered: asking again would load its models again."""

    def __init__(self, server: RayServer) -> None:
        super().__init__(server)
        self._ray = server
        self._known: dict[str, httpx2.Response] = {}

    def reply(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """See `EmbeddedClient.reply`."""
        key = json.dumps([method, path, options], sort_keys=True) if method == "GET" else ""
        found = self._known.get(key)
        if found is None:
            status, content = self._ray.request(method, path, options)
            found = httpx2.Response(status, content=content)
            if key and status == 200:
                self._known[key] = found
        return found

    def scored(self) -> dict[str, tuple[int, float]]:
        """See `EmbeddedClient.scored`. Of all workers."""
        return dict(self._ray.counted)


class Pool:
    """Workers of a cluster that score batches; see `RayServer.pool`."""

    def __init__(
        self,
        server: RayServer,
        start: _Start,
        ask: Ask,
        sources: Mapping[str, SourceInfo],
        versions: Mapping[str, str],
    ) -> None:
        self._server = server
        self._worker = (start, ask, {spec: _lasting(info) for spec, info in sources.items()}, dict(versions))

    def answers(self, batches: Mapping[int, Sequence[Window]]) -> Generator[tuple[int, pa.Table], None, None]:
        """Number and table of every batch, in the order in which they are done.

        Raises the first error of a worker; closing the generator ends the workers.
        """
        import ray

        if not batches:
            return
        self._server.stop()  # what it held of the cluster is the workers' now
        cluster = self._server.cluster
        self._server._on_stage(f"scoring with {counted(cluster.workers, 'worker')} on Ray ({cluster.address})")
        with _quiet_data() as data:
            found = data.from_arrow(_blocks(batches)).map_batches(
                _Worker,
                fn_constructor_args=self._worker,
                batch_size=None,
                batch_format="pyarrow",
                compute=data.ActorPoolStrategy(size=cluster.workers, max_tasks_in_flight_per_actor=2),
                num_cpus=cluster.cpus,
                num_gpus=cluster.gpus,
            )
            try:
                for block in found.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
                    for row in block.to_pylist():
                        if row["error"]:
                            raise pickle.loads(row["error"])
                        self._count(json.loads(row["scored"]))
                        yield row["number"], _table(row["table"])
            except ray.exceptions.RayError as error:
                raise _lost(error) from error

    def _count(self, scored: Mapping[str, Sequence[float]]) -> None:
        for name, (tokens, seconds) in scored.items():
            before = self._server.counted.get(name, (0, 0.0))
            self._server.counted[name] = (before[0] + int(tokens), before[1] + seconds)


class _Lead:
    """The server that is asked about models and text; its methods run on the machine where it is."""

    def __init__(self, start: _Start) -> None:
        self._server = start.server()
        self._client: EmbeddedClient | None = None

    def start(self) -> tuple[bool, Any]:
        """What could not be loaded, and what did not fit."""
        try:
            self._server.start()
        except EvalgateError as error:
            return False, pickle.dumps(error)
        self._client = EmbeddedClient(self._server)
        return True, (self._server.failed, self._server.no_room)

    def request(self, method: str, path: str, options: dict[str, Any]) -> tuple[bool, Any]:
        """Status and content of a request."""
        assert self._client is not None  # it was started
        try:
            reply = self._client.reply(method, path, **options)
        except EvalgateError as error:
            return False, pickle.dumps(error)
        return True, (reply.status_code, reply.content)

    def stop(self) -> None:
        """End the server."""
        if self._client is not None:
            self._client.close()
        self._server.stop()


class _Worker:
    """One worker: a server of its own, which is started with the first batch and again where it is killed."""

    def __init__(self, start: _Start, ask: Ask, sources: Mapping[str, SourceInfo], versions: Mapping[str, str]) -> None:
        self._start = start
        self._ask = ask
        self._sources = sources
        self._versions = versions
        self._server: EmbeddedServer | None = None
        self._client: EmbeddedClient | None = None
        self._scored: dict[str, tuple[int, float]] = {}

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Each row's answer, or the error in its place: an exception would end the pool without its message."""
        import pyarrow as pa

        found: dict[str, list[Any]] = {"number": [], "table": [], "scored": [], "error": []}
        for number, packed in zip(rows.column("number").to_pylist(), rows.column("windows").to_pylist(), strict=True):
            table, error = b"", b""
            scored: dict[str, tuple[int, float]] = {}
            try:
                answer, scored = self._answer(pickle.loads(packed))
                table = _bytes(answer)
            except EvalgateError as failed:
                error = pickle.dumps(failed)
            for name, value in zip(found, (number, table, json.dumps(scored), error), strict=True):
                found[name].append(value)
        kinds = (pa.int64(), pa.large_binary(), pa.string(), pa.large_binary())
        return pa.table({name: pa.array(found[name], kind) for name, kind in zip(found, kinds, strict=True)})

    def _answer(self, windows: Sequence[Window]) -> tuple[pa.Table, dict[str, tuple[int, float]]]:
        """The table of some windows, and by model what scoring them took; again where the server was killed."""
        for left in reversed(range(ATTEMPTS)):
            try:
                client = self._ready()
                return self._ask(client, windows), self._since(client)
            except ServerError:
                if self._server is None or not self._server.killed or not left:
                    raise
                self._end()
        raise AssertionError("every attempt returns or raises")

    def _ready(self) -> EmbeddedClient:
        if self._client is None:
            self._server = self._start.server()
            self._server.start()
            client = EmbeddedClient(self._server)
            check_alike(client, self._sources, self._versions)
            self._client, self._scored = client, client.scored()
        return self._client

    def _since(self, client: EmbeddedClient) -> dict[str, tuple[int, float]]:
        now = client.scored()
        before, self._scored = self._scored, now
        return {name: (now[name][0] - before[name][0], now[name][1] - before[name][1]) for name in now}

    def _end(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.stop()
        self._server, self._client = None, None


def check_alike(client: EmbeddedClient, sources: Mapping[str, SourceInfo], versions: Mapping[str, str]) -> None:
    """Raise MismatchError where this machine's server holds other models than the one that the run describes."""
    here = client.sources(list(sources))
    other = [(f"version of {name}", version, client.versions().get(name)) for name, version in versions.items()]
    for spec, wanted in sources.items():
        found = _lasting(here[spec])
        names = [field.name for field in fields(wanted)]
        other += [(f"{n.replace('_', ' ')} of {spec}", getattr(wanted, n), getattr(found, n)) for n in names]
    for what, wanted_value, value in other:
        if value is not None and wanted_value != value:
            raise MismatchError(
                f"the machine {socket.gethostname()} has another {what} than the machine where the run began "
                f"({value} and {wanted_value}): give all machines of the cluster the same packages, files and devices"
            )


def _lasting(info: SourceInfo) -> SourceInfo:
    """The source without what was measured while it loaded, which differs from load to load."""
    return replace(info, noise_floor=None, kl_floor=None, load_seconds=None)


def _strict(options: Sequence[str]) -> tuple[str, ...]:
    """A worker's options: it loads what the run is made of, all of it."""
    return tuple(option for option in options if option != "--keep-going")


def _blocks(batches: Mapping[int, Sequence[Window]]) -> list[pa.Table]:
    import pyarrow as pa

    numbers = list(batches)
    each = math.ceil(len(numbers) / MOST_BLOCKS)
    parts = [numbers[low : low + each] for low in range(0, len(numbers), each)]
    return [
        pa.table(
            {
                "number": pa.array(part, pa.int64()),
                "windows": pa.array([pickle.dumps(list(batches[number])) for number in part], pa.large_binary()),
            }
        )
        for part in parts
    ]


def _bytes(table: pa.Table) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _table(content: bytes) -> pa.Table:
    import pyarrow as pa

    return pa.ipc.open_stream(content).read_all()


@contextmanager
def _connected(cluster: Cluster) -> Generator[None, None, None]:
    """Ray is connected inside the block; a session that is there already is used, and left as it is."""
    os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
    import ray

    if ray.is_initialized():
        yield
        return
    local = cluster.address == LOCAL
    # A CPU more than the workers need: with none left, no task of Ray Data's own would ever run.
    before = signal.getsignal(signal.SIGTERM)  # Ray sets its own, which would end us without a word
    room = {"num_cpus": max(os.cpu_count() or 1, math.ceil(cluster.workers * cluster.cpus) + 1)} if local else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                address=cluster.address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **({"include_dashboard": False, **room} if local else {}),
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ServerError(
            f"cannot connect to Ray at {cluster.address} ({_first_line(error)}): start a cluster with "
            "`ray start --head` and name it, or use --ray local"
        ) from error
    try:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
        held = ray.cluster_resources().get("GPU", 0.0)
        if local and cluster.gpus > held:
            raise UsageError(
                f"--num-gpus {cluster.gpus:g} is more than this machine has ({held:g}): leave it out, or name a cluster"
            )
        yield
    finally:
        ray.shutdown()


@contextmanager
def _quiet_data() -> Generator[Any, None, None]:
    """Ray Data, without its progress bars and announcements inside the block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own defaults are deprecated
        import ray.data

        logging.getLogger("ray.data").setLevel(logging.ERROR)
        context = ray.data.DataContext.get_current()
        before = context.enable_progress_bars, context.print_on_execution_start
        context.enable_progress_bars, context.print_on_execution_start = False, False
        try:
            yield ray.data
        finally:
            context.enable_progress_bars, context.print_on_execution_start = before


def _lost(error: BaseException) -> ServerError:
    return ServerError(
        f"Ray lost the servers ({_first_line(error)}): what was scored is kept, so run the command again",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
