"""Several forwards of one model, all of them through one layer before any goes on to the next.

Each forward is the model's own code in a coroutine (a greenlet), which waits where a layer begins until that layer's
turn has come. So whatever a body does between its layers is done as it always is, and what a layer gives has the bits
that it has in a forward by itself. Two things need no more memory than one layer's that way:

- weights: a layer is read before its turn, the next one while it computes, and let go of after it (`streamed.py`);
- keys and values: a long window goes through a layer chunk by chunk, and only that layer's keys and values are kept.

Between two layers a forward consists of its hidden rows, which may be written to a file meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn

Forward = Callable[[], torch.Tensor]
_Thread = Callable[[Callable[[], Any]], "Future[Any]"]
Restore = Callable[[], None]
_WORTH_WRITING = 1 << 16  # bytes


@dataclass(eq=False)
class Stage:
    """Where forwards wait for each other. module: whose call begins it; None where it is asked for by `need`.

    read: prepares it, on another thread. bring: puts what was read in place. drop: lets it go. weight: bytes that are
    read.
    """

    name: str
    module: nn.Module | None = None
    read: Callable[[], Any] | None = None
    bring: Callable[[Any], None] | None = None
    drop: Callable[[], None] | None = None
    weight: int = 0
    here: bool = field(default=False, init=False)
    inside: int = field(default=0, init=False)  # forwards that are between its beginning and its end


@dataclass
class Sweep:
    """How far the forwards have come: stages done of all, bytes read, and seconds since the beginning."""

    stages: int
    done: int = 0
    bytes: int = 0
    total_bytes: int = 0
    began: float = field(default_factory=time.monotonic)


class _Task:
    """One forward. restore: puts back what it had set when it was left. A greenlet belongs to the thread that began
    it."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.greenlet: Any = None
        self.restore: Restore = _nothing
        self.result: torch.Tensor | None = None


def _nothing() -> None:
    return None


class _Here(threading.local):
    """The forward that runs in this thread, and the greenlet that it hands over to."""

    def __init__(self) -> None:
        self.task: _Task | None = None
        self.hub: Any = None


class LayerByLayer:
    """Runs forwards of one model stage by stage. snapshot: how to put back what a forward reads while it runs.

    ahead: read the next stage while one computes. scratch: a folder for hidden rows; None keeps them in memory.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        snapshot: Callable[[], Restore],
        ahead: bool = False,
        scratch: Path | None = None,
        watch: Callable[[Sweep], None] | None = None,
        always: bool = False,
    ) -> None:
        """always: stages are also read and let go of in forwards outside `run`, one after the other."""
        self._stages = list(stages)
        self._order = {stage: number for number, stage in enumerate(self._stages)}
        self._snapshot = snapshot
        self._ahead = ahead
        self._scratch = scratch
        self._watch = watch
        self._here = _Here()
        self._counting = threading.Lock()
        self._files: _Files | None = None
        self._reading: dict[Stage, Future[Any]] = {}
        self._reader: ThreadPoolExecutor | None = None
        self._always = always
        self._last: Stage | None = None  # asked for by `need` outside `run`
        if always:
            self._hook()

    @property
    def running(self) -> bool:
        """Whether the code that asks runs inside a forward of `run`."""
        return self._here.task is not None

    def run(self, forwards: Sequence[Forward], *, spill: bool = False, lanes: int = 1) -> list[torch.Tensor]:
        """What the forwards give, in their order. spill: keep hidden rows in files between two layers.

        lanes: threads that share the forwards, and torch's threads; 1 = the calling thread, with all of them.
        A forward that raises ends them all, with its error.
        """
        tasks = [_Task(forward) for forward in forwards]
        sweep = Sweep(len(self._stages), total_bytes=sum(stage.weight for stage in self._stages))
        with self._hooked(), self._written(spill), self._read_ahead(), _threads(lanes) as threads:
            shares = [tasks[number :: len(threads)] for number in range(len(threads))]
            try:
                waiting = self._all(threads, shares, self._begun)
                while waiting:
                    stage = min(waiting.values(), key=self._order.__getitem__)
                    self._bring(stage, sweep)
                    own = [[task for task in share if waiting.get(task) is stage] for share in shares]
                    waiting = {task: other for task, other in waiting.items() if other is not stage}
                    waiting |= self._all(threads, own, self._begun)
                    self._let_go()
                    sweep.done = self._order[stage] + 1
                    if self._watch is not None:
                        self._watch(sweep)
            finally:
                self._all(threads, shares, self._given_up)
                self._let_go(all_of_them=True)
        return [task.result for task in tasks if task.result is not None]

    def _all(
        self,
        threads: Sequence[_Thread],
        shares: Sequence[Sequence[_Task]],
        work: Callable[[Sequence[_Task]], dict[_Task, Stage]],
    ) -> dict[_Task, Stage]:
        """Do work on each thread's share of the forwards; returns where those wait that have not ended."""
        under_way = [thread(partial(work, share)) for thread, share in zip(threads, shares, strict=True)]
        found: dict[_Task, Stage] = {}
        errors = []
        for each in under_way:  # all of them, before an error lets go of what they share
            try:
                found |= each.result()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return found

    def _begun(self, tasks: Sequence[_Task]) -> dict[_Task, Stage]:
        """Run forwards, in the thread that they belong to, until each waits for a stage or ends."""
        self._here.hub = getcurrent()
        with torch.inference_mode():
            found = {task: self._switch(task) for task in tasks}
        return {task: stage for task, stage in found.items() if stage is not None}

    def _given_up(self, tasks: Sequence[_Task]) -> dict[_Task, Stage]:
        """End forwards that have not ended, in the thread that they belong to."""
        for task in tasks:
            if task.greenlet is not None and not task.greenlet.dead:
                self._here.task = task
                task.restore()
                task.greenlet.throw(GreenletExit)
        self._here.task = self._here.hub = None
        return {}

    def need(self, stage: Stage) -> None:
        """Wait, in a forward, until a stage's turn has come; outside `run`, prepare it in the place of the last one."""
        if self._here.task is not None:
            self._wait(stage, None)
        elif stage is not self._last:
            if self._last is not None:
                self._drop(self._last)
            self._last = stage
            self._now(stage)

    def _now(self, stage: Stage) -> None:
        if stage.read is not None and stage.bring is not None and not stage.here:
            stage.bring(stage.read())
            stage.here = True

    @staticmethod
    def _drop(stage: Stage) -> None:
        if stage.here:
            stage.here = False
            if stage.drop is not None:
                stage.drop()

    def _switch(self, task: _Task) -> Stage | None:
        """Run a forward until it waits for a stage, which is returned, or to its end."""
        self._here.task = task
        task.restore()
        if task.greenlet is None:
            task.greenlet = greenlet(task.forward)
        try:
            found: Any = task.greenlet.switch()
        finally:
            task.restore = self._snapshot()
            self._here.task = None
        if not task.greenlet.dead:
            return found  # type: ignore[no-any-return]
        task.result = found
        return None

    def _wait(self, stage: Stage, hidden: torch.Tensor | None) -> None:
        hub = self._here.hub
        if stage.here or self._here.task is None or hub is None:
            return
        if hidden is None or self._files is None:
            hub.switch(stage)
        else:
            with self._files.away(hidden):
                hub.switch(stage)

    def _enter(self, stage: Stage) -> Callable[..., None]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._here.task is None:
                if self._always:
                    self._now(stage)
                return  # else a forward of another thread, which has nothing to do with this
            given = args[0] if args else kwargs.get("hidden_states")
            self._wait(stage, given if isinstance(given, torch.Tensor) else None)
            with self._counting:
                stage.inside += 1

        return enter

    def _leave(self, stage: Stage) -> Callable[..., None]:
        def leave(*_: Any) -> None:
            if self._here.task is not None:
                with self._counting:
                    stage.inside -= 1
            elif self._always:
                self._drop(stage)

        return leave

    def _bring(self, stage: Stage, sweep: Sweep) -> None:
        read = self._reading.pop(stage, None)
        if stage.read is not None and self._reader is not None:
            tensors = (read or self._reader.submit(stage.read)).result()
            if stage.bring is not None:
                stage.bring(tensors)
            sweep.bytes += stage.weight
        stage.here = True
        for other in list(self._reading):  # read ahead for nothing: no forward needed it
            self._reading.pop(other).cancel()
        following = self._order[stage] + 1
        if self._ahead and following < len(self._stages) and self._reader is not None:
            upcoming = self._stages[following]
            if upcoming.read is not None and not upcoming.here:
                self._reading[upcoming] = self._reader.submit(upcoming.read)

    def _let_go(self, *, all_of_them: bool = False) -> None:
        for stage in self._stages:
            if all_of_them:
                stage.inside = 0
            if not stage.inside:
                self._drop(stage)

    def _hook(self) -> list[Any]:
        hooks: list[Any] = []
        for stage in self._stages:
            if stage.module is not None:
                hooks.append(stage.module.register_forward_pre_hook(self._enter(stage), with_kwargs=True))
                hooks.append(stage.module.register_forward_hook(self._leave(stage)))
        return hooks

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """The stages' modules call `_enter` and `_leave` inside the block."""
        hooks = [] if self._always else self._hook()
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _read_ahead(self) -> Iterator[None]:
        """A thread that reads stages, inside the block."""
        if not any(stage.read is not None for stage in self._stages):
            yield
            return
        with ThreadPoolExecutor(1, thread_name_prefix="layers") as self._reader:
            try:
                yield
            finally:
                for reading in self._reading.values():
                    reading.cancel()
                self._reading.clear()
        self._reader = None

    @contextmanager
    def _written(self, spill: bool) -> Iterator[None]:
        """Files for hidden rows, inside the block."""
        if not spill or self._scratch is None:
            yield
            return
        self._scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._scratch) as file:
            self._files = _Files(file.fileno())
            try:
                yield
            finally:
                self._files = None


class _Files:
    """Hidden rows of waiting forwards, side by side in one file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._free: dict[int, list[int]] = {}  # places by size
        self._end = 0
        self._lock = threading.Lock()

    @contextmanager
    def away(self, tensor: torch.Tensor) -> Iterator[None]:
        """Inside the block the tensor's memory is free, and its content in the file."""
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size < _WORTH_WRITING or not storage.resizable():
            yield
            return
        with self._lock:
            places = self._free.setdefault(size, [])
            place = places.pop() if places else self._end
            self._end = max(self._end, place + size)
        device = tensor.device
        held: Any = storage.cpu() if device.type != "cpu" else storage  # type: ignore[no-untyped-call]
        _each(os.pwrite, self._descriptor, held.data_ptr(), size, place)
        del held
        storage.resize_(0)
        try:
            yield
        finally:
            storage.resize_(size)
            back: Any = storage if device.type == "cpu" else torch.UntypedStorage(size)  # type: ignore[no-untyped-call]
            _each(os.preadv, self._descriptor, back.data_ptr(), size, place)
            if back is not storage:
                storage.copy_(back)
            places.append(place)


def _each(call: Callable[..., int], descriptor: int, address: int, size: int, place: int) -> None:
    """Write or read `size` bytes at `address`, in as many calls as it takes."""
    view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    done = 0
    while done < size:
        part = view[done : done + (1 << 30)]
        done += call(descriptor, [part] if call is os.preadv else part, place + done)


@contextmanager
def _threads(count: int) -> Iterator[list[_Thread]]:
    """Threads with equal shares of torch's, inside the block; the calling one itself where there is one lane."""
    if count <= 1:
        yield [_now]
        return
    whole = torch.get_num_threads()
    ready = threading.Barrier(count + 1)

    def begin() -> None:
        torch.get_num_threads()  # the first use in a thread takes over the setting of the process: not after ours
        torch.set_num_threads(max(1, whole // count))

    with ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1, "layers", begin)) for _ in range(count)]
        for pool in pools:
            pool.submit(ready.wait)
        ready.wait()
        torch.set_num_threads(whole)
        yield [pool.submit for pool in pools]


def _now(work: Callable[[], Any]) -> Future[Any]:
    done: Future[Any] = Future()
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)
    return done


def snapshot(runner: Any) -> Restore:
    """How to put back what a runner's forward reads while it runs: its context, and the length it is held at."""
    if runner is None:
        return _nothing
    context = getattr(runner, "context", None)
    kept = dict(vars(context)) if context is not None else {}
    held = runner.lengths.held_at

    def restore() -> None:
        if context is not None:
            vars(context).update(kept)
        runner.lengths.held_at = held

    return restore


def stages_of(layers: Sequence[nn.Module], drop: Callable[[int], None]) -> list[Stage]:
    """Stages of a model whose weights are in memory. drop: gets the index of each attention layer that is done."""
    found = []
    for number, layer in enumerate(layers):
        indices = [m.layer_idx for m in layer.modules() if isinstance(getattr(m, "layer_idx", None), int)]

        def done(indices: Sequence[Any] = tuple(indices)) -> None:
            for index in indices:
                drop(index)

        found.append(Stage(f"layer {number}", layer, drop=done))
    return found
