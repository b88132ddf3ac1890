"""Starting any command with the probe's environment: settings.py, launcher.py, watcher.py, atb.py."""
