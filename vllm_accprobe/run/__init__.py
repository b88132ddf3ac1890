"""Starting any command with the probe's environment: launcher.py, watcher.py, atb.py."""
