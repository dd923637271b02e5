"""HTTP requests to test servers: each on its own connection, with a timeout that suits a busy machine."""

from __future__ import annotations

import httpx

from tests.support.waiting import LONGEST

# One client for all: a new one for each request would read the system's certificates again.
_client = httpx.Client(
    verify=False, timeout=LONGEST, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
)
get, post, options, request, stream = _client.get, _client.post, _client.options, _client.request, _client.stream
