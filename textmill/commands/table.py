"""The table of commands, one row each: the command line, --help and `textmill.NAME` in Python all read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal


@dataclass(frozen=True)
class Flag:
    """An option of a command line, and the parameter of the command's function that it sets."""

    name: str
    parameter: str
    summary: str
    kind: Literal["switch", "text", "texts", "step", "number", "minutes"] = "switch"
    """switch: takes no value; texts: may be given several times; step: a number, latest or best."""
    value: object = True
    """What a switch passes."""
    example: str = ""
    """A value to show in the usage; a flag that has one is required."""
    excludes: str = ""
    """A flag that cannot be used at the same time."""
    function: str = ""
    """MODULE:FUNCTION: a switch that calls this instead of the command, without arguments or settings."""


@dataclass(frozen=True)
class Command:
    """A row of the table."""

    function: str
    """MODULE:FUNCTION."""
    summary: str
    arguments: tuple[str, ...] = ("WHERE",)
    """The positional arguments, as the usage shows them: one in brackets may be left out, one with "..." at its end
    takes all that are left, as a list."""
    sections: tuple[str, ...] = ()
    """The sections of the config that it reads; --help --all lists their keys."""
    keys: str = ""
    """Keys of other sections that it reads, separated by spaces."""
    settings: str = ""
    """The settings that matter most, separated by spaces, in the order of the work; --help lists these."""
    flags: tuple[Flag, ...] = ()
    opens: Literal["config", "model"] | None = "config"
    """config: the function gets WHERE as a RunConfig; a model folder without a run is refused.
    model: the same, but any model folder will do, and the folder of a checkpoint selects its step.
    None: the function gets the arguments as they were typed."""
    takes_settings: bool = True
    """Whether section.key=value is allowed. A command that opens none gets them as `settings`."""
    result_is_output: bool = False
    """Whether its result is what it prints: then it ends, with exit code 141, as soon as nobody reads that."""
    timed: bool = False
    """Whether the function takes `command`, the time at which the command started."""

    @property
    def python_name(self) -> str:
        """Its name in `import textmill`."""
        return self.function.partition(":")[2]

    def load(self) -> Callable[..., Any]:
        return load_function(self.function)


def load_function(name: str) -> Callable[..., Any]:
    """Import MODULE:FUNCTION."""
    module, _, function = name.partition(":")
    call: Callable[..., Any] = getattr(import_module(module), function)
    return call


ALL = ("corpus", "tokenizer", "tokens", "runner", "model", "train", "engine", "evaluate", "sample", "track")

FORCE = Flag("--force", "force", "run this stage again from scratch, in the same folder", value="yes")
RESTART = Flag("--force", "force", "train again from scratch, in the same folder", value="yes", excludes="--step")
REBUILD = Flag("--force", "force", "rebuild the stages whose input or settings have changed", value="changed")
RESUME_STEP = Flag("--step", "step", "N, latest or best: the checkpoint to resume from (default: latest)", "step")
STEP = Flag("--step", "step", "N, latest or best: which checkpoint (default: best; latest if none measured)", "step")
CHANGE = Flag(
    "--change", "change", "use changed settings from the checkpoint on (rates, batch, blend ...)", excludes="--force"
)
SEEN_STEP = Flag("--step", "step", "N: list the documents that training step N saw", "number")
DROPPED = Flag(
    "--dropped",
    "dropped",
    "RULE: list documents that this rule of prepare dropped, or `all` rules",
    "text",
    excludes="--step",
)
COUNTS = Flag(
    "--counts", "counts", "FILE: write how often each token occurs, for train.masked.counts", "text", excludes="--step"
)
OUT_TEXTS = Flag("--out", "out", "FILE.npy or FILE.jsonl: write there instead of printing JSON lines", "text")
COPY = Flag("--out", "out", "the folder of the new run (default: RUN-replay)", "text")
OUT = Flag("--out", "out", "the file to write (default: report.html in the first run)", "text", excludes="--svg")
SVG = Flag("--svg", "svg", "FILE: write only the loss curves, as a picture for a README", "text")
JSON = Flag("--json", "as_json", "print JSON instead of text")
MINUTES = Flag(
    "--minutes", "minutes", "how long `textmill run` may take (default: until more does not help)", "minutes"
)
FAMILY = Flag(
    "--family",
    "family",
    "auto (default): llama, or gpt2 on a GPU if not compiled; both predict the next token; bert: masked ones",
    "text",
)
TUNE_MINUTES = Flag("--minutes", "minutes", "how long all trials together may take (default: 60)", "minutes")
TUNE_AGAIN = Flag("--force", "force", "remove the finished trials and start again", value="yes")
BEST = Flag("--best", "best", "search mesh, micro-batch and activation checkpointing for the fastest settings that fit")
TO = Flag("--to", "to", "FILE: write the config there instead of printing it", "text")
GPUS = Flag("--gpus", "gpus", "N: on how many GPUs the command ran (default: as its launcher says, else 1)", "number")
LIST_TASKS = Flag(
    "--list",
    "list",
    "list the tasks: what each measures, what its files are called and where they come from",
    function="textmill.evaluation.tasks:list_tasks",
)
RUN_KEYS = "engine.device engine.precision"
"""What is read of the engine to run a finished model."""
TEXT = Flag(
    "--text", "text", "your text: files, a folder or a quoted glob; may be repeated", "texts", example="'texts/*.txt'"
)

FOLLOW = Flag(
    "--follow",
    "follow",
    "serve the newest checkpoint of a run, and each newer one that training writes",
    excludes="--step",
)
PREFERENCES = Flag(
    "--preferences", "preferences", "FILE: append the answers that users of the page prefer, as JSON lines", "text"
)
IMPORT_FLAGS = (
    Flag("--kind", "kind", "deepspeed, flax, gguf, hf, megatron, nanogpt or onnx (default: detected)", "text"),
    Flag("--config", "config", "the model's Hugging Face config.json, if WHAT has none", "text"),
    Flag("--tokenizer", "tokenizer", "the folder or file of its tokenizer, if WHAT has none", "text"),
    Flag("--vocab", "vocab", "the size of the vocabulary without padding rows", "number"),
    Flag("--heads", "heads", "the number of attention heads, if WHAT does not record it", "number"),
    Flag("--activation", "activation", "gelu_new, gelu, relu, silu or tanh, if WHAT does not record it", "text"),
)

COMMANDS = {
    "new": Command(
        "textmill.commands.new:new",
        "inspect your text and this machine, write a config to start from",
        arguments=("DIR",),
        flags=(TEXT, MINUTES, FAMILY),
        opens=None,
        takes_settings=False,
    ),
    "from": Command(
        "textmill.commands.translate:translate",
        "translate a command, shell script or DeepSpeed JSON of another tool into a config",
        arguments=("COMMAND",),
        flags=(TO, GPUS),
        opens=None,
        takes_settings=False,
        result_is_output=True,
    ),
    "run": Command(
        "textmill.commands.run:run",
        "run all stages, skipping those that are done",
        sections=ALL,
        settings=(
            "folder corpus.sources corpus.text_key tokenizer.vocab model.family model.size train.preset "
            "train.length train.batch train.steps train.learning_rate engine.device"
        ),
        flags=(REBUILD,),
        timed=True,
    ),
    "prepare": Command(
        "textmill.commands.prepare:prepare",
        "turn text into clean documents",
        sections=("corpus", "runner"),
        settings=(
            "corpus.sources corpus.text_key corpus.documents corpus.preset corpus.rules corpus.min_chars "
            "corpus.languages corpus.dedup corpus.split corpus.split_by corpus.source_splits "
            "runner.kind runner.workers"
        ),
        flags=(FORCE,),
    ),
    "fit-tokenizer": Command(
        "textmill.tokens.vocabulary.fitting:fit_tokenizer",
        "fit a vocabulary to the corpus",
        sections=("tokenizer", "runner"),
        settings=(
            "tokenizer.kind tokenizer.vocab tokenizer.use tokenizer.fit_on tokenizer.fit_sample "
            "tokenizer.special_tokens tokenizer.chat tokenizer.lowercase runner.workers"
        ),
        flags=(FORCE,),
    ),
    "tokenize": Command(
        "textmill.tokens.tokenize:tokenize",
        "turn documents into token ids",
        sections=("tokens", "tokenizer", "runner"),
        settings=(
            "tokens.use tokens.use_valid tokens.use_test tokens.append_end tokens.level tokens.kind "
            "tokens.features.max_length "
            "tokens.features.stride tokens.index_format tokenizer.vocab tokenizer.use runner.workers"
        ),
        flags=(FORCE,),
    ),
    "tune": Command(
        "textmill.commands.tune:tune",
        "try settings around a project's own in short trials, write the best ones",
        sections=("model", "train", "engine"),
        settings=(
            "model.size model.shape.width train.length train.batch train.minutes train.learning_rate "
            "train.weight_decay engine.device"
        ),
        flags=(TUNE_MINUTES, JSON, TUNE_AGAIN),
    ),
    "plan": Command(
        "textmill.commands.plan:plan",
        "estimate memory, speed, disk and cost of a run, on this machine or another",
        sections=("plan", "model", "train", "engine"),
        settings=(
            "plan.gpu plan.devices plan.per_node plan.network_gbit_s plan.memory_gb plan.tokens plan.price "
            "model.size train.length train.batch train.steps engine.micro_batch engine.mesh.shard"
        ),
        flags=(BEST, JSON),
        result_is_output=True,
    ),
    "merge": Command(
        "textmill.tokens.merge:merge",
        "join token stores A, B ... into OUT",
        arguments=("OUT", "A B ..."),
        flags=(FORCE,),
        opens=None,
        takes_settings=False,
    ),
    "train": Command(
        "textmill.training.generations:train",
        "train a model, or resume training",
        sections=("model", "train", "engine", "sample", "track"),
        settings=(
            "model.family model.size model.init_from train.preset train.layout train.length train.batch "
            "train.steps train.learning_rate train.optimizer train.evaluate_every engine.micro_batch "
            "engine.device"
        ),
        flags=(RESTART, RESUME_STEP, CHANGE),
        timed=True,
    ),
    "verify": Command(
        "textmill.verification:verify",
        "check that a parallel config gives the numbers of one process, or the model family in a file",
        sections=("engine",),
        settings=(
            "engine.kind engine.mesh.replicate engine.mesh.shard engine.mesh.tensor engine.zero engine.precision "
            "engine.offload_optimizer engine.deepspeed_config engine.timeout"
        ),
        opens=None,
        result_is_output=True,
    ),
    "evaluate": Command(
        "textmill.commands.evaluate:evaluate",
        "measure a model",
        sections=("evaluate",),
        keys=(
            f"train.length train.layout tokens.use corpus.documents corpus.encoding {RUN_KEYS} "
            "engine.mesh.tensor engine.timeout"
        ),
        settings=(
            "evaluate.tasks evaluate.shots evaluate.text evaluate.split evaluate.window evaluate.stride "
            "evaluate.sample evaluate.batch evaluate.baselines engine.device engine.precision"
        ),
        flags=(LIST_TASKS, STEP, JSON),
        opens="model",
        result_is_output=True,
    ),
    "generate": Command(
        "textmill.generation:generate",
        "continue a text",
        sections=("sample",),
        keys=RUN_KEYS,
        settings=(
            "sample.prompt sample.prompts_file sample.count sample.max_tokens sample.temperature sample.top_k "
            "sample.top_p sample.repetition_penalty sample.stop sample.seed engine.device"
        ),
        flags=(STEP, JSON),
        opens="model",
        result_is_output=True,
    ),
    "fill": Command(
        "textmill.generation.fill:fill",
        "fill in the masked tokens of a text with a model such as BERT",
        arguments=("WHERE", "[TEXT ...]"),
        keys=f"sample.prompt sample.prompts_file sample.top_k {RUN_KEYS}",
        settings="sample.prompt sample.prompts_file sample.top_k engine.device engine.precision",
        flags=(STEP, JSON),
        opens="model",
        result_is_output=True,
    ),
    "embed": Command(
        "textmill.generation.embed:embed",
        "compute an embedding (a vector) of each text, or of each line of a file",
        arguments=("WHERE", "[TEXT ...]"),
        sections=("embed",),
        keys=RUN_KEYS,
        settings="embed.pooling embed.normalize embed.length engine.device engine.precision",
        flags=(STEP, OUT_TEXTS),
        opens="model",
        result_is_output=True,
    ),
    "chat": Command(
        "textmill.generation.chat:chat",
        "chat with a model that was finetuned for it",
        sections=("sample",),
        keys=RUN_KEYS,
        settings=(
            "sample.max_tokens sample.temperature sample.top_k sample.top_p sample.min_p "
            "sample.repetition_penalty sample.stop sample.seed engine.device engine.precision"
        ),
        flags=(STEP,),
        opens="model",
        result_is_output=True,
    ),
    "serve": Command(
        "textmill.server.lifecycle:serve",
        "serve a model, or several, over HTTP, with a page to try it",
        arguments=("WHERE", "[WHERE ...]"),
        sections=("serve", "sample", "embed"),
        keys=RUN_KEYS,
        settings=(
            "serve.host serve.port serve.key_file serve.model_name serve.slots serve.queue serve.max_tokens "
            "serve.request_timeout sample.temperature engine.device"
        ),
        flags=(STEP, FOLLOW, PREFERENCES),
        opens="model",
    ),
    "export": Command(
        "textmill.conversion:export",
        "write a model for other tools (transformers, llama.cpp, ONNX ...)",
        sections=("export",),
        settings="export.folder export.kind export.precision export.name export.license",
        flags=(FORCE, STEP),
        opens="model",
    ),
    "import": Command(
        "textmill.conversion.importing:import_model",
        "turn a model file of another tool into a model folder",
        arguments=("WHAT", "OUT"),
        flags=(FORCE, *IMPORT_FLAGS),
        opens=None,
        takes_settings=False,
    ),
    "show": Command(
        "textmill.commands.show:show",
        "show what is in a folder: corpus, tokenizer, tokens, run or model",
        flags=(SEEN_STEP, DROPPED, COUNTS),
        opens=None,
        result_is_output=True,
    ),
    "watch": Command(
        "textmill.commands.report:watch",
        "show the curves of a run in the terminal, while it trains or later",
        arguments=("RUN",),
        opens=None,
        takes_settings=False,
        result_is_output=True,
    ),
    "report": Command(
        "textmill.commands.report:report",
        "write an HTML report of one run, or of several side by side",
        arguments=("RUN ...",),
        flags=(OUT, SVG),
        opens=None,
        takes_settings=False,
    ),
    "replay": Command(
        "textmill.commands.replay:replay",
        "repeat a run from its record, and say bit by bit whether it is the same",
        arguments=("RUN",),
        flags=(COPY,),
        opens=None,
    ),
    "compare": Command(
        "textmill.commands.report:compare",
        "compare runs: results, settings that differ, and whether it is more than chance",
        arguments=("RUN ...",),
        flags=(JSON,),
        opens=None,
        takes_settings=False,
        result_is_output=True,
    ),
    "runs": Command(
        "textmill.commands.report:runs",
        "list all runs below a folder with their best figures",
        arguments=("FOLDER",),
        opens=None,
        takes_settings=False,
        result_is_output=True,
    ),
    "doctor": Command(
        "textmill.commands.doctor:doctor",
        "run small jobs to find what is wrong with this machine or project",
        arguments=("[WHERE]",),
        flags=(JSON,),
        opens=None,
        result_is_output=True,
    ),
    "check": Command(
        "textmill.commands.check:check",
        "compare every file of a folder with its checksum",
        opens=None,
        result_is_output=True,
    ),
    "recipes": Command(
        "textmill.commands.recipes:recipes",
        "list the recipes that come with textmill",
        arguments=(),
        opens=None,
        takes_settings=False,
        result_is_output=True,
    ),
    "completion": Command(
        "textmill.commands.completion:completion",
        "print a script that completes textmill's commands in bash or zsh",
        arguments=("SHELL",),
        opens=None,
        takes_settings=False,
        result_is_output=True,
    ),
}
