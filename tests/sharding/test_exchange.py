"""Exchanges between ranks over gloo: values, gradients, and what happens when a rank is missing."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from world import World, die_here, run_world, stop_here

from torchrec_tpu.sharding.exchange import Exchange, _own_address, ragged_all_to_all
from torchrec_tpu.sparsecore.backends import tpu
from torchrec_tpu.sparsecore.errors import PeerError


def item_counts(world_size: int) -> Tensor:
    """Items from rank r to rank p at [r, p]: unequal, some zero, and rank 1 sends nothing."""
    counts = (torch.arange(world_size * world_size).view(world_size, world_size) * 7 + 3) % 5
    if world_size > 1:
        counts[1] = 0
    return counts


def part(
    source: int, destination: int, count: int, width: int | None, dtype: torch.dtype
) -> Tensor:
    """What a rank sends to another: every number tells who and where."""
    numbers = torch.arange(count * (width or 1)) + 100 * source + 10 * destination
    return (numbers if width is None else numbers.view(count, width)).to(dtype)


def sent_and_wanted(
    rank: int, counts: Tensor, width: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    world = range(len(counts))
    sent = [part(rank, p, int(counts[rank, p]), width, dtype) for p in world]
    wanted = [part(r, rank, int(counts[r, rank]), width, dtype) for r in world]
    return torch.cat(sent), torch.cat(wanted)


def values_arrive(rank: int, world_size: int, exchange: Exchange) -> None:
    counts = item_counts(world_size)
    send, receive = counts[rank].tolist(), counts[:, rank].tolist()
    for dtype in (torch.float32, torch.float16, torch.int32, torch.int64, torch.uint8):
        for width in (None, 1, 3):
            sent, wanted = sent_and_wanted(rank, counts, width, dtype)
            pending = exchange.ragged(sent, send, receive)
            received = pending.wait()
            assert received.dtype is dtype
            assert torch.equal(received, wanted), (dtype, width)
            assert pending.wait() is received
    nothing = torch.empty(0, 4)
    assert exchange.ragged(nothing, [0] * world_size, [0] * world_size).wait().shape == (0, 4)


def headers_arrive(rank: int, world_size: int, exchange: Exchange) -> None:
    header = torch.stack([torch.tensor([rank, p, rank * p]) for p in range(world_size)])
    wanted = torch.stack([torch.tensor([r, rank, r * rank]) for r in range(world_size)])
    assert torch.equal(exchange.headers(header).wait(), wanted)
    with pytest.raises(ValueError, match="header has shape"):
        exchange.headers(header[:-1])


def several_are_in_flight(rank: int, world_size: int, exchange: Exchange) -> None:
    counts = item_counts(world_size)
    send, receive = counts[rank].tolist(), counts[:, rank].tolist()
    pairs = [sent_and_wanted(rank, counts, w, torch.float32) for w in (2, 5)]
    pending = [exchange.ragged(sent, send, receive) for sent, _ in pairs]
    for waiting, (_, wanted) in reversed(list(zip(pending, pairs, strict=True))):
        assert torch.equal(waiting.wait(), wanted)


def gradients_return(rank: int, world_size: int, exchange: Exchange) -> None:
    counts = item_counts(world_size)
    send, receive = counts[rank].tolist(), counts[:, rank].tolist()
    sent, wanted = sent_and_wanted(rank, counts, 2, torch.float32)
    sent.requires_grad_()
    received = ragged_all_to_all(sent, send, receive, exchange)
    assert torch.equal(received, wanted)
    # The gradient of an item is what its receiver multiplies it by: itself plus the receiver.
    weights = received.detach() + rank
    (received * weights).sum().backward(retain_graph=True)
    receivers = torch.repeat_interleave(torch.arange(world_size), counts[rank])
    once = sent.detach() + receivers.view(-1, 1)
    assert torch.equal(sent.grad, once)
    (received * weights).sum().backward()
    assert torch.equal(sent.grad, 2 * once)

    with torch.no_grad():
        silent = ragged_all_to_all(sent, send, receive, exchange)
    assert torch.equal(silent, wanted)
    assert not silent.requires_grad
    before = silent.clone()
    sent.detach().zero_()
    assert torch.equal(silent, before)  # in a world of one, too, it is another tensor


def messages_are_heard(rank: int, world_size: int, exchange: Exchange) -> None:
    message = f"rank {rank} says é" if rank % 2 else None
    heard = exchange.agree(message)
    assert heard == [f"rank {r} says é" if r % 2 else None for r in range(world_size)]
    assert exchange.agree(None) == [None] * world_size
    assert exchange.agree("") == [""] * world_size


def bad_arguments_are_refused(rank: int, world_size: int, exchange: Exchange) -> None:
    ones = [1] * world_size
    for payload, send, receive in (
        (torch.zeros(world_size + 1), ones, ones),
        (torch.zeros(world_size), ones, [*ones, 1]),
        (torch.zeros(world_size), [2, -1, *ones][:world_size] if world_size > 1 else [-1], ones),
        (torch.zeros(world_size, 1, 1), ones, ones),
    ):
        with pytest.raises(ValueError, match="wanted one or two dimensions"):
            exchange.ragged(payload, send, receive)
    with pytest.raises(ValueError, match="must be positive"):
        Exchange(deadline_seconds=0)
    with pytest.raises(ValueError, match="no Exchange over the process group 'none'"):
        torch.ops.torchrec_tpu.ragged_all_to_all(torch.zeros(1), [1], [1], "none")


def collectives_can_be_guarded(rank: int, world_size: int, exchange: Exchange) -> None:
    total = torch.tensor([rank + 1.0])
    options = dist.AllreduceOptions()
    pending = exchange.guard(lambda: exchange.group.allreduce([total], options), total)
    assert pending.wait().item() == sum(range(1, world_size + 1))


def a_tpu_is_told_where_parts_begin(rank: int, world_size: int, exchange: Exchange) -> None:
    """With torch_tpu's collective played by gloo, by the words of its documentation."""

    def ragged_all_to_all(
        operand: Tensor, output: Tensor, *offsets_and_sizes: Tensor | str
    ) -> Tensor:
        *counts, group = offsets_and_sizes
        assert group == exchange.group.group_name
        assert all(count.dtype is torch.int32 for count in counts)
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, (operand, *[count.tolist() for count in counts]))
        result = output.clone()
        for sender, (values, begin_send, sent, begin_there, _) in enumerate(everyone):
            sliced = values[begin_send[rank] :][: sent[rank]]
            assert len(sliced) == counts[3][sender]
            result[begin_there[rank] :][: sent[rank]] = sliced
        return result

    counts = item_counts(world_size)
    sent, wanted = sent_and_wanted(rank, counts, 3, torch.float32)
    arguments = sent, counts[rank].tolist(), counts[:, rank].tolist(), exchange.group.group_name
    with pytest.raises(NotImplementedError, match="no exchange on device cpu: torch_tpu"):
        tpu.ragged_all_to_all(*arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu, "why_no_tpu", lambda: None)
        patch.setattr(tpu, "_ops", lambda: SimpleNamespace(ragged_all_to_all=ragged_all_to_all))
        assert torch.equal(tpu.ragged_all_to_all(*arguments), wanted)


def the_op_is_what_torch_expects(rank: int, world_size: int, exchange: Exchange) -> None:
    ones = [1] * world_size
    values = torch.randn(world_size, 2, requires_grad=True)
    op = torch.ops.torchrec_tpu.ragged_all_to_all.default
    torch.library.opcheck(op, (values, ones, ones, exchange.group.group_name))
    with FakeTensorMode():
        received = op(torch.empty(world_size, 2, dtype=torch.float16), ones, [3] * world_size, "?")
    assert received.shape == (3 * world_size, 2)
    assert received.dtype is torch.float16
    on_meta = torch.empty(world_size, 2, device="meta")
    if world_size > 1:
        with pytest.raises(NotImplementedError, match="device 'meta'"):
            exchange.ragged(on_meta, ones, ones)


def strangers_change_nothing(rank: int, world_size: int, exchange: Exchange) -> None:
    if exchange._watch is None:
        return
    me = exchange._watch._peers[rank]
    verdict = {"token": "guessed", "rank": 0, "missing": {"0": "is gone"}}
    for line in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\n",
        b"{}\n",
        json.dumps(verdict).encode() + b"\n",
    ):
        with socket.create_connection((me.address, me.port), timeout=10) as stranger:
            stranger.sendall(line)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    assert not exchange._watch.verdicts
    headers_arrive(rank, world_size, exchange)


CASES: tuple[Callable[[int, int, Exchange], None], ...] = (
    values_arrive,
    headers_arrive,
    several_are_in_flight,
    gradients_return,
    messages_are_heard,
    bad_arguments_are_refused,
    collectives_can_be_guarded,
    a_tpu_is_told_where_parts_begin,
    the_op_is_what_torch_expects,
    strangers_change_nothing,
)


def all_cases(rank: int, world_size: int) -> None:
    exchange = Exchange(deadline_seconds=60)
    for case in CASES:
        case(rank, world_size, exchange)
    if world_size > 1:
        members = [[r for r in range(world_size) if r % 2 == half] for half in (0, 1)]
        half = Exchange([dist.new_group(ranks) for ranks in members][rank % 2])
        values_arrive(half.rank, half.world_size, half)
        values_arrive(rank, world_size, exchange)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_exchange(world_size: int) -> None:
    run_world(all_cases, world_size)


@pytest.mark.parametrize(
    "environment",
    [
        {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "192.0.2.1"},
        {"GLOO_SOCKET_IFNAME": "", "MASTER_ADDR": "localhost"},
        {"GLOO_SOCKET_IFNAME": "", "MASTER_ADDR": "no-such-host.invalid"},
    ],
)
def test_own_address_is_that_of_the_way_to_the_others(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _own_address() in ("127.0.0.1", "::1")


# ---------------------------------------------------------------------------------- missing ranks

DEADLINE = 8.0


def one_is_missing(rank: int, world_size: int, missing: int, how: str) -> Any:
    exchange = Exchange(deadline_seconds=DEADLINE)
    counts = [2] * world_size
    payload = torch.arange(2 * world_size)
    exchange.ragged(payload, counts, counts).wait()
    if rank == missing:
        if how == "dies":
            die_here()
        if how == "hangs":
            stop_here()
        if how == "raises":
            raise ValueError("the data is bad")
        if how == "is late":
            time.sleep(DEADLINE + 2)
    if rank == (missing + 1) % world_size:
        time.sleep(1)  # the deadlines of ranks differ
    began = time.monotonic()
    with pytest.raises(PeerError) as caught:
        exchange.ragged(payload, counts, counts).wait()
    return caught.value.ranks, str(caught.value), time.monotonic() - began


@pytest.mark.parametrize(
    ("missing", "how", "store"),
    [
        (0, "dies", "tcp"),
        (2, "hangs", "file"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (0, "dies", "file"),
                (1, "dies", "tcp"),
                (3, "dies", "tcp"),
                (0, "hangs", "tcp"),
                (2, "raises", "tcp"),
                (1, "is late", "tcp"),
            )
        ),
    ],
)
def test_survivors_name_the_missing_rank(missing: int, how: str, store: str) -> None:
    with World(one_is_missing, 4, missing, how, store=store) as world:
        hanging = missing if how == "hangs" else None
        outcomes = world.join(100, grace=DEADLINE + 10, hanging=hanging)
    says = {
        "dies": "has ended",
        "hangs": "does not answer",
        "raises": "has ended",
        "is late": "is alive, but has come only to exchange 1 of 2",
    }[how]
    for rank, outcome in enumerate(outcomes):
        if rank != missing:
            assert outcome.error is None, outcome.error
            assert outcome.result, outcome.output
            ranks, message, seconds = outcome.result
            assert ranks == (missing,), message
            assert says in message
            assert seconds < DEADLINE, message
