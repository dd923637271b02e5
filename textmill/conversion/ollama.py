"""The Modelfile with which Ollama runs an exported GGUF file."""

from __future__ import annotations

from typing import Any

from textmill.config.chat import CONTENT
from textmill.tokens.vocabulary.tokenizer import TextTokenizer


def modelfile(file: str, shape: Any, tokenizer: TextTokenizer) -> str:
    """FROM the file, the chat template in Go's language, the longest context and the stop token."""
    lines = [f"FROM ./{file}", f'TEMPLATE """{_template(tokenizer)}"""', f"PARAMETER num_ctx {shape.positions}"]
    return "\n".join([*lines, f'PARAMETER stop "{tokenizer.inner.id_to_token(tokenizer.end)}"']) + "\n"


def _template(tokenizer: TextTokenizer) -> str:
    """Turns of a conversation; a model without a chat template of ours continues the prompt."""
    if tokenizer.chat is None:
        return "{{ .Prompt }}"
    branches = []
    keyword = "if"
    for role, text in tokenizer.chat.turns:
        before, _, after = text.partition(CONTENT)
        branches.append(f'{{{{ {keyword} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}')
        keyword = "else if"
    return f"{{{{ range .Messages }}}}{''.join(branches)}{{{{ end }}}}{{{{ end }}}}{tokenizer.chat.prompt}"
