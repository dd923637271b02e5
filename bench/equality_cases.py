"""The cases of bench/equality.py: command lines, and the files and folders to read after them.

All settings are in the tables below, as on a command line. Paths are relative to the folder of the whole session: data
in data/NAME, runs in runs/NAME, all else in out/NAME.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ENGINES = ("torch", "deepspeed", "jax")
SMALL = "model.shape.layers=2 model.shape.width=32 model.shape.positions=64"
MODELS = {
    "gpt2": f"model.family=gpt2 model.size=nano {SMALL} model.shape.heads=2",
    "llama": f"model.family=llama model.size=nano {SMALL} model.shape.heads=4 model.shape.kv_heads=2",
    "qwen3": f"model.family=llama model.size=nano {SMALL} model.shape.heads=4 model.shape.kv_heads=2 "
    "model.shape.head_width=16 model.shape.qk_norm=true",
    "qwen2": f"model.family=llama model.size=nano {SMALL} model.shape.heads=4 model.shape.kv_heads=1 "
    "model.shape.qkv_bias=true model.shape.untied=true",
    "record": f"model.family=llama model.size=nano {SMALL} model.shape.heads=2 "
    "model.shape.activation=relu2 model.shape.qk_norm=true",
    "bert": f"model.family=bert model.size=tiny {SMALL} model.shape.heads=2",
    "megatron-bert": f"model.family=bert model.size=tiny {SMALL} model.shape.heads=2 model.shape.norm=pre "
    "model.shape.deep_init=true",
}
PREPARE = "runner.workers=1"
DATA = {
    "text": "corpus.sources=[texts/plain.txt] corpus.section_chars=500 corpus.split=90,5,5 tokenizer.vocab=320",
    "features": "corpus.sources=[texts/plain.txt] corpus.section_chars=500 tokenizer.use=data/text/tokenizer "
    "tokens.kind=features tokens.features.max_length=32 tokens.features.min_length=8 tokens.features.stride=24",
    "chat": "corpus.sources=[texts/messages.jsonl] corpus.chat=messages tokenizer.vocab=320 tokenizer.chat=default",
    "pairs": "corpus.sources=[texts/pairs.csv] corpus.chat=pairs tokenizer.vocab=320 tokenizer.chat=dsgpt2",
    "sentences": "corpus.sources=[texts/plain.txt] corpus.section_chars=500 corpus.sentences=split "
    "tokens.level=sentence tokenizer.kind=wordpiece tokenizer.vocab=320 tokenizer.lowercase=true",
    "tfrecord": "corpus.sources=[texts/short.txt] corpus.section_chars=500 corpus.sentences=split "
    "tokens.level=sentence tokenizer.use=data/sentences/tokenizer tokens.kind=tfrecord train.layout=masked "
    "train.length=32 model.family=bert model.size=tiny",
    "unigram": "corpus.sources=[texts/short.txt] corpus.documents=block tokenizer.kind=unigram tokenizer.vocab=400 "
    "tokenizer.split_digits=true tokens.append_end=false tokens.prepend_begin=true tokens.index_format=lazy",
    "formats": "corpus.sources=[texts/formats] corpus.keep_fields=[url] corpus.split=80,10,10 tokenizer.vocab=300 "
    "runner.workers=2",
    "nested": "corpus.sources=[texts/nested.json] corpus.text_key=document[].paragraph[].form tokenizer.vocab=300",
    "cleaned": "corpus.sources=[texts/dirty.jsonl] corpus.rules=[repair,markers,html,newlines,controls,unicode,"
    "compatibility,invisibles,punctuation,width,emails,phones,url_lines,boilerplate,spaces] corpus.min_chars=20 "
    "corpus.max_digits=0.5 corpus.max_symbols=0.5 corpus.max_repeated_lines=0.5 corpus.max_repeated_words=0.5 "
    "corpus.keep_dropped=true corpus.dedup=near corpus.dedup_threshold=0.7 "
    "corpus.decontaminate=[choices:texts/choices.jsonl] tokenizer.vocab=300",
    "web": "corpus.sources=[texts/dirty.jsonl] corpus.preset=web corpus.dedup_shingles=words tokenizer.vocab=300",
    "classes": "corpus.labels=sequence-classification corpus.sources=[texts/classes.csv] corpus.split=80,20,0 "
    "train.layout=labelled train.length=32 "
    "tokenizer.kind=wordpiece tokenizer.vocab=300",
    "words": "corpus.labels=token-classification corpus.sources=[texts/words.conll] corpus.split=80,20,0 "
    "train.layout=labelled train.length=32 "
    "tokenizer.kind=wordpiece tokenizer.vocab=300",
    "answers": "corpus.labels=question-answering corpus.sources=[texts/answers.json] corpus.split=80,20,0 "
    "train.layout=labelled train.length=32 "
    "tokenizer.kind=wordpiece tokenizer.vocab=300 tokens.overlap=8",
}
"""Of `prepare` and `tokenize`, which also fits the tokenizer."""
FIXED = "corpus.sources=[texts/strings.jsonl] corpus.rules=[] corpus.dedup=none corpus.split=1,0,0"
"""Fixed strings, encoded by each tokenizer."""
TRAIN = (
    "train.length=32 train.batch=8 train.steps=20 train.decay_steps=20 train.warmup=4 train.learning_rate=5e-3 "
    "train.log_every=1 train.save_every=10 train.evaluate_every=10 train.evaluate_batches=2 "
    "engine.device=cpu engine.precision=fp32 engine.micro_batch=8"
)
LAYOUTS = {
    "packed": ("text", "train.layout=packed"),
    "isolated": ("text", "train.layout=packed train.packed.isolate_documents=true"),
    "padded": ("text", "train.layout=padded"),
    "features": ("features", "train.layout=features"),
    "chat": ("chat", "train.layout=chat"),
    "masked": ("sentences", "train.layout=masked"),
    "masked-order": ("sentences", "train.layout=masked train.masked.pairs=order"),
    "masked-none": ("sentences", "train.layout=masked train.masked.pairs=none train.masked.whole_words=false"),
    "classes": ("classes", "train.layout=labelled"),
    "words": ("words", "train.layout=labelled"),
    "answers": ("answers", "train.layout=labelled"),
}
"""The data and the settings of each batch layout."""
LABELLED = ("classes", "words", "answers")
GRID = {
    ("gpt2", "torch"): "packed isolated padded features chat",
    ("llama", "torch"): "packed isolated padded features chat",
    ("qwen3", "torch"): "packed isolated",
    ("qwen2", "torch"): "packed",
    ("record", "torch"): "packed isolated",
    ("bert", "torch"): "masked masked-order masked-none classes words answers",
    ("megatron-bert", "torch"): "masked",
    ("gpt2", "deepspeed"): "packed isolated padded features chat",
    ("qwen3", "deepspeed"): "isolated",
    ("bert", "deepspeed"): "masked classes answers",
    ("gpt2", "jax"): "packed isolated padded features chat",
    ("llama", "jax"): "packed",
    ("qwen3", "jax"): "isolated",
    ("bert", "jax"): "masked masked-none",
}
"""The batch layouts of a family and engine. The engines get the same batches, so one with all layouts is enough."""
TEACHER = "train.distil.teachers=[runs/{family}-torch-{layout}]"
OPTIONS = {
    "dropout": "model.shape.dropout=0.1",
    "muon": "train.optimizer=muon train.muon.adamw_rate_factor=0.3",
    "accumulate": "engine.micro_batch=2 model.shape.dropout=0.1",
    "recompute": "engine.activation_checkpointing=1 model.shape.dropout=0.1",
    "losses": "train.label_smoothing=0.1 train.loss=sample_mean",
    "average": "train.ema_window=10",
    "rates": "train.layer_decay=0.8 train.embedding_rate_factor=0.5 train.freeze=[wpe] "
    "train.clip=0.5 train.schedule=stable train.warmup_shape=log",
    "rampup": "engine.micro_batch=2 train.batch_rampup=4,2,40 train.schedule=inverse_sqrt",
    "long": "train.steps=200 train.decay_steps=200 train.save_every=200 train.log_every=20 train.optimizer=muon "
    "train.learning_rate=2e-2",
    "init": "model.init_from=runs/{family}-torch-{layout} model.init_layers=[1,0,1]",
    "lora": "model.init_from=runs/{family}-torch-{layout} model.lora.rank=4 model.lora.dropout=0.1",
    "distil": f"{TEACHER} train.distil.temperature=1.5",
    "distil-states": f"{TEACHER} train.distil.mse=0.1 train.distil.cosine=0.2",
    "distil-hidden": f"{TEACHER} train.distil.hidden=0.5",
    "resume": "",
}
"""Settings that are added to a run of the grid; {family} and {layout} are those of that run. `resume` stops at
RESUMED steps and goes on."""
RESUMED = 10
FROM_WEIGHTS = ("init", "lora")
ADDED = {
    ("gpt2", "torch", "packed"): " ".join(OPTIONS),
    ("llama", "torch", "packed"): "long dropout recompute lora distil",
    ("bert", "torch", "masked"): "dropout accumulate lora distil",
    ("gpt2", "torch", "chat"): "long",
    ("gpt2", "deepspeed", "packed"): "dropout accumulate losses lora distil resume",
    ("gpt2", "jax", "packed"): "dropout muon accumulate recompute losses lora resume",
    ("llama", "jax", "packed"): "lora",
    ("bert", "jax", "masked"): "lora",
}
"""The options of a family, engine and layout."""
MESHES = {
    "data": "engine.mesh.replicate=2 engine.micro_batch=2 model.shape.dropout=0.1",
    "fsdp": "engine.mesh.shard=2 engine.micro_batch=4 model.shape.dropout=0.1",
    "tensor": "engine.mesh.tensor=2 engine.micro_batch=4 model.shape.dropout=0.1",
    "zero1": "engine.zero=1 engine.micro_batch=2 model.shape.dropout=0.1",
    "zero3": "engine.zero=3 engine.micro_batch=4 model.shape.dropout=0.1",
}
"""Of two processes, or of two devices in JAX."""
PARALLEL = {
    ("gpt2", "torch", "packed"): "data fsdp tensor",
    ("qwen3", "torch", "isolated"): "fsdp tensor",
    ("bert", "torch", "masked"): "tensor",
    ("gpt2", "deepspeed", "packed"): "zero1 zero3",
    ("gpt2", "jax", "packed"): "fsdp",
    ("llama", "jax", "packed"): "tensor",
}
GENERATE = {
    "greedy": "sample.temperature=0 sample.max_tokens=80",
    "sampled": "sample.temperature=0.9 sample.top_k=50 sample.top_p=0.95 sample.max_tokens=40 sample.count=3",
    "penalties": "sample.temperature=0.8 sample.min_p=0.01 sample.repetition_penalty=1.2 "
    "sample.presence_penalty=0.2 sample.frequency_penalty=0.1 sample.max_tokens=40 sample.seed=7",
    "beams": "sample.beams=3 sample.max_tokens=20",
}
EVALUATE = {
    "perplexity": "evaluate.tasks=[perplexity] evaluate.stride=16",
    "sampled": "evaluate.tasks=[perplexity] evaluate.sample=20 evaluate.split=test",
    "text": "evaluate.tasks=[perplexity] evaluate.text=[texts/wiki.txt]",
    "choices": "evaluate.tasks=[lambada:texts/lambada.jsonl,choices:texts/choices.jsonl,pairs:texts/good_bad.jsonl]",
    "wikitext": "evaluate.tasks=[wikitext:texts/wiki.txt]",
    "wikitext-megatron": "evaluate.tasks=[wikitext:texts/wiki.txt] evaluate.wikitext=megatron",
    "wikitext-transformers": "evaluate.tasks=[wikitext:texts/wiki.txt] evaluate.wikitext=transformers",
}
EVALUATE_BERT = "evaluate.tasks=[pseudo_perplexity,pairs:texts/good_bad.jsonl] evaluate.sample=20"
EXPORT = {"gpt2": ("hf", "gguf", "onnx"), "qwen3": ("hf", "gguf"), "llama": ("hf", "onnx"), "bert": ("hf",)}
EXPORT_OPTIONS = {"gguf": "export.precision=q8_0"}
IMPORTED = {"gguf": "model.gguf", "onnx": ""}
"""The file or folder of an export that `import` reads."""


@dataclass(frozen=True)
class Case:
    """Commands that run one after the other, and what is read when they are done."""

    name: str
    commands: list[list[str]]
    reads: list[str] = field(default_factory=list)
    needs: tuple[str, ...] = ()
    engine: str = "torch"
    ranks: int = 1
    stdin: str = ""

    @property
    def prints(self) -> bool:
        """Whether what the commands print is a result."""
        return bool(self.stdin) or "--json" in self.commands[-1]


def data_cases() -> list[Case]:
    """Documents, tokenizers and token ids."""
    cases = []
    for name, settings in DATA.items():
        words = ["empty.yaml", *merge_settings(f"folder=data/{name}", PREPARE, settings)]
        needs = tuple(f"data-{other}" for other in DATA if f"data/{other}/" in settings)
        cases.append(Case(f"data-{name}", [["prepare", *words], ["tokenize", *words]], [f"data/{name}"], needs))
    for name in ("text", "sentences", "unigram", "chat"):
        folders = f"folder=out/ids-{name} tokenizer.use=data/{name}/tokenizer"
        words = ["empty.yaml", *merge_settings(folders, PREPARE, FIXED)]
        commands = [["prepare", *words], ["tokenize", *words]]
        cases.append(Case(f"ids-{name}", commands, [f"out/ids-{name}/tokens"], (f"data-{name}",)))
    merge = ["merge", "out/merged", "data/text/tokens", "out/ids-text/tokens"]
    return [*cases, Case("merged", [merge], ["out/merged"], ("data-text", "ids-text"))]


def merge_settings(*texts: str) -> list[str]:
    """The settings of all texts; a later one replaces an earlier one of the same key."""
    words = [word for text in texts for word in text.split()]
    return list({word.partition("=")[0]: word for word in words}.values())


def train_case(family: str, engine: str, layout: str, added: str = "", settings: str = "", ranks: int = 1) -> Case:
    """A run of the grid, or one with added settings."""
    data, batches = LAYOUTS[layout]
    base = f"{family}-torch-{layout}"
    name = "-".join(filter(None, (family, engine, layout, added)))
    model = MODELS[family] if added not in FROM_WEIGHTS else f"model.family={family}"
    added_settings = settings.format(family=family, layout=layout)
    folders = f"folder=data/{data} train.folder=runs/{name}"
    words = merge_settings(folders, DATA[data], model, TRAIN, batches, f"engine.kind={engine}", added_settings)
    command = ["train", "empty.yaml", *words]
    commands = (
        [["train", "empty.yaml", *merge_settings(*words, f"train.steps={RESUMED}")], command]
        if added == "resume"
        else [command]
    )
    needs = (f"data-{data}", *([base] if f"runs/{base}" in added_settings else []))
    return Case(name, commands, [f"runs/{name}"], needs, engine, ranks)


def train_cases() -> list[Case]:
    """All runs."""
    return [
        *(train_case(*row, layout) for row, layouts in GRID.items() for layout in layouts.split()),
        *(train_case(*row, name, OPTIONS[name]) for row, names in ADDED.items() for name in names.split()),
        *(train_case(*row, name, MESHES[name], ranks=2) for row, names in PARALLEL.items() for name in names.split()),
    ]


def use_cases() -> list[Case]:
    """Texts, embeddings, figures and exports of trained models."""
    cases = []
    for run in ("gpt2-torch-packed-long", "llama-torch-packed-long"):
        for name, settings in GENERATE.items():
            command = ["generate", f"runs/{run}", "sample.prompt=KING RICHARD:\nStand", *settings.split(), "--json"]
            cases.append(Case(f"generate-{run}-{name}", [command], needs=(run,)))
    run = "gpt2-torch-chat-long"
    chat = ["chat", f"runs/{run}", "sample.temperature=0", "sample.max_tokens=30"]
    cases.append(Case("chat", [chat], needs=(run,), stdin="Who is there?\nSpeak again.\n"))
    run = "bert-torch-masked"
    fill = ["fill", f"runs/{run}", "sample.prompt=the king [MASK] to the [MASK] .", "--json"]
    embed = ["embed", f"runs/{run}", "the king is dead", "long live the queen", "--out", "out/{}.npy"]
    cases.append(Case("fill", [fill], needs=(run,)))
    for name, setting in (("mean", "embed.normalize=true"), ("cls", "embed.pooling=cls")):
        words = [word.format(f"embed-{name}") for word in embed]
        cases.append(Case(f"embed-{name}", [[*words, setting]], [f"out/embed-{name}.npy"], (run,)))
    cases.append(Case("evaluate-bert", [["evaluate", f"runs/{run}", *EVALUATE_BERT.split(), "--json"]], needs=(run,)))
    for run in ("gpt2-torch-packed-long", "llama-torch-packed-long"):
        for name, settings in EVALUATE.items():
            command = ["evaluate", f"runs/{run}", *settings.split(), "--json"]
            cases.append(Case(f"evaluate-{run}-{name}", [command], needs=(run,)))
    for layout in ("chat", *LABELLED):
        run = f"{'gpt2' if layout == 'chat' else 'bert'}-torch-{layout}"
        command = ["evaluate", f"runs/{run}", "--json"]
        written = [f"out/predicted-{layout}.json"] if layout in LABELLED else []
        command += [f"evaluate.predictions={path}" for path in written]
        cases.append(Case(f"evaluate-{run}", [command], written, (run,)))
    for family, kinds in EXPORT.items():
        cases += [export_case(family, kind) for kind in kinds]
    return cases


def export_case(family: str, kind: str) -> Case:
    """An export, and the import of what it wrote."""
    run = f"{family}-torch-{'masked' if family == 'bert' else 'packed'}"
    name = f"export-{family}-{kind}"
    settings = f"export.kind={kind} export.folder=out/{name} export.name=model {EXPORT_OPTIONS.get(kind, '')}"
    commands = [["export", f"runs/{run}", *settings.split()]]
    if kind in IMPORTED:
        commands.append(["import", f"out/{name}/{IMPORTED[kind]}".rstrip("/"), f"out/{name}-imported"])
    reads = [f"out/{name}", *([f"out/{name}-imported"] if kind in IMPORTED else [])]
    return Case(name, commands, reads, (run,))


def all_cases() -> dict[str, Case]:
    """Every case by name; a case comes after those that it needs."""
    return {case.name: case for case in (*data_cases(), *train_cases(), *use_cases())}
