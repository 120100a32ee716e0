"""Tensors between the ranks of a process group, with deadlines and the name of who is missing.

    exchange = Exchange(group, deadline_seconds=60)
    sizes = exchange.headers(header).wait()                       # (W, H): row w came from rank w
    rows = exchange.ragged(payload, send, receive).wait()         # parts in the order of ranks
    rows = ragged_all_to_all(payload, send, receive, exchange)    # the same, differentiable

Every rank makes the same calls in the same order. A collective that breaks, or that is not done at
the deadline, raises `PeerError` on every rank that is left. A collective itself only knows that
some connection is lost, and the store of a process group ends with the process that holds it. So
each rank of a world larger than one listens on a port of its own, says there how many exchanges it
has started, and takes note of ranks that others found missing before it looks for them itself.

Legend: W ranks, H numbers of a header, N items that are sent, M that are received.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_tpu.sparsecore import ops
from torchrec_tpu.sparsecore.errors import PeerError

ResultT = TypeVar("ResultT")

_LOOK_SECONDS: Final = 0.2  # between looks for word from other ranks while a collective is awaited
_MAX_PATIENCE_SECONDS: Final = 5.0  # with one rank that is asked
_FIRST_PATIENCE_SECONDS: Final = 30.0  # while ranks start, not all at the same time
_MAX_LINE_BYTES: Final = 1 << 16


class Pending(Generic[ResultT]):
    """A collective that was started.

    Args:
        finish: waits for it and gives its result; called once.
    """

    def __init__(self, finish: Callable[[], ResultT]) -> None:
        self._finish: Callable[[], ResultT] | None = finish
        self._result: ResultT

    def wait(self) -> ResultT:
        """The result, once it is there; the same one at every call.

        Raises:
            PeerError: ranks are missing.
        """
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


class Exchange:
    """All-to-all collectives over one process group.

    The first `Exchange` over a group is a collective call: ranks tell each other their addresses.

    Tensors on the CPU go through the group's CPU backend (gloo), those on a TPU through torch_tpu's
    ragged all-to-all. A world of one sends nothing: results are the arguments themselves.

    Args:
        group: the ranks; the default group when None.
        deadline_seconds: after it, a collective that was awaited has either ended or raised. It
            covers collectives on the CPU; those of a TPU are awaited by its runtime. It must be
            longer than ranks may differ in the time they need for a step.

    Raises:
        PeerError: a rank cannot be reached.

    Attributes:
        group: the process group.
        rank: of this process in the group.
        world_size: W.
        deadline_seconds: as given.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, deadline_seconds: float = 300.0
    ) -> None:
        if deadline_seconds <= 0:
            raise ValueError(f"deadline_seconds={deadline_seconds} must be positive")
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise ValueError("there is no process group: call init_process_group first")
        self.group: dist.ProcessGroup = group
        self.rank: int = self.group.rank()
        self.world_size: int = self.group.size()
        self.deadline_seconds = deadline_seconds
        self._patience = min(_MAX_PATIENCE_SECONDS, deadline_seconds / 10)
        # What is left of the deadline is for asking the other ranks, and for telling them.
        self._timeout = timedelta(seconds=deadline_seconds - 2 * self._patience)
        self._watch = None if self.world_size == 1 else _watch_of(self)
        ops.set_exchange(self.group.group_name, self.ragged)

    def __repr__(self) -> str:
        return (
            f"Exchange(rank {self.rank} of {self.world_size}, "
            f"deadline_seconds={self.deadline_seconds})"
        )

    def headers(self, header: Tensor) -> Pending[Tensor]:
        """One row of numbers to each rank, and one from each.

        Args:
            header: (W, H) int64 on the CPU, H the same on all ranks; row w goes to rank w.

        Returns:
            (W, H) int64: row w came from rank w.
        """
        if header.dim() != 2 or len(header) != self.world_size:
            raise ValueError(
                f"header has shape {tuple(header.shape)}, wanted ({self.world_size}, H)"
            )
        ones = [1] * self.world_size
        return self.ragged(header, ones, ones)

    def ragged(
        self, payload: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> Pending[Tensor]:
        """A part of the payload to each rank, and a part from each. Without autograd.

        Args:
            payload: (N,) or (N, width): rank 0's part first.
            send: items for each rank, N in all.
            receive: items from each rank, M in all; what those send to this one.

        Returns:
            (M,) or (M, width): rank 0's part first. The payload must stay as it is until then.
        """
        payload = payload.detach().contiguous()
        self._check(payload, send, receive)
        if self.world_size == 1:
            return Pending(lambda: payload)
        if payload.device.type != "cpu":
            result = ops.ragged_all_to_all_on_device(payload, send, receive, self.group.group_name)
            return Pending(lambda: result)
        out = payload.new_empty((sum(receive), *payload.shape[1:]))
        options = dist.AllToAllOptions()
        options.timeout = self._timeout
        return self.guard(
            lambda: self.group.alltoall_base(out, payload, list(receive), list(send), options),
            out,
            keep=payload,
        )

    def guard(
        self, start: Callable[[], dist.Work], result: ResultT, *, keep: object = None
    ) -> Pending[ResultT]:
        """Any collective of the group under the deadline, e.g. an asynchronous all-reduce.

        Args:
            start: starts it.
            result: of the pending call.
            keep: what the collective reads until it is done.
        """
        watch = self._watch
        number = 0 if watch is None else watch.begin()
        try:
            work = start()
        except RuntimeError as error:  # a connection was lost earlier
            if watch is None:
                raise
            raise self._missing(number, error) from error
        alive = [keep]

        def finish() -> ResultT:
            self._await(work, number)
            alive.clear()
            return result

        return Pending(finish)

    def agree(self, message: str | None) -> list[str | None]:
        """What each rank says: for errors that only some of them have. Two exchanges."""
        letters = [] if message is None else [0, *message.encode()]  # 0: "" is no None
        send = [len(letters)] * self.world_size
        receive = self.headers(torch.tensor(send).view(-1, 1)).wait().flatten().tolist()
        payload = torch.tensor(letters * self.world_size, dtype=torch.uint8)
        parts = torch.split(self.ragged(payload, send, receive).wait(), receive)
        return [bytes(part.tolist())[1:].decode() if len(part) else None for part in parts]

    def _check(self, payload: Tensor, send: Sequence[int], receive: Sequence[int]) -> None:
        wanted = (len(payload), self.world_size, self.world_size)
        found = (sum(send), len(send), len(receive))
        if payload.dim() not in (1, 2) or found != wanted or min(*send, *receive) < 0:
            raise ValueError(
                f"payload {tuple(payload.shape)}, send {list(send)}, receive {list(receive)}: "
                f"wanted one or two dimensions, and {self.world_size} counts each, those of `send` "
                "as many as the payload has items"
            )
        if self.world_size == 1 and list(send) != list(receive):
            raise ValueError(f"a world of one sends {list(send)} and receives {list(receive)}")

    def _await(self, work: dist.Work, number: int) -> None:
        watch = self._watch
        if watch is None:
            work.wait()
            return
        until = time.monotonic() + self._timeout.total_seconds()
        while True:
            try:
                work.wait(timedelta(seconds=_LOOK_SECONDS))
                return
            except RuntimeError as error:
                if work.is_completed() or watch.verdicts or time.monotonic() >= until:
                    raise self._missing(number, error) from error

    def _missing(self, number: int, error: Exception) -> PeerError:
        """Who is missing in an exchange that failed; tells the ranks that are left."""
        assert self._watch is not None
        found = self._watch.look_for_missing(number, self._patience)
        where = f"exchange {number}, deadline_seconds={self.deadline_seconds}"
        if not found:
            reason = f"fails although all ranks take part: the network is broken or slow ({error})"
        elif self.rank in found:
            reason = f"was given up by the others: {found[self.rank]}"
        else:
            reason = "misses " + "; ".join(
                f"rank {rank}, whose {why}" for rank, why in sorted(found.items())
            )
        return PeerError(
            f"rank {self.rank} of {self.world_size} {reason} ({where}). Start the job again from "
            "its last checkpoint",
            ranks=tuple(sorted(found)),
        )


def ragged_all_to_all(
    values: Tensor, send: Sequence[int], receive: Sequence[int], exchange: Exchange
) -> Tensor:
    """A part of the values to each rank, and a part from each; the gradient goes the way back.

    Args:
        values: (N,) or (N, width): rank 0's part first.
        send: items for each rank, N in all.
        receive: items from each rank, M in all.
        exchange: over the group.

    Returns:
        (M,) or (M, width): rank 0's part first.

    Raises:
        PeerError: ranks are missing; also from `backward()`.
    """
    result: Tensor = ops.ragged_all_to_all(values, send, receive, exchange.group.group_name)
    return result


# ------------------------------------------------------------------------------ who is still there


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peer:
    """Where a rank listens."""

    host: str
    process: int
    address: str
    port: int

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


class _Watch:
    """Says how far this rank is, and asks the others.

    One line of JSON each way: {"token", "rank", "missing": {rank: reason}} and {"started"}.

    Attributes:
        verdicts: of each rank that has given up, the ranks that it misses and why.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.group = exchange.group
        self.verdicts: dict[int, dict[int, str]] = {}
        self._rank = exchange.rank
        self._started = 0
        address = _own_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server(
            (address, 0), family=family, backlog=max(16, exchange.world_size)
        )
        self._peers, self._token = self._introduce(address, exchange.world_size)
        threading.Thread(target=self._serve, name="torchrec_tpu-watch", daemon=True).start()

    def _introduce(self, address: str, world_size: int) -> tuple[list[_Peer], str]:
        mine = (
            _Peer(
                host=socket.gethostname(),
                process=os.getpid(),
                address=address,
                port=self._listener.getsockname()[1],
            ),
            secrets.token_hex(16),
        )
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, mine, group=self.group)
        return [peer for peer, _ in everyone], everyone[0][1]

    def begin(self) -> int:
        """Number of the exchange that this rank starts now."""
        self._started += 1
        return self._started

    def ask_the_next(self) -> None:
        """Makes sure, before it matters, that ranks reach each other; each tries one.

        Raises:
            PeerError: it does not answer.
        """
        rank = (self._rank + 1) % len(self._peers)
        if isinstance(answer := self._ask(rank, _FIRST_PATIENCE_SECONDS), str):
            raise PeerError(
                f"rank {self._rank} asked rank {rank} at {self._peers[rank].address}, but its "
                f"{answer}. If only the address is wrong, set GLOO_SOCKET_IFNAME to the interface "
                "that ranks reach each other by",
                ranks=(rank,),
            )

    def close(self) -> None:
        """Stops listening."""
        self._listener.close()

    def look_for_missing(self, number: int, patience: float) -> dict[int, str]:
        """Ranks without which exchange `number` cannot end, and why; word of them goes to all.

        When some have ended or hang, it is because of them, and not of those that are late. A rank
        that gave up is not missing: it ended because others are.
        """
        others = [rank for rank in range(len(self._peers)) if rank != self._rank]
        with ThreadPoolExecutor(max_workers=min(64, len(others))) as pool:
            answers = dict(
                zip(others, pool.map(lambda rank: self._ask(rank, patience), others), strict=True)
            )
            gone = {rank: why for rank, why in answers.items() if isinstance(why, str)}
            for verdict in list(self.verdicts.values()):
                gone.update(verdict)
            gone = {rank: why for rank, why in gone.items() if rank not in self.verdicts}
            found = gone or {
                rank: f"{self._peers[rank]} is alive, but has come only to exchange {started} of "
                f"{number}"
                for rank, started in answers.items()
                if isinstance(started, int) and started < number
            }
            list(pool.map(lambda rank: self._tell(rank, found, patience), others))
        return found

    def _ask(self, rank: int, patience: float) -> int | str:
        """How many exchanges a rank has started, or why it cannot say."""
        peer = self._peers[rank]
        try:
            return int(self._call(peer, None, patience)["started"])
        except ConnectionError:
            return f"{peer} has ended"
        except OSError as error:
            return f"{peer} does not answer ({error}): it is stopped, or its host is lost"

    def _tell(self, rank: int, found: Mapping[int, str], patience: float) -> None:
        with contextlib.suppress(OSError):  # whoever cannot hear it is missing or has ended
            self._call(self._peers[rank], found, patience)

    def _call(self, peer: _Peer, missing: Mapping[int, str] | None, patience: float) -> Any:
        line = {"token": self._token, "rank": self._rank, "missing": missing}
        with socket.create_connection((peer.address, peer.port), timeout=patience) as connection:
            connection.sendall(json.dumps(line).encode() + b"\n")
            return None if missing is not None else json.loads(_line(connection))

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                connection.settimeout(1.0)
                said = json.loads(_line(connection))
                if said["token"] != self._token:
                    continue
                if said["missing"] is not None:
                    missing = {int(rank): str(why) for rank, why in said["missing"].items()}
                    self.verdicts[int(said["rank"])] = missing
                    continue
                connection.sendall(json.dumps({"started": self._started}).encode() + b"\n")


_watches: dict[str, _Watch] = {}


def _watch_of(exchange: Exchange) -> _Watch:
    """One watch a group: all its exchanges are numbered in one row."""
    name = exchange.group.group_name
    watch = _watches.get(name)
    if watch is None or watch.group is not exchange.group:
        if watch is not None:
            watch.close()
        _watches[name] = watch = _Watch(exchange)
        watch.ask_the_next()
    return watch


def _line(connection: socket.socket) -> bytes:
    """Bytes up to the end of a line.

    Raises:
        ConnectionError: there is no end.
    """
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(4096)
        if not part or len(data) > _MAX_LINE_BYTES:
            raise ConnectionError("no whole line")
        data += part
    return data


def _own_address() -> str:
    """The address by which other ranks reach this process.

    That of gloo's interface when GLOO_SOCKET_IFNAME names one; else the one that this host uses
    towards MASTER_ADDR; else what its own name means.
    """
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            request = struct.pack("256s", interface[:15].encode())
            return socket.inet_ntoa(
                fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24]
            )  # SIOCGIFADDR
    target = os.environ.get("MASTER_ADDR") or socket.gethostname()
    for family, kind, protocol, _, address in _resolved(target):
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            probe.connect(address)  # of a datagram socket: chooses a route, sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _resolved(host: str) -> Iterator[tuple[Any, ...]]:
    with contextlib.suppress(socket.gaierror):
        yield from socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
