"""The models of a server: found by name, loaded when they are first used, unloaded when memory is short."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

from textmill.errors import TextmillError, warn
from textmill.generation.requests import MemoryShort, ModelStats
from textmill.server.errors import HttpError, quote_value
from textmill.server.model_process import ModelProcess
from textmill.server.service import Service, broken_model_error

IDLE_SECONDS = 0.05
"""How often a model that is to be unloaded is checked for running requests."""


class ServedModels:
    """The services of a server, one for each model; they share the first one's config, key and metrics."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = {service.name: service for service in services}
        self._first = services[0]
        self.config = services[0].config
        self.key = services[0].key
        self.metrics = services[0].metrics
        self.stopping = False
        self.preferences: Path | None = None
        """Where preferred answers are written."""
        self._loading = asyncio.Lock()
        self._last_used: dict[str, float] = {}
        self._leaving: Service | None = None
        """The service whose model is being unloaded."""
        self._replaced: set[ModelProcess] = set()
        """Processes of earlier checkpoints that still answer requests."""
        if len(services) > 1:
            for service in services:
                service.load = partial(self._load, service)

    def find(self, name: str | None) -> Service:
        """Return the service that a request names; the first one if it names none."""
        service = self._first if name is None else self._services.get(name)
        if service is None:
            names = ", ".join(f"'{one}'" for one in self._services)
            message = f"model: unknown model {quote_value(name)}; this server has {names}"
            raise HttpError(404, message, field="model", code="model_not_found")
        return service

    def describe(self) -> list[dict[str, Any]]:
        """Return the entries of /v1/models."""
        return [service.model_info() for service in self._services.values()]

    def title(self) -> str:
        """Return the names of all models, and the first one's step."""
        step = f" at step {self._first.step:,}" if self._first.step else ""
        return ", ".join([f"{self._first.name}{step}", *list(self._services)[1:]])

    def problem(self) -> str:
        """Describe what is wrong with a model; empty if nothing is."""
        problems = {service.name: service.problem() for service in self._services.values()}
        name, problem = next(((name, text) for name, text in problems.items() if text), ("", ""))
        return f"{name}: {problem}" if problem and len(problems) > 1 else problem

    def stats(self) -> ModelStats:
        """Return the counts of all models together."""
        stats = [service.model.stats() for service in self._services.values()]
        return ModelStats(*map(sum, zip(*map(astuple, stats), strict=True)))

    def steps(self) -> dict[str, int]:
        """Return the steps of the models that are loaded, by name."""
        return {service.name: service.step for service in self._services.values() if service.model.loaded}

    async def connect(self) -> None:
        """Connect to the process of the first model, which has been started."""
        await self._first.model.connect()

    async def close(self, grace: float) -> None:
        """Accept nothing more; let requests finish for `grace` seconds. A second call may shorten the grace."""
        self.stopping = True
        for service in self._services.values():
            service.stopping = True
        models = [*self._replaced, *(service.model for service in self._services.values())]
        await asyncio.gather(*(model.close(grace) for model in models))

    async def replace(self, service: Service, newer: Service) -> None:
        """Let a newer checkpoint answer new requests; the older one answers those that it has, and is closed."""
        async with self._loading:
            older = service.model
            if older.loaded:
                await newer.model.load()
            service.model = newer.model
            service.step = newer.step
            self._replaced.add(older)
        warn(f"{service.name}: step {service.step:,} answers from here on")
        try:
            await older.close(service.config.request_timeout)
        finally:
            self._replaced.discard(older)

    async def _load(self, service: Service) -> None:
        """Load the model of a service if it is not in memory; if there is no space, unload the one unused longest."""
        self._last_used[service.name] = time.monotonic()
        if service.model.loaded and service is not self._leaving:
            return
        async with self._loading:
            while not service.model.loaded and not self.stopping:
                loaded = [one for one in self._services.values() if one.model.loaded]
                if self.config.loaded_models is not None and len(loaded) >= self.config.loaded_models:
                    await self._unload_oldest(loaded)
                    continue
                try:
                    await service.model.load()
                except MemoryShort as error:
                    if not loaded:
                        raise broken_model_error(f"'{service.name}' cannot be loaded: {error}") from None
                    await self._unload_oldest(loaded)
                except TextmillError as error:
                    reason = str(error) or "see the server's log"
                    raise broken_model_error(f"'{service.name}' cannot be loaded: {reason}") from None
                else:
                    warn(f"loaded {service.name}")

    async def _unload_oldest(self, loaded: Sequence[Service]) -> None:
        """Unload the model that was not used for the longest time, once its requests have ended."""
        oldest = min(loaded, key=lambda service: self._last_used.get(service.name, 0.0))
        self._leaving = oldest
        try:
            while (stats := oldest.model.stats()).active or stats.waiting:
                await asyncio.sleep(IDLE_SECONDS)
            await oldest.model.unload()
            warn(f"unloaded {oldest.name}, to make space")
        finally:
            self._leaving = None
