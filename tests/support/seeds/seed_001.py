"""The lines of document 001."""

from support.seeds.joined import joined

prepare, LINES = joined("001", "precheck_lines", "fused_lines", "online_lines")
