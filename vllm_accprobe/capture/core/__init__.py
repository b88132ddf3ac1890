"""What every capture shares: session, sink, rows, layouts; and `say`, for which nothing heavy is imported."""

from __future__ import annotations

import logging
import sys


def say(message: str) -> None:
    """In the server's log, in its own format where vLLM's logger is configured; else on stderr. Never raises."""
    try:
        logger = logging.getLogger("vllm.accprobe")
        if logger.hasHandlers() and logger.isEnabledFor(logging.WARNING):
            logger.warning("accprobe: %s", message)
        else:
            sys.stderr.write(f"accprobe: {message}\n")
            sys.stderr.flush()
    except Exception:  # a closed stderr at process exit must not become an error of the server
        return
