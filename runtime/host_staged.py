"""Several ranks that share a GPU, which NCCL refuses: messages pass through pinned host memory and Gloo.

    rank 0: GPU ──copy stream──► pinned ──worker──► Gloo ──► pinned ──current stream──► GPU : rank 1

The copies run on a stream of their own; the host never waits for them but in the worker thread,
which starts what is to be sent or summed, in order, once its copy has arrived. Tensors in host
memory go as over plain Gloo.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from efftra_fx.errors import EfftraError

from .gloo_transport import GlooTransport
from .group_transport import Group, GroupHandle, plain_tensor
from .transport import Done, Handle, check_sections, describe

cuda: Any = torch.cuda  # not typed throughout


class Copied(Protocol):
    """An event: the copy before it has arrived."""

    def synchronize(self) -> None:
        """Block until then."""
        ...


class Staging(Protocol):
    """How tensors get to host memory and back; another one stands in where there is no GPU."""

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Copied]:
        """Start copying to fresh host memory."""
        ...

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return host memory that copies are fast from."""
        ...

    def to_device(self, host: Tensor, target: Tensor) -> None:
        """Copy back, in order with the current stream."""
        ...


class CudaStaging:
    """Pinned memory and a copy stream; torch's caching host allocator keeps buffers until copies are done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = cuda.Stream(device)

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Copied]:
        """Copy on the copy stream, after what the current stream has been given so far."""
        host = self.buffer(tuple(tensor.shape), tensor.dtype)
        self.stream.wait_stream(cuda.current_stream(self.device))
        with cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
            arrived: Copied = cuda.Event()
            self.stream.record_event(arrived)
        tensor.record_stream(self.stream)
        return host, arrived

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return pinned memory."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def to_device(self, host: Tensor, target: Tensor) -> None:
        """Copy on the current stream."""
        target.copy_(host, non_blocking=True)


class StagedHandle:
    """Something that the worker will start; waiting copies its result to `target`, if there is one."""

    __slots__ = ("error", "inner", "started", "target", "transport", "waits_for")

    def __init__(self, transport: HostStagedTransport, target: Tensor | None, waits_for: str) -> None:
        self.transport, self.target, self.waits_for = transport, target, waits_for
        self.started = threading.Event()
        self.inner: GroupHandle | None = None
        self.error: BaseException | None = None

    def ready(self) -> bool:
        """Return True: other ranks do not need this thread."""
        return True

    def wait(self, what: str = "") -> Tensor:
        """Block the host until done."""
        if not self.started.wait(self.transport.timeout_s):
            self.transport.explain(RuntimeError("timed out in a copy to the host"), what, self.waits_for)
        if self.error is not None:
            raise self.error
        assert self.inner is not None
        result = self.inner.wait(what)
        if self.target is None:
            return result
        self.transport.staging.to_device(result, self.target)
        return self.target


class ReceiveHandle:
    """A receive into host memory; waiting copies it to the device."""

    __slots__ = ("device", "inner", "result", "staging")

    def __init__(self, staging: Staging, inner: GroupHandle, device: torch.device) -> None:
        self.staging, self.inner, self.device = staging, inner, device
        self.result: Tensor | None = None

    @property
    def waits_for(self) -> str:
        """Name the sender."""
        return self.inner.waits_for

    def ready(self) -> bool:
        """Return True: other ranks do not need this thread."""
        return True

    def wait(self, what: str = "") -> Tensor:
        """Block the host until the message is there; its copy is in order with the current stream."""
        if self.result is None:
            host = self.inner.wait(what)
            self.result = torch.empty_like(host, device=self.device, pin_memory=False)
            self.staging.to_device(host, self.result)
        return self.result


Job = tuple[Copied, Callable[[], GroupHandle], StagedHandle]


class HostStagedTransport(GlooTransport):
    """Messages and sums of tensors on a shared GPU."""

    def __init__(
        self, control: Group, device: torch.device, timeout_s: float, host: str, staging: Staging | None = None
    ) -> None:
        self.staging: Staging = CudaStaging(device) if staging is None else staging
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.under_way: list[StagedHandle] = []
        self.worker = threading.Thread(target=self.work, name="host staging", daemon=True)
        super().__init__(control, device, timeout_s, host)
        self.worker.start()

    def send(self, tensor: Tensor, peer: int, tag: int) -> Handle[Tensor]:
        """Copy to the host, then send."""
        if tensor.device != self.device:
            return super().send(tensor, peer, tag)
        self.check()
        self.check_peer(peer)
        if tensor.numel() == 0:
            return Done(tensor)
        plain = plain_tensor(tensor)
        host, copied = self.staging.to_host(plain)
        handle = StagedHandle(self, None, f"rank {peer}")
        self.jobs.put((copied, lambda: self.start_send(host, peer, tag), handle))
        self.under_way.append(handle)
        return handle

    def recv(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, peer: int, tag: int
    ) -> Handle[Tensor]:
        """Post a receive into host memory."""
        if device != self.device:
            return super().recv(shape, dtype, device, peer, tag)
        self.check()
        self.check_peer(peer)
        host = self.staging.buffer(shape, dtype)
        if host.numel() == 0:
            return Done(torch.empty(shape, dtype=dtype, device=device))
        return ReceiveHandle(self.staging, self.start_recv(host, peer, tag), device)

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Handle[Tensor]:
        """Copy to the host, sum, copy back at the wait."""
        if tensor.device != self.device:
            return super().all_reduce(tensor, ranks)
        self.check()
        if len(ranks) == 1 or tensor.numel() == 0:
            return Done(tensor)
        self.check_prepared(ranks)
        host, copied = self.staging.to_host(plain_tensor(tensor))
        handle = StagedHandle(self, tensor, describe([rank for rank in ranks if rank != self.rank]))
        self.jobs.put((copied, lambda: self.start_sum(host, ranks), handle))
        return handle

    def sections(self, tensor: Tensor, counts: Sequence[int], ranks: tuple[int, ...], gather: bool) -> Handle[Tensor]:
        """Copy to the host, exchange, copy the result back at the wait."""
        if tensor.device != self.device:
            return super().sections(tensor, counts, ranks, gather)
        self.check()
        check_sections(tensor, counts, ranks, self.rank, gather)
        plain = plain_tensor(tensor).view(-1)
        if len(ranks) == 1 or not sum(counts):
            return Done(plain.clone())
        self.check_prepared(ranks)
        host, copied = self.staging.to_host(plain)
        size = sum(counts) if gather else counts[ranks.index(self.rank)]
        result = torch.empty(size, dtype=tensor.dtype, device=self.device)
        handle = StagedHandle(self, result, describe([rank for rank in ranks if rank != self.rank]))
        self.jobs.put((copied, lambda: self.start_sections(host, tuple(counts), ranks, gather), handle))
        return handle

    def drain(self, what: str = "end of step") -> None:
        """Wait for all sends."""
        under_way, self.under_way = self.under_way, []
        for handle in under_way:
            handle.wait(f"{what} (sending)")
        super().drain(what)

    def close(self) -> None:
        """Stop the worker and destroy our own groups."""
        self.jobs.put(None)
        self.worker.join(self.timeout_s)
        super().close()

    def work(self) -> None:
        """Start jobs in order, each when its copy has arrived: the body of the worker thread."""
        while self.start_next():
            pass

    def start_next(self) -> bool:
        """Wait for a job and start it, keeping nothing of it; say whether there was one."""
        if (job := self.jobs.get()) is None:
            return False
        copied, start, handle = job
        try:
            copied.synchronize()
            handle.inner = start()
        except (EfftraError, RuntimeError) as error:  # belongs to whoever waits for the handle
            handle.error = error
        handle.started.set()
        return True
