"""The way to a MongoDB server: what db_config.json says, patience when the server restarts, and no secret in any message."""

from __future__ import annotations

import difflib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from textmill.errors import TextmillError, warn
from textmill.storage.files import read_json

try:
    import pymongo
    from pymongo.errors import BulkWriteError, ConnectionFailure, CursorNotFound, PyMongoError
except ImportError:
    raise TextmillError("a MongoDB corpus needs pymongo; run: pip install 'textmill[mongo]'") from None

Answer = TypeVar("Answer")
VARIABLE = "TEXTMILL_MONGO"
PATIENCE = 120.0
"""Seconds that a server may be away before the work ends, unless MONGO_PATIENCE in db_config.json says another number."""
FIRST_WAIT, LONGEST_WAIT = 0.25, 8.0
"""Seconds between two tries; the wait doubles."""
TIMEOUTS = {"serverSelectionTimeoutMS": 5_000, "socketTimeoutMS": 300_000}
"""Unless the connection string says others: a server that took a question and never answers is not waited for without end."""
META = "meta_info"


@dataclass(frozen=True)
class Server:
    """One database of one server, with the collections that db_config.json names."""

    path: Path
    database: str
    collections: tuple[str, ...]
    address: str = field(repr=False)
    """The connection string: never written, never said."""
    patience: float | None = None
    """Seconds that the server may be away."""

    @cached_property
    def db(self) -> Any:
        """The database; every process must open its own."""
        own: dict[str, Any] = {
            name: value for name, value in TIMEOUTS.items() if name.lower() not in self.address.lower()
        }
        try:
            return pymongo.MongoClient(self.address, appname="textmill", **own)[self.database]
        except (PyMongoError, ValueError) as error:
            raise TextmillError(
                f"{self.path}: not a connection to MongoDB ({self.clean(error)}); mend the connection string"
            ) from None

    def close(self) -> None:
        """Let the connection go; what is asked later opens it again."""
        if "db" in self.__dict__:
            self.__dict__.pop("db").client.close()

    def ask(self, question: Callable[[Any], Answer]) -> Answer:
        """Ask the database something that may be asked twice; a server that is away is waited for."""
        begin, wait, patience = time.monotonic(), FIRST_WAIT, PATIENCE if self.patience is None else self.patience
        while True:
            try:
                return question(self.db)
            except BulkWriteError as error:
                raise TextmillError(f"{self.path}: MongoDB refused to write ({_codes(error)})") from None
            except (ConnectionFailure, CursorNotFound) as error:
                reason, away = self.clean(error), time.monotonic() - begin
                if away > patience:
                    raise TextmillError(
                        f"{self.path}: no MongoDB server for {away:.0f} s ({reason}); start it and run again"
                    ) from None
                if wait == FIRST_WAIT:
                    warn(f"{self.path}: the MongoDB server does not answer ({reason}); trying again for {patience:g} s")
                time.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)
            except PyMongoError as error:
                raise TextmillError(f"{self.path}: MongoDB says: {self.clean(error)}") from None

    def clean(self, error: Exception) -> str:
        """An error of pymongo without anything of the connection string in it."""
        kind, text = type(error).__name__, str(error).partition(", Timeout:")[0].partition(" (configured")[0][:300]
        place = self.address.partition("://")[2].partition("?")[0]
        user, _, hosts = place.rpartition("@")
        parts = [
            self.address,
            place,
            user,
            *user.split(":"),
            *re.split("[,/]", hosts),
            *(host.partition(":")[0] for host in hosts.split(",")),
        ]
        parts += re.findall(r"=([^&]*)", self.address.partition("?")[2])
        secrets = {
            spelling for part in parts for spelling in (part, unquote(part)) if spelling and spelling != self.database
        }
        if any(len(secret) < 3 and secret in text for secret in secrets):
            return kind  # so short that the gaps would give it away
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return f"{kind}: {text}"


def open_server(path: str | Path) -> Server:
    """The server that a db_config.json names; nothing is asked of it yet."""
    path = Path(path)
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise TextmillError(
            f"{path}: found a {type(settings).__name__}; give an object with MONGO_CONNECTION_DB and COLLECTIONS"
        )
    database, names = settings.get("MONGO_CONNECTION_DB"), settings.get("COLLECTIONS")
    if not isinstance(database, str) or not database:
        raise TextmillError(f"{path}: no MONGO_CONNECTION_DB; give the name of the database")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise TextmillError(f"{path}: COLLECTIONS is not a list of names; give at least one collection")
    if len(set(names)) < len(names):
        raise TextmillError(f"{path}: COLLECTIONS names a collection twice; keep one")
    patience = settings.get("MONGO_PATIENCE")
    if patience is not None and (
        isinstance(patience, bool) or not isinstance(patience, int | float) or not 0 <= patience < 1e9
    ):
        raise TextmillError(
            f"{path}: MONGO_PATIENCE: found {patience!r}; give the seconds that the server may be away, such as 120"
        )
    return Server(path, database, tuple(names), _address(path, settings), patience)


def check_collections(server: Server) -> None:
    """Refuse a collection that the database does not hold."""
    there = server.ask(lambda db: db.list_collection_names())
    for name in server.collections:
        if name not in there:
            near = difflib.get_close_matches(name, there, n=1)
            advice = (
                f"did you mean '{near[0]}'?" if near else f"the database holds {', '.join(sorted(there)) or 'none'}"
            )
            raise TextmillError(f"{server.path}: COLLECTIONS: no collection '{name}'; {advice}")


def _address(path: Path, settings: dict[str, Any]) -> str:
    if address := os.environ.get(VARIABLE):
        return address
    address, named = settings.get("MONGO_CONNECTION_STRING"), settings.get("MONGO_CONNECTION_FILE")
    if isinstance(named, str) and named:
        try:
            address = (path.parent / os.path.expanduser(named)).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TextmillError(
                f"{path}: MONGO_CONNECTION_FILE: {named}: not readable ({type(error).__name__})"
            ) from None
    if not isinstance(address, str) or not address:
        raise TextmillError(
            f"{path}: no connection string; set {VARIABLE} in the environment, or MONGO_CONNECTION_FILE or MONGO_CONNECTION_STRING there"
        )
    return address


def _codes(error: Any) -> str:
    """What kind of refusal, without the documents that pymongo would quote."""
    codes = {str(one.get("code")) for one in error.details.get("writeErrors", [])}
    return f"code {', '.join(sorted(codes))}; 11000 is an idx that is there already" if codes else type(error).__name__
