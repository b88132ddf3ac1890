"""What formats have in common: the interface of a dump, how a path is recognised, and what one tool's files share."""
