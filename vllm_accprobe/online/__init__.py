"""Calls checked on the golden's machine as they happen on the other one. docs/online.md."""
