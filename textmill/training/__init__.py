"""The training loop and its parts. Read loop.py first: `train` locks the run folder, chooses what to start from and
builds the engine. Then `Training.run_steps` repeats:

    batch = batches.batch_at(step, ...)                       this rank's samples, read ahead by a thread
    result = engine.train_step(batch, step, learning rate)    returns before the device has finished the step
    _after_step(step + 1, result)                             what is due: log, evaluate, save, stop

`step` counts from 0. `done` is the number of finished steps, and the step's number in logs and checkpoints. The other
modules, in the order in which the loop calls them:

before the first step   setup.py, which calls auto_preset.py and auto_settings.py (`train.preset=auto`), resuming.py or
                        new_run.py (both return a start.Start), run_length.py
the run's folder        run_folder.py (what it contains), changing.py (`train --change`)
in each step            step_log.py (log, throughput), divergence.py (skipped updates), replica_check.py,
                        token_check.py, run_minutes.py (`train.minutes`)
when due                valid_loss.py (valid split), tasks.py (`train.tasks`), best_step.py (early stopping),
                        saving.py (checkpoints), sample_prompts.py
distillation            teachers.py, teacher_cache.py
"""
