"""Reports of a real run: its files, the terminal view, the HTML page in a browser, the SVG file."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_ind
from transformers import GPT2LMHeadModel

import textmill
from bench.kill_train import train_arguments
from tests.support.browser import Browser, missing
from textmill.cli import main
from textmill.reports.comparison import compare_runs, list_differences
from textmill.reports.curves import build_svg, draw_curve, reduce_points
from textmill.reports.page import build_page, shorten_account
from textmill.reports.run_files import find_run, flatten, read_run
from textmill.reports.texts import describe_progress, describe_run, describe_runs
from textmill.track.jsonl import read_notes

LOGGED = ("train.log_every=1", "train.evaluate_every=2", "train.save_every=2", "train.warmup=0")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    """A copy of the token stores with two runs: one resumed, one with another batch size."""
    folder = Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("reports") / "project"))
    for arguments in (("first", 4, ()), ("first", 6, ()), ("other", 2, ("train.batch=2",))):
        run, steps, more = arguments
        assert main([*train_arguments(folder, folder / run, steps), *LOGGED, *more]) == 0
    return folder


def test_the_files_of_a_run(root: Path) -> None:
    run = read_run(find_run(str(root / "first")))
    lines = [json.loads(line) for line in (root / "first" / "metrics.jsonl").read_text().splitlines()]
    assert run.points("loss") == [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert [step for step, _ in run.points("loss")] == [1, 2, 3, 4, 5, 6], "a resumed run has each step once"
    progress = json.loads((root / "first" / "step-0000006" / "progress.json").read_text())
    assert run.tokens_after(6) == progress["tokens"]
    assert run.parameters == GPT2LMHeadModel.from_pretrained(root / "first" / "step-0000006").num_parameters()
    assert run.last_step == 6
    assert run.best_step == min(run.valid_losses, key=run.valid_losses.__getitem__)
    speeds = dict(run.points("tokens_per_second"))
    assert run.seconds[0][1] == pytest.approx(run.tokens_after(1) / speeds[1])
    assert find_run(str(root / "first" / "step-0000006")).resolve() == root / "first"


def test_a_run_is_named_after_its_project(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(root / "first", tmp_path / "mill" / "run")
    for place, where in ((tmp_path, "mill"), (tmp_path / "mill", "."), (tmp_path / "mill" / "run", ".")):
        monkeypatch.chdir(place)
        assert read_run(find_run(where)).name == "mill"


def test_epochs_bits_per_byte_and_time_left_are_in_the_files(root: Path) -> None:
    run = read_run(root / "first")
    counts = json.loads((root / "tokens" / "manifest.json").read_text())["splits"]
    for bits, loss, split in (("bits_per_byte", "loss", "train"), ("valid_bits_per_byte", "valid_loss", "valid")):
        nats = counts[split]["tokens"] / counts[split]["bytes"] * dict(run.points(loss))[6]
        assert dict(run.points(bits))[6] == pytest.approx(nats / math.log(2))
    epoch = dict(run.points("epoch"))[6]
    assert epoch == pytest.approx(run.tokens_after(6) / counts["train"]["tokens"], rel=0.02)
    assert f"epoch {epoch:.2f}, {dict(run.points('bits_per_byte'))[6]:.3f} bits/byte (train)" in describe_progress(run)
    assert run.seconds_left == 0
    first = replace(run, metrics=[line for line in run.metrics if line["step"] <= 3], valid_losses={})
    speed = dict(run.points("tokens_per_second"))[3]
    first.__dict__["planned_steps"] = 12
    assert first.seconds_left == pytest.approx(run.tokens_after(6) / speed), "the newest checkpoint is of step 6"
    by_epochs = replace(run, settings={**run.settings, "train.epochs": 3 * epoch, "train.minutes": None})
    assert by_epochs.seconds_left == pytest.approx(2 * run.tokens_after(6) / run.points("tokens_per_second")[-1][1])


def test_notes_keep_every_start_and_its_environment(root: Path) -> None:
    notes = read_notes(root / "first" / "notes.jsonl")
    texts = [note["text"] for note in notes if "text" in note]
    assert sum("; starts" in text for text in texts) == 1
    assert sum("; resumes from step 4" in text for text in texts) == 1
    environments = [note["environment"] for note in notes if "environment" in note]
    assert len(environments) == 2
    assert environments[0]["python"] == sys.version.split()[0]


def test_the_page_has_every_figure_and_no_text_can_end_its_script(root: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(root / "first", tmp_path / "copy", symlinks=True))
    sample = {"step": 2, "prompt": "</script><b>{{js}}", "text": "<!-- & é 한국어"}
    (copy / "samples.jsonl").write_text(json.dumps(sample) + "\n", encoding="utf-8")
    page = build_page([read_run(copy)])
    assert page.count("</script>") == 2, "the data and the script, nothing of the run"
    data = json.loads(page.split('type="application/json">')[1].split("</script>")[0])
    run = data["runs"][0]
    assert [row[0] for row in run["series"]["loss"]] == [1, 2, 3, 4, 5, 6]
    samples = next(part for part in run["parts"] if part["title"].startswith("Samples"))
    assert sample["prompt"] in samples["texts"][0]
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page, "it works offline"


RESULT = {
    "step": 6,
    "perplexity": {
        "loss": 2.0,
        "token_perplexity": 7.389,
        "bits_per_byte": 1.25,
        "bits_per_byte/unigram": 3.5,
        "bits_per_byte/bigram": 2.75,
        "card": {"split": "valid", "documents": 3, "tokens": 1234, "bytes": 4000},
    },
}


def test_bits_per_byte_in_the_table_of_runs_are_of_the_step_of_the_loss(root: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(root / "first", tmp_path / "copy", symlinks=True))
    (copy / "evaluation").mkdir(exist_ok=True)
    (copy / "evaluation" / "step-0000002-valid.json").write_text(json.dumps({**RESULT, "step": 2}))
    run = read_run(copy)
    counts = json.loads((root / "tokens" / "manifest.json").read_text())["splits"]["valid"]
    step = min(run.valid_losses, key=run.valid_losses.__getitem__)
    bits = run.valid_losses[step] * counts["tokens"] / counts["bytes"] / math.log(2)
    assert step == 6
    assert list(describe_runs([run], tmp_path))[1].split()[-3:] == [f"{run.valid_losses[6]:.4f}", "6", f"{bits:.4f}"]


def test_the_page_begins_with_the_results_next_to_counting(root: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(root / "first", tmp_path / "copy", symlinks=True))
    (copy / "evaluation").mkdir(exist_ok=True)
    (copy / "evaluation" / "step-0000006-valid.json").write_text(json.dumps(RESULT))
    summary = {"inputs": {"step": "step-0000006"}, "verdict": ["Undertrained."], "texts": ["merhaba dünya, 안녕, 你好"]}
    (copy / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    verdict, measured, texts = page_data(copy)["parts"][:3]
    assert (verdict["title"], verdict["texts"]) == ("Verdict at step 6", ["Undertrained."])
    assert measured["title"] == "Measured at step 6 on the valid split: 3 documents, 1,234 tokens, 4,000 bytes"
    assert [row[1] for row in measured["rows"]] == ["2.0000", "7.3890", "1.2500", "3.5000", "2.7500"]
    assert texts["title"] == "Texts of the model at step 6, not selected"
    assert texts["texts"] == summary["texts"]
    assert list(page_data(copy)["baselines"].values()) == [2.75, 3.5]
    (copy / "summary.json").write_text(json.dumps({**summary, "inputs": {"step": "step-0000009"}}))
    assert not any(part["title"].startswith("Verdict") for part in page_data(copy)["parts"]), "it has no checkpoint"


def test_a_page_names_the_largest_files_of_a_corpus() -> None:
    sources = {f"{number}.txt": {"records": number, "kept": 0} for number in range(100)}
    account = shorten_account({"records": 4950, "by_source": sources})
    assert list(account["by_source"]) == [f"{number}.txt" for number in range(99, 79, -1)]
    assert account["other_sources"] == "80, in corpus/account.json"
    assert account["records"] == 4950


def page_data(folder: Path) -> dict[str, Any]:
    """The run as the script of its page reads it."""
    page = build_page([read_run(folder)])
    run: dict[str, Any] = json.loads(page.split('type="application/json">')[1].split("</script>")[0])["runs"][0]
    return run


def test_differences_between_runs(root: Path) -> None:
    rows = list_differences([read_run(root / "first"), read_run(root / "other")])
    assert {row[0] for row in rows} == {"train.batch", "train.steps"}
    assert next(row for row in rows if row[0] == "train.batch")[2] == "2"


def test_a_comparison(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs with several seeds give scipy's Welch test; the losses of documents add up to those of the results."""
    monkeypatch.chdir(tmp_path)
    runs = {}
    for rate, seed in (("1e-3", 1), ("1e-3", 2), ("3e-3", 1), ("3e-3", 2)):
        run = tmp_path / f"rate{rate}-seed{seed}"
        more = (f"train.learning_rate={rate}", f"train.seed={seed}", "train.optimizer=adamw")
        assert main([*train_arguments(root, run, 4), *LOGGED, *more]) == 0
        runs[rate, seed] = run
    for run in [runs["1e-3", 1], runs["3e-3", 1]]:
        assert main(["evaluate", str(run), "engine.device=cpu", "evaluate.baselines=false"]) == 0
    capsys.readouterr()
    found = textmill.compare([str(run) for run in runs.values()], as_json=True)
    assert json.loads(capsys.readouterr().out) == found
    assert found["head"][-2:] == ["train.learning_rate", "train.seed"]
    assert [row[-2:] for row in found["rows"]] == [["0.001", "1"], ["0.001", "2"], ["0.003", "1"], ["0.003", "2"]]
    losses = {key: min(read_run(run).valid_losses.values()) for key, run in runs.items()}
    groups = [[losses[rate, seed] for seed in (1, 2)] for rate in ("1e-3", "3e-3")]
    welch = ttest_ind(groups[1], groups[0], equal_var=False)
    low, high = welch.confidence_interval()
    means = [sum(group) / 2 for group in groups]
    expected = f"{means[1] - means[0]:+.4f} (95%: {low:+.4f} to {high:+.4f}), p = {welch.pvalue:.2g} (Welch's t)"
    assert any(line.endswith(expected) for line in found["findings"])

    logs = [next((run / "evaluation").glob("*.items.jsonl")) for run in (runs["1e-3", 1], runs["3e-3", 1])]
    documents = [{row["id"]: row for row in map(json.loads, log.read_text().splitlines())} for log in logs]
    results = [json.loads(Path(str(log).replace(".items.jsonl", ".json")).read_text()) for log in logs]
    assert len(documents[0]) == results[0]["perplexity"]["card"]["documents"]
    assert sum(row["loss"] for row in documents[0].values()) == pytest.approx(
        results[0]["perplexity"]["loss"] * results[0]["perplexity"]["card"]["tokens"]
    )
    assert "items" not in results[0]["perplexity"]
    difference = results[1]["perplexity"]["bits_per_byte"] - results[0]["perplexity"]["bits_per_byte"]
    (line,) = [line for line in found["findings"] if line.startswith("perplexity")]
    assert f"{len(documents[0])} items in common, steps 4 and 4: bits/byte" in line
    assert f"minus rate1e-3-seed1: {difference:+.4f} (95%: " in line

    assert main(["compare", *map(str, runs.values())]) == 0
    output = capsys.readouterr().out
    assert output.count("train loss, steps 1 to 4") + output.count("valid loss, steps 2 to 4") == 4
    page = build_page([read_run(run) for run in runs.values()])
    data = json.loads(page.split('type="application/json">')[1].split("</script>")[0])
    assert data["comparison"]["rows"] == found["rows"]
    one_each = compare_runs([read_run(runs["1e-3", 2]), read_run(runs["3e-3", 2])]).findings
    assert "one seed for a setting" in one_each[0]
    assert "no evaluation in common" in one_each[1]
    assert main(["compare", str(root / "first")]) == 2
    assert "compare: needs two runs or more" in capsys.readouterr().err


def test_the_commands(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(root / "first"), str(root / "other"), "--out", str(tmp_path / "both.html")]) == 0
    assert (tmp_path / "both.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main(["report", str(root / "first"), "--svg", str(tmp_path / "loss.svg")]) == 0
    svg = ElementTree.parse(tmp_path / "loss.svg").getroot()
    lines = svg.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [6, 3], "train loss and valid loss"
    capsys.readouterr()
    assert main(["runs", str(root)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table] == ["run", "first", "other"]
    assert main(["watch", str(root / "first")]) == 0
    assert "train loss, steps 1 to 6" in capsys.readouterr().out
    assert main(["show", str(root / "first")]) == 0
    assert "checkpoints: " in capsys.readouterr().out


def test_without_a_run_the_command_that_trains_it_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "textmill.yaml").write_text("train: {}\n")
    for command in ("report", "watch"):
        assert main([command, str(tmp_path)]) == 2
        assert f"no run there yet; train the model first: textmill run {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report"], "report: no run given"),
        (["report", "nowhere"], "nowhere: no such folder"),
        (["watch", "."], "no run there"),
        (["runs", "."], "no run below this folder"),
        (["report", "{run}", "--out", "no/such/file.html"], "there is no folder"),
        (["report", "{run}", "--out", "a", "--svg", "b"], "cannot be used together"),
    ],
)
def test_mistakes_get_one_line(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([argument.format(run=root / "first") for argument in arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_curves() -> None:
    rows = reduce_points([(step, float(step % 10)) for step in range(1, 1001)], 100)
    assert len(rows) == 100
    assert rows[0] == [10, 4.5, 0, 9], "the mean, lowest and highest of ten points"
    assert reduce_points([], 5) == []
    picture = draw_curve([(0, 0.0), (1, 1.0)], width=20, height=4)
    assert len(picture) == 4
    assert picture[0].startswith("1┤"), "the highest value is at the top"
    assert picture[3].startswith("0┤")
    assert picture[0][-1] != chr(0x2800), "the curve ends at the top right"
    assert picture[0][3] == chr(0x2800), "and does not start there"
    assert draw_curve([(3, 2.0)], width=20, height=2), "a single point"
    assert "<polyline" in build_svg({"a": [(1, 2.0)], "b": []}, "step", "loss")


def test_the_page_of_a_long_run_is_small(root: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(root / "first" / "run.yaml", tmp_path / "run")
    line = {"loss": 3.123456789, "learning_rate": 0.000123456789, "grad_norm": 0.987654321, "tokens_per_second": 5e5}
    lines = (
        json.dumps({"step": step, **{name: one * (1 + step % 7) for name, one in line.items()}})
        for step in range(1, 30_001)
    )
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = build_page([read_run(tmp_path / "run")])
    assert len(page.encode()) < 2_000_000
    data = json.loads(page.split('type="application/json">')[1].split("</script>")[0])
    assert data["runs"][0]["series"]["loss"][-1][0] == 30_000, "the last step is shown"


def test_flat_settings() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": {}}, "e": [1]}) == {"a.b.c": 1, "a.d": {}, "e": [1]}


def test_a_run_without_metrics_yet(root: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(root / "first" / "run.yaml", tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    run = read_run(find_run(str(tmp_path)))
    assert "step 0" in next(describe_run(run))
    assert "<!doctype html>" in build_page([run])
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 3, "loss": 4.5}\n')
    lines = list(describe_run(read_run(tmp_path / "run")))
    assert lines[1:] == ["\ntrain loss: 4.5000 at step 3"], "a single point is no curve"


def test_watch_ends_when_interrupted(root: Path) -> None:
    """In a terminal, which `script` gives it, watch goes on until Ctrl-C."""
    if shutil.which("script") is None:
        pytest.skip("no program `script` to make a terminal")
    # With exec, the exit code is the command's: some shells end with 130 themselves after Ctrl-C.
    command = f"exec {sys.executable} -m textmill watch {root / 'first'}"
    watching = subprocess.Popen(
        ["script", "-qec", command, "/dev/null"], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert watching.stdout is not None
    assert any("Ctrl-C ends" in line for line in watching.stdout)
    watching.communicate("\x03", timeout=120)
    assert watching.returncode == 0


@pytest.mark.long
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_the_page_in_a_browser(root: Path, tmp_path: Path) -> None:
    """Curves are drawn, hover shows values, dragging zooms, no error in the console, at any width."""
    path = tmp_path / "report.html"
    assert main(["report", str(root / "first"), str(root / "other"), "--out", str(path)]) == 0
    browser = Browser()
    try:
        browser.open(path.as_uri())
        labels = "return [...document.querySelectorAll('.chart.wide text')].map(one => one.textContent).join()"
        drawn = browser.run("return [...document.querySelectorAll('.chart path')].map(p => p.getAttribute('d').length)")
        assert len(drawn) >= 8
        assert min(drawn) > 5
        browser.hover(".chart.wide svg")
        assert browser.run("return getComputedStyle(document.querySelector('.chart.wide .tip')).display") == "block"
        assert "first: loss:" in browser.text(".chart.wide .tip")
        before = browser.run(labels)
        browser.run(
            "const svg = document.querySelector('.chart.wide svg'), box = svg.getBoundingClientRect();"
            "const at = (kind, x) => svg.dispatchEvent(new PointerEvent(kind,"
            " {clientX: box.left + box.width * x, clientY: box.top + 50, bubbles: true}));"
            "at('pointerdown', 0.3); at('pointermove', 0.6); at('pointerup', 0.6);"
        )
        assert browser.run(labels) != before, "zoomed"
        browser.run("document.querySelector('.chart.wide svg').dispatchEvent(new MouseEvent('dblclick'))")
        assert browser.run(labels) == before, "and back"
        browser.click("#comparison th:nth-child(2)")
        firsts = "return [...document.querySelectorAll('#comparison td:first-child')].map(cell => cell.textContent)"
        assert browser.run(firsts) == ["other", "first"], "sorted by steps"
        browser.click("#comparison th:nth-child(2)")
        assert browser.run(firsts) == ["first", "other"]
        browser.size(400, 900)
        assert browser.run("return document.documentElement.scrollWidth") <= 400, "nothing sticks out"
        browser.click("#theme")
        assert browser.errors() == []
        copy = Path(shutil.copytree(root / "first", tmp_path / "copy", symlinks=True))
        (copy / "evaluation").mkdir(exist_ok=True)
        (copy / "evaluation" / "step-0000006-valid.json").write_text(json.dumps(RESULT))
        path.write_text(build_page([read_run(copy)]), encoding="utf-8")
        browser.open(path.as_uri())
        drawn = browser.run("return [...document.querySelectorAll('.chart text')].map(one => one.textContent)")
        assert "counting pairs of tokens (bigram)" in drawn
        assert browser.errors() == []
    finally:
        browser.close()
