"""Prepare a corpus on a Dask cluster of two processes: python dask_prepare.py TEXTS FOLDER."""

from __future__ import annotations

import sys

from dask.distributed import LocalCluster

from textmill.config import RunConfig
from textmill.corpus.prepare import prepare


def main() -> None:
    texts, folder = sys.argv[1:]
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        options = ["--runner=apache_beam.runners.dask.dask_runner.DaskRunner"]
        options += [f"--dask_client_address={cluster.scheduler_address}"]
        corpus = {"sources": [texts], "section_chars": 100, "split": [8.0, 1.0, 1.0]}
        runner = {"kind": "beam", "options": options, "shared_folder": f"{folder}-shared"}
        prepare(RunConfig.model_validate({"folder": folder, "corpus": corpus, "runner": runner}))


if __name__ == "__main__":
    main()
