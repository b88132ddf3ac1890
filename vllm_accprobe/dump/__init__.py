"""The dump: the contract between capture and analysis. schema.py has its words."""
