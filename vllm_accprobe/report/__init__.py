"""What a person reads after a comparison: table.py (csv), terminal.py (lines), html/ (one self-contained page).

Every report is written from a ``compare.result.Comparison`` alone; nothing here opens a dump or judges anything.
"""
