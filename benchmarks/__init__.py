"""Measures apex.amp against torch.autocast, side by side in one run.

python -m benchmarks [--quick] [--only NAME] [--json PATH]
"""

import os

# torch's profiler otherwise logs each start and stop to stderr. Read when torch is first imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
