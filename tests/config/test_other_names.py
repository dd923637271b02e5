"""Options of nanoGPT, Hugging Face, Megatron, DeepSpeed and others lead to our key, or to what to do instead."""

from __future__ import annotations

import re

import pytest

from textmill.cli import main
from textmill.config.keys import all_fields, suggest_key
from textmill.config.other_names import BY_TOOL, PREFIXES, RULES, TARGETS, VALUES, describe_target, is_reason, target_of

OPTIONS = """
--alpha_ce --alpha_clm --alpha_cos --alpha_mlm --append-eod --batch-size --block_size --cache-dir --cache_dir
--checkpoint-activations --checkpoint-num-layers --ckpt_dir --ckpt_id --ckpt_id_finetune --ckpt_save_steps
--clip-grad --cloze-eval --config_name --config_path --config_train --cpp_ext --cuda_ext --data-path --data_file
--dataloader_num_workers --dataset-impl --dataset-name --dataset-split-type --dataset-sub-name --datasets
--deep-init --deepscale --deepscale_config --deepspeed --deepspeed_config --deepspeed_mpi --direct_num_workers
--direct_running_mode --disable-pip-version-check --distributed-backend --do_eval --do_sample --do_train --dtype
--dump_checkpoint --dump_file --dump_path --enable_bos --enable_eos --enable_padding --eval-dataset-paths
--eval-frequency --eval-interval --eval-iters --eval_batch_size --evaluation_strategy --file_path --fp16
--fp32-embedding --freeze_pos_embs --global-batch-size --global-option --gpu_id --gpus
--gradient_accumulation_steps --grouped_tokenized_datasets --hidden-size --ignore-label --input --jobid
--json-key --layers --lazy-loader --learning-rate --load --local_rank --log-interval --logging-frequency
--logging_dir --loss_type --lr --lr-decay-iters --lr-decay-samples --lr-decay-style --lr-warmup-fraction
--master_addr --master_port --max-position-embeddings --max-preds-per-seq --max-sequence-length --max_length
--merge-file --metric_for_best_model --micro-batch-size --min-lr --min-sequence-length --min_length
--model-config-name --model-parallel-size --model-path --model-save-dir --model_name_or_path --model_select
--network --nnodes --no-cache --node_rank --nproc_per_node --num-attention-heads --num-epochs --num-layers
--num-special-token-reserved --num_beams --num_gpus --num_train_epochs --output-path --output-prefix
--output_dir --overwrite_output_dir --per_device_eval_batch_size --per_device_train_batch_size --port
--preprocessing_num_workers --presplit-sentences --random-seed --ref_model_type --repetition_penalty --restart
--resume-dataloader --save --save-frequency --save-interval --seed --seq-length --split --stride
--student_config --student_pretrained_weights --student_type --teacher_name --teacher_type --temperature
--test-data --text-key --token_counts --token_counts_dump --tokenized_datasets --tokenizer-model
--tokenizer-model-type --tokenizer-name-or-path --tokenizer-path --tokenizer-type --tokenizer_name
--tokenizer_type --top_k --tr_ratio --train-data --train-dataset-paths --train-iters --train-samples
--train_file --train_iters --train_mode --truncated_len --use-tfrecords --use_cpu --valid-data --validation_file
--vocab --vocab-file --vocab_id_dir --vocab_load_dir --vocab_size --wandb-project --wandb-run-dir
--wandb-username --wandb_dir --warmup --webtext-eval --weight-decay --workers --workspace --workspace_finetune
""".split()
"""Every option in the manuals of the five tools that textmill replaces."""
DISTILLATION = """
--data_file --student_type --student_config --student_pretrained_weights --teacher_type --teacher_name --temperature
--alpha_ce --alpha_mlm --alpha_clm --alpha_mse --alpha_cos --mlm --mlm_mask_prop --word_mask --word_keep --word_rand
--mlm_smoothing --token_counts --restrict_ce_to_mask --freeze_pos_embs --freeze_token_type_embds --n_epoch
--group_by_size --warmup_prop --weight_decay --learning_rate --adam_epsilon --max_grad_norm --initializer_range
--fp16_opt_level --n_gpu --log_interval --checkpoint_interval --vocab_transform --ref_model_path --alpha_lm --pkd
--alpha_pkd --beta_pkd --teacher_layers --pkd_output --minilm --alpha_att --alpha_val --max_steps
""".split()
"""Every option of Hugging Face's distillation scripts, and those that a compression project for GPT-2 added."""
SAME_NAME = r"did you mean '[\w.]+\.{leaf}'\?"


@pytest.mark.parametrize("option", sorted({*OPTIONS, *DISTILLATION}))
def test_no_option_gets_a_wrong_suggestion(option: str) -> None:
    """Advice is from the tables, or names a key with the very same last word: likeness of letters is not meaning."""
    name = option.lstrip("-").replace("-", "_")
    target = target_of(name)
    if target is None:
        assert re.fullmatch(SAME_NAME.format(leaf=name), suggest_key(name)), suggest_key(name)
    else:
        assert suggest_key(name) == describe_target(target)


def test_the_table_names_keys_that_exist_and_each_option_once() -> None:
    known = {name for name, _ in all_fields()}
    for targets in (TARGETS, *BY_TOOL.values()):
        options = " ".join(targets.values()).split()
        assert len(options) == len(set(options))
        for target in targets:
            if target.startswith("@"):
                assert target[1:] in RULES
            elif is_reason(target):
                keys = re.findall(
                    r"\b(?:corpus|tokenizer|tokens|model|train|engine|evaluate|track)\.[a-z_.]+\b", target
                )
                assert set(keys) <= known, target
            else:
                assert target.partition("=")[0] in known
    assert {key for key, _ in RULES.values()} | set(VALUES) <= known


@pytest.mark.parametrize(
    ("option", "part"),
    [
        ("--alpha_ce=5", "write train.distil.kl=VALUE"),
        ("--restart=1", "goes on from its newest checkpoint"),
        ("--load", "give the same command again"),
        ("--use-tfrecords", "train.layout=masked"),
        ("--nproc_per_node=2", "torchrun"),
        ("--lr=1", "write train.learning_rate=VALUE"),
        ("--vocab", "write tokenizer.use=VALUE"),
        ("--enable_bos", "write tokens.prepend_begin=VALUE"),
        ("--freeze_pos_embs", "write train.freeze=wpe"),
        ("--gradient_accumulation_steps=16", "batch per GPU x accumulation x GPUs"),
        ("--validation_file=v.txt", "'corpus.source_splits': such as valid.txt:valid"),
        ("--eval-dataset-paths=x", "write tokens.use_valid=VALUE"),
        ("--tr_ratio=0.95", "such as 95,5,0"),
        ("--wandb_dir=x", "track.project"),
        ("--config_train=x", "mongo:db_config.json"),
    ],
)
def test_the_command_line_says_it(option: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart", option]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize("prefix", PREFIXES)
def test_options_that_begin_alike_have_one_reason(prefix: str) -> None:
    assert target_of(f"{prefix}anything") == PREFIXES[prefix]
    assert is_reason(PREFIXES[prefix])


def test_an_option_of_the_table_comes_before_its_prefix() -> None:
    assert target_of("--muon-momentum") == "train.muon.momentum"
    assert target_of("--ddp_timeout") == "engine.timeout"


def test_letters_alone_are_not_enough_for_a_suggestion() -> None:
    assert "did you mean" not in suggest_key("train.use_swa")
    assert suggest_key("train.stepz") == "did you mean 'train.steps'?"


def test_the_advice_for_a_subset_of_a_dataset_is_a_source() -> None:
    """As docs/corpus.md has it: NAME may have a slash itself."""
    assert "hf:NAME:SUBSET:SPLIT" in suggest_key("dataset_sub_name")
