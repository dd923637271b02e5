"""Importing this makes any torch look as if it was built with CUDA, so that textmill imports its kernels."""

from __future__ import annotations

import torch

torch.version.cuda = torch.version.cuda or "13.0"
