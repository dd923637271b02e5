"""Opens an export as its reader would: in a fresh process, without textmill, with the other library's defaults.

python reader_process.py < a request as JSON > "ANSWER " and the answers as JSON. See readers.py for both.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from importlib import import_module
from pathlib import Path
from typing import Any

Tree = dict[str, Any]
ANSWER = "ANSWER "


def open_with_transformers(request: Tree) -> Tree:
    """Token ids by AutoTokenizer; if a class is named, its outputs and greedy tokens."""
    if not request["model_class"]:
        sys.modules["torch"] = None  # type: ignore[assignment]  # a tokenizer needs none, and its import takes longest
    transformers: Any = import_module("transformers")
    folder = request["path"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pairs = [tokenizer(*pair) for pair in request["pairs"]]
    talk = request["talk"]
    options: Tree = {"add_generation_prompt": True, "return_dict": False}
    found: Tree = {
        "version": transformers.__version__,
        "ids": [tokenizer(text)["input_ids"] for text in request["texts"]],
        "pairs": [[list(pair["input_ids"]), list(pair.get("token_type_ids", []))] for pair in pairs],
        "talk": [int(id_) for id_ in tokenizer.apply_chat_template(talk, **options)] if talk else None,
    }
    if not request["model_class"]:
        return found
    torch: Any = import_module("torch")
    options = {"dtype": torch.float32, "output_loading_info": True}
    net, loading = getattr(transformers, request["model_class"]).from_pretrained(folder, **options)
    found["missing"] = sorted(loading["missing_keys"])
    ids = torch.tensor([request["prompt"]])
    with torch.no_grad():
        net.eval()
        values = net(ids).logits if request["has_logits"] else net.base_model(ids).last_hidden_state
        found["values"] = values[0].tolist()
        if request["tokens"]:
            ends = net.generation_config.eos_token_id
            found["ends"] = ends if isinstance(ends, list) else [ends]
            # Greedy, whatever the model's own settings of sampling are.
            plain = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
            mask = torch.ones_like(ids)
            new = net.generate(ids, attention_mask=mask, max_new_tokens=request["tokens"], **plain)
            found["new"] = new[0, ids.shape[1] :].tolist()
    return found


def open_with_sentence_transformers(request: Tree) -> Tree:
    """Embeddings, without a prompt."""
    library: Any = import_module("sentence_transformers")
    model = library.SentenceTransformer(request["path"], device="cpu")
    vectors = model.encode(request["embedded"], prompt="").tolist() if request["embedded"] else []
    return {"version": library.__version__, "vectors": vectors}


def open_with_llama_cpp(request: Tree) -> Tree:
    """Token ids, the chat template, greedy tokens and embeddings by llama.cpp's own server."""
    xllamacpp: Any = import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = request["path"]
    params.port, params.n_ctx, params.n_parallel, params.warmup = 0, request["context"], 1, False
    params.verbosity = -1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # the default is F16
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.embedding = bool(request["embedded"])
    server = xllamacpp.Server(params)

    def post(path: str, body: Tree) -> Any:
        call = urllib.request.Request(server.listening_address + path, json.dumps(body).encode())
        return json.load(urllib.request.urlopen(call, timeout=300))

    options = {"add_special": True, "parse_special": True}
    greedy = {"n_predict": request["tokens"], "temperature": 0, "top_k": 1, "return_tokens": True}
    return {
        "version": str(getattr(xllamacpp, "__version__", "")),
        "ids": [post("/tokenize", {"content": text, **options})["tokens"] for text in request["texts"]],
        "talk": post("/apply-template", {"messages": request["talk"]})["prompt"] if request["talk"] else None,
        "vectors": [post("/embedding", {"content": text})[0]["embedding"][0] for text in request["embedded"]],
        "new": post("/completion", {"prompt": request["prompt"], **greedy})["tokens"] if request["tokens"] else [],
    }


def open_with_onnxruntime(request: Tree) -> Tree:
    """Logits by onnxruntime, those of the second half with the past of the first; the states of an encoder that
    predicts no tokens."""
    numpy: Any = import_module("numpy")
    onnxruntime: Any = import_module("onnxruntime")
    session = onnxruntime.InferenceSession(request["path"], providers=["CPUExecutionProvider"])
    inputs = {one.name: one.shape for one in session.get_inputs()}
    past = {
        name: numpy.zeros((1, shape[1], 0, shape[3]), numpy.float32)
        for name, shape in inputs.items()
        if name.startswith("past_key_values.")
    }
    present = [name.replace("past_key_values", "present") for name in past]
    output = "logits" if request["has_logits"] else "last_hidden_state"
    length = len(request["prompt"])
    values: list[Any] = []
    for stop in dict.fromkeys([max(1, length // 2), length]) if past else [length]:
        ids = numpy.array([request["prompt"][len(values) : stop]], numpy.int64)
        every = {
            "input_ids": ids,
            "attention_mask": numpy.ones((1, stop), numpy.int64),
            "token_type_ids": 0 * ids,
            "position_ids": numpy.arange(len(values), stop)[None],
            **past,
        }
        outputs, *states = session.run([output, *present], {name: every[name] for name in inputs})
        values += outputs[0].tolist()
        past = dict(zip(past, states, strict=True))
    return {"version": onnxruntime.__version__, "values": values}


OPENERS = {
    "transformers": open_with_transformers,
    "sentence-transformers": open_with_sentence_transformers,
    "llama.cpp": open_with_llama_cpp,
    "onnxruntime": open_with_onnxruntime,
}


def main() -> None:
    """Answer the request on standard input."""
    # The folder of this file has modules with names of other packages' modules.
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).resolve().parent]
    request = json.load(sys.stdin)
    try:
        found = OPENERS[request["reader"]](request)
    except ImportError as error:
        found = {"not_installed": error.name or str(error)}
    except Exception as error:  # whatever the library raises is what its user would see
        found = {"error": f"{type(error).__name__}: {error}"}
    print(ANSWER + json.dumps(found), flush=True)
    os._exit(0)  # threads of a server do not matter any more


if __name__ == "__main__":
    main()
