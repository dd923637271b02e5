"""Sections for a finished model: evaluation, sampling, embedding, serving, export; and for tracking and `plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from textmill.config.own_files import OWN_SUFFIX
from textmill.config.section import Section, changeable, path, per_call
from textmill.errors import TextmillError

TASKS = Path(__file__).parent.parent / "evaluation" / "tasks"
LM_EVAL = "lm-eval"
"""`lm-eval:NAME` runs a task of lm-evaluation-harness."""


def task_names() -> list[str]:
    """The evaluation tasks: one file each."""
    return sorted(file.stem for file in TASKS.glob("*.py") if file.stem != "__init__")


def is_task_file(task: str) -> bool:
    """Whether an entry of `evaluate.tasks` is a YAML file that describes a task of the user's own."""
    return task.endswith((".yaml", ".yml")) and not task.startswith(f"{LM_EVAL}:")


def own_task_file(task: str) -> str | None:
    """The Python file of the user's own in an entry of `evaluate.tasks`, FILE.py or FILE.py:DATA; None if it has
    none."""
    start, ending, _ = f"{task}:".partition(f"{OWN_SUFFIX}:")
    return start + OWN_SUFFIX if ending and not task.startswith(f"{LM_EVAL}:") else None


class EvaluateConfig(Section):
    """How a model is evaluated."""

    tasks: list[str] = Field(["perplexity"], json_schema_extra={"task_files": True})
    """What to measure: perplexity, tasks on files such as hellaswag:FILE, or your own. Perplexity is that of a split or
    of `evaluate.text` (for a BERT pseudo_perplexity). Tasks on a file of data: wikitext:FILE, lambada:FILE,
    hellaswag:FILE, choices:FILE, pairs:FILE (`textmill evaluate --list` has all). Your own: a YAML file or a Python
    file, ./my_task.py or ./my_task.py:FILE (docs/own-parts.md). lm-eval:NAME: tasks of lm-evaluation-harness (extra:
    textmill[eval])."""
    split: Literal["train", "valid", "test"] = "valid"
    """The split to evaluate on."""
    text: list[str] = Field([], json_schema_extra={"source": True, "per_call": True})
    """Files or folders to measure instead of a split; read as `corpus.sources` are, but not cleaned. With a finetuned
    head, examples as `corpus.labels` reads them; without labels they get predictions only."""
    predictions: str | None = Field(None, json_schema_extra={"path": True, "per_call": True})
    """The file for what the model answered to each example: JSON lines with scores and metrics; of a finetuned head its
    predictions, for questions as SQuAD's JSON. Default: next to the result, in the run's `evaluation` folder."""
    shots: int | None = Field(None, ge=0, le=1000)
    """Examples in the prompt before each question (few-shot), drawn as lm-evaluation-harness does from the file that is
    published with the data, if it is in the same folder (`textmill evaluate --list`), else from the measured file
    without the question; default: 5 in gsm8k, as published in core, else none."""
    batch: int = changeable(16, ge=1)
    """Windows in one forward pass."""
    window: int | None = Field(None, ge=1)
    """Tokens that the model reads at once; default: `train.length`, or the model's longest context."""
    stride: int | None = Field(None, ge=1)
    """Tokens between the starts of two windows; default: the window's length. A smaller stride gives each token more
    context."""
    sample: int | None = Field(None, ge=2)
    """Measure only this many examples (windows, for perplexity), a random sample; default: all."""
    baselines: bool = True
    """Also evaluate a unigram and a bigram model, counted on the train split."""
    wikitext: Literal["lm-eval", "megatron", "transformers"] = "lm-eval"
    """The protocol of the task wikitext. lm-eval: each article alone, detokenised, first token predicted; megatron: the
    file as one detokenised text, a window every 32 tokens, first token not predicted; transformers: the file as it is,
    a window every 512 tokens, first token not predicted. `evaluate.window` and `evaluate.stride` override it."""

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, tasks: list[str]) -> list[str]:
        if not tasks:
            raise TextmillError(f"evaluate.tasks: is empty; choose from {', '.join(task_names())}")
        return check_tasks(tasks, "evaluate.tasks")


def check_tasks(tasks: list[str], key: str) -> list[str]:
    """Refuse a name that is no task; `key` is the setting that error messages name."""
    known = task_names()
    for task in tasks:
        is_own = is_task_file(task) or own_task_file(task) is not None
        if not is_own and task.partition(":")[0] not in [*known, LM_EVAL]:
            raise TextmillError(
                f"{key}: unknown task '{task}'; choose from {', '.join(known)}, {LM_EVAL}:NAME, or name a YAML or "
                "Python file of your own"
            )
    return tasks


class ServeConfig(Section):
    """How a model is served over HTTP; `sample` holds the defaults of a request."""

    host: str = changeable("127.0.0.1", min_length=1)
    """The address to listen on; 0.0.0.0: every address of this machine."""
    port: int = changeable(8000, ge=0, le=65535)
    """The port to listen on; 0: any free port, which is printed."""
    key_file: str | None = path(None)
    """A file whose first line is the API key; default: the environment variable TEXTMILL_API_KEY, else no key is
    required."""
    model_name: str | None = changeable(None, min_length=1, max_length=200)
    """The model's name in requests and replies; default: the name of its folder."""
    slots: int = changeable(16, ge=1, le=1024)
    """Texts generated at the same time (continuous batching)."""
    queue: int = changeable(64, ge=0, le=100_000)
    """Texts that may wait for a slot; more are refused with status 429."""
    max_body: int = changeable(1_000_000, ge=1000)
    """Most bytes in the body of a request."""
    max_tokens: int = changeable(4096, ge=1)
    """Most new tokens that a request may ask for."""
    loaded_models: int | None = changeable(None, ge=1)
    """Several models: most of them in memory at the same time; default: as many as fit. The one that was not used for
    the longest time is unloaded."""
    drop_oldest: bool = changeable(True)
    """Drop the oldest turns of a conversation that is longer than the model's context, and say so in the reply; false:
    refuse it with status 400."""
    request_timeout: float = changeable(300.0, gt=0, le=86400)
    """Seconds for a request, waiting included; then it ends with the text generated so far."""
    shutdown_grace: float = changeable(30.0, ge=0, le=3600)
    """Seconds that running requests have to finish when the server is stopped."""
    step_timeout: float = changeable(60.0, gt=0, le=86400)
    """Seconds that one step of the model may take; after that it counts as hung: /health returns 503, and waiting
    requests get an error."""
    allowed_origins: list[str] = changeable([])
    """Web origins whose pages may call the server (CORS), such as https://example.org; default: none."""
    allowed_hosts: list[str] = changeable([])
    """More host names of the server; by default a server that listens on this machine only accepts localhost and
    addresses."""

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, value: list[str]) -> list[str]:
        for origin in value:
            if origin != "*" and (not origin.startswith(("http://", "https://")) or origin.count("/") != 2):
                raise TextmillError(
                    f"serve.allowed_origins: '{origin}' is no web origin; write https://NAME or "
                    "http://NAME:PORT, without a path"
                )
        return value


class SampleConfig(Section):
    """How text is generated."""

    prompt: str | None = per_call(None)
    """The text to continue; default: lines that are typed or piped in, else an empty text. Like `sample.prompts_file`,
    `sample.min_tokens` and `sample.count` it belongs to one call, and no folder records it."""
    prompts_file: str | None = Field(None, json_schema_extra={"source": True, "per_call": True})
    """A file of texts to continue: one per line, or JSON lines with a key "prompt"; each answer is a line of JSON."""
    temperature: float = Field(0.8, ge=0)
    """How random: 0 is always the most likely token (greedy), 1 the model's own probabilities."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens only; 0: no limit."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most likely tokens that together reach this probability (nucleus sampling)."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from tokens at least this fraction as likely as the most likely one; 0: no limit."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Above 1: tokens that already occur, in the prompt too, become less likely."""
    presence_penalty: float = Field(0.0, ge=-100, le=100)
    """Subtracted from the logit of every token that occurs in the new text."""
    frequency_penalty: float = Field(0.0, ge=-100, le=100)
    """Subtracted from the logit of a token once for each time that it occurs in the new text."""
    min_tokens: int = per_call(0, ge=0)
    """Fewest new tokens: no end of text before."""
    max_tokens: int = Field(200, ge=1)
    """Most new tokens."""
    stop: list[str] = Field([], json_schema_extra={"free_texts": True})
    """Texts that end the generation; the result ends before the first of them."""
    json_schema: str | None = Field(None, json_schema_extra={"source": True, "per_call": True})
    """A file with a JSON schema, which every new text then follows."""
    beams: int = Field(1, ge=1, le=64)
    """Above 1: beam search with this many beams instead of sampling."""
    slide_context: bool = True
    """Past the model's longest context, continue with its last half as context; false: stop there."""
    seed: int = Field(1234, ge=0, lt=2**63)
    """The same seed gives the same text."""
    count: int = per_call(1, ge=1, le=1000)
    """How many samples; their seeds count up from `sample.seed`."""
    batch: int = changeable(16, ge=1, le=4096)
    """Texts generated at the same time; each needs memory for its KV cache."""

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: list[str]) -> list[str]:
        if "" in stop:
            raise TextmillError("sample.stop: has an empty text, which would end every text at once; use [] for none")
        if any("\ud800" <= letter <= "\udfff" for text in stop for letter in text):
            raise TextmillError("sample.stop: has a lone surrogate (half of a character); give it as UTF-8 text")
        return stop


class EmbedConfig(Section):
    """How the embedding of a text is computed."""

    pooling: Literal["auto", "mean", "cls"] = "auto"
    """From the hidden states of a text to one vector: mean (over all its tokens) or cls (the first token's); auto: as
    the files of sentence-transformers in the model's folder say, else mean."""
    normalize: bool | None = None
    """Divide each embedding by its length, so that products are cosine similarities; default: as these files say, else
    false."""
    length: int | None = Field(None, ge=1)
    """Longest text in tokens, special ones included; a longer text is truncated. Default: as these files say, else the
    model's longest context."""


class ExportConfig(Section):
    """Write a model for other tools; what is written is read back and compared before it appears."""

    folder: str | None = path()
    """The folder to write; a URL such as s3://BUCKET/NAME, or hf://OWNER/NAME for the Hugging Face hub (token in
    HF_TOKEN)."""
    kind: Literal["hf", "gguf", "onnx", "dataset"] = "hf"
    """The format: hf (transformers, vLLM, lm-eval: config.json, safetensors, tokenizer, model card); gguf (llama.cpp,
    Ollama; extra: textmill[export]); onnx (with past key values; extra: textmill[export]); dataset (the prepared corpus
    as a Hugging Face dataset with a card)."""
    precision: Literal["fp32", "bf16", "fp16", "q8_0", "q4_0"] = "fp32"
    """Precision of the written weights; q8_0 and q4_0 (8 and 4 bits in blocks of 32) with gguf only."""
    max_divergence: float | None = Field(None, gt=0)
    """With q8_0 and q4_0: the largest mean Kullback-Leibler divergence of the next token, in nats, on text of the valid
    split or of a built-in sample; above it nothing is written. Default: 0.02 with q8_0, 0.5 with q4_0."""
    reader: bool = True
    """Also open the result in a fresh process as its reader would, if the library is installed: hf with transformers,
    gguf with llama.cpp (the package xllamacpp), onnx with onnxruntime; compare token ids, chat turns, outputs and
    greedy tokens."""
    name: str | None = None
    """The name of the model in its card and its GGUF file; default: the name of `export.folder`."""
    license: str | None = None
    """The licence that the card names, such as apache-2.0."""


class TrackConfig(Section):
    """Where training metrics are sent, in addition to the console and metrics.jsonl."""

    kinds: list[Literal["tensorboard", "wandb"]] = changeable([])
    """tensorboard, wandb (extra: textmill[track])."""
    project: str = changeable("textmill")
    """Project in W&B; the environment has the rest, such as WANDB_ENTITY and WANDB_NAME."""


class PlanConfig(Section):
    """The machine that `textmill plan` estimates a run for; default: this one. No folder records these settings."""

    gpu: str | None = per_call(None)
    """The GPU by its product name, such as H100, A100 or V100: sets memory and peak FLOP/s; default: this machine's
    device."""
    devices: int | None = per_call(None, ge=1)
    """How many devices, on all machines together; default: as many as `engine.mesh` needs."""
    memory_gb: float | None = per_call(None, gt=0)
    """Memory of one device in GB (2^30 bytes); default: that of `plan.gpu`, or of this machine's device."""
    tflops: float | None = per_call(None, gt=0)
    """Peak of one device in 10^12 operations per second, dense, in the precision of the run; default: that of
    `plan.gpu`."""
    per_node: int = per_call(8, ge=1)
    """Devices of one machine."""
    network_gbit_s: float | None = per_call(None, gt=0)
    """Network of one machine in Gbit/s; default: for each device a ninth of its link, as in a DGX H100 (400 Gbit/s for
    each)."""
    price: float | None = per_call(None, ge=0)
    """Price of one device for an hour, in any currency; default: no cost is printed."""
    tokens: int | None = per_call(None, ge=1)
    """Tokens of the train split; default: counted in the token store, if there is one."""
    probe_steps: int = per_call(20, ge=0)
    """How many training steps are timed, if the run fits on this machine's device; 0: none."""
