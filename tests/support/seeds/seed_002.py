"""The lines of document 002."""

from support.seeds.joined import joined

prepare, LINES = joined("002", "precheck_lines", "fused_lines")
