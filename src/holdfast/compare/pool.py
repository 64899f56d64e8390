"""Where jobs run: here, in processes of this machine, or on a Ray cluster. A job that fails stops no other."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, Protocol, cast

from holdfast.compare.grid import Job
from holdfast.compare.records import JobFolder, JobRecord
from holdfast.compare.run import Action, Outcome, attempt
from holdfast.errors import Interrupted, UserError
from holdfast.shared import sharing

Tasks = Sequence[tuple[Job, Action]]


class Runner(Protocol):
    """Takes jobs and yields how each ended, in any order."""

    def __call__(self, tasks: Tasks) -> Iterator[Outcome]:
        """Run them all."""
        ...


def choose_runner(jobs: int, ray_address: str | None) -> Runner:
    """Ray where an address is given, otherwise this machine with ``jobs`` processes."""
    if jobs < 1:
        raise UserError("--jobs must be at least 1", found=str(jobs))
    if ray_address is not None:
        return RayRunner(ray_address)
    return run_here if jobs == 1 else LocalRunner(jobs)


def run_here(tasks: Tasks) -> Iterator[Outcome]:
    """One after another, in this process; what they have in common is made once."""
    with sharing():
        for job, action in tasks:
            outcome = attempt(job, action)
            _stop_if_interrupted(outcome)
            yield outcome


def _stop_if_interrupted(outcome: Outcome) -> None:
    if outcome.interrupted is not None:
        raise _interruption(outcome.interrupted)


def _interruption(number: int) -> Interrupted:
    return Interrupted(
        "the study was interrupted; jobs that were training wrote their checkpoints",
        signal_number=number,
        do="give the same command again: finished jobs stay, interrupted ones go on. Tables are of the finished ones",
    )


@contextmanager
def terminations() -> Generator[None]:
    """SIGTERM interrupts as Ctrl-C does: running jobs end their step, and tables are made of those that are done."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise _interruption(number)

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: whoever runs it there deals with signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _died(job: Job, action: Action, why: str) -> Outcome:
    """A job whose process is gone. What it had done until its last checkpoint is kept for the next attempt."""
    record = JobRecord("failed", error=why)
    if action == "run":
        JobFolder(job.folder).write(record)
    return Outcome(job, action, record)


# -- processes of this machine ----------------------------------------------------------------------------------------


class LocalRunner:
    """``jobs`` processes that each take one job after another; one that dies takes its job with it, and no other."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.context = multiprocessing.get_context("spawn")

    def __call__(self, tasks: Tasks) -> Iterator[Outcome]:
        """Run them all."""
        waiting = deque(tasks)
        workers = [_Worker(self.context, self.jobs) for _ in range(min(self.jobs, len(waiting)))]
        try:
            while waiting or any(worker.busy for worker in workers):
                for worker in workers:
                    if waiting and not worker.busy:
                        worker.give(*waiting.popleft())
                for worker in _ready(workers):
                    outcome = worker.take()
                    _stop_if_interrupted(outcome)
                    yield outcome
        except (KeyboardInterrupt, Interrupted) as error:
            _finish_steps(workers)
            if isinstance(error, Interrupted):
                raise
            raise _interruption(signal.SIGINT) from error
        finally:
            for worker in workers:
                worker.close()


class _Worker:
    """One process and the job it is at."""

    def __init__(self, context: Any, share: int) -> None:
        self.context, self.share = context, share
        self.task: tuple[Job, Action] | None = None
        self._start()

    def _start(self) -> None:
        self.pipe, theirs = self.context.Pipe()
        self.process = self.context.Process(target=_work, args=(theirs, self.share), daemon=True)
        # The process takes an interrupt when it can deal with it, and not while it imports.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()

    @property
    def busy(self) -> bool:
        return self.task is not None

    def give(self, job: Job, action: Action) -> None:
        if not self.process.is_alive():
            self._start()
        self.task = (job, action)
        self.pipe.send(self.task)

    def take(self) -> Outcome:
        assert self.task is not None
        job, action = self.task
        self.task = None
        try:
            return cast(Outcome, self.pipe.recv())
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            hint = " (killed: out of memory?)" if code == -signal.SIGKILL else ""
            self._start()
            return _died(job, action, f"its process ended with code {code}{hint}")

    def end(self) -> None:
        """Wait until an interrupted job has ended, or its process has."""
        self.task = None
        with suppress(EOFError, OSError):
            self.pipe.recv()

    def close(self) -> None:
        self.pipe.close()  # the process reads the end of its pipe, and leaves
        self.process.join(timeout=20)
        if self.process.is_alive():
            self.process.terminate()


def _ready(workers: list[_Worker]) -> list[_Worker]:
    """Workers that have an answer, or died; waits for one."""
    by_pipe: dict[Any, _Worker] = {worker.pipe: worker for worker in workers if worker.busy}
    return [by_pipe[pipe] for pipe in wait(list(by_pipe))]


def _finish_steps(workers: list[_Worker]) -> None:
    """Ask running jobs to finish their step and write a checkpoint, and wait until they have."""
    for worker in workers:
        if worker.busy and worker.process.pid is not None:
            os.kill(worker.process.pid, signal.SIGINT)
    for worker in workers:
        if worker.busy:
            worker.end()


def _work(pipe: Connection, share: int) -> None:
    """A worker's life. It leaves the terminal's group: an interrupt reaches it once, through its parent.

    It ends without a word when it is interrupted between two jobs, or when its parent is gone.
    """
    with suppress(EOFError, OSError, KeyboardInterrupt):
        os.setpgrp()
        import torch

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // share))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        with sharing():
            while True:
                job, action = pipe.recv()
                pipe.send(attempt(job, action))


# -- Ray --------------------------------------------------------------------------------------------------------------


class RayRunner:
    """Jobs as Ray tasks. The study's folder and data must be at the same path on every machine of the cluster."""

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise UserError(
                "--ray needs Ray, which is not installed", do="install it: pip install 'holdfast[ray]'"
            ) from error
        self.ray: Any = ray
        if not ray.is_initialized():
            os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # a busy machine takes longer than Ray's 30 s
            try:
                ray.init(address=None if address == "local" else address, include_dashboard=False, log_to_driver=False)
            except Exception as error:  # Ray raises all kinds, plain exceptions among them
                message = f"no Ray cluster at {address!r}"
                raise UserError(message, found=str(error)[:200], do="give HOST:PORT, `auto` or `local`") from error

    def __call__(self, tasks: Tasks) -> Iterator[Outcome]:
        """Run them all; a task is submitted when a place is free, so that the driver holds few at a time."""
        resources = self.ray.cluster_resources()
        gpus = 1 if resources.get("GPU", 0) and not _on_cpu(tasks) else 0
        places = max(1, int(resources["GPU"] if gpus else resources.get("CPU", 1)))
        remote = self.ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_attempt_alone)
        waiting, running = deque(tasks), dict[Any, tuple[Job, Action]]()
        while waiting or running:
            while waiting and len(running) < places:
                task = waiting.popleft()
                running[remote.remote(*task)] = task
            done, _ = self.ray.wait(list(running), num_returns=1)
            for reference in done:
                job, action = running.pop(reference)
                yield self._result(reference, job, action)

    def _result(self, reference: Any, job: Job, action: Action) -> Outcome:
        try:
            return cast(Outcome, self.ray.get(reference))
        except self.ray.exceptions.RayError as error:  # the machine or its process is gone
            return _died(job, action, f"Ray lost it: {str(error).splitlines()[0][:200]}")


def _on_cpu(tasks: Tasks) -> bool:
    return all(job.config.train.device == "cpu" for job, _ in tasks)


def _attempt_alone(job: Job, action: Action) -> Outcome:
    import torch

    torch.set_num_threads(1)
    return attempt(job, action)
