"""The training loop and its parts. Read loop.py first; it calls the others in this order.

before the first step   setup.py, which calls auto_preset.py and auto_settings.py (`train.preset=auto`), resuming.py or
                        new_run.py (both return a start.Start), run_length.py
the run's folder        run_folder.py (what it contains), changing.py (`train --change`)
in each step            step_log.py (log, throughput), divergence.py (skipped updates), replica_check.py,
                        token_check.py, run_minutes.py (`train.minutes`)
when due                valid_loss.py (valid split), tasks.py (`train.tasks`), best_step.py (early stopping),
                        saving.py (checkpoints), sample_prompts.py
distillation            teachers.py, teacher_cache.py
"""
