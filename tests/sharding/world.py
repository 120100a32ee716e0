"""Worlds of processes over gloo, for tests.

    def scenario(rank, world_size, *args): ...       # of the test module, returns what pickles

    results = run_world(scenario, 3, *args)          # one a rank

Each rank is a fresh interpreter that loads the test module from its file and calls the function
with the default process group initialised. Starting one costs seconds, importing torchrec most of
them: put many cases into one world.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

GRACE_SECONDS = 15.0  # for the other ranks, once one has failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a rank ended.

    Attributes:
        result: what a world's function returned; None when it raised or was killed.
        error: traceback of what it raised.
        exit_code: of the process; the negative number of the signal that killed it.
        output: of the process, both streams.
        seconds: from the start of the world to the end of the process.
    """

    result: Any
    error: str | None
    exit_code: int
    output: str
    seconds: float


def run_world(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    deadline: float = 120,
    **environment: str,
) -> list[Any]:
    """What `function(rank, world_size, *args)` returns on each rank.

    Raises:
        AssertionError: a rank raised, died or was not done at the deadline; with every traceback.
    """
    with World(function, world_size, *args, **environment) as world:
        outcomes = world.join(deadline)
    failed = [
        f"---- rank {rank} of {world_size}: exit code {outcome.exit_code} after "
        f"{outcome.seconds:.0f} s\n{outcome.error or outcome.output[-4000:]}"
        for rank, outcome in enumerate(outcomes)
        if outcome.exit_code or outcome.error
    ]
    assert not failed, "\n".join(failed)
    return [outcome.result for outcome in outcomes]


class Processes:
    """Processes that start together.

    Args:
        commands: one each.
        environments: variables of each, beside `child_environment`.
        directory: of their outputs, removed at the end.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        *,
        directory: tempfile.TemporaryDirectory[str] | None = None,
    ) -> None:
        self._directory = directory or tempfile.TemporaryDirectory()
        self.directory = Path(self._directory.name)
        self._started = time.monotonic()
        self._files = [
            (self.directory / f"output{rank}").open("w+") for rank in range(len(commands))
        ]
        self.processes = [
            subprocess.Popen(
                command,
                env=child_environment(**environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for command, environment, file in zip(commands, environments, self._files, strict=True)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for file in self._files:
            file.close()
        self._directory.cleanup()

    def join(
        self, deadline: float, *, grace: float = GRACE_SECONDS, hanging: int | None = None
    ) -> list[Outcome]:
        """How the ranks ended; those that are not done at the deadline are killed.

        Args:
            deadline: seconds from the start of the world.
            grace: seconds that the others have once one rank has failed.
            hanging: a rank that does not end by itself, killed once the others have.
        """
        ended: dict[int, float] = {}
        until = self._started + deadline
        while len(ended) < len(self.processes):
            if hanging is not None and {*ended, hanging} == {*range(len(self.processes))}:
                self.processes[hanging].kill()
            now = time.monotonic()
            for rank, process in enumerate(self.processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = now - self._started
                    if process.returncode:
                        until = min(until, now + grace)
            if now > until:
                for process in self.processes:
                    process.kill()  # also those that are stopped
                    process.wait()
            time.sleep(0.05)
        return [self._outcome(rank, ended[rank]) for rank in range(len(self.processes))]

    def _outcome(self, rank: int, seconds: float) -> Outcome:
        self._files[rank].seek(0)
        file = self.directory / f"result{rank}"
        result, error = pickle.loads(file.read_bytes()) if file.exists() else (None, None)
        return Outcome(
            result=result,
            error=error,
            exit_code=self.processes[rank].returncode,
            output=self._files[rank].read(),
            seconds=seconds,
        )


class World(Processes):
    """Processes that run one function, each as a rank of one group.

    Args:
        function: called as function(rank, world_size, *args) on each rank.
        world_size: ranks.
        args: what pickles.
        store: "file", or "tcp" for one that rank 0 holds.
        environment: variables of the processes.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        store: str = "file",
        **environment: str,
    ) -> None:
        directory = tempfile.TemporaryDirectory()
        path = Path(directory.name)
        method = f"file://{path}/store" if store == "file" else f"tcp://127.0.0.1:{free_port()}"
        job = (function.__code__.co_filename, function.__qualname__, world_size, method, args)
        (path / "job").write_bytes(pickle.dumps(job))
        super().__init__(
            [[sys.executable, __file__, str(path), str(rank)] for rank in range(world_size)],
            [environment] * world_size,
            directory=directory,
        )


def child_environment(**environment: str) -> dict[str, str]:
    """Of a process that finds what this one finds, and leaves cores to the others."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
        **environment,
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def stop_here() -> None:
    """Makes this process hang: it does nothing, but its connections stay open."""
    os.kill(os.getpid(), signal.SIGSTOP)


def die_here() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _run(directory: Path, rank: int) -> None:
    file, name, world_size, method, args = pickle.loads((directory / "job").read_bytes())
    result, error = None, None
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size)
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        result = getattr(module, name)(rank, world_size, *args)
        blob = pickle.dumps((result, None))
    except BaseException:
        error = traceback.format_exc()
        blob = pickle.dumps((None, error))
    (directory / f"result{rank}.part").write_bytes(blob)
    (directory / f"result{rank}.part").rename(directory / f"result{rank}")
    if error is None:
        dist.destroy_process_group()
    else:
        sys.exit(1)


if __name__ == "__main__":
    _run(Path(sys.argv[1]), int(sys.argv[2]))
