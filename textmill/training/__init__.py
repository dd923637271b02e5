"""The training loop and its parts. Read loop.py first; its `Training.run_steps` repeats:

    batch = batches.batch_at(step, ...)                       this rank's samples, read ahead by a thread
    result = engine.train_step(batch, step, learning rate)    returns before the device has finished the step
    _after_step(step + 1, result)                             what is due: log, evaluate, save, stop

`step` counts from 0. `done` is the number of finished steps, and the step's number in logs and checkpoints. The other
modules, in the order in which the loop calls them:

generations.py     calls the loop several times, for `train.generations`
auto_preset.py     what `train.preset=auto` sets
start.py           a new run or a checkpoint to resume from; changing.py: `train --change`
run_length.py      the number of steps; timing.py: throughput, and `train.minutes`
run_folder.py      what a run folder contains, and the thread that writes checkpoints
validation.py      the valid split and `train.tasks` during training
divergence.py      skipped updates, and replicas that differ
"""
