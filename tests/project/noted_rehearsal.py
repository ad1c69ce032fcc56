"""Imported first by the processes of a rehearsal whose statements are noted."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks import gpu
from tests.project.run_statements import note

note(Path(gpu.__file__).parent, Path(os.environ["PIPESHIFT_RUN_STATEMENTS"]))
