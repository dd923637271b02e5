"""Writes the pages that follow from the code: reference.md, commands/ and the tables of coming-from/.

Run it after a change of settings or commands: python docs/generate.py
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any, get_args

from textmill.commands.table import COMMANDS, Command
from textmill.config import RunConfig, Section
from textmill.config.keys import all_fields, describe_type, section_types, suggest_key
from textmill.config.other_names import RULES, is_reason, target_of

DOCS = Path(__file__).parent
TOPICS = {
    "new": "autopilot",
    "from": "from",
    "run": "index",
    "prepare": "corpus",
    "fit-tokenizer": "tokenizers",
    "tokenize": "tokens",
    "tune": "autopilot",
    "plan": "plan",
    "merge": "batches",
    "train": "train",
    "verify": "parallel",
    "evaluate": "evaluate",
    "generate": "generate",
    "chat": "generate",
    "serve": "serve",
    "export": "export",
    "import": "export",
    "show": "tokens",
    "watch": "report",
    "report": "report",
    "runs": "report",
    "doctor": "doctor",
    "check": "batches",
    "recipes": "index",
    "completion": "index",
    "fill": "bert",
    "embed": "bert",
}
"""The page that explains each command; other commands have none."""
EXAMPLES = 3
OPTIONS = {
    "nanogpt": """out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint init_from wandb_log
        wandb_project wandb_run_name dataset gradient_accumulation_steps batch_size block_size n_layer n_head n_embd
        dropout bias learning_rate max_iters weight_decay beta1 beta2 grad_clip decay_lr warmup_iters lr_decay_iters
        min_lr backend device dtype compile seed max_new_tokens temperature top_k num_samples start""",
    "nanochat": """run device_type depth aspect_ratio head_dim max_seq_len window_pattern num_iterations target_flops
        target_param_data_ratio device_batch_size total_batch_size embedding_lr unembedding_lr weight_decay matrix_lr
        adam_beta1 adam_beta2 warmup_ratio warmdown_ratio final_lr_frac resume_from_step eval_every eval_tokens
        core_metric_every core_metric_max_per_task sample_every save_every model_tag temperature top_k""",
    "hf-trainer": """output_dir overwrite_output_dir num_train_epochs max_steps per_device_train_batch_size
        per_device_eval_batch_size gradient_accumulation_steps learning_rate weight_decay adam_beta1 adam_beta2
        adam_epsilon max_grad_norm lr_scheduler_type warmup_ratio warmup_steps logging_steps logging_dir save_steps
        save_strategy save_total_limit eval_steps eval_strategy evaluation_strategy seed bf16 fp16 optim
        gradient_checkpointing torch_compile deepspeed fsdp report_to run_name resume_from_checkpoint
        load_best_model_at_end metric_for_best_model early_stopping_patience dataloader_num_workers push_to_hub
        label_smoothing_factor local_rank do_train do_eval model_name_or_path config_name tokenizer_name train_file
        validation_file block_size cache_dir preprocessing_num_workers tokenized_datasets grouped_tokenized_datasets
        text_column_names label_column_name max_seq_length doc_stride version_2_with_negative null_score_diff_threshold
        n_best_size max_answer_length do_predict test_file validation_split_percentage gpus master_addr master_port
        nnodes node_rank nproc_per_node""",
    "distillation": """adam_epsilon alpha_ce alpha_clm alpha_cos alpha_mlm alpha_mse alpha_pkd beta_pkd
        checkpoint_interval config_path data_file dump_checkpoint dump_file dump_path file_path force fp16
        freeze_pos_embs freeze_token_type_embds gpus gradient_accumulation_steps group_by_size initializer_range layers
        learning_rate local_rank log_interval master_addr master_port max_grad_norm mlm mlm_mask_prop mlm_smoothing
        n_epoch n_gpu nnodes node_rank nproc_per_node pkd ref_model_type restrict_ce_to_mask seed student_config
        student_pretrained_weights student_type teacher_layers teacher_name teacher_type temperature token_counts
        token_counts_dump tokenizer_name tokenizer_type vocab_size warmup_prop weight_decay word_keep word_mask
        word_rand""",
    "megatron-deepspeed": """append-eod batch-size bert-no-binary-head cache-dir checkpoint-activations
        checkpoint-num-layers clip-grad cloze-eval data-path dataset-impl datasets deep-init deepspeed deepspeed_config
        disable-pip-version-check distributed-backend eval-interval eval-iters fp16 fp32-embedding global-batch-size
        global-option cpp_ext cuda_ext hidden-size input jobid json-key lazy-loader load log-interval lr lr-decay-iters
        lr-decay-samples lr-decay-style lr-warmup-fraction mask-prob master_addr master_port max-position-embeddings
        max-preds-per-seq merge-file micro-batch-size min-lr model-parallel-size model-path nnodes no-cache node_rank
        nproc_per_node num-attention-heads num-layers num_gpus output-prefix presplit-sentences rampup-batch-size
        resume-dataloader save save-interval seed seq-length short-seq-prob split split-sentences
        tensor-model-parallel-size test-data text-key tokenizer-model-type tokenizer-name-or-path tokenizer-path
        tokenizer-type train-data train-iters train-samples use-tfrecords valid-data vocab vocab-file warmup
        webtext-eval weight-decay workers zero-stage""",
    "dsgpt2": """ckpt_dir ckpt_id ckpt_id_finetune ckpt_save_steps config_train deepscale deepscale_config deepspeed
        deepspeed_config deepspeed_mpi distributed-backend do_sample enable_bos enable_eos enable_padding
        eval_batch_size gpu_id gpus local_rank loss_type max_length min_length model_select network num_beams port
        repetition_penalty restart seed temperature top_k tr_ratio train_iters train_mode truncated_len use_cpu
        vocab_id_dir vocab_load_dir wandb_dir workspace workspace_finetune""",
    "jax-lm-training": """batch-size dataset-name dataset-split-type dataset-sub-name direct_num_workers
        direct_running_mode dtype eval-dataset-paths eval-frequency ignore-label learning-rate logging-frequency
        max-sequence-length min-sequence-length model-config-name model-save-dir num-epochs num-special-token-reserved
        output-path random-seed save-frequency stride tokenizer-model train-dataset-paths wandb-project wandb-run-dir
        wandb-username""",
}
"""The options of each tool, by the page that leads from it to textmill."""
TOOLS = {"megatron-deepspeed": "megatron", "hf-trainer": "hf", "jax-lm-training": "jax-lm", "distillation": "distil"}
"""Tools whose page has another name."""
NOT_NEEDED = "not needed: `textmill train --OPTION` says why"
BEGIN, END = "<!-- options: written by docs/generate.py -->", "<!-- end of options -->"


MOST_USED = {key for row in COMMANDS.values() for key in row.settings.split()}


def reference_page() -> str:
    """Every key with its default, values and meaning, by section."""
    lines = [
        "# All settings",
        "",
        "Every key of a config, for YAML (`train: {batch: 64}`), the command line (`train.batch=64`) and",
        "Python. `textmill COMMAND --help` prints those that matter most for a command, which stand first in",
        "each section here; `textmill COMMAND --help --all` prints all that it reads. This page is written by",
        "`docs/generate.py` from the code.",
    ]
    plain = [name for name, field in RunConfig.model_fields.items() if not section_types(field.annotation)]
    lines += ["", *_table([(name, RunConfig.model_fields[name]) for name in plain])]
    for name, field in RunConfig.model_fields.items():
        listed: set[tuple[str, str | None]] = set()
        for number, section in enumerate(section_types(field.annotation)):
            kind = f" with kind {section.model_fields['kind'].default}" if number else ""
            lines += [
                "",
                f"## {name}{kind}",
                "",
                _wrap(_one_line(section.__doc__)),
                *_section(section, f"{name}.", listed),
            ]
    return "\n".join(lines) + "\n"


def _section(section: type[Section], prefix: str, listed: set[tuple[str, str | None]]) -> list[str]:
    rows, below = [], []
    for name, field in section.model_fields.items():
        key = prefix + name
        if (key, field.description) in listed:
            continue
        listed.add((key, field.description))
        inner = section_types(field.annotation)
        if not inner or str in get_args(field.annotation):  # model.shape may be a path
            rows.append((key, field))
        for one in inner:
            below += [
                "",
                f"### {key}",
                "",
                _one_line(field.description or one.__doc__),
                *_section(one, f"{key}.", listed),
            ]
    rows.sort(key=lambda row: row[0] not in MOST_USED)
    return ["", *_table(rows), *below] if rows else below


def _table(rows: list[tuple[str, Any]]) -> list[str]:
    head = ["| key | default | value | meaning |", "|---|---|---|---|"]
    return head + [
        f"| `{key}` | {_default(field)} | {_cell(describe_type(field.annotation))} | {_cell(field.description)} |"
        for key, field in rows
    ]


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, Section):
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "`{}`".format(_one_line(text).replace("|", "\\|"))


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _wrap(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _cell(text: str | None) -> str:
    return _one_line(text).replace("|", "\\|").replace("<", "&lt;")


def command_page(name: str, row: Command) -> str:
    """One command: what it does, examples of its topic page, its flags and sections."""
    required = [f"{flag.name} {flag.example}" for flag in row.flags if flag.example]
    usage = " ".join(["textmill", name, *row.arguments, *required])
    more = " [section.key=value ...]" if row.takes_settings else ""
    lines = [f"# textmill {name}", "", f"{row.summary[0].upper()}{row.summary[1:]}.", "", f"    {usage}{more}"]
    if examples := examples_of(name):
        lines += ["", "```sh", *examples, "```"]
    if name in TOPICS:
        lines += ["", f"Explained in [{_title(TOPICS[name])}](../{TOPICS[name]}.md)."]
    if row.flags:
        lines += ["", "| flag | meaning |", "|---|---|"]
        lines += [f"| `{flag.name}` | {_cell(flag.summary)} |" for flag in row.flags]
    if row.sections:
        fields = dict(reversed([*all_fields()]))  # of a key that several kinds have, the first kind's
        links = ", ".join(f"[{section}](../reference.md#{section})" for section in row.sections)
        lines += [
            "",
            "The settings that matter most:",
            "",
            *_table([(key, fields[key]) for key in row.settings.split()]),
        ]
        lines += ["", _wrap(f"All settings: {links}; `textmill {name} --help --all` prints them.")]
    return "\n".join(lines) + "\n"


def examples_of(name: str) -> list[str]:
    """The first lines with this command on its topic page, else on another page; a test runs them there."""
    topic = DOCS / f"{TOPICS.get(name, 'index')}.md"
    for page in (topic, *sorted(DOCS.glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        shells = [block for language, block in blocks if language in ("", "sh", "console")]
        lines = [line.strip().removeprefix("$ ") for block in shells for line in block.splitlines()]
        if found := [line for line in lines if re.match(rf"textmill {name}( |$)", line)]:
            return found[:EXAMPLES]
    return []


def _title(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def options_table(tool: str) -> str:
    """The options of a tool and what textmill has instead; options with the same answer share a row, as do all that are
    not needed."""
    answers: dict[str, list[str]] = {}
    for option in sorted(set(OPTIONS[tool].split())):
        answer = counterpart(option, TOOLS.get(tool, tool))
        answers.setdefault(NOT_NEEDED if answer.startswith("not needed") else answer, []).append(f"`{option}`")
    answers |= {NOT_NEEDED: last} if (last := answers.pop(NOT_NEEDED, [])) else {}
    rows = [f"| {', '.join(options)} | {answer} |" for answer, options in answers.items()]
    return "\n".join([BEGIN, "", "| option | textmill |", "|---|---|", *rows, "", END])


def counterpart(option: str, tool: str) -> str:
    """Our key for an option of another tool, or what to do instead."""
    target = target_of(option, tool)
    if target is None:
        if any(key.rpartition(".")[2] == option.replace("-", "_") for key, _ in all_fields()):
            return f"`{suggest_key(option).split(chr(39))[1]}`"
        raise ValueError(f"{option}: add it to textmill/config/other_names.py")
    if is_reason(target):
        return _cell(target)
    if target.startswith("@"):
        key, note = RULES[target[1:]]
        return f"`{key}`: {_cell(note)}"
    return f"`{target}`"


def pages() -> dict[Path, str]:
    """Every page that follows from the code, and its text."""
    found = {DOCS / "reference.md": reference_page()}
    found |= {DOCS / "commands" / f"{name}.md": command_page(name, row) for name, row in COMMANDS.items()}
    for tool in OPTIONS:
        path = DOCS / "coming-from" / f"{tool}.md"
        text = path.read_text(encoding="utf-8")
        found[path] = re.sub(f"{BEGIN}.*{END}", lambda _, tool=tool: options_table(tool), text, flags=re.DOTALL)
    return found


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
