"""How the suite is spread over two processes.

What starts a vLLM engine or a Ray cluster stays in one of them, one after the other, because engines are shared by
session-scoped fixtures; it begins first, because it takes longest. Of all other tests a file is a piece."""

from __future__ import annotations

import pytest

APART = ("test_documents.py", "test_replicas_engine.py")
"""Files with engines that take long and share few captures: the other process begins with them."""


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups, whichever of the two was loaded first
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        name = "engine" if _engine(item) and item.path.name not in APART else str(item.path)
        item.add_marker(pytest.mark.xdist_group(name))
    if getattr(config.option, "numprocesses", None) or hasattr(config, "workerinput"):
        items.sort(key=lambda item: not _engine(item))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Without groups every process starts every engine, which takes twice the time and memory, and nothing says so."""
    grouped = getattr(session.config.option, "loadgroup", False) and hasattr(session.config, "workerinput")
    if grouped and session.items and not any("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("pytest-xdist did not group the tests: another pytest than pyproject.toml asks for?")


def _engine(item: pytest.Item) -> bool:
    fixtures = getattr(item, "fixturenames", ())
    marked = any(item.get_closest_marker(name) for name in ("engine", "ray"))
    return marked or any(name.endswith("engines") for name in fixtures)
