"""Connect to the MongoDB server of a db_config.json, retry during outages, and keep secrets out of messages."""

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

Response = TypeVar("Response")
CONNECTION_VARIABLE = "TEXTMILL_MONGO"
DEFAULT_MAX_OUTAGE = 120.0
"""Seconds that a server may be unreachable before the command fails; MONGO_PATIENCE in db_config.json overrides it."""
FIRST_DELAY = 0.25
MAX_DELAY = 8.0
"""Seconds between two attempts; the delay doubles each time."""
TIMEOUTS = {"serverSelectionTimeoutMS": 5_000, "socketTimeoutMS": 300_000}
"""Defaults for the connection string; a server that never answers must not block the command."""
META_COLLECTION = "meta_info"


@dataclass(frozen=True)
class MongoServer:
    """One database of a server, with the collections of a db_config.json."""

    path: Path
    database: str
    collections: tuple[str, ...]
    address: str = field(repr=False)
    """The connection string; it is secret, so it is never written or printed."""
    max_outage: float | None = None
    """Seconds that the server may be unreachable."""

    @cached_property
    def db(self) -> Any:
        """The database connection; each process must open its own."""
        options: dict[str, Any] = {
            name: value for name, value in TIMEOUTS.items() if name.lower() not in self.address.lower()
        }
        try:
            return pymongo.MongoClient(self.address, appname="textmill", **options)[self.database]
        except (PyMongoError, ValueError) as error:
            raise TextmillError(
                f"{self.path}: cannot connect to MongoDB ({self.redact(error)}); fix the connection string"
            ) from None

    def close(self) -> None:
        """Close the connection; the next request opens it again."""
        if "db" in self.__dict__:
            self.__dict__.pop("db").client.close()

    def request(self, operation: Callable[[Any], Response]) -> Response:
        """Run an idempotent database operation; retry while the server is unreachable."""
        started = time.monotonic()
        delay = FIRST_DELAY
        max_outage = DEFAULT_MAX_OUTAGE if self.max_outage is None else self.max_outage
        while True:
            try:
                return operation(self.db)
            except BulkWriteError as error:
                raise TextmillError(f"{self.path}: MongoDB rejected the write ({_write_error_codes(error)})") from None
            except (ConnectionFailure, CursorNotFound) as error:
                reason = self.redact(error)
                outage = time.monotonic() - started
                if outage > max_outage:
                    raise TextmillError(
                        f"{self.path}: no MongoDB server for {outage:.0f} s ({reason}); "
                        f"start it and run the command again"
                    ) from None
                if delay == FIRST_DELAY:
                    warn(f"{self.path}: the MongoDB server does not answer ({reason}); retrying for {max_outage:g} s")
                time.sleep(delay)
                delay = min(2 * delay, MAX_DELAY)
            except PyMongoError as error:
                raise TextmillError(f"{self.path}: MongoDB error: {self.redact(error)}") from None

    def redact(self, error: Exception) -> str:
        """A pymongo error as text, without any part of the connection string."""
        kind = type(error).__name__
        text = str(error).partition(", Timeout:")[0].partition(" (configured")[0][:300]
        secrets = _secrets_of(self.address) - {self.database}
        if any(len(secret) < 3 and secret in text for secret in secrets):
            return kind  # a secret this short could be guessed from the replaced text
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return f"{kind}: {text}"


def _secrets_of(address: str) -> set[str]:
    """The parts of a connection string, as written and with percent-encoding decoded.

    mongodb://ann:p%40ss@db1:27017,db2/korpus?replicaSet=rs0 has, besides itself and longer parts: ann, p%40ss, p@ss,
    db1:27017, db1, db2, korpus and rs0.
    """
    options = address.partition("?")[2]
    credentials_and_hosts = address.partition("://")[2].partition("?")[0]
    credentials, _, hosts = credentials_and_hosts.rpartition("@")
    parts = [address, credentials_and_hosts, credentials, *credentials.split(":"), *re.split("[,/]", hosts)]
    parts += [host.partition(":")[0] for host in hosts.split(",")]
    parts += re.findall(r"=([^&]*)", options)
    return {spelling for part in parts for spelling in (part, unquote(part)) if spelling}


def open_server(path: str | Path) -> MongoServer:
    """The server of a db_config.json; does not connect yet."""
    path = Path(path)
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise TextmillError(
            f"{path}: expected an object with MONGO_CONNECTION_DB and COLLECTIONS; found a {type(settings).__name__}"
        )
    database = settings.get("MONGO_CONNECTION_DB")
    names = settings.get("COLLECTIONS")
    if not isinstance(database, str) or not database:
        raise TextmillError(f"{path}: MONGO_CONNECTION_DB is missing; set the name of the database")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise TextmillError(f"{path}: COLLECTIONS must be a list of names; list at least one collection")
    if len(set(names)) < len(names):
        raise TextmillError(f"{path}: COLLECTIONS lists a collection twice; keep one")
    max_outage = settings.get("MONGO_PATIENCE")
    if max_outage is not None and (
        isinstance(max_outage, bool) or not isinstance(max_outage, int | float) or not 0 <= max_outage < 1e9
    ):
        raise TextmillError(
            f"{path}: MONGO_PATIENCE: found {max_outage!r}; set the seconds the server may be unreachable, such as 120"
        )
    return MongoServer(path, database, tuple(names), _connection_string(path, settings), max_outage)


def check_collections(server: MongoServer) -> None:
    """Raise an error for a collection that the database does not have."""
    existing = server.request(lambda db: db.list_collection_names())
    for name in server.collections:
        if name not in existing:
            close_matches = difflib.get_close_matches(name, existing, n=1)
            advice = (
                f"did you mean '{close_matches[0]}'?"
                if close_matches
                else f"the database holds {', '.join(sorted(existing)) or 'none'}"
            )
            raise TextmillError(f"{server.path}: COLLECTIONS: no collection '{name}'; {advice}")


def _connection_string(path: Path, settings: dict[str, Any]) -> str:
    """The environment variable's, else the secret file's, else that of db_config.json."""
    if address := os.environ.get(CONNECTION_VARIABLE):
        return address
    address = settings.get("MONGO_CONNECTION_STRING")
    secret_file = settings.get("MONGO_CONNECTION_FILE")
    if isinstance(secret_file, str) and secret_file:
        try:
            address = (path.parent / os.path.expanduser(secret_file)).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TextmillError(
                f"{path}: MONGO_CONNECTION_FILE: {secret_file}: not readable ({type(error).__name__})"
            ) from None
    if not isinstance(address, str) or not address:
        raise TextmillError(
            f"{path}: no connection string; set the environment variable {CONNECTION_VARIABLE}, "
            f"or MONGO_CONNECTION_FILE or MONGO_CONNECTION_STRING in the file"
        )
    return address


def _write_error_codes(error: Any) -> str:
    """The error codes of a rejected write, without the documents that pymongo would quote."""
    codes = {str(write_error.get("code")) for write_error in error.details.get("writeErrors", [])}
    return (
        f"code {', '.join(sorted(codes))}; 11000 means that the idx exists already" if codes else type(error).__name__
    )
