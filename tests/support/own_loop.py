"""A researcher's own loop. python -m tests.support.own_loop STEPS KIND STOP WHERE SETTING ...

KIND: `run` as the settings say, `loss` with the built-in loss, `logits` with a cross-entropy of full logits; the loop
breaks off after STOP steps of this process."""

from __future__ import annotations

import sys

import torch.nn.functional as F

import textmill


def main(kind: str, stop: int, where: str, settings: list[str]) -> None:
    with textmill.open_training(where, settings) as run:
        for number, step in enumerate(run, 1):
            if kind == "run":
                step.run()
            else:
                for batch in step:
                    if kind == "loss":
                        loss = step.loss(batch)
                    else:
                        logits = step.logits(batch)
                        losses = F.cross_entropy(
                            logits.flatten(0, 1), batch.labels.flatten().long(), ignore_index=-100, reduction="none"
                        )
                        loss = (losses * batch.weights.flatten()).sum()
                    step.backward(loss)
            if step.number % 2 == 0 and kind == "logits":
                run.log(square=step.number**2)
            if number == stop:
                break


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])
