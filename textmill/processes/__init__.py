"""The processes of a run: ranks, the heartbeat between them, stop signals and exit codes."""
