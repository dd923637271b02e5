"""What the options of other tools are called here: one table for hints on the command line, docs and `textmill from`.

A target says what to do with an option:

    train.steps                the key that takes its value; VALUES has the values that differ
    train.layout=padded        the setting that a flag without a value stands for
    @batch                     a rule of RULES, which computes settings from several options
    not needed: nccl on GPUs   why there is no key, or what to do instead
"""

from __future__ import annotations

from typing import Any

_LAUNCHER = "not needed: start textmill with torchrun, srun, mpirun or deepspeed, whose options these are"
_INSTALL = "not needed: make installs everything"
_RESUMES = "not needed: a run goes on from its newest checkpoint; --step N chooses another, --force starts from scratch"
_MASKING = "not available: of the tokens to predict, 80 % are masked, 10 % kept and 10 % replaced"
_ATTENTION = "not available: attention is not compared; use train.distil.kl, cosine or hidden"
_CACHES = "not needed: every stage has its own folder; nothing is cached elsewhere"
_DEVICES = "use CUDA_VISIBLE_DEVICES to choose GPUs, and torchrun to use several"
_FUSED = "not needed: the fastest implementation that the device has is used"
_PIPELINE = (
    "not translated: pipelines (engine.mesh.pipeline) were never run on GPUs; engine.mesh.shard (FSDP) divides "
    "weights and optimizer state, engine.activation_checkpointing saves activations"
)
_EXPERTS = (
    "not available in the families that come with textmill; write a mixture of experts as a family of "
    "your own, whose file model.family names"
)
_RUN_FILES = "not needed: the files of a tracker are in the run's folder"
_COLLECTIVES = "not needed: how gradients are exchanged is not set by hand"
_LOADING = "not needed: batches are built in a thread while the device computes"
_SCALING = "not available: fp16 has dynamic loss scaling with its own limits; bf16 needs none"
_LOG = "not needed: metrics.jsonl has every measurement"
_HUB = "use textmill export with export.folder=hf://OWNER/NAME"
_ONE_SEED = "not needed: one train.seed determines weights, data order and dropout"
_NET = "not available: the net is the published GPT-2, BERT or Llama; model.family=FILE.py is a net of your own"

TARGETS = {
    # the length of the run, batches, rates
    "@batch": """batch_size micro_batch_size global_batch_size train_batch_size per_device_train_batch_size
        per_gpu_train_batch_size train_micro_batch_size_per_gpu device_batch_size gradient_accumulation_steps
        accumulation total_batch_size data_parallel_size""",
    "@steps": """max_steps max_iters train_iters iterations num_train_steps max_train_steps num_iterations
        total_steps""",
    "@epochs": "num_train_epochs max_epochs num_epochs n_epoch epochs",
    "train.samples": "train_samples",
    "train.tokens": "train_tokens max_tokens",
    "train.length": """block_size seq_length seq_len max_seq_length context_length sequence_length max_seq_len
        truncated_len""",
    "train.learning_rate": "lr max_lr matrix_lr learning_rate optimizer_lr",
    "train.min_learning_rate": "min_lr",
    "train.schedule": "lr_decay_style lr_scheduler_type scheduler lr_scheduler",
    "@decayed": "decay_lr",
    "@warmup": "warmup lr_warmup_fraction lr_warmup_samples",
    "train.warmup": """warmup_steps warmup_iters lr_warmup_iters lr_warmup_steps num_warmup_steps warmup_ratio
        warmup_num_steps warmup_prop""",
    "train.warmup_shape": "warmup_type",
    "train.decay_steps": "lr_decay_iters lr_decay_steps",
    "train.decay_samples": "lr_decay_samples",
    "train.decay_fraction": "warmdown_ratio",
    "train.batch_rampup": "rampup_batch_size",
    "train.clip": "grad_clip clip_grad max_grad_norm gradient_clipping max_norm",
    "@betas": "betas beta1 beta2 adam_beta1 adam_beta2 adamw_beta1 adamw_beta2",
    "train.epsilon": "eps adam_eps adam_epsilon adamw_eps",
    "train.weight_decay": "wd weight_decay weight_decay_rate",
    "train.layer_decay": "layerwise_lr_decay lr_layer_decay",
    "train.muon.momentum": "muon_momentum",
    "train.optimizer": "optim optimizer class_path",
    "train.label_smoothing": "label_smoothing_factor label_smoothing",
    "train.loss": "loss_type",
    "train.seed": "seed random_seed",
    "train.freeze": "freeze_layers frozen",
    "train.freeze=wpe": "freeze_pos_embs",
    "train.freeze=embeddings.token_type_embeddings": "freeze_token_type_embds",
    # layouts
    "train.layout=padded": "enable_padding",
    "train.layout=masked": "mlm",
    "train.layout=chat": "sft",
    "@tfrecords": "use_tfrecords",
    "train.packed.isolate_documents=true": "reset_position_ids reset_attention_mask eod_mask_loss",
    "@train_mode": "train_mode",
    "train.chat.pack": "packing sample_packing",
    "train.masked.probability": "mlm_probability mask_prob masked_lm_prob mlm_mask_prop mlm_prob",
    "train.masked.max_predictions": "max_preds_per_seq max_predictions_per_seq",
    "train.masked.short_probability": "short_seq_prob",
    "train.masked.whole_words": "whole_word_mask do_whole_word_mask",
    "@counts": "token_counts",
    "train.masked.pairs=none": "bert_no_binary_head",
    # measurements and checkpoints
    "@interval": "eval_strategy evaluation_strategy save_strategy",
    "train.evaluate_every": "eval_interval eval_steps eval_frequency eval_every",
    "@evaluated_batches": "eval_iters eval_max_iters",
    "train.save_every": """save_interval save_steps ckpt_save_steps save_frequency checkpoint_interval
        checkpointing_steps""",
    "train.log_every": "log_interval logging_steps logging_frequency",
    "train.checkpoints.keep": "save_total_limit",
    "train.best.metric": "metric_for_best_model",
    "train.best.patience": "early_stopping_patience",
    "train.tasks_every": "core_metric_every",
    "train.tasks_sample": "core_metric_max_per_task",
    "folder": "out_dir output_dir save_dir",
    "train.folder": "save model_save_dir dump_path",
    "@dsgpt2_folder": "ckpt_dir workspace workspace_finetune",
    "name the checkpoint's folder in model.init_from, such as RUN/step-0142000": "ckpt_id_finetune",
    "@load": "load",
    # the net
    "model.shape.layers": "n_layer num_layers num_hidden_layers depth decoder_num_layers encoder_num_layers",
    "model.shape.heads": "n_head num_heads num_attention_heads",
    "model.shape.width": "n_embd hidden_size d_model",
    "model.shape.inner": "n_inner ffn_hidden_size intermediate_size",
    "model.shape.activation": "activation_function activation",
    "model.shape.positions": "n_positions n_ctx max_position_embeddings",
    "model.shape.dropout": "dropout hidden_dropout",
    "model.shape.attention_dropout": "attention_dropout",
    "model.shape.activation=relu2": "squared_relu",
    "model.shape.untied=true": "untie_embeddings_and_output_weights",
    "@deep_init": "deep_init",
    "@tied": "tie_embeddings tie_word_embeddings",
    "@model_type": "model_type",
    "@shape_overrides": "config_overrides",
    "@rope": "position_embedding_type normalization swiglu use_rotary_position_embeddings",
    "model.shape.kv_heads": "num_query_groups num_key_value_heads",
    "model.shape.head_width": "kv_channels",
    "model.shape.rotary_base": "rotary_base",
    "model.shape.qk_norm=true": "qk_layernorm",
    "model.size": "model_select",
    "@published": "config_name model_config_name model_name",
    "model.shape": "student_config",
    "model.family": "student_type",
    "@weights": "model_name_or_path teacher_name teacher_name_or_path",
    "model.init_from": """init_checkpoint model_path student_pretrained_weights ref_model_path
        ref_model_type initial_checkpoint_dir pretrained_checkpoint checkpoint_dir""",
    "model.init_from=bert-large-uncased": "pretrained_bert",
    "model.lora.rank": "lora_r lora_rank",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.targets": "target_modules",
    "name the matrices in model.lora.targets, such as q_proj and v_proj; default: all of the blocks": """lora_query
        lora_key lora_value lora_projection lora_mlp lora_head""",
    "not available: weights are not quantized in training": "quantize load_in_4bit load_in_8bit",
    "is not in this folder: translate it where it is": "options_file",
    # text
    "@sources": "train_file train_data data_file input file_path train_data_path json_path",
    "@evaluation_files": "validation_file valid_data test_data test_file val_data_path",
    "@dataset": "dataset_name dataset_config_name dataset_sub_name dataset_split_type",
    "@mongo": "config_train config_src",
    "@tokens": """data_path datasets train_dataset_paths tokenized_datasets grouped_tokenized_datasets
        train_data_prefix""",
    "tokens.use_valid": "eval_dataset_paths valid_data_path",
    "tokens.use_test": "test_data_path",
    "@split": "split tr_ratio validation_split_percentage val_split_fraction",
    "corpus.text_key": "json_keys json_key text_key text_column_name text_column_names dataset_text_field",
    "corpus.label_key": "label_column_name",
    "corpus.sentences=lines": "presplit_sentences",
    "corpus.documents=line": "line_by_line",
    "corpus.sentences=split": "split_sentences",
    "runner.workers": "workers num_workers num_proc num_process preprocessing_num_workers",
    "@beam": "direct_running_mode direct_num_workers",
    # tokenizer and tokens
    "tokenizer.use": """tokenizer_name_or_path tokenizer_name vocab_file vocab tokenizer_path tokenizer_model
        tokenizer_model_type tokenizer_dir tokenizer_type_or_path""",
    "@tokenizer_type": "tokenizer_type",
    "@dsgpt2_vocab": "vocab_load_dir vocab_id_dir",
    "tokenizer.vocab": "vocab_size nvocab",
    "tokenizer.chat": "chat_template",
    "tokens.folder": "output_path output_prefix dump_file tokens_dir grouped_tokens_dir",
    "tokens.index_format": "dataset_impl data_impl",
    "tokens.append_end": "append_eod enable_eos",
    "tokens.prepend_begin": "enable_bos",
    "tokens.overlap": "doc_stride",
    "tokens.tfrecord_epochs": "dupe_factor",
    "tokens.features.max_length": "max_sequence_length",
    "tokens.features.min_length": "min_sequence_length",
    "tokens.features.reserved_tokens": "num_special_token_reserved",
    "tokens.features.stride": "stride",
    # engine
    "engine.precision": "dtype mixed_precision precision fp8_format",
    "engine.precision=fp16": "fp16",
    "engine.precision=bf16": "bf16",
    "engine.compile": "torch_compile compile",
    "@tensor": "tensor_model_parallel_size model_parallel_size tensor_parallel_size",
    "@fsdp": "fsdp use_fsdp use_torch_fsdp2 use_distributed_optimizer",
    "engine.mesh.sequence_parallel": "sequence_parallel",
    "@zero": "zero_stage stage",
    "@deepspeed": "deepspeed deepspeed_config deepscale deepscale_config use_deepspeed deepspeed_config_file",
    "engine.offload_weights": "offload_param",
    "engine.offload_optimizer=cpu": "cpu_offload cpu_optimizer optimizer_cpu_offload",
    "engine.nvme_folder": "nvme_path",
    "engine.activation_checkpointing=1": """checkpoint_activations gradient_checkpointing recompute_activations
        deepspeed_activation_checkpointing recompute_granularity""",
    "engine.activation_checkpointing": "checkpoint_num_layers recompute_num_layers",
    "engine.device=cpu": "use_cpu no_cuda",
    "@gpu": "gpu_id",
    "engine.device": "device_type device",
    "engine.deterministic": "full_determinism deterministic_mode",
    "@timeout": "distributed_timeout_minutes",
    "engine.timeout": "ddp_timeout",
    # distillation
    "@labels": "alpha_clm alpha_mlm alpha_lm",
    "train.distil.kl": "alpha_ce alpha_pkd",
    "train.distil.mse": "alpha_mse",
    "train.distil.cosine": "alpha_cos",
    "train.distil.hidden": "beta_pkd",
    "@teacher_layers": "teacher_layers list",
    # evaluation, generation, tracking
    "@evaluate_batch": "per_device_eval_batch_size eval_batch_size",
    "evaluate.stride": "overlapping_eval",
    "not available: an answer has at most 30 tokens": "max_answer_length",
    "not needed: found in the examples": "version_2_with_negative",
    "not needed: 20 of each window are combined": "n_best_size",
    "not available: no answer needs no margin over the best one": "null_score_diff_threshold",
    "sample.prompt": "prompt start",
    "sample.max_tokens": "max_new_tokens out_seq_length max_length",
    "sample.min_tokens": "min_length",
    "sample.count": "num_samples num_return_sequences",
    "sample.beams": "num_beams beam_size",
    "sample.top_k": "top_k",
    "@do_sample": "do_sample",
    "sample.temperature=0": "greedy",
    "@wandb": "wandb_project wandb_log wandb wandb_dir logger_name tensorboard_dir tensorboard_log_dir",
    "track.kinds": "report_to",
    "track.project": "project",
    "set WANDB_ENTITY, WANDB_NAME, WANDB_TAGS or WANDB_RUN_GROUP in the environment": """
        wandb_username wandb_entity wandb_run_name run_name wandb_exp_name wandb_tags wandb_group""",
    # no key: what to do instead
    _RESUMES: """restart resume_from_checkpoint adlr_autoresume adlr_autoresume_interval resume_from_step resume
        ckpt_step""",
    "not needed: the batches of a step follow from the step, so a resumed run continues exactly": """resume_dataloader
        ignore_data_skip no_save_rng no_load_rng""",
    "use the flag --step N, latest or best": "ckpt_id",
    "not needed: the command is textmill train": "do_train",
    "not needed: train evaluates every train.evaluate_every steps, and textmill evaluate at any time": "do_eval",
    "use textmill evaluate with evaluate.split=test": "do_predict",
    "use the flag --force": "overwrite_output_dir force",
    "use textmill evaluate with evaluate.tasks=lambada:FILE": "cloze_eval",
    "use textmill evaluate with evaluate.text=FILE": "webtext_eval",
    "use textmill evaluate": "eval_only skip_train",
    "use textmill generate": "inference",
    "not needed: export.kind=onnx writes any model": "onnx_safe",
    "name the prefixes with their weights in tokens.use, as in [{path: A, weight: 0.3}]": """train_weighted_split_paths
        train_weighted_split_paths_path data_args_path per_split_data_args_path""",
    "name the prefixes in tokens.use_valid or tokens.use_test": """valid_weighted_split_paths
        valid_weighted_split_paths_path test_weighted_split_paths test_weighted_split_paths_path""",
    "set train.decay_samples to it divided by train.length": "lr_decay_tokens",
    "not available: no steps are left out": "skip_train_iteration_range",
    "not available: every token counts the same": "reweight_loss_based_on_position_frequency",
    "not available: the optimizer's state is in fp32": """use_bnb_optimizer use_precision_aware_optimizer exp_avg_dtype
        exp_avg_sq_dtype""",
    "give it in the JSON of engine.deepspeed_config": """zero_reduce_scatter zero_contigious_gradients remote_device
        use_pin_memory cpu_torch_adam""",
    "not available: engine.activation_checkpointing says how many blocks are recomputed, and no more": """
        contigious_checkpointing checkpoint_in_cpu synchronize_each_layer profile_backward""",
    "not available: there are no encoder-decoders, retrievers and nets of images": """encoder_seq_length
        decoder_seq_length retriever_seq_length sample_rate ict_head_size biencoder_projection_dim
        biencoder_shared_query_context_model ict_load bert_load titles_data_path query_in_block_prob use_one_sent_docs
        evidence_data_path retriever_report_topk_accuracies retriever_score_scaling block_data_path embedding_path
        indexer_batch_size indexer_log_interval num_classes img_dim num_channels patch_dim""",
    "not needed: tokens are always read from disk as they are used": """lazy_loader no_mmap_bin_files mmap_warmup
        skip_mmap_warmup streaming low_cpu_mem_usage""",
    _CACHES: "cache_dir no_cache overwrite_cache data_cache_path data_cache_dir",
    _LOADING: "dataloader_num_workers valid_num_workers num_dataset_builder_threads",
    "not needed: the end of an epoch is filled up from its start": "dataloader_drop_last",
    "not needed: weights and their updates are in fp32 in every precision": """fp32_embedding fp16_opt_level
        fp32_layernorm fp32_tokentypes fp32_allreduce attention_softmax_in_fp32
        accumulate_allreduce_grads_in_fp32 fp32_residual_connection
        bf16_full_eval fp16_full_eval main_params_dtype main_grads_dtype grad_reduce_in_bf16 fp16_lm_cross_entropy""",
    "not needed: every command uses the best checkpoint, as train.best.metric defines it": "load_best_model_at_end",
    "use textmill show WHERE --counts FILE": "token_counts_dump",
    "not needed: model.init_from=TEACHER with model.init_layers=0,2,4,7,9,11 starts a student from these blocks": """
        dump_checkpoint config_path""",
    "use sample.temperature to generate, train.distil.temperature to distil": "temperature",
    "use model.init_layers to start from some blocks of model.init_from, model.shape.layers for their number": "layers",
    "not needed: the folders in train.distil.teachers say what they are": "teacher_type",
    "not needed: every term of train.distil counts tokens with a label only": "restrict_ce_to_mask",
    "not available: samples are not grouped by length; train.layout=packed has no padding": """group_by_size
        group_by_length length_column_name train_sampling_strategy""",
    _MASKING: "word_mask word_keep word_rand",
    "not available: weights start with the spread of the published model, 0.02": """initializer_range init_method_std
        init_method_xavier_uniform""",
    _DEVICES: "n_gpu gpus devices num_nodes",
    "not needed: model.init_from copies the head too": "vocab_transform",
    "set train.distil.hidden above 0, with train.distil.teacher_layers": "pkd",
    "not available: hidden states are compared without a projection, so teachers need the model's width": "pkd_output",
    _ATTENTION: "minilm alpha_att alpha_val",
    _LAUNCHER: """local_rank master_addr master_port nnodes node_rank nproc_per_node num_gpus deepspeed_mpi jobid
        launcher hostfile use_cpu_initialization lazy_mpu_init rank world_size""",
    "not needed: nccl on GPUs, gloo on CPUs": "distributed_backend backend ddp_backend",
    "is an option of docker, not of training": "network",
    _INSTALL: "cpp_ext cuda_ext global_option disable_pip_version_check",
    _HUB: """push_to_hub hub_model_id hub_token hub_private_repo hub_strategy hub_always_push hub_revision""",
    "not needed: the hub's own login or HF_TOKEN is used": "token",
    "set track.kinds": "with_tracking",
    "not needed: train.layout decides how samples are filled; padded is a document each": "pad_to_max_length",
    "not needed: the format of a file is detected": "data_loader delim loose_json",
    "not needed: samples are always shuffled; train.seed decides how": "shuffle",
    "not needed: samples are drawn as they are trained on": "max_num_samples data_epochs input_data_sizes_file",
    "not available: samples of evaluation are as long as those of training": "eval_seq_length eval_max_preds_per_seq",
    "name it with the files: corpus.sources=[{path: FILE, text_key: KEY}]": "eval_text_key",
    "not needed: model.init_from reads published models, such as gpt2": "eval_hf load_openai",
    "not needed: the last word is counted with all its tokens": "strict_lambada",
    "not needed: the loss is the mean of all tokens of a step": "calculate_per_token_loss",
    "not needed: fp8 chooses its own scales": "fp8_amax_history_len fp8_amax_compute_algo fp8_param_gather fp8_margin",
    "not needed: memory is managed while training": """manual_gc manual_gc_interval empty_unused_memory_level
        no_create_attention_mask_in_dataloader""",
    "not needed: the tokenizer's files have it": "tiktoken_pattern tiktoken_num_special_tokens",
    "not available: there are no invented data; corpus.sources=tinyshakespeare is a small text": "mock_data",
    "not available: there is no profiler": """profile profile_step_start profile_step_end profile_ranks
        use_pytorch_profiler""",
    "not needed: model.family=llama has rotary positions instead": "no_position_embedding",
    "set train.batch_rampup": "step_batch_size_schedule",
    "not needed: textmill generate prints its texts; write them to a file with > FILE": "genfile sample_output_file",
    "name the prompts in sample.prompt": "sample_input_file",
    "not needed: a cache of keys and values is always used": "recompute",
    "not needed: every train.save_every steps there is a checkpoint; the best one is kept": "always_save_checkpoint",
    "not available: GPT-2's linear layers and norms have biases; model.family=llama has none": """bias
        disable_bias_linear add_bias_linear add_qkv_bias""",
    "set the width itself: model.shape.width": "aspect_ratio",
    "set the number of heads: model.shape.heads is the width divided by it": "head_dim",
    "set train.minutes or train.tokens; textmill plan computes the FLOPs": "target_flops",
    "set train.tokens; textmill plan prints the parameters": "target_param_data_ratio",
    "set train.muon.adamw_rate_factor to it divided by train.learning_rate": "embedding_lr unembedding_lr",
    "set train.min_learning_rate to this fraction of train.learning_rate": "final_lr_frac min_lr_ratio",
    "set train.evaluate_batches to it divided by train.batch and train.length": "eval_tokens",
    "set train.sample_prompts; they are continued with every checkpoint": "sample_every",
    "not needed: folder or train.folder names the run": "model_tag",
    "train.folder names the run's folder, WANDB_NAME in the environment the run on W&B": "run",
    "not available: attention sees all earlier tokens": "window_pattern window_size sliding_window",
    "not needed: merges are read from the file next to the vocabulary: merges.txt, or NAME-merges.txt": "merge_file",
    "not needed: paragraphs keep their line breaks; corpus.rules changes that": """keep_linebreaks keep_newlines
        no_keep_linebreaks""",
    "set train.layout: chat has loss on the assistant's messages only, packed on all tokens": """train_on_inputs
        assistant_only_loss mask_prompt loss_on_targets_only completion_only_loss""",
    _RUN_FILES: "wandb_run_dir logging_dir wandb_save_dir",
    _PIPELINE: """pipeline pipeline_parallel pipeline_parallel_size pp pipeline_model_parallel_size
        pipeline_model_parallel_split_rank num_layers_per_virtual_pipeline_stage
        virtual_pipeline_model_parallel_size partition_activations pp_partition_method""",
    "not available: sequences are not divided over devices; engine.activation_checkpointing makes long ones fit": """
        context_parallel_size context_parallel_sequence_parallel_size ds_sequence_parallel_size""",
    _EXPERTS: """experts expert n_experts moe expert_parallel expert_parallel_size num_local_experts num_experts
        expert_model_parallel_size expert_tensor_parallel_size""",
    _FUSED: """use_flash_attn attention_backend abort_on_unmet_fused_kernel_constraints no_masked_softmax_fusion
        no_bias_gelu_fusion no_bias_dropout_fusion
        no_gradient_accumulation_fusion no_rope_fusion use_mcore_models transformer_impl openai_gelu
        apply_query_key_layer_scaling no_query_key_layer_scaling use_liger_kernel liger_kernel_config tf32
        torch_compile_backend torch_compile_mode cross_entropy_loss_fusion scaled_upper_triang_masked_softmax_fusion
        attn_implementation use_fast_tokenizer use_slow_tokenizer no_persist_layer_norm use_legacy_models
        no_async_tensor_model_parallel_allreduce no_bias_swiglu_fusion optimizer_cuda_graph""",
    _COLLECTIVES: """use_contiguous_buffers_in_ddp no_scatter_gather_tensors_in_pipeline use_torch_ddp tp_comm_overlap
        gradient_predivide_factor no_contiguous_buffers_in_local_ddp use_contiguous_buffers_in_local_ddp
        accelerator_config parallelism_config average_tokens_across_devices scatter_gather_tensors_in_pipeline""",
    _SCALING: "loss_scale initial_loss_scale min_loss_scale min_scale loss_scale_window hysteresis dynamic_loss_scale",
    _LOG: """logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen
        log_level log_level_replica disable_tqdm include_tokens_per_second skip_memory_metrics debug
        timing_log_level log_throughput no_log_learnig_rate_to_tensorboard no_log_loss_scale_to_tensorboard log_path
        codecarbon_dir log_params_norm log_num_zeros_in_grad log_timers_to_tensorboard
        log_batch_size_to_tensorboard log_validation_ppl_to_tensorboard log_memory_to_tensorboard
        tensorboard_queue_size tensorboard_log_interval log_progress steps_per_print""",
    "not needed: a checkpoint always has all that a resume needs": """save_only_model save_on_each_node no_save_optim
        no_load_optim enable_jit_checkpoint restore_callback_states_from_checkpoint ckpt_format use_dist_ckpt
        use_checkpoint_args override_lr_scheduler override_opt_param_scheduler use_checkpoint_lr_scheduler
        use_checkpoint_opt_param_scheduler async_save auto_detect_ckpt_format universal_checkpoint dist_ckpt_format""",
    "not needed: only the loss is measured while training; train.tasks measures more": """prediction_loss_only
        eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics
        eval_delay eval_on_start label_names include_inputs_for_metrics eval_initial_validation
        eval_final_validation eval_max_new_tokens""",
    "not needed: engine.micro_batch=auto chooses a size that fits": "auto_find_batch_size torch_empty_cache_steps",
    "not available: the schedule and the optimizer have no further settings": """lr_scheduler_kwargs optim_args
        optim_target_modules lr_power sgd_momentum lr_warmup_init lr_wsd_decay_style lr_wsd_decay_iters
        lr_wsd_decay_samples weight_decay_incr_style start_weight_decay end_weight_decay decoupled_lr
        decoupled_min_lr""",
    "not available: there is no noise on embeddings; use model.shape.dropout": "neftune_noise_alpha",
    "not needed: training uses no key-value cache": "use_cache",
    "not needed: of a loss, perplexity or error the lowest is the best, else the highest": "greater_is_better",
    "not available: biases and norms have no weight decay, all other weights have it": "no_decay",
    "not available: a token seen n times is masked with the weight n to the power of -0.7": "mlm_smoothing",
    "not needed: gradient_checkpointing's only setting here is how many blocks": """gradient_checkpointing_kwargs
        recompute_method distribute_saved_activations distribute_checkpointed_activations recompute_modules""",
    _ONE_SEED: "data_seed data_parallel_random_init",
    "not needed: only the text is read; corpus.keep_fields keeps more": "remove_unused_columns",
    "not available: there is no Trackio; use track.kinds=tensorboard or wandb": """trackio_space_id
        trackio_bucket_id trackio_static_space_id""",
    "not needed: the vocabulary is padded by itself, and padding is never predicted": """
        make_vocab_size_divisible_by pad_vocab_size_to vocab_extra_ids padded_vocab_size""",
    "not needed: SIGTERM saves a checkpoint and ends the run; train.minutes limits its time": """exit_interval
        exit_duration_in_mins exit_signal_handler kill_switch_path exit_on_missing_checkpoint""",
    "use model.init_from: it starts a new run from weights": "finetune",
    "name fewer files in corpus.sources; evaluate.sample limits an evaluation": "max_train_samples max_eval_samples",
    "not needed: name the .npy files in tokens.use": "use_npy_data_loader",
    "set train.ema_window to 1 / (1 - decay) for a moving average of the weights": "ema_decay model_ema_decay",
    "not needed: positions without loss always have the label -100": "ignore_label",
    _NET: """apply_layernorm_1p norm_epsilon layernorm_epsilon layernorm_zero_centered_gamma rotary_percent
        rotary_seq_len_interpolation_factor glu_activation
        embed_layernorm sync_tp_duplicated_parameters bert_binary_head apply_residual_connection_post_layernorm
        multi_latent_attention mtp_num_layers trust_remote_code model_revision torch_dtype
        data_sharding rotary_scaling_factor use_rope_scaling no_rope_freq kv_lora_rank q_lora_rank qk_head_dim
        v_head_dim qk_pos_emb_head_dim mscale mscale_all_dim quick_geglu window_attn_skip_freq""",
    "not needed: model.family=llama always has grouped queries; model.shape.kv_heads sets their number": """
        group_query_attention""",
    "not needed: files are read in parallel shards of their own": "partitions keep_sequential_samples chunk_size",
}
"""Targets and the options that they stand for, with underscores instead of hyphens."""

PREFIXES = {
    **dict.fromkeys(("rl_", "grpo_", "langrl_"), "not available: there is no reinforcement learning"),
    **dict.fromkeys(("inference_", "decode_"), "not needed: textmill serve batches requests by itself"),
    **dict.fromkeys(("ddp_", "megatron_fsdp_", "fsdp_", "overlap_", "gtp_"), _COLLECTIVES),
    **dict.fromkeys(("cuda_graph_", "te_", "fp4_"), _FUSED),
    **dict.fromkeys(("dino_", "vision_", "img_", "swin_"), "not available: there are no nets of images"),
    **dict.fromkeys(("mamba_", "hybrid_", "heterogeneous_", "linear_attention_", "relative_attention_"), _NET),
    **dict.fromkeys(("yarn_", "rope_"), "not available: rotary positions have a base only, model.shape.rotary_base"),
    **dict.fromkeys(("inprocess_", "ft_", "one_logger_"), _RESUMES),
    "moe_": _EXPERTS,
    "fim_": "not available: no text is filled into the middle of another",
    "ckpt_": "not needed: a checkpoint always has all that a resume needs",
    "dataloader_": _LOADING,
    "logits_": "not available: a teacher computes its predictions in each step",
    "muon_": "not available: of Muon only train.muon.momentum is set",
}
"""Targets of options that begin so and are not in the table."""

BY_TOOL: dict[str, dict[str, str]] = {
    "megatron-eval": {
        "evaluate.batch": "batch_size",
        "@evaluation_task": "data_path valid_data eval_iters cloze_eval webtext_eval",
        "not needed: the model's folder has its shape": "num_layers hidden_size num_attention_heads seq_length",
        "@evaluated_model": "model_path load",
    },
    "megatron": {_LOADING: "num_workers"},
    "megatron-generate": {
        "@evaluated_model": "load model_path",
        "sample.temperature": "temperature",
        "not needed: the model's folder has its shape": """num_layers hidden_size num_attention_heads seq_length
            max_position_embeddings""",
    },
    "megatron-merge": {"not needed: tokens.use reads all; textmill merge OUT A B writes one file": "output_prefix"},
    "distil": {"train.distil.temperature": "temperature", "@distil_data": "data_file", "tokens.use": "data_dir"},
    "extract": {"model.init_layers": "layers"},
    "binarize": {"not needed: tokenizer.use names the tokenizer": "tokenizer_type"},
    "counts": {"tokens.use": "data_file", "not needed: the tokenizer knows its size": "vocab_size"},
    "nanogpt-sample": {
        "@evaluated_model": "init_from out_dir",
        "sample.temperature": "temperature",
        "sample.seed": "seed",
    },
    "nanogpt": {"@nanogpt_model": "init_from", "@nanogpt_data": "dataset", "sample.temperature": "temperature"},
    "jax-lm": {"train.length": "max_sequence_length"},
    "dsgpt2": {
        "sample.temperature": "temperature",
        "not available: an answer is never replaced by its question": "alpha",
    },
    "litgpt": {
        "@litgpt_data": "data",
        "@weights": "checkpoint_dir",
        "train.length": "max_seq_length",
        "not needed: engine.micro_batch=auto chooses a size that fits": "micro_batch_size",
    },
}
"""Targets that only one tool's options of these names have."""

RULES: dict[str, tuple[str, str]] = {
    "steps": ("train.steps", "optimizer steps"),
    "epochs": ("train.epochs", "passes over the train split, unless steps are given"),
    "evaluated_batches": ("train.evaluate_batches", "batches of train.evaluate_batch samples of the valid split"),
    "tied": ("model.shape.untied", "the opposite: true gives the head weights of its own"),
    "model_type": ("model.family", "gpt2, llama or bert"),
    "shape_overrides": ("model.shape", "one key for each, such as model.shape.layers=4"),
    "batch": ("train.batch", "samples of a step on all devices: batch per GPU x accumulation x GPUs"),
    "evaluate_batch": ("train.evaluate_batch", "of all GPUs; evaluate.batch is that of textmill evaluate"),
    "decayed": ("train.schedule", "false is train.schedule=constant"),
    "warmup": ("train.warmup", "steps, or a fraction of the run when below 1"),
    "betas": ("train.betas", "both in a list, such as 0.9,0.95"),
    "tfrecords": ("tokens.use", "name the files there, with train.layout=masked"),
    "train_mode": ("train.layout", "pretrain: padded; finetune: chat, with tokenizer.chat=dsgpt2 and model.init_from"),
    "counts": (
        "train.masked.counts",
        "token_counts.pickle or a file of textmill show --counts; for train.layout=masked only",
    ),
    "interval": ("train.evaluate_every", "steps or epoch; of checkpoints: train.save_every"),
    "dsgpt2_folder": (
        "train.folder",
        "CKPT_DIR/WORKSPACE; a finetuning starts from model.init_from, CKPT_DIR/WORKSPACE_FINETUNE",
    ),
    "load": ("model.init_from", "only to start from other weights; to go on with a run, give the same command again"),
    "deep_init": ("model.shape.deep_init", "of bert; gpt2's residual branches always start smaller"),
    "rope": ("model.family", "llama has rotary positions, RMSNorm and SwiGLU, gpt2 learned positions and LayerNorm"),
    "published": ("model.size", "such as small for gpt2; the path of a config.json goes to model.shape"),
    "weights": (
        "model.init_from",
        "with tokenizer.use, the tokenizer of these weights; of teachers: train.distil.teachers",
    ),
    "sources": ("corpus.sources", "files of text or records"),
    "evaluation_files": (
        "corpus.source_splits",
        "such as valid.txt:valid, with the file in corpus.sources too; never training data",
    ),
    "dataset": ("corpus.sources", "hf:NAME, hf:NAME:SUBSET or hf:NAME:SUBSET:SPLIT; a dataset keeps its own splits"),
    "mongo": ("corpus.sources", "mongo:db_config.json"),
    "tokens": ("tokens.use", "existing tokens; text goes to corpus.sources"),
    "split": ("corpus.split", "three numbers for train, valid and test, such as 95,5,0"),
    "beam": ("runner.options", "--NAME=VALUE, with runner.kind=beam"),
    "tokenizer_type": ("tokenizer.use", "a name or the vocabulary's file; tokenizer.kind is for a new vocabulary"),
    "dsgpt2_vocab": ("tokenizer.use", "the folder VOCAB_LOAD_DIR/VOCAB_ID_DIR"),
    "tensor": ("engine.mesh.tensor", "the number of GPUs that divide each matrix"),
    "fsdp": ("engine.mesh.shard", "the number of GPUs that share a replica"),
    "teacher_layers": ("train.distil.teacher_layers", "a block for each of the model's, for train.distil.hidden"),
    "zero": ("engine.zero", "0 to 3; with fp16 at least 1, which computes the same as 0"),
    "deepspeed": ("engine.deepspeed_config", "the JSON file, with engine.kind=deepspeed"),
    "gpu": ("engine.device", "such as cuda:1"),
    "timeout": ("engine.timeout", "in seconds"),
    "labels": ("train.distil.labels", "one loss of the labels: alpha_clm of GPT-2, alpha_mlm of BERT"),
    "do_sample": ("sample.temperature", "0 for false"),
    "wandb": ("track.kinds", "tensorboard or wandb; also track.project"),
    "evaluation_task": ("evaluate.tasks", "wikitext:FILE or lambada:FILE; evaluate.text for other texts"),
    "evaluated_model": ("model.init_from", "the folder that textmill import wrote, or WHERE of textmill evaluate"),
    "distil_data": ("tokens.use", "binarized_text.pickle; a text goes to corpus.sources"),
    "nanogpt_model": ("model.init_from", "a model's name; scratch and resume need no setting"),
    "nanogpt_data": ("corpus.sources", "the text; of GPT-2's tokens: tokens.use=data/NAME/train.bin"),
    "litgpt_data": ("corpus.sources", "the text of TextFiles or JSON"),
}
"""The key that a rule sets first, and what its value is; textmill/commands/translate.py has the rules themselves."""

VALUES: dict[str, dict[str, Any]] = {
    "train.schedule": {
        "WSD": "stable",
        "inverse-square-root": "inverse_sqrt",
        "constant_with_warmup": "constant",
        "warmup_stable_decay": "stable",
        "cosine_with_min_lr": "cosine",
        "cosine_with_restarts": "cosine",  # the trainer's default is one cycle
        "polynomial": "linear",  # of power 1
        "WarmupLR": "constant",
        "WarmupDecayLR": "linear",
        "WarmupCosineLR": "cosine",
        "LRRangeTest": "range_test",
    },
    "train.optimizer": {
        **dict.fromkeys(("adam", "Adam", "AdamW", "adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
        **dict.fromkeys(("adamw_apex_fused", "torch.optim.AdamW", "FusedAdam"), "adamw"),
    },
    "train.loss": {"lm_loss": "sample_mean"},
    "train.best.metric": {"eval_loss": "valid_loss", "loss": "valid_loss", "eval_accuracy": "valid_accuracy"},
    "model.size": {"112m": "dsgpt2-112m", "112m_half": "dsgpt2-112m-half", "345m": "dsgpt2-345m"},
    "model.family": {"distilbert": "bert", "roberta": "bert"},
    "engine.precision": {
        **dict.fromkeys(("float32", "32-true", "32", "no"), "fp32"),
        **dict.fromkeys(("float16", "half", "16-mixed", "16-true", "16"), "fp16"),
        **dict.fromkeys(("bfloat16", "bf16-mixed", "bf16-true"), "bf16"),
        **dict.fromkeys(("e4m3", "hybrid"), "fp8"),
    },
    "sample.top_p": {"0": 1.0, "0.0": 1.0},
    "tokens.index_format": {"cached": "lazy", "infer": "mmap"},
    "track.kinds": {"none": [], "all": ["tensorboard", "wandb"]},
}
"""Values of other tools that are written differently here, by our key."""


def _by_option(targets: dict[str, str]) -> dict[str, str]:
    return {option: target for target, options in targets.items() for option in options.split()}


OPTIONS = _by_option(TARGETS)
"""The target of each option."""
OPTIONS_BY_TOOL = {tool: _by_option(targets) for tool, targets in BY_TOOL.items()}


def target_of(option: str, tool: str = "") -> str | None:
    """The target of an option of a tool such as litgpt-lora, else of litgpt, else of any tool; None if unknown."""
    name = option.lstrip("-").replace("-", "_").lower()
    tables = (OPTIONS_BY_TOOL.get(one, {}) for one in (tool, tool.partition("-")[0]))
    known = next((table[name] for table in (*tables, OPTIONS) if name in table), None)
    return known or next((target for prefix, target in PREFIXES.items() if name.startswith(prefix)), None)


def is_reason(target: str) -> bool:
    """Whether a target is a sentence and no setting."""
    return " " in target


def describe_target(target: str) -> str:
    """What to write instead of an option, as one sentence."""
    if is_reason(target):
        return target
    if target.startswith("@"):
        key, note = RULES[target[1:]]
        return f"textmill calls it '{key}': {note}"
    return f"write {target}" if "=" in target else f"textmill calls it '{target}'"
