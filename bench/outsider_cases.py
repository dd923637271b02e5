"""Random valid configs, mutated input files and mutated command lines for bench/outsiders.py."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
import zipfile
from collections.abc import Callable
from typing import Any

SENTENCES = [
    f"The mill number {number * 7919 % 1000} stands by the river, and wheel {number % 17} turns. 물레방아 {number}."
    for number in range(120)
]
STRANGE_VALUES = [
    "",
    " ",
    "0",
    "-1",
    "1e9",
    "1e400",
    "nan",
    "inf",
    "true",
    "null",
    "[]",
    "{}",
    "[1,2",
    "{a: 1",
    "x",
    "'",
    '"',
    "é물",
    "\udcff",
    "a" * 5000,
    "1,2,3",
    "/dev/null",
    "/proc/nope/x",
    "..",
    "~",
    "$HOME",
    "*",
    "!!python/object:os.system x",
    "&a [*a]",
    "0x10",
    "1_000",
    "auto",
    "2.5",
    "\n",
    "\t",
    "999999999999",
    "%s",
    "latest",
    "1",
    "2",
    "3",
    "0.5",
    "100",
    "false",
]
STRANGE_ARGUMENTS = [
    "",
    "-",
    "--",
    "--force",
    "--step",
    "--step=best",
    "--step=-1",
    "--json",
    "--help",
    "-h",
    "--change",
    "--minutes=x",
    "--dropped",
    "train.stepz=3",
    "=",
    "train=",
    ".=1",
    "train.=1",
    "train..steps=1",
    "nothing",
    "sample.prompt=é",
    "corpus.sources=nowhere.txt",
    "engine.kind=jaxx",
    "model.family=./none.py",
    "train.batch=1000000000",
    "model.shape.width=7",
    "train.schedule=sinus",
    "tokenizer.use=nowhere",
    "model.init_from=nowhere",
]


def random_config(dice: random.Random) -> dict[str, Any]:
    """Return random valid settings of a short training run."""
    length = dice.choice([8, 16, 31])
    batch = dice.choice([1, 2, 4, 6])
    width, heads = dice.choice([(8, 1), (8, 2), (12, 3), (16, 4)])
    train: dict[str, Any] = {
        "length": length,
        "batch": batch,
        "log_every": dice.choice([1, 2, 50]),
        "seed": dice.randrange(2**40),
        "learning_rate": dice.choice([1e-4, 3e-3, 2e-2]),
        "warmup": dice.choice([0, 1, 0.3]),
        "schedule": dice.choice(["cosine", "linear", "constant", "stable", "inverse_sqrt"]),
        "optimizer": dice.choice(["adamw", "adamw", "muon"]),
        "clip": dice.choice([0.0, 1.0]),
        "save_every": dice.choice([1, 2, 500, "epoch"]),
        "evaluate_every": dice.choice([2, 3, 500, "epoch"]),
        "evaluate_batches": dice.choice([1, 2]),
        "weight_decay": dice.choice([0.0, 0.1]),
    }
    train |= dice.choice([{"steps": dice.randint(2, 6)}, {"samples": 5 * batch}, {"tokens": 4 * batch * length}])
    train |= dice.choice([{}, {"layout": "padded"}, {"packed": {"isolate_documents": True}}])
    extras: list[dict[str, Any]] = [
        {"ema_window": 20.0},
        {"freeze": ["wpe"]},
        {"layer_decay": 0.8},
        {"label_smoothing": 0.1},
        {"loss": "sample_mean"},
        {"checkpoints": {"keep": 1}},
        {"sample_prompts": ["The mill"]},
    ]
    for extra in dice.sample(extras, dice.randint(0, 3)):
        train |= extra
    if batch > 2 and dice.random() < 0.2:
        train["batch_rampup"] = [2, 2, 4]
    shape = {"layers": dice.randint(1, 2), "heads": heads, "width": width, "positions": 32}
    shape["dropout"] = dice.choice([0.0, 0.1])
    sample: dict[str, Any] = {"max_tokens": dice.randint(1, 40), "temperature": dice.choice([0.0, 0.7, 2.0])}
    sample |= dice.choice([{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"beams": 2}, {"repetition_penalty": 1.3}])
    engine = {
        "device": "cpu",
        "precision": dice.choice(["fp32", "bf16"]),
        "activation_checkpointing": dice.choice([0, 1]),
    }
    return {"train": train, "model": {"shape": shape}, "sample": sample, "engine": engine}


def input_files() -> dict[str, bytes]:
    """Return one intact file of every kind that `corpus.sources` reads, by name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"text": text, "id": number} for number, text in enumerate(SENTENCES)]
    table, parquet, arrow = pa.Table.from_pylist(rows), io.BytesIO(), io.BytesIO()
    pq.write_table(table, parquet, row_group_size=40)
    with pa.ipc.new_stream(arrow, table.schema) as writer:
        writer.write_table(table)
    text = "\n\n".join(SENTENCES).encode()
    jsonl = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    comma, tab = (f"id{d}text\n" + "".join(f'{n}{d}"{s}"\n' for n, s in enumerate(SENTENCES)) for d in (",", "\t"))
    pages = "".join(
        f"<page><title>T{n}</title><ns>0</ns><id>{n}</id><revision><id>1</id><text>'''{s}''' {{{{x|y}}}} [[a|b]]</text>"
        "</revision></page>\n"
        for n, s in enumerate(SENTENCES)
    )
    wiki = "".join(f'<doc id="{n}" url="u" title="T">\n{s}\n</doc>\n' for n, s in enumerate(SENTENCES))
    files = {
        "a.txt": text,
        "utf16.txt": text.decode().encode("utf-16"),
        "cp949.txt": text.decode().encode("cp949"),
        "a.md": text,
        "a.jsonl": jsonl,
        "a.json": json.dumps(rows).encode(),
        "a.csv": comma.encode(),
        "a.tsv": tab.encode(),
        "a.parquet": parquet.getvalue(),
        "a.arrow": arrow.getvalue(),
        "a.xml": f"<mediawiki>{pages}</mediawiki>".encode(),
        "wiki_00": wiki.encode(),
    }
    packed: list[tuple[str, Callable[[bytes], bytes]]] = [
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
    ]
    for end, compress in packed:
        files |= {f"{name}{end}": compress(files[name]) for name in ("a.txt", "a.jsonl", "a.csv", "a.xml", "wiki_00")}
    try:
        import zstandard

        files["a.jsonl.zst"] = zstandard.ZstdCompressor().compress(jsonl)
    except ImportError:
        pass
    return files | archives({name: files[name] for name in ("a.txt", "a.jsonl", "a.csv.gz")})


def archives(members: dict[str, bytes]) -> dict[str, bytes]:
    """Return a zip, a tar and a compressed tar archive of these files."""
    zipped, tars = io.BytesIO(), {"": io.BytesIO(), "gz": io.BytesIO()}
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"inner/{name}", data)
    for kind, stream in tars.items():
        with tarfile.open(fileobj=stream, mode="w:gz" if kind else "w") as tar:
            for name, data in members.items():
                info = tarfile.TarInfo(f"inner/{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return {"a.zip": zipped.getvalue(), "a.tar": tars[""].getvalue(), "a.tar.gz": tars["gz"].getvalue()}


def mutate_bytes(data: bytes, dice: random.Random) -> bytes:
    """Return the bytes with one to four random faults."""
    for _ in range(dice.choice([1, 1, 2, 4])):
        place, other = (dice.randrange(len(data) + 1) for _ in range(2))
        low, high = min(place, other), max(place, other)
        flipped = bytearray(data)
        for _ in range(dice.choice([1, 1, 8, 64])):
            if flipped:
                flipped[dice.randrange(len(flipped))] ^= 1 << dice.randrange(8)
        data = dice.choice(
            [
                bytes(flipped),
                bytes(flipped),
                data[:place],
                data[place:],
                data[:low] + data[high:],
                data[:high] + data[low:],
                data[:place] + dice.randbytes(dice.choice([1, 3, 500])) + data[place:],
                data + dice.randbytes(40),
                data[:low] + bytes(min(200, high - low)) + data[high:],
                data[:place] + b'"' + data[place:],
                data[:place] + b"\xff\xfe" + data[place:],
                data.replace(b"\n", b"\r", 30),
                b"",
                data * 2,
                data[:place] + b"{" * 3000 + data[place:],
                data[:place] + b"\n" + data[place:],
            ]
        )
    return data


PREPARE_SETTINGS = [
    "corpus.text_key=id",
    "corpus.text_key=id+text",
    "corpus.documents=line",
    "corpus.documents=block",
    "corpus.documents=file",
    "corpus.preset=web",
    "corpus.preset=books",
    "corpus.dedup=near",
    "corpus.chat=auto",
    "corpus.encoding=utf-8",
    "corpus.encoding=cp949",
    "corpus.sentences=split",
    "corpus.keep_dropped=true",
    *["corpus.max_unreadable=1"] * 10,
    "corpus.delimiter=tab",
    "corpus.header=false",
    "corpus.quoting=none",
]
COMMAND_LINES = [
    ["prepare", "small.yaml", "corpus.min_chars=5"],
    ["fit-tokenizer", "small.yaml", "tokenizer.vocab=300"],
    ["tokenize", "small.yaml"],
    ["train", "small.yaml", "train.steps=2", "train.batch=2"],
    ["train", "run", "train.steps=4", "--step", "2"],
    ["train", "run", "--change", "train.batch=3", "train.steps=4"],
    ["run", "small.yaml", "train.steps=2"],
    ["evaluate", "run", "evaluate.batch=4", "--json"],
    ["generate", "run", "sample.prompt=The", "sample.max_tokens=5"],
    ["generate", "run/step-0000002", "--json"],
    ["chat", "run", "sample.max_tokens=3"],
    ["export", "run", "export.folder=out"],
    ["show", "small.yaml"],
    ["show", "run", "--step", "1"],
    ["show", "corpus", "--dropped", "all"],
    ["check", "run"],
    ["check", "tokens"],
    ["recipes"],
    ["new", "mine", "--text", "text.txt", "--minutes", "1"],
    ["merge", "joined", "tokens", "tokens"],
]


def mutate_line(line: list[str], dice: random.Random) -> list[str]:
    """Return a command line with one to three mistakes."""
    line = list(line)
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        place = dice.randrange(len(line)) if line else 0
        action = dice.choice(["drop", "double", "typo", "value", "add", "swap", *["setting"] * 4])
        if action == "add" or not line:
            line.insert(place, dice.choice(STRANGE_ARGUMENTS))
        elif action == "drop":
            del line[place]
        elif action == "double":
            line.insert(place, line[place])
        elif action == "typo":
            at = dice.randrange(len(line[place]) + 1)
            line[place] = line[place][:at] + dice.choice("abz=.-_ 0\\é") + line[place][at + dice.randint(0, 1) :]
        elif action == "value":
            key, sign, _ = line[place].partition("=")
            line[place] = f"{key}={dice.choice(STRANGE_VALUES)}" if sign else dice.choice(STRANGE_VALUES)
        elif action == "setting":
            line.append(f"{dice.choice(known_keys())}={dice.choice(STRANGE_VALUES)}")
        else:
            other = dice.randrange(len(line))
            line[place], line[other] = line[other], line[place]
    return [argument.replace("\0", "") for argument in line]


def known_keys() -> list[str]:
    """Return every key of the config, except those that wait for a network or start other processes."""
    from textmill.config.keys import all_fields

    left_out = ("serve.", "runner.", "corpus.mongo", "folder", "corpus.folder", "engine.kind")
    return [key for key, _ in all_fields() if not key.startswith(left_out)]
