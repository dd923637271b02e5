"""The HTTP server: OpenAI's API and a page to try the model; the model runs in a process of its own."""
