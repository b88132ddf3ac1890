"""Other tools' command lines: spellings that are read, options that mean theirs, tables that are theirs."""
