"""Process groups from a launcher's environment: torchrun's, srun's, or none for one process alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from textmill.processes.ranks import Ranks, SingleProcess
from textmill.processes.signals import default_signals

LOST = ("gloo", "NCCL", "Connection closed")
"""Words of errors that a collective raises when another process is gone."""
FIRST_PORT, PORTS = 20_000, 20_000
"""Where a SLURM job's processes meet when MASTER_PORT does not say: a port by the job's number."""


@dataclass(frozen=True)
class Launch:
    """A process's place among those that were started with it."""

    rank: int
    world: int
    local: int
    """Its number on its own machine, which is that of its GPU."""
    meet: str
    """host:port of the first."""


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """What torchrun or srun says; nothing for a process started by itself."""
    try:
        launch = _launch_in(environment)
    except ValueError as error:
        raise TextmillError(f"the launcher's environment: {error}; start the processes with torchrun or srun") from None
    if launch is not None and not 0 <= launch.rank < launch.world:
        raise TextmillError(
            f"the launcher's environment: rank {launch.rank} of {launch.world} processes; start them with torchrun or srun"
        )
    return launch


def _launch_in(environment: Mapping[str, str]) -> Launch | None:
    if "RANK" in environment and "WORLD_SIZE" in environment:
        meet = f"{environment.get('MASTER_ADDR', 'localhost')}:{environment.get('MASTER_PORT', 29500)}"
        return Launch(
            int(environment["RANK"]), int(environment["WORLD_SIZE"]), int(environment.get("LOCAL_RANK", 0)), meet
        )
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        host = environment.get("MASTER_ADDR") or first_host(environment.get("SLURM_STEP_NODELIST", "localhost"))
        port = environment.get("MASTER_PORT") or FIRST_PORT + int(environment.get("SLURM_JOB_ID", 0)) % PORTS
        rank, world = int(environment["SLURM_PROCID"]), int(environment["SLURM_STEP_NUM_TASKS"])
        return Launch(rank, world, int(environment.get("SLURM_LOCALID", 0)), f"{host}:{port}")
    return None


def first_host(nodes: str) -> str:
    """The first name in SLURM's short spelling of several: gpu[03-07,9],cpu1 -> gpu03."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?", nodes)
    return (match[1] + (match[2] or "")) if match else nodes


def open_ranks(device: str, timeout: float) -> Ranks:
    """The processes that a launcher started together, their groups opened; the words of `engine.device` and `engine.timeout`."""
    launch = launch_of(os.environ)
    if launch is None or launch.world == 1:
        return SingleProcess()
    chosen = device_of(device, launch)
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    # torchrun has a meeting place of its own behind env://.
    place = "env://" if "TORCHELASTIC_RUN_ID" in os.environ else f"tcp://{launch.meet}"
    patience = max(timeout, heartbeat.START_SECONDS)
    try:
        with default_signals():
            store, rank, world = next(rendezvous(place, launch.rank, launch.world, timeout=timedelta(seconds=patience)))
            watchdog = heartbeat.Watchdog(rank, world, _status_store(store, timeout), timeout)
            # A longer timeout than the watchdog's, which knows which rank the others wait for.
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=3 * timeout + 60)
            )
    except dist.DistError as error:
        raise TextmillError(
            f"the {launch.world} processes of this run did not meet at {launch.meet} within {patience:.0f} seconds "
            f"({str(error).splitlines()[0][:160]}); start all of them, or raise engine.timeout"
        ) from None
    return TorchRanks(launch, chosen, watchdog)


def _status_store(store: Any, timeout: float) -> PrefixStore:
    """A separate connection to the rendezvous store, for the watchdog's thread."""
    status_store = store.clone()
    status_store.set_timeout(timedelta(seconds=max(5.0, timeout / 2)))
    return PrefixStore(f"watch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", status_store)


def device_of(word: str, launch: Launch) -> torch.device:
    """This process's own device."""
    if word.startswith("cuda:"):
        raise TextmillError(
            f"engine.device: '{word}' is one GPU for {launch.world} processes; say cuda, and each takes its own"
        )
    device = open_device(word)
    if device.type == "mps":
        raise TextmillError(
            f"engine.device: mps is one device for {launch.world} processes; set engine.device=cpu, or start one process"
        )
    if device.type == "cpu":
        return device
    if launch.local >= (count := torch.cuda.device_count()):
        raise TextmillError(
            f"engine.device: process {launch.local} of this machine finds {count} GPUs; start one process a GPU"
        )
    return torch.device("cuda", launch.local)


class TorchRanks:
    """Ranks over a gloo group of its own, so that agreeing never meets the collectives of a step."""

    def __init__(self, launch: Launch, device: torch.device, watchdog: heartbeat.Watchdog) -> None:
        self.launch, self.rank, self.world, self.device, self.watchdog = (
            launch,
            launch.rank,
            launch.world,
            device,
            watchdog,
        )
        self.group = dist.new_group(backend="gloo")

    @property
    def first(self) -> bool:
        """Rank 0."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """One all-reduce of one number."""
        return self.all_reduce([int(flag)])[0] > 0

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """One all-reduce."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.group)
        self.report_progress()
        found: list[float] = tensor.tolist()
        return found

    def all_gather(self, value: Any) -> list[Any]:
        """Lengths first, then texts filled up to the longest."""
        text = json.dumps(value).encode()
        lengths = self._gathered(torch.tensor([len(text)], dtype=torch.int64))
        longest = int(max(int(length) for length in lengths))
        texts = self._gathered(torch.tensor(list(text.ljust(longest)), dtype=torch.uint8))
        return [json.loads(bytes(one.tolist())) for one in texts]

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(found, tensor, group=self.group)
        self.report_progress()
        return found

    def barrier(self) -> None:
        """Wait for all."""
        dist.barrier(group=self.group)
        self.report_progress()

    def new_group(self) -> TorchRanks:
        """Over another group."""
        return TorchRanks(self.launch, self.device, self.watchdog)

    def report_progress(self, place: str | None = None) -> None:
        """Passed to the watchdog."""
        self.watchdog.report_progress(place)

    @contextmanager
    def under_watchdog(self, on_end: Callable[[str], None]) -> Iterator[None]:
        """The watchdog runs since the ranks met; here it gets `on_end`, and the errors of failed collectives."""
        self.watchdog.on_end = on_end
        try:
            yield
        except RuntimeError as error:
            if any(word in str(error) for word in LOST):
                self.watchdog.end_job(f"a collective failed ({str(error).splitlines()[0][:160]})")
            raise

    def close(self) -> None:
        """Stop the watchdog and destroy all groups."""
        self.watchdog.close()
        if dist.is_initialized():
            dist.destroy_process_group()
