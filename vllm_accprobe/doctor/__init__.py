"""Would a capture work here: this environment, a wheel, the taps in captured graphs. docs/doctor.md."""
