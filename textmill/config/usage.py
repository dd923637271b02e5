"""Sections for using a model: sampling, export, tracking of its training, and the machine that `plan` estimates."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from textmill.config.section import Section, changeable, path, per_call, source
from textmill.errors import TextmillError


class SampleConfig(Section):
    """How text is generated."""

    prompt: str | None = per_call(None)
    """The text to continue; default: lines that are typed or piped in, else an empty text. Like `sample.prompts_file`,
    `sample.min_tokens` and `sample.count` it belongs to one call, and no folder records it."""
    prompts_file: str | None = Field(None, json_schema_extra={"source": True, "per_call": True})
    """A file of texts to continue: one per line, or JSON lines with a key "prompt"; each answer is a line of JSON."""
    temperature: float = Field(0.8, ge=0)
    """0: always the most likely token (greedy); higher: more random."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens only; 0: no limit."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most likely tokens that together reach this probability (nucleus sampling)."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from tokens at least this fraction as likely as the most likely one; 0: no limit."""
    typical_p: float = Field(1.0, gt=0, le=1)
    """Sample from the tokens closest to the expected information that together reach this probability (locally
    typical)."""
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
    beams: int = Field(1, ge=1, le=64)
    """Above 1: beam search with this many beams instead of sampling."""
    length_penalty: float = Field(1.0, ge=-100, le=100)
    """Beam search: above 0 prefers longer texts, below 0 shorter ones."""
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


class MegatronExport(Section):
    """Settings of `export.kind=megatron`."""

    tensor: int = Field(1, ge=1)
    """Tensor-parallel size: as many mp_rank_NN folders; it must divide the heads and the MLP's width."""
    pipeline: int = Field(1, ge=1)
    """Pipeline-parallel size; it must divide the layers."""
    version: Literal["0", "1.0", "2.0", "3.0"] = "3.0"
    """Checkpoint version, which decides the order of queries, keys and values; 2.0 and 3.0 have the same order."""
    vocab_multiple: int = Field(128, ge=1)
    """The vocabulary is padded to a multiple of this times the tensor-parallel size
    (Megatron's make-vocab-size-divisible-by)."""

    @field_validator("version", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int | float) else value  # YAML reads 2.0 as a number


class ExportConfig(Section):
    """Write a model for other tools; what is written is read back and compared before it appears."""

    folder: str | None = path()
    """The folder to write; a URL such as s3://BUCKET/NAME, or hf://OWNER/NAME for the Hugging Face hub (token in
    HF_TOKEN)."""
    kind: Literal["hf", "gguf", "nanogpt", "megatron", "deepspeed", "onnx", "tokenizer"] = "hf"
    """The format: hf (transformers, vLLM, lm-eval: config.json, safetensors, tokenizer, model card); gguf (llama.cpp,
    Ollama; extra: textmill[export]); nanogpt (ckpt.pt); megatron (Megatron-LM); deepspeed; onnx (with past key
    values; extra: textmill[export]); tokenizer (only the tokenizer, in the files of other tools: vocab.txt, vocab.json
    with merges.txt, or a sentencepiece .model)."""
    precision: Literal["fp32", "bf16", "fp16", "q8_0", "q4_0"] = "fp32"
    """Precision of the written weights; q8_0 and q4_0 (8 and 4 bits in blocks of 32) with gguf only."""
    max_file_gb: float = Field(5.0, gt=0)
    """hf: most gigabytes of weights in one file; a larger model gets several files and an index."""
    name: str | None = None
    """The name of the model in its card and its GGUF file; default: the name of `export.folder`."""
    license: str | None = None
    """The licence that the model card names, such as apache-2.0."""
    vocab_used_in: str | None = source()
    """Keep only the tokens that occur in this folder written by `tokenize`, or in this prefix of .bin and .idx files,
    with what they are merged from, bytes and special tokens; ids change. Default: keep all."""
    megatron: MegatronExport = MegatronExport()
    """Settings of Megatron's checkpoints."""


class WandbConfig(Section):
    """Settings of `track.kinds=wandb`."""

    project: str = changeable("textmill")
    """Project on W&B."""
    entity: str | None = changeable(None)
    """User or team on W&B; default: that of your login."""
    name: str | None = changeable(None)
    """Name of the run on W&B; default: the run folder's name."""
    group: str | None = changeable(None)
    """A group of runs on W&B, such as the trials of one question."""
    tags: list[str] = changeable([])
    """Tags of the run on W&B."""
    offline: bool = changeable(True)
    """Write to the run folder and send nothing; `wandb sync` sends it later."""


class TrackioConfig(Section):
    """Settings of `track.kinds=trackio`."""

    project: str = changeable("textmill")
    """Project in Trackio."""
    name: str | None = changeable(None)
    """Name of the run in Trackio; default: the run folder's name."""
    group: str | None = changeable(None)
    """A group of runs in Trackio."""
    space: str | None = changeable(None)
    """Send the metrics to this Hugging Face Space (USER/NAME); default: they stay on this machine."""


class TrackConfig(Section):
    """Where training metrics are sent, in addition to the console and metrics.jsonl."""

    kinds: list[Literal["tensorboard", "wandb", "trackio"]] = changeable([])
    """tensorboard, wandb, trackio (extra: textmill[track])."""
    wandb: WandbConfig = changeable(WandbConfig())
    """Settings of Weights & Biases."""
    trackio: TrackioConfig = changeable(TrackioConfig())
    """Settings of Trackio."""


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
    mfu: float = per_call(0.4, gt=0, le=1)
    """The fraction of the peak that training is assumed to reach, if no step can be timed here."""
    price: float | None = per_call(None, ge=0)
    """Price of one device for an hour, in any currency; default: no cost is printed."""
    tokens: int | None = per_call(None, ge=1)
    """Tokens of the train split; default: counted in the token store, if there is one."""
    probe_steps: int = per_call(20, ge=0)
    """How many training steps are timed, if the run fits on this machine's device; 0: none."""
