"""A plan as text for the terminal."""

from __future__ import annotations

from typing import Any

KB = 2**10
MB = 2**20
GB = 2**30
PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "buffers": "communication buffers",
    "activations": "activations",
    "logits": "logits",
}


def format_plan(figures: dict[str, Any]) -> str:
    """All parts of a plan, one line for each figure."""
    machine = figures["machine"]
    lines = [f"machine: {machine['devices']} x {machine['device']} with {machine['memory'] / GB:,.1f} GB"]
    lines += ["", *_table("parameters", {**figures["parameters"], "all": sum(figures["parameters"].values())}, "{:,}")]
    if figures["trained"] != sum(figures["parameters"].values()):
        lines.append(f"  trained: {figures['trained']:,}")
    lines += ["", *_memory_lines(figures), "", *_work_lines(figures), "", *_disk_lines(figures)]
    return "\n".join(lines)


def _memory_lines(figures: dict[str, Any]) -> list[str]:
    memory = figures["memory"]
    machine = figures["machine"]
    unit, name = (GB, "GB") if memory["total"] >= GB else (MB, "MB")
    mesh = ", ".join(f"{axis} {size}" for axis, size in memory["mesh"].items() if size > 1)
    how = f"{memory['engine']}, {memory['precision']}, micro-batch {memory['micro_batch']}"
    head = f"memory of each device in {name} ({how}"
    head += f" x {memory['passes']}" if memory["passes"] > 1 else ""
    head += f", {mesh}" if mesh else ""
    head += ", activation checkpointing" if memory["recompute"] else ""
    parts = {text: memory[part] / unit for part, text in PARTS.items()}
    lines = _table(head + ")", {**parts, "all": memory["total"] / unit}, "{:,.2f}")
    usable = f"{machine['usable'] / GB:,.1f} GB that tensors can use"
    lines.append(f"  {'fits into' if figures['fits'] else 'DOES NOT FIT into'} the {usable}")
    if memory["host"]:
        lines.append(f"  offloaded to the machine's memory, for each device: {memory['host'] / GB:,.1f} GB")
    if memory["cache_per_text"]:
        lines.append(f"  in generation, KV cache of one text: {format_bytes(memory['cache_per_text'])}")
    if not figures["fits"]:
        near = figures["settings_that_fit"]
        lines.append("  nearest settings that fit:" if near else "  no setting was found that fits; use more devices")
        for fitting in near:
            settings = " ".join(f"{key}={value}" for key, value in fitting["settings"].items())
            host = f", and {fitting['host'] / GB:,.1f} GB of the machine's memory" if fitting["host"] else ""
            lines.append(f"    {settings}   ({fitting['total'] / GB:,.2f} GB{host})")
    return lines


def _work_lines(figures: dict[str, Any]) -> list[str]:
    lines = ["work"]
    tokens = "" if figures["tokens"] is None else f", {figures['tokens']:,} tokens"
    epochs = (
        "" if figures["epochs"] is None else f", {figures['epochs']:.2f} epochs of {figures['train_tokens']:,} tokens"
    )
    unknown = (
        "not known before the text is tokenized; set plan.tokens" if figures["train_tokens"] is None else "not known"
    )
    steps = unknown if figures["steps"] is None else f"{figures['steps']:,}"
    lines.append(f"  steps: {steps}{tokens}{epochs}")
    if figures["flops"] is not None:
        lines.append(f"  operations: {figures['flops']:.3g} FLOPs, {figures['flops_per_token']:.3g} for a token")
    for kind, sent in figures["communication"].items():
        lines.append(f"  each device sends in a step: {format_bytes(sent)} ({kind})")
    if figures["step_seconds"] is None:
        lines.append("  time: not known; set plan.gpu or plan.tflops")
        return lines
    speed = f"{figures['tokens_per_second']:,.0f} tokens/s, {figures['step_seconds']:.3g} s for a step"
    lines.append(f"  speed: {speed} ({figures['speed']})")
    if figures["hours"] is not None:
        lines.append(f"  time: {_format_hours(figures['hours'])}, without evaluation and saving")
    if figures["cost"] is not None:
        lines.append(f"  cost: {figures['cost']:,.2f}, at the price of plan.price")
    return lines


def _disk_lines(figures: dict[str, Any]) -> list[str]:
    disk = figures["disk"]
    kept = f"{disk['checkpoints_kept']} kept: {format_bytes(disk['checkpoints'])}"
    lines = ["disk", f"  a checkpoint: {format_bytes(disk['checkpoint'])}; {kept}"]
    if disk["tokens"]:
        lines.append(f"  token store: {format_bytes(disk['tokens'])}")
    if disk.get("teacher_cache"):
        lines.append(f"  predictions of teachers: {format_bytes(disk['teacher_cache'])}")
    return lines


def _table(head: str, values: dict[str, Any], form: str) -> list[str]:
    texts = {name: form.format(value) for name, value in values.items()}
    names = max(map(len, texts))
    figures = max(map(len, texts.values()))
    return [head, *(f"  {name:<{names}}  {text:>{figures}}" for name, text in texts.items())]


def _format_hours(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.1f} minutes"
    return f"{hours:,.1f} hours" if hours < 48 else f"{hours:,.0f} hours ({hours / 24:,.1f} days)"


def format_bytes(count: float) -> str:
    """A number of bytes in the unit that makes it readable."""
    for unit, name in ((GB, "GB"), (MB, "MB"), (KB, "kB")):
        if count >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{count:,.0f} bytes"
