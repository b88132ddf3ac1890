"""What formats have in common: the face that they give a dump, how a path is told, and what one tool's files share."""
