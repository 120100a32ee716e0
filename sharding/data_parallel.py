"""The dense part of a model: equal on all ranks at the start, and equal gradients ever after."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from torchrec_tpu.sharding.exchange import Exchange


class DataParallel(DataParallelWrapper):
    """Keeps everything that is not sharded the same on all ranks, with one all-reduce a backward.

    For `DistributedModelParallel(..., data_parallel_wrapper=DataParallel())`. Parameters and
    buffers are those of rank 0 at the start. When a backward is done, the gradients that it left
    are averaged over the ranks, in one flat tensor a dtype, so they may also be accumulated over
    several backwards. A parameter that no rank's loss depends on keeps the gradient None; one that
    only some ranks' losses depend on gets the average with zeros for the others. The module itself
    stays what it is: nothing is around it, and nothing is in front of its names in state dicts.

    Every rank must run every backward.

    Args:
        deadline_seconds: after which an all-reduce that misses a rank raises.
    """

    def __init__(self, *, deadline_seconds: float = 300.0) -> None:
        self._deadline_seconds = deadline_seconds

    def wrap(
        self,
        dmp: DistributedModelParallel,
        env: ShardingEnv,
        device: torch.device,  # noqa: ARG002
    ) -> None:
        """Makes the unsharded parameters of a model data-parallel, in place. A collective.

        Raises:
            PeerError: ranks are missing.
        """
        sharded = set(DistributedModelParallel._sharded_parameter_names(dmp.module))
        parameters = [p for name, p in dmp.named_parameters() if name not in sharded]
        state = [*(p.detach() for p in parameters), *dmp.module.buffers()]
        if not state:
            return
        exchange = Exchange(env.process_group, deadline_seconds=self._deadline_seconds)
        for tensors in _by_dtype(state):
            flat = _joined(tensors)
            _broadcast(exchange, flat)
            for tensor, part in zip(tensors, _parts(flat, tensors), strict=True):
                tensor.copy_(part)
        _Averager([p for p in parameters if p.requires_grad], exchange)


class _Averager:
    """Averages gradients over the ranks at the end of every backward that reaches a parameter."""

    def __init__(self, parameters: Sequence[nn.Parameter], exchange: Exchange) -> None:
        self._parameters = parameters
        self._exchange = exchange
        self._last_backward = -1
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, _: Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if backward != self._last_backward:
            self._last_backward = backward
            # At the end, when every rank has made all exchanges of this backward: in any other
            # order than theirs the ranks would wait for each other.
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        for parameters in _by_dtype(self._parameters):
            grads = [
                torch.zeros_like(p)
                if p.grad is None
                else (p.grad.to_dense() if p.grad.is_sparse else p.grad)
                for p in parameters
            ]
            has_grad = torch.tensor([p.grad is not None for p in parameters])
            flat = torch.cat([_joined(grads), has_grad.to(grads[0])])
            _all_reduce(self._exchange, flat)
            counts = flat[-len(parameters) :].tolist()
            flat.div_(self._exchange.world_size)
            for parameter, count, part in zip(
                parameters, counts, _parts(flat, parameters), strict=True
            ):
                if not count:
                    continue
                if parameter.grad is None or parameter.grad.is_sparse:
                    parameter.grad = part.clone()
                else:
                    parameter.grad.copy_(part)


def _broadcast(exchange: Exchange, flat: Tensor) -> None:
    group = exchange.group
    exchange.guard(
        lambda: dist.broadcast(flat, group=group, group_src=0, async_op=True), flat, keep=flat
    ).wait()


def _all_reduce(exchange: Exchange, flat: Tensor) -> None:
    group = exchange.group
    exchange.guard(
        lambda: dist.all_reduce(flat, group=group, async_op=True), flat, keep=flat
    ).wait()


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _parts(flat: Tensor, shapes: Sequence[Tensor]) -> list[Tensor]:
    """The pieces of what `_joined` has made, and what follows them left out."""
    sizes = [tensor.numel() for tensor in shapes]
    pieces = torch.split(flat[: sum(sizes)], sizes)
    return [piece.view_as(shape) for piece, shape in zip(pieces, shapes, strict=True)]
