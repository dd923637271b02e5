"""Process groups of the processes that torchrun, srun or mpirun started; none for a single process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from textmill.devices import open_device
from textmill.errors import TextmillError
from textmill.processes import heartbeat
from textmill.processes.launch import Launch, read_launch
from textmill.processes.ranks import SINGLE_PROCESS, Ranks
from textmill.processes.signals import default_signals

CONNECTION_ERRORS = ("gloo", "NCCL", "Connection closed")
"""Parts of the messages that a collective raises if another process has ended."""


def open_ranks(device: str, timeout: float) -> Ranks:
    """Connect the processes that a launcher started; `device` and `timeout` are those of the config's engine."""
    launch = read_launch(os.environ)
    if launch is None or launch.world == 1:
        return SINGLE_PROCESS
    chosen = choose_device(device, launch)
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    # Under torchrun env:// is its own rendezvous.
    url = "env://" if "TORCHELASTIC_RUN_ID" in os.environ else f"tcp://{launch.address}"
    start_timeout = max(timeout, heartbeat.START_SECONDS)
    try:
        with default_signals():
            wait = timedelta(seconds=start_timeout)
            store, rank, world = next(rendezvous(url, launch.rank, launch.world, timeout=wait))
            watchdog = heartbeat.Watchdog(rank, world, _status_store(store, timeout), timeout)
            # Longer than the watchdog's timeout, since the watchdog can name the rank that the others wait for.
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=3 * timeout + 60)
            )
    except dist.DistError as error:
        raise TextmillError(
            f"the {launch.world} processes of this run did not connect at {launch.address} "
            f"within {start_timeout:.0f} seconds "
            f"({str(error).splitlines()[0][:160]}); start all of them, or raise engine.timeout"
        ) from None
    return TorchRanks(launch, chosen, watchdog)


def _status_store(store: Any, timeout: float) -> PrefixStore:
    """A separate connection to the rendezvous store, for the watchdog's thread."""
    status_store = store.clone()
    status_store.set_timeout(timedelta(seconds=max(5.0, timeout / 2)))
    return PrefixStore(f"watch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", status_store)


def own_device(name: str) -> torch.device:
    """This process's device; the processes need not be connected yet."""
    launch = read_launch(os.environ)
    return open_device(name) if launch is None or launch.world == 1 else choose_device(name, launch)


def choose_device(name: str, launch: Launch) -> torch.device:
    """This process's device: on a GPU machine, the GPU of its local rank."""
    if name.startswith("cuda:"):
        raise TextmillError(f"engine.device: '{name}' is one GPU for {launch.world} processes; set engine.device=cuda")
    device = open_device(name)
    if device.type == "mps":
        raise TextmillError(
            f"engine.device: mps is one device for {launch.world} processes; "
            "set engine.device=cpu, or start one process"
        )
    if device.type == "cpu":
        return device
    if launch.local >= (count := torch.cuda.device_count()):
        raise TextmillError(
            f"engine.device: local rank {launch.local} found {count} GPUs on this machine; start one process per GPU"
        )
    return torch.device("cuda", launch.local)


class TorchRanks(Ranks):
    """Ranks with a gloo group of their own, separate from the collectives of a training step."""

    def __init__(self, launch: Launch, device: torch.device, watchdog: heartbeat.Watchdog) -> None:
        self.launch = launch
        self.rank = launch.rank
        self.world = launch.world
        self.device = device
        self.watchdog = watchdog
        self.group = dist.new_group(backend="gloo")

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.group)
        self.report_progress()
        found: list[float] = tensor.tolist()
        return found

    def all_gather(self, value: Any) -> list[Any]:
        text = json.dumps(value).encode()
        lengths = self._gather_tensors(torch.tensor([len(text)], dtype=torch.int64))
        longest = int(max(int(length) for length in lengths))
        texts = self._gather_tensors(torch.tensor(list(text.ljust(longest)), dtype=torch.uint8))
        return [json.loads(bytes(one.tolist())) for one in texts]

    def _gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(found, tensor, group=self.group)
        self.report_progress()
        return found

    def matmul_rate(self, seconds: float) -> float:
        """Of 2,048 x 2,048 numbers on a GPU and 256 x 256 on a CPU."""
        matrix = torch.ones([2048 if self.device.type == "cuda" else 256] * 2, device=self.device)

        def multiply() -> None:
            _ = (matrix @ matrix)[0, 0].item()  # waits for the device

        multiply()  # the first one is not timed
        start, count = time.perf_counter(), 0
        while (spent := time.perf_counter() - start) <= seconds or count < 2:
            multiply()
            count += 1
        return count / spent

    def new_group(self) -> TorchRanks:
        return TorchRanks(self.launch, self.device, self.watchdog)

    def report_progress(self, place: str | None = None) -> None:
        self.watchdog.report_progress(place)

    @contextmanager
    def under_watchdog(self, on_end: Callable[[str], None]) -> Iterator[None]:
        """Give the watchdog, which already runs, its `on_end`, and report failed collectives to it."""
        self.watchdog.on_end = on_end
        try:
            yield
        except RuntimeError as error:
            if any(text in str(error) for text in CONNECTION_ERRORS):
                self.watchdog.end_job(f"a collective failed ({str(error).splitlines()[0][:160]})")
            raise

    def close(self) -> None:
        """Stop the watchdog and destroy all groups."""
        self.watchdog.close()
        if dist.is_initialized():
            dist.destroy_process_group()
