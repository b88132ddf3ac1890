"""``python -m vllm_accprobe``: the command ``accprobe``, for where the console script is not on the path."""

import sys

from vllm_accprobe.cli import main

sys.exit(main())
