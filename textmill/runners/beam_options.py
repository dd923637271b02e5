"""Check the options of a Beam pipeline before any work, with Beam's own parser and validator."""

from __future__ import annotations

import difflib
from contextlib import redirect_stderr
from importlib import import_module
from io import StringIO

from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator

from textmill.errors import TextmillError


def check_options(options: list[str]) -> None:
    """Refuse what Beam's own parser does not know, which Beam would ignore, and what its validator finds."""
    usage = StringIO()
    try:
        with redirect_stderr(usage):
            parsed = PipelineOptions(options)
            engine = parsed.view_as(StandardOptions).runner or ""
            if "." in engine:  # a runner outside of Beam's list defines its options in its own module
                import_module(engine.rpartition(".")[0])
            known = parsed.get_all_options()
            unknown = sorted(set(parsed.get_all_options(retain_unknown_options=True)) - set(known))
    except SystemExit:
        reason = usage.getvalue().strip().splitlines()[-1].partition("error: ")[2]
        raise TextmillError(f"runner.options: {reason}; correct it") from None
    except ImportError as error:
        raise TextmillError(f"runner.options: --runner={engine}: {error}; install what it needs") from None
    if unknown:
        near = difflib.get_close_matches(unknown[0], list(known), n=1)
        advice = f"did you mean --{near[0]}?" if near else "remove it"
        raise TextmillError(f"runner.options: Beam has no option --{unknown[0]}; {advice}")
    # Beam asks for the class of the runner, which exists only where its packages are installed.
    if problems := PipelineOptionsValidator(parsed, type(engine.rpartition(".")[2] or "None", (), {})()).validate():
        raise TextmillError(f"runner.options: {' '.join(problems)} Set what is missing for --runner={engine}")
