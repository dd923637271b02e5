"""Runs a GGUF file in llama.cpp, in a process of its own: token ids of texts, and greedy continuations of ids.

python -m tests.support.llama_cpp FILE < {"texts": [...], "prompts": [[ids], ...], "tokens": 64} > the answers
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any


def answer(file: str, request: dict[str, Any]) -> dict[str, Any]:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.port, params.n_ctx, params.n_parallel, params.warmup = 0, request["context"], 1, False
    params.verbosity = -1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # the default is F16
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)

    def post(path: str, body: dict[str, Any]) -> Any:
        call = urllib.request.Request(server.listening_address + path, json.dumps(body).encode())
        return json.load(urllib.request.urlopen(call, timeout=300))

    ids = [
        post("/tokenize", {"content": text, "add_special": False, "parse_special": False})["tokens"]
        for text in request["texts"]
    ]
    greedy = {"n_predict": request["tokens"], "temperature": 0, "top_k": 1, "return_tokens": True, "ignore_eos": False}
    new = [post("/completion", {"prompt": prompt, **greedy})["tokens"] for prompt in request["prompts"]]
    talk = post("/apply-template", {"messages": request["talk"]})["prompt"] if request.get("talk") else None
    return {"ids": ids, "new": new, "talk": talk}


if __name__ == "__main__":
    found = answer(sys.argv[1], json.load(sys.stdin))
    print("ANSWER " + json.dumps(found), flush=True)
    os._exit(0)  # the server's threads do not matter any more
