"""Local files as tasks of lm-evaluation-harness, and its own model class as the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FUNCTIONS = "from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer\n"
TASKS = {
    "local_wikitext": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: !function functions.wikitext_detokenizer
process_results: !function functions.process_results
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "local_lambada": """
output_type: loglikelihood
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' '+text.split(' ')[-1]}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "local_choices": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]
""",
}


def write_tasks(folder: Path, records: dict[str, list[dict[str, Any]]]) -> None:
    """Write the tasks that have records, and their data, into a folder."""
    (folder / "functions.py").write_text(FUNCTIONS, encoding="utf-8")
    for name, rows in records.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        kwargs = json.dumps({"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")})
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {kwargs}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(head + TASKS[name], encoding="utf-8")


def run_reference(folder: Path, tasks: list[str], model: Path, batch: int = 8) -> dict[str, dict[str, float]]:
    """The metrics of lm-eval's own model class for transformers."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    # Its cache of logits mixes up texts that are equal but divided differently into context and continuation.
    own = HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=batch, logits_cache=False)
    found = lm_eval.simple_evaluate(
        model=own,
        tasks=tasks,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        log_samples=False,
    )
    return {
        task: {key.partition(",")[0]: value for key, value in values.items() if isinstance(value, float)}
        for task, values in found["results"].items()
    }
